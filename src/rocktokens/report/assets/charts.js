// Small drawings beside words, as SVG elements: the history of one number, and intervals around zero.

"use strict";

const RockCharts = (() => {
  const { number } = RockStrip;
  const { shape } = RockMarks;

  function scale([from, to], [start, end]) {
    return (value) => (to > from ? start + ((value - from) / (to - from)) * (end - start) : (start + end) / 2);
  }

  function range(values) {
    return [Math.min(...values), Math.max(...values)];
  }

  function picture(width, height, label, ...shapes) {
    return shape(
      "svg",
      { viewBox: `0 0 ${width} ${height}`, class: "chart", role: "img", "aria-label": label },
      ...shapes,
    );
  }

  // A line through [x, y] points from zero up, with its ends named; `chosen` is the x to mark.
  function sparkline(points, label, chosen = null) {
    const known = points.filter(([, y]) => Number.isFinite(y));
    if (!known.length) return picture(300, 76, `${label}: nothing was measured`);
    const x = scale(range(known.map(([at]) => at)), [8, 292]);
    const y = scale([0, Math.max(...known.map(([, value]) => value)) || 1], [52, 18]);
    const drawn = known.map(([at, value]) => `${x(at).toFixed(1)},${y(value).toFixed(1)}`).join(" ");
    const dots = known.map(([at, value]) =>
      shape(
        "circle",
        { cx: x(at), cy: y(value), r: at === chosen ? 4.5 : 2.5, class: at === chosen ? "dot chosen" : "dot" },
        titled(`step ${at}: ${number(value)}`),
      ),
    );
    const [first, last] = [known[0], known[known.length - 1]];
    const ends = known.length > 1 ? [first, last] : [last];
    const texts = ends.flatMap(([at, value], end) => {
      const anchor = end === 0 && ends.length > 1 ? "start" : "end";
      return [
        shape("text", { x: x(at), y: 70, "text-anchor": anchor, class: "axis" }, `step ${at}`),
        shape(
          "text",
          { x: x(at), y: Math.max(10, y(value) - 8), "text-anchor": anchor, class: "value" },
          number(value),
        ),
      ];
    });
    return picture(
      300,
      76,
      `${label}: ${known.map(([at, value]) => `${number(value)} at step ${at}`).join(", ")}`,
      shape("line", { x1: 8, x2: 292, y1: 52, y2: 52, class: "base" }),
      shape("polyline", { points: drawn, class: "line" }),
      ...dots,
      ...texts,
    );
  }

  function titled(text) {
    return shape("title", {}, text);
  }

  // An estimate with its interval on an axis from -reach to reach, zero in the middle.
  function interval(estimate, ends, reach) {
    const x = scale([-reach, reach], [4, 116]);
    const shapes = [shape("line", { x1: x(0), x2: x(0), y1: 0, y2: 16, class: "base" })];
    if (ends) shapes.push(shape("line", { x1: x(ends[0]), x2: x(ends[1]), y1: 8, y2: 8, class: "line" }));
    if (Number.isFinite(estimate)) shapes.push(shape("circle", { cx: x(estimate), cy: 8, r: 3, class: "dot" }));
    return shape("svg", { viewBox: "0 0 120 16", class: "interval", "aria-hidden": "true" }, ...shapes);
  }

  return { interval, sparkline };
})();
