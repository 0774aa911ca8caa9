// The rocks of a run: their shares, and the table.

"use strict";

(() => {
  const { chip, element, number, percent } = RockStrip;
  const { $, COUNT, address, change, cleared, hint, intervalText, points, run } = Explorer;

  const NUMERIC = ["#", "count", "mean kl", "held out", "again", "change", "in top K", "Δ accuracy"];
  const RULES = {
    method: "Verdicts by our rule.",
    paper: "Verdicts by the paper's rule, which calls neutral whatever the prompts cannot tell.",
  };

  function drawRocks() {
    const { rocks, summary } = run();
    if (!summary) return void $("rocks").replaceChildren(hint("No rocks were looked for yet: run `rocktokens find`."));
    if (!rocks.length) return void $("rocks").replaceChildren(hint("`rocktokens find` found no rocks here."));
    const shares = [
      ["token_share", "of the tokens"],
      ["vocab_share", "of the types used"],
      ["kl_share", "of the kl"],
      ["grad_share", "of the gradient norm"],
    ];
    $("rocks").replaceChildren(
      element("dl", { class: "shares" }, ...shares.map(([name, label]) => shareOf(summary, name, label))),
      ...measuredOn(summary),
      element(
        "table",
        { class: "data" },
        element("caption", {}, captionOf(run())),
        element("thead", {}, element("tr", {}, ...Object.keys(cellsOf(rocks[0])).map(titleCell))),
        element("tbody", {}, ...rocks.map(rockRow)),
      ),
    );
    return undefined;
  }

  function measuredOn({ measured_on: where, n_prompts: count }) {
    if (!where) return [];
    return [hint(`Shares are of the ${where} (${COUNT.format(count)} prompts), with 95 % intervals.`)];
  }

  // Which numbers chose the rocks, which test them, and who judged.
  function captionOf({ is_split: isSplit, rule }) {
    const prompts = isSplit
      ? "Count, mean kl and in top K are of the prompts that selected the rocks; held out is the mean kl on the " +
        "other prompts, change that of it over training."
      : "All prompts selected the rocks, so every number is of prompts that selected them, which flatters it. " +
        "Change: of the kl over training.";
    return rule ? `${prompts} ${RULES[rule]}` : prompts;
  }

  function titleCell(name) {
    return element("th", { scope: "col", class: NUMERIC.includes(name) ? "n" : null }, name);
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
    const cells = Object.entries(cellsOf(rock));
    return element(
      "tr",
      {},
      ...cells.map(([name, cell]) => element("td", { class: NUMERIC.includes(name) ? "n" : null }, cell)),
    );
  }

  function cellsOf(rock) {
    const ofType = { ...cleared(), view: "rollouts", token_id: String(rock.id), rollout: "", position: "" };
    const ofBan = { view: "knockout", ban: String(rock.id), page: "0" };
    return {
      "#": String(rock.rank),
      token: element("a", { href: address(ofType) }, chip(rock.text)),
      category: rock.category.replace(/_/g, " "),
      count: COUNT.format(rock.freq),
      "mean kl": number(rock.mean_kl),
      [run().is_split ? "held out" : "again"]: number(rock.held_out_mean_kl),
      change: change(rock.held_out_change),
      "in top K": percent(rock.p_in_top_k),
      verdict: rock.verdict === "untested" ? "untested" : element("a", { href: address(ofBan) }, rock.verdict),
      "Δ accuracy": points(rock.delta) + intervalText(rock.delta_interval),
    };
  }

  Explorer.views.rocks = { name: "Rocks", draw: drawRocks };
})();
