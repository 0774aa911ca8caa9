// The rocks of a run: their shares, and the table, whose cells come ready from the server.

"use strict";

(() => {
  const { chip, element, number, percent } = RockStrip;
  const { $, COUNT, address, cleared, hint, run } = Explorer;

  function drawRocks() {
    const { rocks, summary, table } = run();
    if (!summary) return void $("rocks").replaceChildren(hint("There are no rocks yet: run `rocktokens find`."));
    if (!rocks.length) return void $("rocks").replaceChildren(hint("`rocktokens find` found no rocks here."));
    const shares = [
      ["token_share", "of the tokens"],
      ["vocab_share", "of the types used"],
      ["kl_share", "of the kl"],
      ["grad_share", "of the gradient norm"],
    ];
    const head = table.titles.map((title, column) =>
      element("th", { scope: "col", class: classOf(table.rows[0][column]) }, title),
    );
    const body = table.rows.map((row, place) =>
      element("tr", {}, ...row.map((cell) => element("td", { class: classOf(cell) }, content(cell, rocks[place])))),
    );
    $("rocks").replaceChildren(
      element("dl", { class: "shares" }, ...shares.map(([name, label]) => shareOf(summary, name, label))),
      ...measuredOn(summary),
      element(
        "table",
        { class: "data" },
        element("caption", {}, [table.title, ...table.notes].join(" ")),
        element("thead", {}, element("tr", {}, ...head)),
        element("tbody", {}, ...body),
      ),
    );
    return undefined;
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

  const classOf = ({ kind }) => (kind === "number" ? "n" : null);

  // A token links to its rollouts, a verdict to the answers it rests on.
  function content({ kind, text }, rock) {
    const ofType = { ...cleared(), view: "rollouts", token_id: String(rock.id), rollout: "", position: "" };
    const ofBan = { view: "knockout", ban: String(rock.id), page: "0" };
    if (kind === "token") return element("a", { href: address(ofType) }, chip(rock.text));
    if (kind === "verdict" && text !== "untested") return element("a", { href: address(ofBan) }, text);
    return text;
  }

  Explorer.views.rocks = { name: "Rocks", draw: drawRocks };
})();
