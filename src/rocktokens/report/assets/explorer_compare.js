// One rollout at two checkpoints, of one run or of two, on one scale. Where their teachers gave different kinds of kl, and
// that is what is looked at, each side has a scale of its own and no difference is shown.
//
// Tokens at the same position are paired where both sides are the same text; rollouts of one number in two runs may
// have nothing else in common, and then a token is chosen on one side.

"use strict";

(() => {
  const { chip, element, number, valueOf } = RockStrip;
  const {
    $,
    SIDES,
    ask,
    changed,
    checkpointLabel,
    checkpointOf,
    complain,
    go,
    hint,
    legendInto,
    link,
    listing,
    nameOf,
    options,
    overview,
    position,
    run,
    showTable,
    state,
    steps,
  } = Explorer;

  const OF_KL = ["kl", "grad_norm"]; // measures
  let compared = [];
  let isPaired = true;
  let isOneKind = true;

  // Both sides: by default the first and the reference checkpoint of one run, or the references of two.
  async function sides() {
    const index = state.run_b || state.run;
    const other = await overview(index);
    const step =
      other === run() && state.checkpoint_b === "" ? other.checkpoints[0] : checkpointOf(other, state.checkpoint_b);
    return {
      run_a: state.run,
      checkpoint_a: checkpointOf(run(), state.checkpoint),
      run_b: index,
      checkpoint_b: step ?? null,
    };
  }

  async function drawCompare() {
    const chosen = await sides();
    const names = listing.runs.map((own) => [String(own.number), own.name]);
    options($("run-b"), names, chosen.run_b);
    options($("checkpoint-b"), steps(await overview(chosen.run_b)), String(chosen.checkpoint_b ?? ""));
    if (chosen.checkpoint_a === null || chosen.checkpoint_b === null) {
      complain("Comparing needs replayed traces in both runs: run `rocktokens trace`.");
    } else if (state.rollout) {
      await drawStrips(chosen);
    } else {
      const first = { checkpoint: chosen.checkpoint_a, sort: "rollout_id", page: 0 };
      const { rows } = await ask("first", `runs/${state.run}/rollouts`, first);
      go({ rollout: String(rows[0].rollout_id) }, { replace: true });
    }
  }

  async function drawStrips(chosen) {
    if ($("compare-rollout") !== document.activeElement) $("compare-rollout").value = state.rollout;
    if (changed("compare", chosen, state.rollout, state.measure)) {
      const strips = await Promise.all(SIDES.map((side) => stripOf(side, chosen)));
      const numbers = SIDES.map((side) => chosen[`run_${side}`]);
      const runs = await Promise.all(numbers.map(overview));
      noteDifference(strips, runs);
      const scales = strips.map((own) => RockStrip.scaleOf(isOneKind ? strips : [own], state.measure));
      legendInto($("view-compare"), ...(isOneKind ? scales.slice(1) : scales));
      compared = SIDES.map((side, at) => drawSide(side, nameOf(numbers[at]), runs[at], strips[at], scales[at]));
    }
    drawTable(chosen);
    compared.forEach((own, index) => own.select(positionOn(SIDES[index])));
    showPair(position(), state.side);
  }

  function stripOf(side, chosen) {
    const path = `runs/${chosen[`run_${side}`]}/rollouts/${encodeURIComponent(state.rollout)}`;
    return ask(`strip ${side}`, path, { checkpoint: chosen[`checkpoint_${side}`] });
  }

  // Both values of every token that is paired, and by how much they differ.
  function drawTable(chosen) {
    $("compare-table").hidden = !isPaired || !isOneKind;
    if ($("compare-table").hidden) return;
    showTable($("compare-table"), [chosen, state.rollout, state.measure], () => {
      const { label } = RockStrip.MEASURES[state.measure];
      const [a, b] = compared.map((own) => own.tokens);
      const linkOf = (token) => link({ position: String(token.position) }, {}, chip(token.text));
      return {
        table: {
          titles: ["position", "token", "category", "left", "right", "left − right"],
          rows: a.map((token, place) => rowOf(token, b[place])),
          title: `${label} of every token on both sides.`,
        },
        label: "tokens",
        picks: ["category"],
        content: (cell, row, column) => (column === 1 ? linkOf(a[row]) : cell.text),
      };
    });
  }

  function rowOf(token, paired) {
    const [left, right] = [valueOf(token, state.measure), valueOf(paired, state.measure)];
    const isKnown = Number.isFinite(left) && Number.isFinite(right);
    const numbers = [left, right, isKnown ? left - right : null];
    return [
      { text: String(token.position), kind: "number", value: token.position },
      { text: RockStrip.visible(token.text), kind: "token" },
      { text: (token.category ?? "").replace(/_/g, " "), kind: "text" },
      ...numbers.map((value) => ({ text: number(value), kind: "number", value })),
    ];
  }

  function noteDifference([a, b], runs) {
    const differing = isOtherPrompt(a, b) ? "prompts" : isOtherAnswer(a, b) ? "answers" : null;
    isPaired = differing === null;
    isOneKind = runs[0].teacher === runs[1].teacher || !OF_KL.includes(state.measure);
    const sentences = [
      isPaired ? "" : `The ${differing} differ, so tokens are not paired.`,
      isOneKind ? "" : "The teachers gave different kinds of kl, so each side has a scale of its own.",
    ].filter(Boolean);
    $("compare-note").hidden = !sentences.length;
    $("compare-note").textContent = sentences.join(" ");
    SIDES.forEach((side, index) => {
      const text = differing === "prompts" ? [a, b][index].prompt_text : "";
      $(`prompt-${side}`).textContent = text;
      $(`prompt-${side}`).hidden = !text;
    });
  }

  // By id, and by text where both runs kept it: ids of two tasks may be the same.
  function isOtherPrompt(a, b) {
    const [here, there] = [a.prompt_text, b.prompt_text];
    return a.prompt_id !== b.prompt_id || Boolean(here && there && here !== there);
  }

  function isOtherAnswer(a, b) {
    const isOther = (token, index) => token.token_id !== b.tokens[index].token_id;
    return a.tokens.length !== b.tokens.length || a.tokens.some(isOther);
  }

  const positionOn = (side) => (isPaired || side === state.side ? position() : null);

  function drawSide(side, name, own, strip, scale) {
    const checkpoint = checkpointLabel(own, strip.checkpoint);
    $(`name-${side}`).textContent = `${name}, ${checkpoint}${own.teacher}`;
    return RockStrip.draw($(`strip-${side}`), strip, {
      measure: state.measure,
      scale,
      label: `Tokens of rollout ${strip.rollout_id} at ${checkpoint} of ${name}`,
      onSelect: (token) => go({ position: String(token.position), side }, { replace: true }),
      onHover: (token) => (token ? showPair(token.position, side) : showPair(position(), state.side)),
    });
  }

  // The token at a position of a side, and the one it is paired with.
  function showPair(at, chosenSide) {
    const places = compared.map((own, index) => {
      const place = element("div");
      const isShown = isPaired || SIDES[index] === chosenSide;
      const token = isShown && own.tokens.find((one) => one.position === at);
      if (token) RockStrip.panel(place, token);
      return place;
    });
    if (at === null) places[0]?.append(hint("Point at a token, or move over them with the arrow keys."));
    $("compare-panels").replaceChildren(...places);
  }

  const chosenStrip = () => compared[SIDES.indexOf(state.side)];

  Explorer.views.compare = { name: "Compare", draw: drawCompare, strip: chosenStrip };
})();
