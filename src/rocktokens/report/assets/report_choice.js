// The token a reader chose: marked in every table, chip, strip and chart of the page. Again, or Esc, clears it.
//
// Elements say which type they show by data-token. Ids are those of the vocabulary that data-vocabulary of an element
// around them names, so that runs with different tokenizers are not mixed up.

"use strict";

const RockChoice = (() => {
  const { element } = RockStrip;
  const charts = [];
  const bar = document.querySelector(".chosen");
  let chosen = null;

  const vocabularyOf = (node) => node.closest("[data-vocabulary]")?.dataset.vocabulary ?? null;
  const isChosen = (vocabulary, token) => chosen !== null && chosen.vocabulary === vocabulary && chosen.token === token;

  function mark() {
    for (const own of document.querySelectorAll("[data-token]")) {
      const isOn = isChosen(vocabularyOf(own), Number(own.dataset.token));
      own.classList.toggle("is-chosen", isOn);
      const button = own.querySelector(".chip[role=button]");
      if (button) button.setAttribute("aria-pressed", String(isOn));
    }
    for (const { plot, vocabulary } of charts) plot.highlight(chosen?.vocabulary === vocabulary ? chosen.token : null);
    bar.hidden = chosen === null;
    if (chosen) bar.replaceChildren(chosen.name, element("button", { type: "button", onclick: clear }, "Clear (Esc)"));
  }

  // Choose a type, or clear it where it is chosen already.
  function choose(vocabulary, token) {
    const shown = document.querySelector(`[data-vocabulary="${vocabulary}"] [data-token="${token}"]`);
    const text = shown?.querySelector(".chip")?.textContent ?? shown?.textContent ?? `token ${token}`;
    const name = element("span", {}, "Highlighted: ", element("span", { class: "chip" }, text));
    chosen = isChosen(vocabulary, token) ? null : { vocabulary, token, name };
    mark();
  }

  function clear() {
    if (chosen === null) return;
    chosen = null;
    mark();
  }

  // Draw a chart whose data are marked with everything else.
  function draw(host, spec, label) {
    const vocabulary = vocabularyOf(host);
    const onHighlight = (token) => (token === null ? clear() : choose(vocabulary, token));
    charts.push({ vocabulary, plot: RockPlot.draw(host, spec, { label, onHighlight }) });
  }

  function ofEvent(event) {
    const own = event.target.closest?.("[data-token]");
    return own && !event.target.closest("a, summary") ? own : null;
  }

  for (const chip of document.querySelectorAll("tr[data-token] .chip, li[data-token] .chip")) {
    chip.setAttribute("role", "button");
    chip.setAttribute("aria-pressed", "false");
    chip.tabIndex = 0;
  }
  document.addEventListener("click", (event) => {
    const own = ofEvent(event);
    if (own) choose(vocabularyOf(own), Number(own.dataset.token));
  });
  document.addEventListener("keydown", (event) => {
    if (event.key === "Escape") return clear();
    const own = event.key === "Enter" || event.key === " " ? ofEvent(event) : null;
    if (!own) return undefined;
    event.preventDefault();
    return choose(vocabularyOf(own), Number(own.dataset.token));
  });

  return { draw, mark };
})();
