// What the views of the explorer share: the state, which lives in the address (after #), and requests for data.
//
// 1. `go` changes the state and the address; `read` takes over what the address says, after back, forward or a pasted
//    link. Both end in `draw`, which shows the chosen view.
// 2. A part is drawn again only when what it depends on has `changed`; an answer that comes too late is dropped, and so
//    is whatever a view still waits for when another view or run is shown.
// 3. A view registers itself in `views`: its name, what draws it, and what stops when it is left.
// 4. Data comes from the server, or from the page itself where it is a bundle: a block for each address that a server
//    would have answered, packed with zlib. Nothing else knows the difference, but for what a bundle cannot do.
// 5. A run that changes on the disk is noticed by its version. The page says so; whatever is done next shows the new
//    data.

"use strict";

const Explorer = (() => {
  const { element, number } = RockStrip;
  const VIEWS = ["home", "rollouts", "rocks", "classes", "compare", "knockout", "live"];
  const SIDES = ["a", "b"]; // of a comparison: of two tokens that are not paired, which one the position is of
  const FILTERS = ["text", "rock", "correct", "category", "banned", "kl_low", "kl_high", "token_id", "sort"];
  const TABLE = { order: "", find: "", pick: "" }; // what was chosen in the table of a view
  const DEFAULTS = {
    view: "",
    run: "",
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
    with: "",
    ...TABLE,
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
  const VERSION_POLL = 3000; // milliseconds

  const $ = (id) => document.getElementById(id);
  const state = { ...DEFAULTS };
  const views = {};
  const listing = { runs: [], opens_a_run: true, left_out: "", table: null };
  const overviews = new Map();

  // The state and the address

  function readAddress() {
    const said = new URLSearchParams(location.hash.slice(1));
    const next = { ...DEFAULTS };
    for (const name of Object.keys(DEFAULTS)) if (said.has(name)) next[name] = said.get(name);
    if (!VIEWS.includes(next.view)) next.view = listing.opens_a_run ? "rollouts" : "home";
    if (!Object.keys(RockStrip.MEASURES).includes(next.measure)) next.measure = DEFAULTS.measure;
    if (!SIDES.includes(next.side)) next.side = DEFAULTS.side;
    if (!Object.keys(SORTS).includes(next.sort)) next.sort = DEFAULTS.sort;
    if (!isRun(next.run)) next.run = String(listing.runs[0]?.number ?? 0);
    if (!isRun(next.run_b)) next.run_b = DEFAULTS.run_b;
    next.with = next.with.split(",").filter((own) => isRun(own) && own !== next.run).join(",");
    return next;
  }

  function isRun(said) {
    return listing.runs.some((own) => String(own.number) === said);
  }

  function address(changes = {}) {
    const said = Object.entries({ ...state, ...changes }).filter(([name, value]) => value !== DEFAULTS[name]);
    return "#" + new URLSearchParams(said).toString();
  }

  // A link that changes the state as it is when it is followed: `current` brings its address up to date.
  function link(changes, attributes, ...children) {
    return current(element("a", { ...attributes, "data-go": JSON.stringify(changes) }, ...children));
  }

  function current(made) {
    made.href = address(JSON.parse(made.dataset.go));
    return made;
  }

  function go(changes, { replace = false } = {}) {
    const next = address(changes);
    if (next !== (location.hash || "#")) history[replace ? "replaceState" : "pushState"](null, "", next);
    read();
  }

  // Take over what the address says, and show it; of a run that has changed, what it is now.
  function read() {
    Object.assign(state, readAddress());
    if (!$("stale").hidden) forgetData();
    draw();
  }

  const run = () => overviews.get(state.run);
  const nameOf = (index) => listing.runs.find((own) => String(own.number) === String(index))?.name ?? `run ${index}`;
  const checkpointOf = (own, chosen) =>
    chosen !== "" && own.checkpoints.includes(Number(chosen)) ? Number(chosen) : own.reference;

  async function list() {
    Object.assign(listing, await ask("runs", "runs"));
  }

  // What is known of a run, asked for once.
  async function overview(index) {
    if (!overviews.has(index)) overviews.set(index, await ask(`overview ${index}`, `runs/${index}`));
    return overviews.get(index);
  }

  // Requests for data; of two for the same place only the later one is answered.

  class Refusal extends Error {}

  const blocks = new Map([...document.querySelectorAll("script[data-ask]")].map((own) => [own.dataset.ask, own]));
  const isBundle = blocks.size > 0;
  const asked = new Map();

  function forget(...places) {
    for (const place of places) asked.get(place)?.abort();
  }

  async function ask(place, path, parameters = {}) {
    forget(place);
    const abort = new AbortController();
    asked.set(place, abort);
    const asking = addressOf(path, parameters);
    try {
      return await (isBundle ? unpacked(asking) : answered(asking, abort.signal));
    } finally {
      abort.signal.throwIfAborted(); // whatever came of it, it was overtaken
      asked.delete(place);
    }
  }

  // What is asked, as answers.py names it.
  function addressOf(path, parameters = {}) {
    const said = Object.entries(parameters).filter(([, value]) => value !== "" && (value ?? null) !== null);
    const query = new URLSearchParams(said.sort(([a], [b]) => (a < b ? -1 : 1))).toString();
    return query ? `${path}?${query}` : path;
  }

  // Whether an answer can be had: of a bundle, whether it holds it.
  const isThere = (path, parameters) => !isBundle || blocks.has(addressOf(path, parameters));

  async function answered(asking, signal) {
    const response = await fetch(`api/${asking}`, { signal }).catch((error) => {
      throw error.name === "AbortError" ? error : new Refusal("The explorer does not answer. Is it still running?");
    });
    const record = await response.json();
    if (!response.ok) throw new Refusal(record.error);
    return record;
  }

  async function unpacked(asking) {
    if (!blocks.has(asking)) {
      throw new Refusal("This is not in the bundle: run `rocktokens explore` on the run itself to see it.");
    }
    const packed = Uint8Array.from(atob(blocks.get(asking).textContent), (character) => character.charCodeAt(0));
    return new Response(new Blob([packed]).stream().pipeThrough(new DecompressionStream("deflate"))).json();
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

  // Runs that change

  function forgetData() {
    $("stale").hidden = true;
    overviews.clear();
    drawnFor.clear();
  }

  async function checkVersion() {
    const [index, shown] = [state.run, run()];
    if (document.hidden || state.view === "home" || !shown || !$("stale").hidden) return;
    const { version } = await ask("version", `runs/${index}/version`);
    if (run() === shown && version !== shown.version) $("stale").hidden = false;
  }

  // A failure is not reported: the view that needs an answer does that.
  function watchVersion() {
    if (!isBundle) setInterval(() => checkVersion().catch(() => undefined), VERSION_POLL);
  }

  // Drawing

  let scene = "";

  // Enter another view or run. What the last one waits for is dropped, so it is drawn from nothing when it is back.
  function enterScene() {
    const next = JSON.stringify([state.view, state.run, state.run_b]);
    if (next === scene) return;
    scene = next;
    if (asked.size) drawnFor.clear();
    forget(...asked.keys());
    asked.clear();
  }

  // The rollout that the address names. What was begun for another one has been overtaken.
  const chosenRollout = () => JSON.stringify([state.view, state.run, state.checkpoint, state.rollout]);

  function draw() {
    complain("");
    enterScene();
    document.documentElement.dataset.theme = state.theme;
    for (const view of VIEWS) {
      $(`view-${view}`).hidden = view !== state.view;
      if (view !== state.view) views[view].leave?.();
    }
    drawBar();
    attempt(async () => {
      const { view, run: index } = state;
      if (view !== "home") await overview(index);
      if (view !== state.view || index !== state.run) return;
      drawBar();
      await views[view].draw();
    });
  }

  function drawBar() {
    const isHome = state.view === "home";
    document.title = [views[state.view].name, ...(isHome ? [] : [nameOf(state.run)]), "rocktokens"].join(" · ");
    for (const link of $("views").children) {
      link.href = address({ view: link.dataset.view, ...TABLE });
      if (link.dataset.view === state.view) link.setAttribute("aria-current", "page");
      else link.removeAttribute("aria-current");
      link.hidden = link.dataset.view === "home" && listing.opens_a_run && listing.runs.length < 2 && !isBundle;
    }
    options(
      $("run"),
      listing.runs.map((own) => [String(own.number), own.name]),
      state.run,
    );
    $("checkpoint").closest("label").hidden = isHome || !run();
    $("run").closest("label").hidden = isHome;
    $("teacher").hidden = isHome || !run()?.teacher;
    $("teacher").textContent = run()?.teacher.trim() ?? "";
    if (run()) options($("checkpoint"), steps(run()), String(checkpointOf(run(), state.checkpoint) ?? ""));
    for (const select of document.querySelectorAll(".measure")) {
      options(
        select,
        Object.entries(RockStrip.MEASURES).map(([name, measure]) => [name, measure.label]),
        state.measure,
      );
    }
  }

  const tables = new Map();

  // Show a table, drawn again only for other reasons; what is chosen in it is in the address.
  function showTable(host, reasons, make) {
    if (changed(`table ${host.id}`, reasons)) {
      const { table, ...options } = make();
      const onChange = (chosen) => go(chosen, { replace: true });
      tables.set(host.id, RockTable.open(host, table, { ...options, onChange }));
    }
    tables.get(host.id).apply(state);
  }

  function steps(own) {
    return own.checkpoints.length
      ? own.checkpoints.map((step) => [String(step), checkpointLabel(own, step)])
      : [["", "none"]];
  }

  // A student of the user's own has a name; the number beside it need not be a step of training.
  function checkpointLabel(own, step) {
    const name = own.checkpoint_names[step];
    return name === undefined ? `step ${step}` : `checkpoint ${step} (${name})`;
  }

  function options(select, choices, chosen) {
    const key = JSON.stringify(choices);
    if (select.dataset.choices !== key) {
      select.dataset.choices = key;
      select.replaceChildren(...choices.map(([value, label]) => element("option", { value }, label)));
    }
    select.value = chosen;
  }

  function legendInto(view, ...scales) {
    const legends = scales.map((scale) => RockStrip.legend(state.measure, scale));
    view.querySelector(".legend-place").replaceChildren(...legends);
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
    TABLE,
    address,
    ask,
    attempt,
    changed,
    checkpointOf,
    checkpointLabel,
    chosenRollout,
    cleared,
    complain,
    current,
    drawnFor,
    forget,
    forgetData,
    go,
    grade,
    hint,
    intervalText,
    isBundle,
    isThere,
    legendInto,
    link,
    list,
    listing,
    nameOf,
    options,
    overview,
    points,
    position,
    read,
    run,
    showTable,
    state,
    steps,
    views,
    watchVersion,
  };
})();
