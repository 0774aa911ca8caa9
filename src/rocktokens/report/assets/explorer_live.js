// A run in training: its curves, with those of other runs over them, and what the online policy leaves out now; polled
// while it is shown. Curves of one name share a chart; runs differ in colour and dash. What is of different kinds of kl
// is drawn apart.

"use strict";

(() => {
  const { chip, element, number } = RockStrip;
  const { $, COUNT, ask, attempt, changed, complain, forget, go, isBundle, listing, nameOf, options, state } = Explorer;

  const POLL = 2000; // milliseconds
  const HUES = ["blue", "vermillion", "green", "ink", "grey"];
  const DASHES = ["solid", "dashed", "dotted"];
  const MOST = HUES.length * DASHES.length;
  let polling = 0;
  let plot = null;

  function watch() {
    polling = polling || (isBundle ? 0 : setInterval(() => document.hidden || attempt(drawLive), POLL));
    return drawLive();
  }

  function leave() {
    clearInterval(polling);
    polling = 0;
    for (const index of shownRuns()) forget(`live ${index}`);
  }

  const others = () => state.with.split(",").filter(Boolean);
  const shownRuns = () => [state.run, ...others()].slice(0, MOST);

  async function drawLive() {
    drawChoices();
    const indices = shownRuns();
    const shown = await Promise.all(indices.map((index) => ask(`live ${index}`, `runs/${index}/live`)));
    if (String(indices) !== String(shownRuns())) return; // others were chosen meanwhile
    complain("");
    if (!changed("live", indices, shown)) return;
    $("live-status").textContent = progress(shown[0]);
    drawFrozen(shown[0].rocks);
    drawCurves(indices, shown);
  }

  // Which runs lie over each other

  function drawChoices() {
    const chosen = new Set(shownRuns());
    const left = listing.runs.filter((own) => !chosen.has(String(own.number)));
    options($("overlay-add"), [["", "Add a run"], ...left.map((own) => [String(own.number), own.name])], "");
    $("overlay-add").hidden = !left.length || chosen.size >= MOST;
    if (!changed("overlay", others(), listing.runs)) return;
    $("overlay-runs").replaceChildren(
      ...others().map((index) =>
        element(
          "li",
          {},
          nameOf(index),
          " ",
          removeButton(index),
        ),
      ),
    );
  }

  function removeButton(index) {
    const label = `Remove ${nameOf(index)}`;
    return element("button", { type: "button", "aria-label": label, onclick: () => remove(index) }, "×");
  }

  const add = (index) => index && go({ with: [...others(), index].join(",") });
  const remove = (index) => go({ with: others().filter((own) => own !== index).join(",") });

  // Curves

  function drawCurves(indices, shown) {
    const ofKl = shown.flatMap((own) => own.curves.filter((curve) => curve.name === "kl"));
    const teachers = new Set(ofKl.map((curve) => curve.teacher));
    $("overlay-note").hidden = teachers.size < 2;
    const spec = specOf(indices, shown);
    if (!spec.panels.length) {
      plot = null;
      $("curves").replaceChildren();
    } else if (plot === null) {
      plot = RockPlot.draw($("curves"), spec, { label: "Training" });
    } else {
      keepingFocus($("curves"), () => plot.update(spec));
    }
  }

  // New steps come while a chart is walked through by keyboard: what had the focus is made again, and gets it back.
  function keepingFocus(host, change) {
    const parts = () => [...host.querySelectorAll("button, [tabindex]")];
    const at = parts().indexOf(document.activeElement);
    change();
    parts()[at]?.focus();
  }

  function specOf(indices, shown) {
    const groups = indices.map((index, place) => ({
      name: nameOf(index),
      hue: HUES[place % HUES.length],
      symbol: "circle",
      dash: DASHES[Math.floor(place / HUES.length)],
    }));
    const kinds = new Map(shown.flatMap((own) => own.curves.map((curve) => [titleOf(curve), curve.unit])));
    return { groups, panels: [...kinds].map(([kind, unit]) => panelOf(kind, unit, shown)) };
  }

  // Curves of one name share a chart where they are of the same kind of kl, which the teacher's label says.
  const titleOf = ({ name, teacher }) => name.replace(/_/g, " ") + teacher;

  function panelOf(kind, unit, shown) {
    const layers = shown.flatMap((own, group) =>
      own.curves.filter((curve) => titleOf(curve) === kind).map((curve) => layerOf(curve, group)),
    );
    const last = layers.length === 1 ? layers[0].facts.value.at(-1) : "";
    const axis = (title) => ({ title, scale: "linear", domain: null, percent: false, names: [] });
    const title = [kind, last].filter(Boolean).join(": ");
    return { title, x: axis("step"), y: axis(unit), layers };
  }

  function layerOf({ steps, values, unit }, group) {
    const texts = values.map((value) => (value === null ? "—" : [number(value), unit].filter(Boolean).join(" ")));
    return {
      mark: "line",
      group,
      x: steps,
      y: values,
      low: [],
      high: [],
      token: [],
      label: [],
      facts: { step: steps.map((step) => COUNT.format(step)), value: texts },
    };
  }

  // Words

  function drawFrozen(rocks) {
    $("online").replaceChildren(
      ...(rocks.length
        ? [
            element("h4", {}, `Left out of the loss now: ${rocks.length} types`),
            element(
              "ul",
              { class: "online" },
              ...rocks.map((rock) => element("li", { title: `since step ${rock.since}` }, chip(rock.text))),
            ),
          ]
        : []),
    );
  }

  function progress({ step, max_steps: goal }) {
    const hope = isBundle ? "" : " This page updates itself.";
    if (step === null) return `No step is finished yet.${hope}`;
    const done = step + 1;
    if (done >= goal && goal !== null) return `All ${COUNT.format(goal)} steps are finished.`;
    const share = goal === null ? COUNT.format(done) : `${COUNT.format(done)} of ${COUNT.format(goal)}`;
    return `${share} steps are finished.${hope}`;
  }

  Explorer.views.live = {
    name: "Live",
    draw: watch,
    leave,
    listen: () => $("overlay-add").addEventListener("change", (event) => add(event.target.value)),
  };
})();
