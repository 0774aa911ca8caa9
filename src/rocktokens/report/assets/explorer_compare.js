// One rollout at two checkpoints, of one run or of two, on one scale.

"use strict";

(() => {
  const { element } = RockStrip;
  const { $, ask, changed, checkpointOf, complain, go, hint, legendInto, options, position, run, runs, state, steps } =
    Explorer;

  let compared = [];

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
      compared = ["a", "b"].map((side, index) => drawSide(side, strips[index], scale));
    } else {
      for (const side of compared) side.select(position());
    }
    showPair(position());
  }

  function drawSide(side, strip, scale) {
    $(`name-${side}`).textContent = `${strip.run}, step ${strip.checkpoint}`;
    return RockStrip.draw($(`strip-${side}`), strip, {
      measure: state.measure,
      scale,
      selected: position(),
      label: `Tokens of rollout ${strip.rollout_id} at step ${strip.checkpoint} of ${strip.run}`,
      onSelect: (token) => go({ position: String(token.position) }, { replace: true }),
      onHover: (token) => showPair(token ? token.position : position()),
    });
  }

  function showPair(at) {
    const places = compared.map((side) => {
      const place = element("div");
      const token = side.tokens.find((one) => one.position === at);
      if (token) RockStrip.panel(place, token);
      return place;
    });
    if (at === null) places[0]?.append(hint("Point at a token, or move over them with the arrow keys."));
    $("compare-panels").replaceChildren(...places);
  }

  Explorer.views.compare = { name: "Compare", draw: drawCompare, strip: () => compared[0] };
})();
