// One rollout at two checkpoints, of one run or of two, on one scale.
//
// Tokens at the same position are paired where both sides are the same text; rollouts of one number in two runs may
// have nothing else in common, and then a token is chosen on one side.

"use strict";

(() => {
  const { element } = RockStrip;
  const {
    $,
    SIDES,
    ask,
    changed,
    checkpointOf,
    complain,
    go,
    hint,
    legendInto,
    options,
    position,
    run,
    runs,
    state,
    steps,
  } = Explorer;

  let compared = [];
  let isPaired = true;

  // Both sides: by default the first and the reference checkpoint of one run, or the references of two.
  function sides() {
    const index = state.run_b || state.run;
    const other = runs[index];
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
    const chosen = sides();
    const names = runs.map((own, index) => [String(index), own.name]);
    options($("run-b"), names, chosen.run_b);
    options($("checkpoint-b"), steps(runs[chosen.run_b]), String(chosen.checkpoint_b ?? ""));
    if (chosen.checkpoint_a === null || chosen.checkpoint_b === null) {
      complain("Comparing needs replayed traces in both runs: run `rocktokens trace`.");
    } else if (state.rollout) {
      await drawStrips({ ...chosen, rollout: state.rollout });
    } else {
      const { rows } = await ask("first", `runs/${state.run}/rollouts`, { checkpoint: chosen.checkpoint_a });
      go({ rollout: String(rows[0].rollout_id) }, { replace: true });
    }
  }

  async function drawStrips(chosen) {
    if ($("compare-rollout") !== document.activeElement) $("compare-rollout").value = state.rollout;
    if (changed("compare", chosen, state.measure)) {
      const strips = await ask("compare", "compare", chosen);
      const scale = RockStrip.scaleOf(strips, state.measure);
      legendInto($("view-compare"), scale);
      noteDifference(strips);
      compared = SIDES.map((side, index) => drawSide(side, strips[index], scale));
    }
    compared.forEach((own, index) => own.select(positionOn(SIDES[index])));
    showPair(position(), state.side);
  }

  function noteDifference([a, b]) {
    const differing = isOtherPrompt(a, b) ? "prompts" : isOtherAnswer(a, b) ? "answers" : null;
    isPaired = differing === null;
    $("compare-note").hidden = isPaired;
    $("compare-note").textContent = isPaired ? "" : `The ${differing} differ, so tokens are not paired.`;
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

  function drawSide(side, strip, scale) {
    $(`name-${side}`).textContent = `${strip.run}, step ${strip.checkpoint}`;
    return RockStrip.draw($(`strip-${side}`), strip, {
      measure: state.measure,
      scale,
      label: `Tokens of rollout ${strip.rollout_id} at step ${strip.checkpoint} of ${strip.run}`,
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
