// The rocks of a run: their shares, what training did to them, and the table, whose cells come ready from the server.
//
// A label is decided twice, on the prompts that selected the rocks and on the others; each has a column to filter by.

"use strict";

(() => {
  const { chip, element, number, percent } = RockStrip;
  const { $, COUNT, DEFAULTS, TABLE, cleared, hint, link, run, showTable } = Explorer;

  function drawRocks() {
    const { rocks, summary, labels, table, version } = run();
    $("rocks").hidden = !rocks.length;
    $("shares").replaceChildren(...aboutAll(rocks, summary, labels));
    if (!rocks.length) return;
    showTable($("rocks"), [run().name, version], () => ({
      table,
      label: "rocks",
      picks: ["category", "label", "label, other half", "verdict"],
      content: (cell, row) => content(cell, rocks[row]),
    }));
  }

  function aboutAll(rocks, summary, labels) {
    if (!summary) return [hint("There are no rocks yet: run `rocktokens find`.")];
    if (!rocks.length) return [hint("`rocktokens find` found no rocks here.")];
    const shares = [
      ["token_share", "of the tokens"],
      ["vocab_share", "of the types used"],
      ["kl_share", "of the kl"],
      ["grad_share", "of the gradient norm"],
    ];
    return [
      element("dl", { class: "shares" }, ...shares.map(([name, label]) => shareOf(summary, name, label))),
      ...measuredOn(summary),
      ...(labels ? [element("p", {}, labels)] : []),
    ];
  }

  function measuredOn({ measured_on: where, n_prompts: count }) {
    if (!where) return [];
    return [hint(`Shares are of the ${where} (${COUNT.format(count)} prompts), with 95 % intervals.`)];
  }

  function shareOf(summary, name, label) {
    const ends = summary.intervals?.[name];
    return element(
      "div",
      {},
      element("dt", {}, label),
      element(
        "dd",
        {},
        percent(summary[name]),
        element("small", {}, ends ? ` [${number(100 * ends[0], 1)}, ${number(100 * ends[1], 1)}]` : ""),
      ),
    );
  }

  // A token links to its rollouts, a verdict to the answers it rests on.
  function content({ kind, text }, rock) {
    const fresh = { ...TABLE, ...cleared(), sort: DEFAULTS.sort, rollout: "", position: "" };
    const ofType = { ...fresh, view: "rollouts", token_id: String(rock.id) };
    const ofBan = { ...TABLE, view: "knockout", ban: String(rock.id), page: "0" };
    if (kind === "token") return link(ofType, {}, chip(rock.text));
    if (kind === "verdict" && text !== "untested") return link(ofBan, {}, text);
    return text;
  }

  Explorer.views.rocks = { name: "Rocks", draw: drawRocks };
})();
