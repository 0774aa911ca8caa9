// Classes of interchangeable tokens: their members, what bans have shown of them, and what they hold of the loss.

"use strict";

(() => {
  const { chip, element } = RockStrip;
  const { $, DEFAULTS, TABLE, ask, changed, cleared, hint, link, showTable, state } = Explorer;

  let found = { classes: [], table: null };

  async function drawClasses() {
    if (changed("classes", state.run)) found = await ask("classes", `runs/${state.run}/classes`);
    $("no-classes").hidden = found.classes.length > 0;
    $("classes").hidden = !found.classes.length;
    if (!found.classes.length) {
      return void $("no-classes").replaceChildren(
        hint("There are no classes yet: run `rocktokens find --classes`, then `rocktokens knockout --classes`."),
      );
    }
    const members = found.table.titles.indexOf("members");
    return showTable($("classes"), found, () => ({
      table: found.table,
      label: "classes",
      picks: ["members are", "whole class banned"],
      content: (cell, row, column) => (column === members ? memberLinks(found.classes[row]) : cell.text),
    }));
  }

  function memberLinks({ ids, texts }) {
    const ofType = { ...TABLE, ...cleared(), sort: DEFAULTS.sort, view: "rollouts", rollout: "", position: "" };
    const linkOf = (text, place) => link({ ...ofType, token_id: String(ids[place]) }, {}, chip(text));
    const links = texts.flatMap((text, place) => [linkOf(text, place), " "]);
    return element("span", { class: "members" }, ...links);
  }

  Explorer.views.classes = { name: "Classes", draw: drawClasses };
})();
