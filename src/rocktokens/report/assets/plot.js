// Charts that can be touched: hover, zoom, toggle groups, walk through by keyboard, highlight a token.
//
//   const plot = RockPlot.draw(host, spec, { label, onHighlight });
//   plot.update(spec)       new data in place: zoom, hidden groups and the highlight stay
//   plot.highlight(token)   mark every datum of a token id; null clears
//
// `label` names the chart for those who do not see it. onHighlight(token) is told what the reader chose, null to clear;
// marking it is left to the page, which calls highlight on all its charts. Needs strip.js, plot_scales.js and
// plot_marks.js before it, and plot.css.
//
//   spec   {groups: [{name, hue, symbol, dash}], panels: [{title, x: axis, y: axis, layers: [layer]}]}
//   axis   {title, scale: "linear" | "log" | "sqrt" | "rows", domain: [from, to] | null, percent, names: [row, …]}
//   layer  {mark, group: index | null, x: [], y: [], low: [], high: [], start: [], token: [], label: [],
//           facts: {name: []}, named, faint, thickness}
//
// Marks, column by column; a value may be null. `label`, `facts` (texts) and `token` are what a datum says if touched.
//   points   symbols at (x, y); low and high are the ends of an interval, along x where y has rows, else along y
//   line     a line through (x, y) in this order, with dots; low and high make a band; `faint` draws it thin and
//            untouchable; without a group it is for orientation, named by its first label
//   bars     rows of y, from `start` (0 where there is none) to x; low and high as for points
//   rule     a dashed line across the panel at x (or at y where x is empty), named by its label
//   shade    a shaded stripe from x[0] to x[1]
// Hues: vermillion, blue, green, grey, ink. Symbols: circle, diamond, square, triangle-up, triangle-down, tick. Dashes:
// solid, dashed, dotted. `named`: how many data, from the first, get their label written beside them.
//
// Text is only ever set as text. Everything is drawn again when the width changes.

"use strict";

const RockPlot = (() => {
  const { element } = RockStrip;
  const { domainOf, symbol, zoomed } = RockScales;
  const { RADIUS, drawPanel, shape } = RockMarks;
  const REACH = 32; // pixels from a datum that still mean it
  const DRAG = 6; // pixels a pointer moves before it draws a box
  const ZOOM = 0.6;
  const AWAY = 14; // pixels from a datum to what it says
  const KEYS = "Arrow keys move between data, Enter highlights a token, plus and minus zoom, 0 resets.";
  const MOVES = {
    ArrowRight: ["px", 1],
    ArrowLeft: ["px", -1],
    ArrowDown: ["py", 1],
    ArrowUp: ["py", -1],
    Home: ["px", -Infinity],
    End: ["px", Infinity],
  };

  function draw(host, spec, { label = "", onHighlight = () => {} } = {}) {
    const state = { spec, hidden: new Set(), views: new Map(), highlighted: null, width: 0 };
    const tip = element("div", { class: "plot-tip", role: "status", hidden: true });
    const legend = element("div", { class: "plot-legend", role: "group", "aria-label": "Groups" });
    const tools = element(
      "div",
      { class: "plot-tools", role: "group", "aria-label": "Zoom" },
      tool("+", "Zoom in", () => zoomAll(ZOOM)),
      tool("−", "Zoom out", () => zoomAll(1 / ZOOM)),
      tool("Reset", "Reset the zoom", reset),
    );
    const grid = element("div", { class: "plot-panels" });
    const root = element("div", { class: "plot" }, element("div", { class: "plot-bar" }, legend, tools), grid, tip);
    let panels = [];

    function tool(text, name, onclick) {
      const title = `${name}. Or drag a box; Ctrl and wheel.`;
      return element("button", { type: "button", "aria-label": name, title, onclick }, text);
    }

    function build() {
      legend.replaceChildren(...(state.spec.groups.length > 1 ? state.spec.groups.map(toggle) : []));
      panels = state.spec.panels.map(panelOf);
      grid.classList.toggle("plot-single", panels.length === 1);
      grid.replaceChildren(...panels.map((own) => own.root));
    }

    function toggle(group, index) {
      const drawn = group.dash
        ? { d: "M-8 0H8", class: `mark-line dash-${group.dash}` }
        : { d: symbol(group.symbol, 0, 0, RADIUS), class: "mark-symbol" };
      const sign = { viewBox: "-8 -8 16 16", class: `plot-sign hue-${group.hue}`, "aria-hidden": "true" };
      const isShown = () => String(!state.hidden.has(index));
      const onclick = (event) => {
        if (!state.hidden.delete(index)) state.hidden.add(index);
        event.currentTarget.setAttribute("aria-pressed", isShown());
        redraw();
      };
      const attributes = { type: "button", "aria-pressed": isShown(), onclick };
      return element("button", attributes, shape("svg", sign, shape("path", drawn)), group.name);
    }

    function panelOf(panel, index) {
      const body = element("div", {
        class: "plot-body",
        tabindex: 0,
        role: "application",
        "aria-roledescription": "chart",
        "aria-label": `${[label, panel.title].filter(Boolean).join(": ")}. ${KEYS}`,
      });
      const own = { spec: panel, index, body, hits: [], current: null, drawn: null };
      own.root = element(
        "div",
        { class: "plot-panel" },
        panel.title ? element("p", { class: "plot-title" }, panel.title) : null,
        panel.y.title ? element("p", { class: "plot-axis" }, `↑ ${panel.y.title}`) : null,
        body,
        panel.x.title ? element("p", { class: "plot-axis plot-axis-x" }, `${panel.x.title} →`) : null,
      );
      listen(own);
      return own;
    }

    // Drawing

    function fullView({ x, y, layers }) {
      const shown = layers.filter((layer) => layer.group === null || !state.hidden.has(layer.group));
      const ends = shown.flatMap((layer) => [...layer.low, ...layer.high]);
      const bars = shown.some((layer) => layer.mark === "bars") ? [0] : [];
      const isRows = y.scale === "rows";
      const valuesX = [...shown.flatMap((layer) => layer.x), ...bars, ...(isRows ? ends : [])];
      const valuesY = [...shown.flatMap((layer) => layer.y), ...(isRows ? [] : ends)];
      return { x: domainOf(x, valuesX), y: domainOf(y, valuesY) };
    }

    function redraw() {
      for (const own of panels) {
        const width = own.body.clientWidth;
        if (!width) continue;
        const view = { ...fullView(own.spec), ...state.views.get(own.index) };
        const { hidden, highlighted } = state;
        own.drawn = drawPanel(own.spec, state.spec.groups, { width, view, hidden, highlighted });
        own.hits = own.drawn.hits;
        own.current = null;
        own.body.replaceChildren(own.drawn.svg);
      }
      tip.hidden = true;
    }

    // Zoom: the axes of a panel that have numbers

    function setView(own, view) {
      const kept = Object.entries(view).filter(([name]) => own.spec[name].scale !== "rows");
      state.views.set(own.index, { ...state.views.get(own.index), ...Object.fromEntries(kept) });
    }

    function zoomBy(own, share, [px, py]) {
      const { x, y } = own.drawn.scales;
      setView(own, {
        x: zoomed(own.spec.x.scale, x.domain, share, x.invert(px)),
        y: zoomed(own.spec.y.scale, y.domain, share, y.invert(py)),
      });
    }

    function zoomTo(own, from, to) {
      const { x, y } = own.drawn.scales;
      const between = (axis, at) => [axis.invert(from[at]), axis.invert(to[at])].sort((a, b) => a - b);
      const isWide = Math.abs(from[0] - to[0]) > DRAG;
      const isHigh = Math.abs(from[1] - to[1]) > DRAG;
      setView(own, { ...(isWide ? { x: between(x, 0) } : {}), ...(isHigh ? { y: between(y, 1) } : {}) });
      redraw();
    }

    function zoomAll(share) {
      for (const own of panels) if (own.drawn) zoomBy(own, share, own.drawn.centre);
      redraw();
    }

    function reset() {
      state.views.clear();
      redraw();
    }

    // Touch

    function nearest(own, [px, py]) {
      const closest = (away, reach) => {
        let [best, least] = [null, reach];
        for (const hit of own.hits) if (away(hit) < least) [best, least] = [hit, away(hit)];
        return best;
      };
      const distance = (hit) => Math.hypot(hit.px - px, hit.py - py);
      if (own.spec.y.scale !== "rows") return closest(distance, REACH);
      // All of a row means what is in it.
      const half = own.drawn.rowHeight / 2;
      return closest(distance, half) ?? closest((hit) => Math.abs(hit.py - py) + Math.abs(hit.px - px) / 1e4, half);
    }

    function show(own, hit) {
      own.drawn?.focus(hit);
      own.current = hit;
      tip.hidden = !hit;
      if (!hit) return;
      const { layer, index, token } = hit;
      const group = state.spec.groups[layer.group].name;
      const name = layer.label[index] ?? group;
      const facts = Object.entries(layer.facts).map(([title, texts]) => [title, texts[index]]);
      const pair = ([title, text]) => (text ? [element("dt", {}, title), element("dd", {}, text)] : []);
      tip.replaceChildren(
        element("p", { class: "plot-tip-name" }, token === null ? name : element("span", { class: "chip" }, name)),
        ...(group === name ? [] : [element("p", { class: "plot-tip-group" }, group)]),
        element("dl", {}, ...facts.flatMap(pair)),
      );
      place(own, hit);
    }

    // Put what a datum says beside it, inside the chart's width.
    function place(own, hit) {
      const [outer, inner] = [root.getBoundingClientRect(), own.body.getBoundingClientRect()];
      const [x, y] = [inner.left - outer.left + hit.px, inner.top - outer.top + hit.py];
      const most = Math.max(0, outer.width - tip.offsetWidth);
      const left = x + AWAY <= most ? x + AWAY : x - AWAY - tip.offsetWidth;
      tip.style.left = `${Math.min(most, Math.max(0, left))}px`;
      tip.style.top = `${y + AWAY}px`;
    }

    function choose(hit) {
      if (hit && hit.token !== null) onHighlight(hit.token === state.highlighted ? null : hit.token);
    }

    function listen(own) {
      const { body } = own;
      let from = null; // where a button went down
      let isBox = false;
      const placeOf = (event) => {
        const box = body.getBoundingClientRect();
        return [event.clientX - box.left, event.clientY - box.top];
      };
      body.addEventListener("pointerdown", (event) => {
        isBox = false;
        from = event.button === 0 && event.pointerType === "mouse" ? placeOf(event) : null;
      });
      body.addEventListener("pointermove", (event) => {
        const at = placeOf(event);
        if (from && !isBox && Math.hypot(at[0] - from[0], at[1] - from[1]) > DRAG) {
          isBox = true;
          body.setPointerCapture(event.pointerId);
          show(own, null);
        }
        if (from && isBox) own.drawn.box(from, at);
        else show(own, nearest(own, at));
      });
      body.addEventListener("pointerup", (event) => {
        if (from && isBox) zoomTo(own, from, placeOf(event));
        from = null;
      });
      body.addEventListener("pointercancel", () => {
        from = null;
        own.drawn.box(null);
      });
      body.addEventListener("pointerleave", () => {
        if (!from) show(own, null);
      });
      body.addEventListener("click", (event) => {
        if (!isBox) choose(nearest(own, placeOf(event)));
      });
      const onWheel = (event) => {
        if (!event.ctrlKey && !event.metaKey) return;
        event.preventDefault();
        zoomBy(own, event.deltaY < 0 ? ZOOM : 1 / ZOOM, placeOf(event));
        redraw();
      };
      body.addEventListener("wheel", onWheel, { passive: false });
      body.addEventListener("keydown", (event) => onKey(own, event));
      body.addEventListener("blur", () => show(own, null));
    }

    // The datum this many places after the current one, in the order of pixels along an axis.
    function neighbour(own, key, step) {
      const other = key === "px" ? "py" : "px";
      const sorted = [...own.hits].sort((a, b) => a[key] - b[key] || a[other] - b[other]);
      const before = step > 0 ? -1 : sorted.length;
      const at = own.current ? sorted.indexOf(own.current) : before;
      return sorted[Math.min(sorted.length - 1, Math.max(0, at + step))] ?? null;
    }

    function onKey(own, event) {
      if (event.ctrlKey || event.metaKey || event.altKey) return;
      const { key } = event;
      if (MOVES[key]) {
        show(own, neighbour(own, ...MOVES[key]));
        own.body.querySelector(".plot-focus")?.scrollIntoView({ block: "nearest" });
      } else if (key === "Enter" || key === " ") choose(own.current);
      else if (key === "+" || key === "=") zoomAll(ZOOM);
      else if (key === "-") zoomAll(1 / ZOOM);
      else if (key === "0") reset();
      else return;
      event.preventDefault();
    }

    function update(next) {
      state.spec = next;
      build();
      redraw();
    }

    // What is being looked at stays so.
    function highlight(token) {
      state.highlighted = token;
      const looked = panels.map((own) => own.current);
      redraw();
      panels.forEach((own, at) => {
        const same = (hit) => hit.layer === looked[at]?.layer && hit.index === looked[at].index;
        const hit = own.body.matches(":focus, :hover") && own.hits.find(same);
        if (hit) show(own, hit);
      });
    }

    build();
    host.replaceChildren(root);
    redraw();
    const observer = new ResizeObserver(() => {
      if (root.clientWidth === state.width) return;
      state.width = root.clientWidth;
      redraw();
    });
    observer.observe(root);
    return { highlight, update };
  }

  return { draw };
})();
