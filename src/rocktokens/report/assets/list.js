// A list of any length: only the rows in sight are elements, and pages of rows are fetched as they come into sight.
//
// Browsers stop laying out somewhere above TALLEST pixels; of a list taller than that the scroll bar is a scaled one:
// scrolled to the same share of its way, it shows the same share of the rows.

"use strict";

const RockList = (() => {
  const ROW = 62; // pixels, as the style sheet has it
  const BEYOND = 2; // rows drawn above and below what is in sight
  const TALLEST = 8e6;

  // Fill `host` (a listbox around one element) with the rows of `first` = {total, size, rows} and what follows.
  // fetchPage(page) -> {rows}; rowElement(row) -> element; isChosen(row); attempt(work) runs what may fail.
  function open(host, first, { fetchPage, rowElement, isChosen, attempt }) {
    const inner = host.firstElementChild;
    const pages = new Map([[0, Promise.resolve(first.rows)]]);
    const loaded = new Map([[0, first.rows]]);
    const height = Math.min(first.total * ROW, TALLEST);
    inner.style.height = `${height}px`;
    host.scrollTop = 0;

    const pageOf = (index) => Math.floor(index / first.size);
    const row = (index) => loaded.get(pageOf(index))?.[index % first.size];
    const stretch = () =>
      height > host.clientHeight ? (first.total * ROW - host.clientHeight) / (height - host.clientHeight) : 1;

    function load(page) {
      if (!pages.has(page))
        pages.set(
          page,
          fetchPage(page).then(({ rows }) => rows),
        );
      return pages.get(page).then(
        (rows) => loaded.set(page, rows),
        (error) => {
          pages.delete(page);
          throw error;
        },
      );
    }

    function draw() {
      const offset = host.scrollTop * stretch();
      const from = Math.max(0, Math.floor(offset / ROW) - BEYOND);
      const to = Math.min(first.total, Math.ceil((offset + host.clientHeight) / ROW) + BEYOND);
      const indices = Array.from({ length: Math.max(0, to - from) }, (_, place) => from + place);
      const shown = indices.filter(row).map((index) => placed(index, host.scrollTop + index * ROW - offset));
      inner.replaceChildren(...shown);
      const chosen = shown.find((own) => own.getAttribute("aria-selected") === "true");
      if (chosen) host.setAttribute("aria-activedescendant", chosen.id);
      else host.removeAttribute("aria-activedescendant");
      const missing = indices.map(pageOf).find((page) => !pages.has(page));
      if (missing !== undefined) attempt(() => load(missing).then(() => inner.isConnected && draw()));
    }

    function placed(index, top) {
      const own = rowElement(row(index));
      own.id = `row-${index}`;
      own.style.transform = `translateY(${top}px)`;
      own.setAttribute("role", "option");
      own.setAttribute("aria-selected", String(isChosen(row(index))));
      own.setAttribute("aria-setsize", String(first.total));
      own.setAttribute("aria-posinset", String(index + 1));
      return own;
    }

    function chosenIndex() {
      for (const [page, rows] of loaded) {
        const place = rows.findIndex(isChosen);
        if (place >= 0) return page * first.size + place;
      }
      return -1;
    }

    function reveal(index) {
      const [top, offset] = [index * ROW, host.scrollTop * stretch()];
      if (top < offset) host.scrollTop = top / stretch();
      else if (top + ROW > offset + host.clientHeight) host.scrollTop = (top + ROW - host.clientHeight) / stretch();
    }

    // The row this many places after the chosen one, brought into sight; undefined where there are no rows.
    async function step(by) {
      if (!first.total) return undefined;
      const index = Math.min(first.total - 1, Math.max(0, chosenIndex() + by));
      await load(pageOf(index));
      reveal(index);
      return row(index);
    }

    draw();
    return { draw, row, step };
  }

  return { open };
})();
