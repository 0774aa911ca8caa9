// The runs there are: a table that leads to each of them, asked for again whenever it is shown.

"use strict";

(() => {
  const { $, DEFAULTS, hint, isBundle, link, list, listing, showTable } = Explorer;

  async function drawHome() {
    await list();
    const about = isBundle ? "This page is a bundle: it shows what was written into it." : "";
    const sentences = [about, listing.left_out];
    $("home-notes").replaceChildren(...sentences.filter(Boolean).map(hint));
    showTable($("home"), listing, () => ({
      table: listing.table,
      label: "runs",
      picks: ["student", "task", "state"],
      content: (cell, row, column) => (column === 0 ? nameLink(listing.runs[row]) : cell.text),
    }));
  }

  function nameLink({ number, name, view }) {
    const { theme, measure, ...fresh } = DEFAULTS; // but for how things look, nothing stays chosen in another run
    return link({ ...fresh, run: String(number), view }, {}, name);
  }

  Explorer.views.home = { name: "Runs", draw: drawHome };
})();
