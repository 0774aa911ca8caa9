// Scales, ticks and symbols for plot.js: numbers in, numbers and path strings out; nothing here touches the page.
//
// An axis is {title, scale, domain, percent, names}. Scales: "linear", "log", "sqrt", and "rows", where value 0 is the
// first of `names`, 1 the second, and values between them are places between rows.

"use strict";

const RockScales = (() => {
  const FORWARD = { linear: (v) => v, rows: (v) => v, log: Math.log10, sqrt: (v) => Math.sqrt(Math.max(v, 0)) };
  const BACK = { linear: (v) => v, rows: (v) => v, log: (v) => 10 ** v, sqrt: (v) => Math.max(v, 0) ** 2 };
  const ROOM = 0.05; // of the range, kept free beyond the outermost values
  const { minus } = RockStrip;

  // value -> pixel, with `invert` for the way back.
  function scale(kind, [from, to], [start, end]) {
    const [a, b] = [FORWARD[kind](from), FORWARD[kind](to)];
    const at = (value) => start + ((FORWARD[kind](value) - a) / (b - a)) * (end - start);
    at.invert = (pixel) => BACK[kind](a + ((pixel - start) / (end - start)) * (b - a));
    at.domain = [from, to];
    return at;
  }

  // The domain of an axis: as it says, or around the values with some room; never empty.
  function domainOf(axis, values) {
    if (axis.scale === "rows") return [-0.5, axis.names.length - 0.5];
    if (axis.domain) return axis.domain;
    const known = values.filter((value) => Number.isFinite(value) && (axis.scale !== "log" || value > 0));
    let low = Math.min(...known), high = Math.max(...known);
    if (!known.length) [low, high] = axis.scale === "log" ? [1, 10] : [0, 1];
    if (axis.scale === "log") {
      const room = (high / low) ** ROOM;
      return low === high ? [low / 2, high * 2] : [low / room, high * room];
    }
    const room = low === high ? Math.abs(low) / 2 || 1 : ROOM * (high - low);
    const isFromZero = low >= 0 && low - room < 0;
    return [isFromZero ? 0 : low - room, high + room];
  }

  // The middle `share` of a domain around a place in it: less than 1 zooms in.
  function zoomed(kind, [from, to], share, place) {
    const [a, b, at] = [from, to, place].map(FORWARD[kind]);
    return [BACK[kind](at - (at - a) * share), BACK[kind](at + (b - at) * share)];
  }

  // Round values within a domain, about `count` of them, each with its text.
  function ticks(axis, domain, count) {
    const values = (axis.scale === "log" && decades(domain, count)) || steps(domain, count);
    const step = values.length > 1 ? Math.min(...values.slice(1).map((value, at) => value - values[at])) : 1;
    return values.map((value) => ({ value, text: tickText(value, axis.percent, step) }));
  }

  function decades([from, to], count) {
    const powers = [];
    for (let power = Math.floor(Math.log10(from)); power <= Math.log10(to); power++) powers.push(10 ** power);
    const digits = powers.length * 3 <= count + 2 ? [1, 2, 5] : [1];
    const every = Math.ceil(powers.length / count);
    const values = powers.filter((_, at) => at % every === 0).flatMap((power) => digits.map((digit) => digit * power));
    const inside = values.filter((value) => value >= from && value <= to);
    return inside.length > 1 ? inside : null;
  }

  function steps([from, to], count) {
    const rough = (to - from) / Math.max(count, 1);
    const unit = 10 ** Math.floor(Math.log10(rough));
    const step = [1, 2, 5, 10].map((digit) => digit * unit).find((each) => each >= rough * 0.999);
    const first = Math.ceil(from / step - 1e-9);
    const last = Math.floor(to / step + 1e-9);
    return Array.from({ length: Math.max(0, last - first + 1) }, (_, at) => (first + at) * step);
  }

  function tickText(value, isPercent, step) {
    if (isPercent) return `${tickText(100 * value, false, 100 * step)} %`;
    const size = Math.abs(value);
    if (size >= 1e6) return minus(`${+(value / 1e6).toPrecision(3)}M`);
    if (size >= 1e4) return minus(`${+(value / 1e3).toPrecision(3)}k`);
    const digits = Math.min(8, Math.max(0, -Math.floor(Math.log10(step) + 1e-9)));
    const shown = size < step / 1e6 ? 0 : value;
    return minus(shown.toLocaleString("en", { minimumFractionDigits: digits, maximumFractionDigits: digits }));
  }

  // The outline of a symbol of radius r around a place.
  function symbol(shape, x, y, r) {
    const wide = r * 1.15;
    const corners = {
      diamond: [[0, -1.25], [1.25, 0], [0, 1.25], [-1.25, 0]],
      square: [[-0.9, -0.9], [0.9, -0.9], [0.9, 0.9], [-0.9, 0.9]],
      "triangle-up": [[0, -1], [1, 0.8], [-1, 0.8]],
      "triangle-down": [[0, 1], [1, -0.8], [-1, -0.8]],
      tick: [[-0.25, -2], [0.25, -2], [0.25, 2], [-0.25, 2]],
    }[shape];
    if (!corners) return `M${fixed(x - r)} ${fixed(y)}a${r} ${r} 0 1 0 ${2 * r} 0a${r} ${r} 0 1 0 ${-2 * r} 0z`;
    return `M${corners.map(([dx, dy]) => `${fixed(x + wide * dx)} ${fixed(y + wide * dy)}`).join("L")}z`;
  }

  function fixed(pixel) {
    return Number(pixel.toFixed(1));
  }

  return { domainOf, fixed, scale, symbol, ticks, zoomed };
})();
