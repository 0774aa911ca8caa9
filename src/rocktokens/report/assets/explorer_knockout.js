// What banning tokens did, and answers without and with a ban side by side.

"use strict";

(() => {
  const { chip, element } = RockStrip;
  const { $, COUNT, ask, changed, go, grade, hint, intervalText, isBundle, link, points, run, showTable, state } = Explorer;

  async function drawKnockout() {
    if (changed("bans", state.run)) {
      ({ alpha, bans } = await ask("bans", `runs/${state.run}/knockouts`));
    }
    $("bans").hidden = $("bans-note").hidden = !bans.length;
    if (!bans.length) {
      const missing = run().ungraded
        ? `Left out: ${run().ungraded}.`
        : "No token has been banned yet: run `rocktokens knockout`.";
      return void $("pairs").replaceChildren(hint(missing));
    }
    drawBans();
    const chosen = state.ban || String(keyOf(bans[0]));
    if (changed("pairs", state.run, chosen, state.page)) {
      drawPairs(await ask("pairs", `runs/${state.run}/knockouts/${encodeURIComponent(chosen)}`, { page: state.page }));
    }
    return undefined;
  }

  let alpha = null;
  let bans = [];

  // The id that stands for a ban: its own, or for a set one that was not banned alone; null where there is none.
  function keyOf(ban) {
    if (ban.ids.length === 1) return ban.ids[0];
    const alone = new Set(bans.filter((other) => other.ids.length === 1).map((other) => other.ids[0]));
    return ban.ids.find((id) => !alone.has(id)) ?? null;
  }

  function drawBans() {
    $("bans-note").textContent =
      "Change in accuracy, in points, when a token is banned at every decoding step, with its " +
      `${Number((100 * (1 - alpha)).toPrecision(4))} % interval.`;
    const chosen = state.ban || String(keyOf(bans[0]));
    const reach = Math.max(
      0.01,
      ...bans.flatMap((ban) => [Math.abs(ban.delta ?? 0), ...(ban.interval || []).map(Math.abs)]),
    );
    showTable($("bans"), [state.run, bans], () => ({
      table: { titles: ["token", "verdict", "change", "lost", "gained"], rows: bans.map(cellsOf) },
      label: "bans",
      picks: ["verdict"],
      content: (cell, row, column) => contentOf(cell, bans[row], column, reach),
    }));
    for (const own of $("bans").querySelectorAll("a[data-ban]")) {
      if (own.dataset.ban === chosen) own.setAttribute("aria-current", "true");
      else own.removeAttribute("aria-current");
    }
  }

  function cellsOf(ban) {
    const whole = (value) => ({ text: COUNT.format(value), kind: "number", value });
    return [
      { text: RockStrip.visible(ban.name), kind: "token" },
      { text: ban.role === "tested" ? ban.verdict : "placebo", kind: "text" },
      { text: points(ban.delta).replace(" points", ""), kind: "number", value: ban.delta },
      whole(ban.n_lost),
      whole(ban.n_gained),
    ];
  }

  function contentOf(cell, ban, column, reach) {
    if (column === 0) {
      const effect = `change in accuracy ${points(ban.delta)}${intervalText(ban.interval)}`;
      const key = keyOf(ban);
      if (key === null) return chip(ban.name);
      return link({ ban: String(key), page: "0" }, { "data-ban": key, title: effect }, chip(ban.name));
    }
    if (column !== 2) return cell.text;
    return element("span", { class: "change" }, RockCharts.interval(ban.delta, ban.interval, reach), cell.text);
  }

  function drawPairs(found) {
    const { knockout, pairs, total, size, page } = found;
    const pages = Math.max(1, Math.ceil(total / size));
    $("pairs").replaceChildren(
      element(
        "div",
        { class: "rollout-head" },
        element("h2", {}, "Without ", chip(knockout.name)),
        element(
          "span",
          { class: "muted" },
          `${knockout.verdict} · ${points(knockout.delta)}${intervalText(knockout.interval)} · ` +
            `${knockout.n_lost} answers lost, ${knockout.n_gained} gained`,
        ),
      ),
      hint(
        total
          ? `${COUNT.format(total)} answers contain it, those whose grade changed first; all others stay the same.`
          : "No answer contains it: all stay the same under the ban.",
      ),
      ...pairs.map(pairBlock),
      pages > 1 ? more(page, pages, pairs.length) : element("p"),
    );
    document.querySelector("#view-knockout .reading").scrollTop = 0;
  }

  function more(page, pages, shown) {
    return isBundle ? hint(`The first ${shown} are in this bundle.`) : pager(page, pages);
  }

  function pager(page, pages) {
    const button = (label, target) =>
      element(
        "button",
        {
          type: "button",
          disabled: target < 0 || target >= pages,
          onclick: () => go({ page: String(target) }),
        },
        label,
      );
    return element(
      "p",
      { class: "pager" },
      button("Previous", page - 1),
      element("span", {}, `page ${page + 1} of ${pages}`),
      button("Next", page + 1),
    );
  }

  function pairBlock(pair) {
    const side = (name, answer, correct, finished) =>
      element(
        "div",
        {},
        element(
          "h3",
          {},
          `${name} `,
          grade(correct),
          finished ? null : element("span", { class: "muted" }, " cut off"),
        ),
        aligned(answer, pair.first_difference),
      );
    return element(
      "section",
      { class: "pair-block", "aria-label": `Answer to ${pair.prompt_id}` },
      element("p", { class: "prompt" }, pair.prompt_text),
      element(
        "div",
        { class: "pair" },
        side("Free", pair.free, pair.free_correct, pair.free_finished),
        side("Banned", pair.banned, pair.banned_correct, pair.banned_finished),
      ),
    );
  }

  function aligned(answer, difference) {
    const spans = answer.flatMap((token, index) => {
      const classes = [
        difference === null || index < difference ? "same" : "",
        index === difference ? "first" : "",
        token.is_banned ? "banned" : "",
      ];
      const span = element(
        "span",
        { class: classes.filter(Boolean).join(" ") || null, title: index === difference ? "first difference" : null },
        RockStrip.visible(token.text).replace(/·/g, " "),
      );
      return token.text.includes("\n") ? [span, element("br")] : [span];
    });
    return element("p", { class: "aligned" }, ...spans);
  }

  Explorer.views.knockout = { name: "Knock-out", draw: drawKnockout };
})();
