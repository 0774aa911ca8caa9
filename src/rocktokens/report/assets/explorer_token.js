// The token that is pointed at or chosen: its panel, its history, and where else its type occurs.

"use strict";

(() => {
  const { element, number, percent } = RockStrip;
  const {
    $,
    COUNT,
    address,
    ask,
    attempt,
    changed,
    checkpointOf,
    cleared,
    forget,
    hint,
    intervalText,
    points,
    run,
    state,
  } = Explorer;

  const PATIENCE = 160; // milliseconds of rest before more is asked for than the strip holds
  let waiting = 0;

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
    waiting = setTimeout(() => attempt(() => Promise.all([drawHistory(token), drawType(token)])), PATIENCE);
  }

  async function drawHistory(token) {
    const known = await ask(
      "history",
      `runs/${state.run}/rollouts/${encodeURIComponent(state.rollout)}/positions/${token.position}`,
    );
    const label = "kl of this occurrence over checkpoints";
    $("token-history").replaceChildren(
      element("h4", {}, label),
      RockCharts.sparkline(known, label, checkpointOf(run(), state.checkpoint)),
    );
  }

  async function drawType(token) {
    if (!changed("type", state.run, state.checkpoint, token.token_id) && $("token-type").childElementCount) return;
    const card = await ask("type", `runs/${state.run}/types/${token.token_id}`);
    const label = "Mean kl of the type over checkpoints";
    $("token-type").replaceChildren(
      element("h4", {}, label),
      RockCharts.sparkline(
        card.losses.map(([step, kl]) => [step, kl]),
        label,
        checkpointOf(run(), state.checkpoint),
      ),
      ...verdictLine(card),
      element(
        "h4",
        {},
        `Occurrences: ${COUNT.format(card.n_occurrences)} in ${COUNT.format(card.n_rollouts)} rollouts`,
      ),
      element(
        "p",
        {},
        element("a", { href: address({ ...cleared(), token_id: String(card.token_id) }) }, "List these rollouts"),
      ),
      element("ul", { class: "occurrences" }, ...card.occurrences.map((place) => occurrence(place, card.text))),
    );
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

  function occurrence(place, text) {
    const there = String(place.rollout_id) === state.rollout && String(place.position) === state.position;
    return element(
      "li",
      {},
      element(
        "a",
        {
          href: address({ rollout: String(place.rollout_id), position: String(place.position) }),
          "aria-current": there ? "true" : null,
        },
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
