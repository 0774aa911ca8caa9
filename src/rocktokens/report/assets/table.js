// A table that can be sorted by any column and filtered by words and by the values of a column.
//
// 1. `table` is {titles, rows: [[{text, kind, value}]], title, notes}, as display/table.py makes it. A column is sorted
//    by the values of its cells where they have one, else by their texts; what is not known comes last either way.
// 2. What the reader chose is {order, find, pick}: a title, with a minus before it where the column descends; words;
//    and values by title, written as a query. It is the caller's to keep: `onChange` tells it, `apply` shows it.
// 3. Titles are buttons and say how they are sorted (aria-sort); the arrow keys move from row to row over what can be
//    followed. A table wider than its place scrolls in it, its first column stays.

"use strict";

const RockTable = (() => {
  const { element } = RockStrip;
  const DASH = "—";

  // options: label; picks: titles of columns to filter by; content(cell, row, column): what a cell shows, by default
  // its text; onChange({order} or {find} or {pick}). Returns {apply(chosen)}.
  function open(host, table, { label, picks = [], content = (cell) => cell.text, onChange }) {
    const chosen = { order: "", find: "", pick: "" };
    const cellOf = (cell, row, column) => element("td", { class: classOf(cell) }, content(cell, row, column));
    const rows = table.rows.map((cells, row) =>
      element("tr", {}, ...cells.map((cell, column) => cellOf(cell, row, column))),
    );
    const heads = table.titles.map((title, column) =>
      element(
        "th",
        { scope: "col", class: classOf(table.rows[0]?.[column]) },
        element("button", { type: "button", onclick: () => onChange({ order: nextOrder(column) }) }, title),
      ),
    );
    const body = element("tbody", { onkeydown: moveByKey });
    const search = element("input", {
      type: "search",
      "aria-label": `Filter ${label}`,
      placeholder: "Filter",
      maxlength: 200,
      spellcheck: "false",
      oninput: () => onChange({ find: search.value }),
    });
    const selects = picks.filter((title) => table.titles.includes(title)).map(pickOf);
    const status = element("span", { role: "status" });
    const caption = [table.title, ...(table.notes ?? [])].filter(Boolean).join(" ");
    host.replaceChildren(
      ...(caption ? [element("p", { class: "table-note muted" }, caption)] : []),
      element("div", { class: "table-bar" }, search, ...selects.map((own) => own.root), status),
      element(
        "div",
        { class: "table-scroll", tabindex: 0, role: "region", "aria-label": `Table of ${label}` },
        element(
          "table",
          { class: "data", "aria-label": label },
          element("thead", {}, element("tr", {}, ...heads)),
          body,
        ),
      ),
    );

    function pickOf(title) {
      const column = table.titles.indexOf(title);
      const texts = [...new Set(table.rows.map((cells) => cells[column].text))];
      texts.sort((a, b) => a.localeCompare(b, "en"));
      const options = ["any", ...texts.map((text) => text || "none")].map((name) => element("option", {}, name));
      const choose = (event) => {
        const said = new URLSearchParams(chosen.pick);
        if (event.target.selectedIndex) said.set(title, texts[event.target.selectedIndex - 1]);
        else said.delete(title);
        onChange({ pick: said.toString() });
      };
      const select = element("select", { onchange: choose }, ...options);
      return { title, column, texts, select, root: element("label", {}, `${title} `, select) };
    }

    // Numbers from the largest, texts from the first; chosen once more, the other way round.
    function nextOrder(column) {
      const title = table.titles[column];
      const isNumber = table.rows.some((cells) => cells[column].kind === "number");
      const [first, second] = isNumber ? [`-${title}`, title] : [title, `-${title}`];
      return chosen.order === first ? second : first;
    }

    function apply({ order, find, pick }) {
      Object.assign(chosen, { order, find, pick });
      const said = new URLSearchParams(pick);
      for (const { select, texts, title } of selects) {
        select.selectedIndex = texts.indexOf(said.get(title)) + 1;
      }
      if (search !== document.activeElement) search.value = find;
      const isDown = order.startsWith("-");
      const column = table.titles.indexOf(isDown ? order.slice(1) : order);
      heads.forEach((head, at) => {
        if (at === column) head.setAttribute("aria-sort", isDown ? "descending" : "ascending");
        else head.removeAttribute("aria-sort");
      });
      const shown = sorted(column, isDown ? -1 : 1).filter((row) => passes(table.rows[row], find, said));
      body.replaceChildren(...shown.map((row) => rows[row]));
      status.textContent = shown.length === rows.length ? "" : `${shown.length} of ${rows.length}`;
    }

    function sorted(column, direction) {
      const places = rows.map((_, row) => row);
      if (column < 0) return places;
      return places.sort((a, b) => compare(table.rows[a][column], table.rows[b][column], direction));
    }

    function passes(cells, find, said) {
      const words = find.toLowerCase();
      const isFound = !words || cells.some((cell) => cell.text.toLowerCase().includes(words));
      const isPicked = ({ title, texts, column }) =>
        !texts.includes(said.get(title)) || cells[column].text === said.get(title);
      return isFound && selects.every(isPicked);
    }

    apply(chosen);
    return { apply };
  }

  const classOf = (cell) => (cell?.kind === "number" ? "n" : null);
  const keyOf = ({ text, value }) => (Number.isFinite(value) ? value : text === DASH ? "" : text);

  function compare(one, other, direction) {
    const [a, b] = [keyOf(one), keyOf(other)];
    if (a === "" || b === "") return (a === "") - (b === "");
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return direction * (typeof a === "number" ? a - b : a.localeCompare(b, "en", { numeric: true }));
  }

  function moveByKey(event) {
    const step = { ArrowDown: "nextElementSibling", ArrowUp: "previousElementSibling" }[event.key];
    const row = event.target.closest("tr");
    if (!step || !row || event.ctrlKey || event.metaKey || event.altKey) return;
    event.preventDefault();
    row[step]?.querySelector("a[href]")?.focus();
  }

  return { open };
})();
