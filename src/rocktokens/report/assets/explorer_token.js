// The token that is pointed at or chosen: its panel, its history, and where else its type occurs.

"use strict";

(() => {
  const { element, number, percent } = RockStrip;
  const {
    $,
    COUNT,
    DEFAULTS,
    ask,
    attempt,
    changed,
    checkpointOf,
    chosenRollout,
    cleared,
    drawnFor,
    forget,
    hint,
    intervalText,
    isThere,
    link,
    points,
    run,
    state,
  } = Explorer;

  const PATIENCE = 160; // milliseconds of rest before more is asked for than the strip holds
  let waiting = 0;
  let histories = null; // of the tokens of the chosen rollout, by position

  function showToken(token) {
    if (!changed("token", state.run, state.checkpoint, state.rollout, token?.position ?? null)) return;
    clearTimeout(waiting);
    if (!token) {
      forget("history", "type");
      $("token-panel").replaceChildren(hint("Point at a token, or move over them with the arrow keys."));
      $("token-history").replaceChildren();
      $("token-type").replaceChildren();
      return;
    }
    RockStrip.panel($("token-panel"), token);
    const wanted = chosenRollout();
    waiting = setTimeout(() => {
      if (chosenRollout() === wanted) attempt(() => Promise.all([drawHistory(token), drawType(token)]));
      else drawnFor.delete("token"); // overtaken while it rested
    }, PATIENCE);
  }

  async function drawHistory(token) {
    const rollout = `runs/${state.run}/rollouts/${encodeURIComponent(state.rollout)}`;
    if (changed("history", rollout) || !histories) {
      histories = null; // not those of another rollout, should this be overtaken
      histories = await ask("history", `${rollout}/history`);
    }
    const known = histories[token.position] ?? [];
    const label = "kl of this occurrence over checkpoints";
    $("token-history").replaceChildren(
      element("h4", {}, label),
      RockCharts.sparkline(known, label, checkpointOf(run(), state.checkpoint)),
    );
  }

  async function drawType(token) {
    if (!changed("type", state.run, state.checkpoint, token.token_id) && $("token-type").childElementCount) return;
    const path = `runs/${state.run}/types/${token.token_id}`;
    if (!isThere(path)) return void $("token-type").replaceChildren(hint("More about this type is not in the bundle."));
    const card = await ask("type", path);
    const label = "Mean kl of the type over checkpoints";
    $("token-type").replaceChildren(
      element("h4", {}, label),
      RockCharts.sparkline(
        card.losses.map(([step, kl]) => [step, kl]),
        label,
        checkpointOf(run(), state.checkpoint),
      ),
      ...verdictLine(card),
      ...classLine(card),
      element(
        "h4",
        {},
        `Occurrences: ${COUNT.format(card.n_occurrences)} in ${COUNT.format(card.n_rollouts)} rollouts`,
      ),
      ...listLink(card.token_id),
      element("ul", { class: "occurrences" }, ...card.occurrences.map((place) => occurrence(place, card.text))),
    );
  }

  function listLink(id) {
    const asked = { checkpoint: checkpointOf(run(), state.checkpoint), token_id: id, sort: DEFAULTS.sort, page: 0 };
    if (!isThere(`runs/${state.run}/rollouts`, asked)) return [];
    const chosen = { ...cleared(), sort: DEFAULTS.sort, token_id: String(id) };
    return [element("p", {}, link(chosen, {}, "List these rollouts"))];
  }

  function verdictLine(card) {
    const { rock, knockout } = card;
    if (!rock && !knockout) return [];
    const effect = knockout && points(knockout.delta) + intervalText(knockout.interval);
    const ban = knockout ? `${knockout.verdict}: banning it changes accuracy by ${effect}` : "it was not banned";
    const place = rock
      ? `Rock ${rock.rank}, among the top ${run().rocks.length} in ${percent(rock.p_in_top_k)} of resamples of the prompts`
      : "Not a rock";
    return [element("p", {}, `${place}; ${ban}.`)];
  }

  function classLine(card) {
    const own = card.token_class;
    if (!own) return [];
    const kl = card.losses.find(([step]) => step === card.checkpoint)?.[1];
    const split =
      card.mean_choice === null
        ? ""
        : `; of its mean kl of ${number(kl)}, ${number(card.mean_choice)} is choice and the rest decision`;
    const shown = own.texts.flatMap((text) => [RockStrip.chip(text), " "]);
    return [
      element(
        "p",
        { class: "token-class" },
        `Class ${own.number}: `,
        ...shown,
        `${own.state}; whole class banned: ${own.verdict}${split}.`,
      ),
    ];
  }

  function occurrence(place, text) {
    const there = String(place.rollout_id) === state.rollout && String(place.position) === state.position;
    return element(
      "li",
      {},
      link(
        { rollout: String(place.rollout_id), position: String(place.position) },
        { "aria-current": there ? "true" : null },
        element("span", { class: "before" }, oneLine(place.before.slice(-40)).slice(-14)),
        element(
          "span",
          { class: "after" },
          element("mark", {}, RockStrip.visible(text, 12)),
          oneLine(place.after.slice(0, 80)),
        ),
        element("span", { class: "muted" }, number(place.kl, 2)),
      ),
    );
  }

  function oneLine(text) {
    return [...text].map((character) => (character === " " ? " " : RockStrip.visible(character))).join("");
  }

  Explorer.showToken = showToken;
})();
