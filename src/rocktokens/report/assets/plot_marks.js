// One panel of plot.js as SVG: axes, marks, names, and where each datum lies. No state and no events.

"use strict";

const RockMarks = (() => {
  const SVG = "http://www.w3.org/2000/svg";
  const { fixed, scale, symbol, ticks } = RockScales;
  const RADIUS = 4.5;
  const SMALL = 2.2; // radius of what stands behind a crowd of others
  const CROWD = 500;
  const DOTS = 60; // points of a line up to which each is marked
  const ROW = 22; // pixels of a row, beside its name
  const NAMED_ROW = 38; // and below it
  const NAME_SHARE = 0.38; // of the width: rows with longer names have them above
  const EDGE = { top: 8, right: 12, bottom: 24 };
  const FONT = 12;
  const LINE = 13;
  let clips = 0;

  function shape(name, attributes, ...children) {
    const made = document.createElementNS(SVG, name);
    for (const [key, value] of Object.entries(attributes)) if (value !== null) made.setAttribute(key, String(value));
    made.append(...children);
    return made;
  }

  const path = (d, kind) => shape("path", { d, class: kind });
  const clamp = (value, low, high) => Math.min(Math.max(value, low), high);

  // Text

  const pen = document.createElement("canvas").getContext("2d");

  function widthOf(text) {
    pen.font = `${FONT}px ${getComputedStyle(document.body).fontFamily}`;
    return pen.measureText(text).width;
  }

  function cutTo(text, width) {
    if (widthOf(text) <= width) return text;
    const characters = [...text];
    while (characters.length > 1 && widthOf(`${characters.join("")}…`) > width) characters.pop();
    return `${characters.join("")}…`;
  }

  function label(x, y, text, anchor = "start", kind = "") {
    return shape("text", { x: fixed(x), y: fixed(y), "text-anchor": anchor, class: `plot-text ${kind}`.trim() }, text);
  }

  // Axes

  // Where everything goes; `isAbove`: whether the names of rows lie above them.
  function layout({ y }, width, view) {
    const isRows = y.scale === "rows";
    const names = isRows ? y.names : ticks(y, view.y, 5).map(({ text }) => text);
    const widest = Math.max(0, ...names.map(widthOf));
    const isAbove = isRows && widest > NAME_SHARE * width;
    const rowHeight = isAbove ? NAMED_ROW : ROW;
    const height = isRows ? rowHeight * names.length : clamp(0.58 * width, 170, 380);
    const left = isAbove ? 4 : Math.min(widest + 10, 0.5 * width);
    const { top } = EDGE;
    return { width, left, right: width - EDGE.right, top, bottom: top + height, isRows, isAbove, rowHeight };
  }

  function axes({ x, y }, place, scales) {
    const { left, right, top, bottom } = place;
    const frame = path(`M${left} ${top}V${bottom}H${right}`, "plot-frame");
    return [...axisX(x, place, scales.x), ...(place.isRows ? rowNames : axisY)(y, place, scales.y), frame];
  }

  function axisX(axis, { left, right, top, bottom, width }, at) {
    const count = Math.max(2, Math.floor((right - left) / 70));
    const rows = axis.names.map((text, value) => ({ value, text }));
    const all = axis.scale === "rows" ? rows : ticks(axis, at.domain, count);
    return apart(all, at).flatMap(({ value, text }) => {
      const pixel = fixed(at(value));
      const half = widthOf(text) / 2;
      return [
        shape("line", { x1: pixel, x2: pixel, y1: top, y2: bottom, class: "plot-grid" }),
        label(clamp(pixel, left + half - 2, width - half), bottom + 16, cutTo(text, width), "middle"),
      ];
    });
  }

  // Ticks whose texts do not touch.
  function apart(all, at) {
    let end = -Infinity;
    return all.filter(({ value, text }) => {
      const half = widthOf(text) / 2;
      if (at(value) - half < end + 8) return false;
      end = at(value) + half;
      return true;
    });
  }

  function axisY(axis, { left, right }, at) {
    return ticks(axis, at.domain, 5).flatMap(({ value, text }) => {
      const pixel = fixed(at(value));
      const line = shape("line", { x1: left, x2: right, y1: pixel, y2: pixel, class: "plot-grid" });
      return [line, label(left - 6, pixel + 4, text, "end")];
    });
  }

  function rowNames({ names }, { left, width, isAbove }, at) {
    return names.map((name, row) =>
      isAbove
        ? label(left, at(row) - 9, cutTo(name, width - left))
        : label(left - 6, at(row) + 4, cutTo(name, left - 6), "end"),
    );
  }

  // Marks of one layer

  const isKnown = (value) => value !== null && value !== undefined;
  const placesOf = (layer) => [...layer.x.keys()].filter((at) => isKnown(layer.x[at]) && isKnown(layer.y[at]));
  const withEnds = (layer, places) => places.filter((at) => isKnown(layer.low[at]) && isKnown(layer.high[at]));

  function intervals(layer, scales, isRows) {
    const [x, y] = [(value) => fixed(scales.x(value)), (value) => fixed(scales.y(value))];
    const lines = withEnds(layer, placesOf(layer)).map((at) =>
      isRows
        ? `M${x(layer.low[at])} ${y(layer.y[at])}H${x(layer.high[at])}`
        : `M${x(layer.x[at])} ${y(layer.low[at])}V${y(layer.high[at])}`,
    );
    return lines.length ? [path(lines.join(""), "mark-interval")] : [];
  }

  function symbols(layer, scales, sign, radius) {
    return placesOf(layer)
      .map((at) => symbol(sign, scales.x(layer.x[at]), scales.y(layer.y[at]), radius))
      .join("");
  }

  function points(layer, group, scales, { isRows, count }) {
    const isSmall = group.hue === "grey" && count > CROWD;
    const drawn = symbols(layer, scales, group.symbol, isSmall ? SMALL : RADIUS);
    return [...intervals(layer, scales, isRows), path(drawn, isSmall ? "mark-symbol mark-small" : "mark-symbol")];
  }

  function line(layer, group, scales) {
    const places = placesOf(layer);
    if (!places.length) return [];
    const through = (values, own) =>
      own.map((at) => `${fixed(scales.x(layer.x[at]))} ${fixed(scales.y(values[at]))}`).join("L");
    const banded = withEnds(layer, places);
    const back = [...banded].reverse();
    const band = banded.length > 1 ? `M${through(layer.high, banded)}L${through(layer.low, back)}z` : "";
    const kind = `mark-line${group ? ` dash-${group.dash ?? "solid"}` : ""}${layer.faint ? " mark-faint" : ""}`;
    const hasDots = group && !layer.faint && places.length <= DOTS;
    return [
      path(band, "mark-band"),
      path(`M${through(layer.y, places)}`, kind),
      ...(hasDots ? [path(symbols(layer, scales, "circle", 2.6), "mark-symbol")] : []),
      ...(!group && layer.label.length ? [orientation(layer, places[0], scales)] : []),
    ];
  }

  function orientation(layer, at, scales) {
    return label(scales.x(layer.x[at]) + 5, scales.y(layer.y[at]) + 12, layer.label[0], "start", "plot-faint");
  }

  function bars(layer, _, scales, { isRows, barHeight }) {
    const half = fixed(Math.max(2, (barHeight * (layer.thickness ?? 0.6)) / 2));
    const drawn = placesOf(layer).map((at) => {
      const [from, to] = [layer.start[at] ?? 0, layer.x[at]].map((value) => fixed(scales.x(value)));
      return `M${from} ${fixed(scales.y(layer.y[at]) - half)}H${to}v${2 * half}H${from}z`;
    });
    return [path(drawn.join(""), "mark-bar"), ...intervals(layer, scales, isRows)];
  }

  function rule(layer, _, scales, { left, right, top, bottom }) {
    if (!layer.x.length) return layer.y.map((y) => path(`M${left} ${fixed(scales.y(y))}H${right}`, "mark-rule"));
    return layer.x.flatMap((x, at) => {
      const pixel = fixed(scales.x(x));
      const text = layer.label[at];
      const isRight = pixel + 8 + widthOf(text ?? "") < right;
      const [dx, anchor] = isRight ? [6, "start"] : [-6, "end"];
      const named = text ? [label(pixel + dx, bottom - 6, text, anchor, "plot-strong")] : [];
      return [path(`M${pixel} ${top}V${bottom}`, "mark-rule"), ...named];
    });
  }

  function shade(layer, _, scales, { top, bottom }) {
    const [from, to] = layer.x.map((x) => fixed(scales.x(x)));
    return [path(`M${from} ${top}H${to}V${bottom}H${from}z`, "mark-shade")];
  }

  const MARKS = { points, line, bars, rule, shade };

  // Data in sight that can be touched.
  function hitsOf(layer, scales, { left, right, top, bottom }) {
    if (layer.faint || layer.group === null) return [];
    return placesOf(layer).flatMap((index) => {
      const [px, py] = [scales.x(layer.x[index]), scales.y(layer.y[index])];
      const isInside = px >= left - 1 && px <= right + 1 && py >= top - 1 && py <= bottom + 1;
      return isInside ? [{ layer, index, px, py, token: layer.token[index] ?? null }] : [];
    });
  }

  // Names beside their points, where nothing else is written or lies.
  function names(wanted, place, hits) {
    const taken = hits.map(({ px, py }) => [px - 4, py - 4, px + 4, py + 4]);
    const isFree = ([left, top, right, bottom]) =>
      left >= place.left && right <= place.width && top >= 0 && bottom <= place.bottom &&
      !taken.some(([l, t, r, b]) => left < r && right > l && top < b && bottom > t);
    return wanted.flatMap((hit) => {
      const text = hit.layer.label[hit.index];
      const [w, h] = [widthOf(text), LINE];
      const corners = [[8, -h / 2], [-8 - w, -h / 2], [-w / 2, -8 - h], [-w / 2, 8]];
      const further = [[7, -h - 4], [7, 5], [-w - 7, -h - 4], [-w - 7, 5]];
      const boxAt = ([dx, dy]) => [hit.px + dx, hit.py + dy, hit.px + dx + w, hit.py + dy + h];
      const box = [...corners, ...further].map(boxAt).find(isFree);
      if (!box) return [];
      taken.push(box);
      return [label(box[0], box[3] - 2.5, text)];
    });
  }

  function marked(hits, groups) {
    return hits.map(({ layer, px, py }) => {
      const group = groups[layer.group];
      const sign = layer.mark === "points" ? group.symbol : "circle";
      return path(symbol(sign, px, py, RADIUS + 1.5), `mark-symbol mark-highlight hue-${group.hue}`);
    });
  }

  function scalesOf(panel, view, place) {
    const room = place.isAbove ? (NAMED_ROW - ROW) / 2 / NAMED_ROW : 0; // rows begin below their names
    const upright = place.isRows ? [place.top, place.bottom] : [place.bottom, place.top];
    return {
      x: scale(panel.x.scale, view.x, [place.left, place.right]),
      y: scale(panel.y.scale, view.y.map((end) => end - room), upright),
    };
  }

  // Draw a panel; `view` has the domains of both axes.
  function drawPanel(panel, groups, { width, view, hidden, highlighted }) {
    const place = layout(panel, width, view);
    const scales = scalesOf(panel, view, place);
    const layers = panel.layers.filter((layer) => layer.group === null || !hidden.has(layer.group));
    const about = { ...place, barHeight: ROW, count: layers.reduce((sum, layer) => sum + layer.x.length, 0) };
    const hits = layers.flatMap((layer) => hitsOf(layer, scales, place));
    const chosen = highlighted === null ? [] : hits.filter((hit) => hit.token === highlighted);
    const named = chosen.length ? (place.isRows ? [] : chosen) : hits.filter((hit) => hit.index < hit.layer.named);
    const marks = layers.map((layer) => {
      const group = layer.group === null ? null : groups[layer.group];
      return shape("g", { class: `hue-${group?.hue ?? "none"}` }, ...MARKS[layer.mark](layer, group, scales, about));
    });
    const height = place.bottom + EDGE.bottom;
    const clip = `plot-clip-${++clips}`;
    const overlay = shape("g", {});
    const svg = shape(
      "svg",
      { width, height, class: chosen.length ? "has-highlight" : null, "aria-hidden": "true" },
      shape("clipPath", { id: clip }, path(outline(place, 5), null)),
      ...axes(panel, place, scales),
      shape("g", { "clip-path": `url(#${clip})`, class: "plot-marks" }, ...marks),
      shape("g", { class: "plot-names" }, ...names(named, place, hits)),
      ...marked(chosen, groups),
      overlay,
    );
    return { svg, hits, scales, rowHeight: place.rowHeight, centre: middle(place), ...pointing(overlay, place) };
  }

  function outline({ left, right, top, bottom }, beyond) {
    return `M${left - beyond} ${top - beyond}H${right + beyond}V${bottom + beyond}H${left - beyond}z`;
  }

  function middle({ left, right, top, bottom }) {
    return [(left + right) / 2, (top + bottom) / 2];
  }

  // What follows the reader: a ring around a datum, and the box that is being drawn; null takes it away.
  function pointing(overlay, { isRows, top, bottom }) {
    const focus = (hit) => {
      const ring = hit && shape("circle", { cx: hit.px, cy: hit.py, r: RADIUS + 4, class: "plot-focus" });
      overlay.replaceChildren(...(ring ? [ring] : []));
    };
    const box = (from, to) => {
      if (!from) return overlay.replaceChildren();
      const [low, high] = isRows ? [top, bottom] : [from[1], to[1]];
      return overlay.replaceChildren(path(`M${from[0]} ${low}H${to[0]}V${high}H${from[0]}z`, "plot-box"));
    };
    return { focus, box };
  }

  return { RADIUS, drawPanel, shape };
})();
