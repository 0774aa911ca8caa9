// The rollouts of a run: filters, the list of those that pass, and the token strip of the chosen one.

"use strict";

(() => {
  const { chip, element, number } = RockStrip;
  const {
    $,
    COUNT,
    DEFAULTS,
    FILTERS,
    SORTS,
    ask,
    attempt,
    changed,
    checkpointOf,
    chosenRollout,
    cleared,
    drawnFor,
    forget,
    go,
    grade,
    hint,
    isBundle,
    legendInto,
    link,
    options,
    position,
    run,
    state,
  } = Explorer;

  const CATEGORIES = [
    "latex_math",
    "markdown_whitespace",
    "discourse",
    "digit",
    "operator",
    "punctuation",
    "function_word",
    "content_word",
    "other",
  ];
  const REST = 120; // milliseconds before what is typed is searched for
  let list = null;
  let openPages = 0; // of the list, any of which may be on its way
  let typing = 0;
  let strip = null;

  async function drawRollouts() {
    drawFilters();
    if (!run().checkpoints.length) {
      $("rollout").replaceChildren(hint("This run has no replayed traces: run `rocktokens trace`."));
      $("count").textContent = "";
      return undefined;
    }
    const filters = Object.fromEntries(FILTERS.map((name) => [name, state[name]]));
    if (changed("list", state.run, state.checkpoint, filters)) await openList(filters);
    else list?.draw();
    if (!state.rollout && list?.row(0)) return go({ rollout: String(list.row(0).rollout_id) }, { replace: true });
    return drawRollout();
  }

  function drawFilters() {
    const form = $("filters").elements;
    for (const name of FILTERS) if (form[name] && form[name] !== document.activeElement) form[name].value = state[name];
    const isFiltered = FILTERS.some((name) => name !== "sort" && state[name] !== "");
    $("clear").hidden = !isFiltered;
    form.correct.disabled = run().unmarked !== "";
    form.correct.title = run().unmarked && `Not marked as right or wrong: ${run().unmarked}.`;
    $("type-filter").hidden = state.token_id === "";
    if (state.token_id !== "") $("type-filter").replaceChildren("Only with ", chip(typeText(state.token_id)));
  }

  function typeText(id) {
    return run().rocks.find((rock) => String(rock.id) === id)?.text ?? `token ${id}`;
  }

  async function openList(filters) {
    const [index, checkpoint] = [state.run, checkpointOf(run(), state.checkpoint)];
    const fetchPage = (page) => ask(`list ${page}`, `runs/${index}/rollouts`, { ...filters, checkpoint, page });
    forget(...Array.from({ length: openPages }, (_, page) => `list ${page}`));
    const first = await fetchPage(0);
    openPages = Math.ceil(first.total / first.size);
    list = RockList.open($("list"), first, { fetchPage, rowElement, isChosen, attempt });
    const noun = first.total === 1 ? "rollout" : "rollouts";
    const where = isBundle ? " in this bundle" : "";
    const found = first.total ? `${COUNT.format(first.total)} ${noun}${where}` : `No rollout matches${where}.`;
    $("count").textContent = found;
  }

  function rowElement(own) {
    const text = RockStrip.visible(own.preview, 64).replace(/·/g, " ");
    return element(
      "div",
      { class: "row", "data-rollout": own.rollout_id },
      element(
        "div",
        { class: "row-top" },
        element("b", {}, `#${own.rollout_id}`),
        grade(own.correct),
        element("span", {}, `kl ${number(own.mean_kl, 2)}`),
        element(
          "span",
          {},
          element("span", { class: "legend-rock", "aria-hidden": "true" }),
          `${own.n_rocks} of ${own.length}`,
        ),
      ),
      element("p", { class: "row-text" }, text),
    );
  }

  const isChosen = (own) => String(own.rollout_id) === state.rollout;

  async function moveInList(step) {
    const own = await list?.step(step);
    if (own) go({ rollout: String(own.rollout_id), position: "" }, { replace: true });
  }

  async function drawRollout() {
    if (!state.rollout) {
      forget("rollout");
      drawnFor.delete("rollout");
      strip = null;
      $("rollout").replaceChildren(hint("No rollout is chosen."));
      return Explorer.showToken(null);
    }
    if (changed("rollout", state.run, state.checkpoint, state.rollout, state.measure)) {
      const wanted = chosenRollout();
      strip = null; // what is still shown is of another rollout
      const own = await ask("rollout", `runs/${state.run}/rollouts/${encodeURIComponent(state.rollout)}`, {
        checkpoint: checkpointOf(run(), state.checkpoint),
      });
      if (chosenRollout() !== wanted) {
        drawnFor.delete("rollout"); // overtaken while it was asked for
        return undefined;
      }
      const scale = RockStrip.scaleOf([own], state.measure);
      const place = element("div");
      const prompt = own.prompt_text ? [element("p", { class: "prompt" }, own.prompt_text)] : [];
      $("rollout").replaceChildren(rolloutHead(own), ...prompt, place);
      strip = RockStrip.draw(place, own, {
        measure: state.measure,
        scale,
        selected: position(),
        onSelect: (token) => chosenRollout() === wanted && go({ position: String(token.position) }, { replace: true }),
        onHover: (token) => chosenRollout() === wanted && Explorer.showToken(token || selectedToken()),
      });
      legendInto($("view-rollouts"), scale);
    } else {
      strip?.select(position());
    }
    return Explorer.showToken(selectedToken());
  }

  function rolloutHead(own) {
    return element(
      "div",
      { class: "rollout-head" },
      element("h2", {}, `Rollout ${own.rollout_id}`),
      grade(own.correct),
      element("span", { class: "muted" }, tokens(own.tokens.length) + (own.finished === false ? ", cut off" : "")),
      link({ view: "compare", rollout: String(own.rollout_id) }, {}, "compare"),
    );
  }

  const selectedToken = () => strip?.tokens.find((token) => token.position === position()) || null;

  function tokens(count) {
    return `${COUNT.format(count)} ${count === 1 ? "token" : "tokens"}`;
  }

  function listenToFilters() {
    const form = $("filters");
    options(form.elements.sort, Object.entries(SORTS), DEFAULTS.sort);
    options(form.elements.category, [["", "any"], ...CATEGORIES.map((name) => [name, name.replace(/_/g, " ")])], "");
    const apply = (replace) => {
      clearTimeout(typing);
      const said = [...form.elements]
        .filter((field) => field.name && field.checkValidity())
        .map((field) => [field.name, field.value]);
      if (said.some(([name, value]) => value !== state[name])) {
        go({ ...Object.fromEntries(said), rollout: "", position: "" }, { replace });
      }
    };
    form.addEventListener("input", (event) => {
      clearTimeout(typing);
      if (event.target.matches("input")) typing = setTimeout(apply, REST, true);
    });
    form.addEventListener("change", (event) => event.target.matches("select") && apply(false));
    form.addEventListener("submit", (event) => event.preventDefault());
    $("clear").addEventListener("click", () => go({ ...cleared(), rollout: "", position: "" }));
  }

  function listenToList() {
    $("list").addEventListener("scroll", () => list?.draw(), { passive: true });
    $("list").addEventListener("click", (event) => {
      const chosen = event.target.closest(".row");
      if (chosen) go({ rollout: chosen.dataset.rollout, position: "" });
    });
    for (const [id, step] of [["rollout-before", -1], ["rollout-after", 1]]) {
      $(id).addEventListener("click", () => attempt(() => moveInList(step)));
    }
    $("list").addEventListener("keydown", (event) => {
      const moves = { ArrowDown: 1, ArrowUp: -1, PageDown: 8, PageUp: -8, Home: -Infinity, End: Infinity };
      if (!Object.keys(moves).includes(event.key)) return;
      event.preventDefault();
      attempt(() => moveInList(moves[event.key]));
    });
  }

  Explorer.views.rollouts = {
    name: "Rollouts",
    draw: drawRollouts,
    strip: () => strip,
    move: moveInList,
    leave: () => clearTimeout(typing),
    listen() {
      listenToFilters();
      listenToList();
      addEventListener("resize", () => state.view === "rollouts" && list?.draw());
    },
  };
})();
