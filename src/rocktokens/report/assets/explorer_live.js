// A run in training: its curves, and what the online policy leaves out now; polled while it is shown.

"use strict";

(() => {
  const { chip, element, number } = RockStrip;
  const { $, COUNT, ask, attempt, changed, complain, forget, state } = Explorer;

  const POLL = 2000; // milliseconds
  let polling = 0;

  function watch() {
    polling = polling || setInterval(() => document.hidden || attempt(drawLive), POLL);
    return drawLive();
  }

  function leave() {
    clearInterval(polling);
    polling = 0;
    forget("live");
  }

  async function drawLive() {
    const now = await ask("live", `runs/${state.run}/live`);
    complain("");
    if (!changed("live", state.run, now)) return;
    $("live-status").textContent = progress(now);
    $("online").replaceChildren(
      ...(now.rocks.length
        ? [
            element("h4", {}, `Left out of the loss now: ${now.rocks.length} types`),
            element(
              "ul",
              { class: "online" },
              ...now.rocks.map((rock) => element("li", { title: `since step ${rock.since}` }, chip(rock.text))),
            ),
          ]
        : []),
    );
    $("curves").replaceChildren(
      ...now.curves.map((curve) =>
        element(
          "figure",
          {},
          element(
            "figcaption",
            {},
            element("span", {}, curve.name.replace(/_/g, " ")),
            element("b", {}, number(curve.values[curve.values.length - 1])),
          ),
          RockCharts.curve(curve.steps, curve.values, curve.name.replace(/_/g, " ")),
        ),
      ),
    );
  }

  function progress({ step, max_steps: goal }) {
    if (step === null) return "No step is finished yet. This page updates itself.";
    const done = step + 1;
    if (done >= goal && goal !== null) return `All ${COUNT.format(goal)} steps are finished.`;
    const share = goal === null ? COUNT.format(done) : `${COUNT.format(done)} of ${COUNT.format(goal)}`;
    return `${share} steps are finished. This page updates itself.`;
  }

  Explorer.views.live = { name: "Live", draw: watch, leave };
})();
