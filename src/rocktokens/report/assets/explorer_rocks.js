// The rocks of a run: their shares, and the table.

"use strict";

(() => {
  const { chip, element, number, percent } = RockStrip;
  const { $, COUNT, address, cleared, hint, intervalText, points, run } = Explorer;

  function drawRocks() {
    const { rocks, summary } = run();
    if (!rocks.length) return void $("rocks").replaceChildren(hint("No rocks were found yet: run `rocktokens find`."));
    const shares = [
      ["token_share", "of the tokens"],
      ["vocab_share", "of the types used"],
      ["kl_share", "of the kl"],
      ["grad_share", "of the gradient norm"],
    ];
    $("rocks").replaceChildren(
      element("dl", { class: "shares" }, ...shares.map(([name, label]) => shareOf(summary, name, label))),
      element(
        "table",
        { class: "data" },
        element("caption", { class: "visually-hidden" }, "Rocks by rank"),
        element(
          "thead",
          {},
          element(
            "tr",
            {},
            ...["#", "token", "category", "count", "mean kl", "in top K", "verdict", "Δ accuracy"].map((name, index) =>
              element("th", { scope: "col", class: [0, 3, 4, 5, 7].includes(index) ? "n" : null }, name),
            ),
          ),
        ),
        element("tbody", {}, ...rocks.map(rockRow)),
      ),
    );
    return undefined;
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

  function rockRow(rock) {
    return element(
      "tr",
      {},
      element("td", { class: "n" }, String(rock.rank)),
      element(
        "td",
        {},
        element(
          "a",
          { href: address({ ...cleared(), view: "rollouts", token_id: String(rock.id), rollout: "", position: "" }) },
          chip(rock.text),
        ),
      ),
      element("td", {}, rock.category.replace(/_/g, " ")),
      element("td", { class: "n" }, COUNT.format(rock.freq)),
      element("td", { class: "n" }, number(rock.mean_kl)),
      element("td", { class: "n" }, percent(rock.p_in_top_k)),
      element(
        "td",
        {},
        rock.verdict === "untested"
          ? "untested"
          : element("a", { href: address({ view: "knockout", ban: String(rock.id), page: "0" }) }, rock.verdict),
      ),
      element("td", { class: "n" }, points(rock.delta) + intervalText(rock.delta_interval)),
    );
  }

  Explorer.views.rocks = { name: "Rocks", draw: drawRocks };
})();
