// What the views of the explorer share: the state, which lives in the address (after #), and requests to the server.
//
// 1. `go` changes the state and the address; `read` takes over what the address says, after back, forward or a pasted
//    link. Both end in `draw`, which shows the chosen view.
// 2. A part is drawn again only when what it depends on has `changed`; an answer that comes too late is dropped.
// 3. A view registers itself in `views`: its name, what draws it, and what stops when it is left.

"use strict";

const Explorer = (() => {
  const { element, number } = RockStrip;
  const VIEWS = ["rollouts", "rocks", "compare", "knockout", "live"];
  const SIDES = ["a", "b"]; // of a comparison: of two tokens that are not paired, which one the position is of
  const FILTERS = ["text", "rock", "correct", "category", "banned", "kl_low", "kl_high", "token_id", "sort"];
  const DEFAULTS = {
    view: "rollouts",
    run: "0",
    checkpoint: "",
    rollout: "",
    position: "",
    side: "a",
    measure: "kl",
    theme: "",
    text: "",
    rock: "",
    correct: "",
    category: "",
    banned: "",
    kl_low: "",
    kl_high: "",
    token_id: "",
    sort: "rollout_id",
    run_b: "",
    checkpoint_b: "",
    ban: "",
    page: "0",
  };
  const SORTS = {
    rollout_id: "as sampled",
    "-mean_kl": "highest mean kl",
    mean_kl: "lowest mean kl",
    "-max_kl": "highest kl",
    "-n_rocks": "most rocks",
    "-length": "longest",
    length: "shortest",
  };
  const COUNT = new Intl.NumberFormat("en");

  const $ = (id) => document.getElementById(id);
  const runs = [];
  const state = { ...DEFAULTS };
  const views = {};

  // The state and the address

  function readAddress() {
    const said = new URLSearchParams(location.hash.slice(1));
    const next = { ...DEFAULTS };
    for (const name of Object.keys(DEFAULTS)) if (said.has(name)) next[name] = said.get(name);
    if (!VIEWS.includes(next.view)) next.view = DEFAULTS.view;
    if (!Object.keys(RockStrip.MEASURES).includes(next.measure)) next.measure = DEFAULTS.measure;
    if (!SIDES.includes(next.side)) next.side = DEFAULTS.side;
    if (!Object.keys(SORTS).includes(next.sort)) next.sort = DEFAULTS.sort;
    if (!isRun(next.run)) next.run = DEFAULTS.run;
    if (!isRun(next.run_b)) next.run_b = DEFAULTS.run_b;
    if (!runs[next.run].checkpoints.includes(Number(next.checkpoint))) next.checkpoint = DEFAULTS.checkpoint;
    return next;
  }

  function isRun(said) {
    return /^\d+$/.test(said) && Number(said) < runs.length;
  }

  function address(changes = {}) {
    const said = Object.entries({ ...state, ...changes }).filter(([name, value]) => value !== DEFAULTS[name]);
    return "#" + new URLSearchParams(said).toString();
  }

  function go(changes, { replace = false } = {}) {
    const next = address(changes);
    if (next !== (location.hash || "#")) history[replace ? "replaceState" : "pushState"](null, "", next);
    read();
  }

  // Take over what the address says, and show it.
  function read() {
    Object.assign(state, readAddress());
    draw();
  }

  const run = () => runs[state.run];
  const checkpointOf = (own, chosen) =>
    chosen !== "" && own.checkpoints.includes(Number(chosen)) ? Number(chosen) : own.reference;

  // Requests to the server; of two for the same place only the later one is answered.

  class Refusal extends Error {}

  const asked = new Map();

  function forget(...places) {
    for (const place of places) asked.get(place)?.abort();
  }

  async function ask(place, path, parameters = {}) {
    forget(place);
    const abort = new AbortController();
    asked.set(place, abort);
    const said = new URLSearchParams(Object.entries(parameters).filter(([, value]) => value !== "" && value !== null));
    const response = await fetch(`api/${path}?${said}`, { signal: abort.signal }).catch((error) => {
      throw error.name === "AbortError" ? error : new Refusal("The explorer does not answer. Is it still running?");
    });
    const record = await response.json();
    if (!response.ok) throw new Refusal(record.error);
    return record;
  }

  // Run `work`; what goes wrong becomes a sentence on the page, what was overtaken is forgotten.
  async function attempt(work) {
    try {
      await work();
    } catch (error) {
      if (error.name === "AbortError") return;
      drawnFor.clear();
      complain(error.message);
      if (!(error instanceof Refusal)) throw error;
    }
  }

  function complain(sentence) {
    $("problem").textContent = sentence;
    $("problem").hidden = !sentence;
  }

  const drawnFor = new Map();

  // Whether `part` was last drawn for something else; remembers what it is drawn for now.
  function changed(part, ...reasons) {
    const key = JSON.stringify(reasons);
    if (drawnFor.get(part) === key) return false;
    drawnFor.set(part, key);
    return true;
  }

  // Drawing

  function draw() {
    complain("");
    document.documentElement.dataset.theme = state.theme;
    document.title = `${views[state.view].name} · ${run().name} · rocktokens`;
    drawBar();
    for (const view of VIEWS) {
      $(`view-${view}`).hidden = view !== state.view;
      if (view !== state.view) views[view].leave?.();
    }
    attempt(views[state.view].draw);
  }

  function drawBar() {
    for (const link of $("views").children) {
      link.href = address({ view: link.dataset.view });
      if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
    }
    options(
      $("run"),
      runs.map((own, index) => [String(index), own.name]),
      state.run,
    );
    options($("checkpoint"), steps(run()), String(checkpointOf(run(), state.checkpoint) ?? ""));
    for (const select of document.querySelectorAll(".measure")) {
      options(
        select,
        Object.entries(RockStrip.MEASURES).map(([name, measure]) => [name, measure.label]),
        state.measure,
      );
    }
  }

  function steps(own) {
    return own.checkpoints.length ? own.checkpoints.map((step) => [String(step), `step ${step}`]) : [["", "none"]];
  }

  function options(select, choices, chosen) {
    const key = JSON.stringify(choices);
    if (select.dataset.choices !== key) {
      select.dataset.choices = key;
      select.replaceChildren(...choices.map(([value, label]) => element("option", { value }, label)));
    }
    select.value = chosen;
  }

  function legendInto(view, scale) {
    view.querySelector(".legend-place").replaceChildren(RockStrip.legend(state.measure, scale));
  }

  function grade(correct) {
    if (correct === null) return null;
    return element("span", { class: correct ? "right" : "wrong" }, correct ? "✓ correct" : "✗ wrong");
  }

  function hint(sentence) {
    return element("p", { class: "muted" }, sentence);
  }

  const position = () => (state.position === "" ? null : Number(state.position));

  // With its sign, unless it rounds to 0.
  function points(delta) {
    if (!Number.isFinite(delta)) return "—";
    const text = (100 * delta).toFixed(1);
    if (Number(text) === 0) return "0.0 points";
    return `${delta > 0 ? "+" : ""}${text.replace("-", "−")} points`;
  }


  function intervalText(ends) {
    return ends ? ` [${number(100 * ends[0], 1)}, ${number(100 * ends[1], 1)}]` : "";
  }

  function cleared() {
    return Object.fromEntries(FILTERS.filter((name) => name !== "sort").map((name) => [name, ""]));
  }

  return {
    $,
    COUNT,
    DEFAULTS,
    FILTERS,
    SIDES,
    SORTS,
    address,
    ask,
    attempt,
    changed,
    checkpointOf,
    cleared,
    complain,
    drawnFor,
    forget,
    go,
    grade,
    hint,
    intervalText,
    legendInto,
    options,
    points,
    position,
    read,
    run,
    runs,
    state,
    steps,
    views,
  };
})();
