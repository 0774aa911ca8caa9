// What a report does beyond being read: theme, sorting and searching of tables, downloads, charts, token strips.
//
// 1. The page is complete without this script; controls that need it are hidden until it runs.
// 2. Files come from what the page holds: SVG is the image itself, PNG is drawn from it, CSV lies in the data.
// 3. Text of tokens is only ever set as text.

(() => {
  const data = JSON.parse(document.getElementById("data").textContent);
  const root = document.documentElement;
  const PIXELS = 2;
  const TYPES = { png: "image/png", svg: "image/svg+xml", csv: "text/csv;charset=utf-8" };

  // Theme
  const button = document.getElementById("theme");
  const systemIsDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (root.dataset.theme ? root.dataset.theme === "dark" : systemIsDark.matches);
  const nameTheme = () => { button.textContent = isDark() ? "Light" : "Dark"; };
  button.hidden = false;
  button.addEventListener("click", () => {
    root.dataset.theme = isDark() ? "light" : "dark";
    try { localStorage.setItem("rocktokens-theme", root.dataset.theme); } catch { /* kept for this visit only */ }
    nameTheme();
  });
  systemIsDark.addEventListener("change", nameTheme);
  let onScreen;
  addEventListener("beforeprint", () => { onScreen = root.dataset.theme; root.dataset.theme = "light"; });
  addEventListener("afterprint", () => { if (onScreen) root.dataset.theme = onScreen; else delete root.dataset.theme; });
  nameTheme();

  // Tables
  const keyOf = (row, column) => {
    const cell = row.cells[column];
    return cell.dataset.value === undefined ? cell.textContent.trim() : Number(cell.dataset.value);
  };

  // Numbers before texts, so that what is not known comes last either way.
  function compare(a, b, direction) {
    if (typeof a !== typeof b) return typeof a === "number" ? -1 : 1;
    return direction * (typeof a === "number" ? a - b : a.localeCompare(b, "en"));
  }

  function sort(table, column) {
    const headers = [...table.tHead.rows[0].cells];
    const ascending = headers[column].getAttribute("aria-sort") !== "ascending";
    headers.forEach((header) => header.removeAttribute("aria-sort"));
    headers[column].setAttribute("aria-sort", ascending ? "ascending" : "descending");
    const rows = [...table.tBodies[0].rows].map((row) => [keyOf(row, column), row]);
    rows.sort(([a], [b]) => compare(a, b, ascending ? 1 : -1));
    table.tBodies[0].append(...rows.map(([, row]) => row));
  }

  for (const table of document.querySelectorAll("table.sortable")) {
    [...table.tHead.rows[0].cells].forEach((header, column) => {
      const own = RockStrip.element("button", { type: "button", onclick: () => sort(table, column) }, ...header.childNodes);
      header.replaceChildren(own);
    });
  }

  for (const input of document.querySelectorAll("input[data-table]")) {
    const rows = [...document.getElementById(input.dataset.table).tBodies[0].rows];
    const status = input.closest("p").querySelector("[role=status]");
    input.closest("p").hidden = false;
    input.addEventListener("input", () => {
      const wanted = input.value.toLowerCase();
      for (const row of rows) row.hidden = !row.textContent.toLowerCase().includes(wanted);
      status.textContent = wanted ? `${rows.filter((row) => !row.hidden).length} of ${rows.length}` : "";
    });
  }

  // Downloads
  const svgOf = (image) =>
    Uint8Array.from(atob(image.src.slice(image.src.indexOf(",") + 1)), (character) => character.charCodeAt(0));

  async function pngOf(image) {
    await image.decode();
    const canvas = document.createElement("canvas");
    canvas.width = PIXELS * image.naturalWidth;
    canvas.height = PIXELS * image.naturalHeight;
    const context = canvas.getContext("2d");
    context.fillStyle = "white";
    context.fillRect(0, 0, canvas.width, canvas.height);
    context.drawImage(image, 0, 0, canvas.width, canvas.height);
    return new Promise((done) => canvas.toBlob(done, TYPES.png));
  }

  async function contentOf(file, format) {
    if (format === "csv") return data.files[file].csv;
    const image = document.getElementById(file);
    return format === "svg" ? svgOf(image) : pngOf(image);
  }

  async function download(file, format) {
    const content = await contentOf(file, format);
    const url = URL.createObjectURL(new Blob([content], { type: TYPES[format] }));
    RockStrip.element("a", { href: url, download: `${data.files[file].stem}.${format}` }).click();
    setTimeout(() => URL.revokeObjectURL(url), 60_000);
  }

  for (const host of document.querySelectorAll(".downloads")) {
    host.hidden = false;
    host.addEventListener("click", (event) => {
      const format = event.target.closest("button")?.dataset.format;
      if (format) download(host.dataset.file, format);
    });
  }

  // Charts: what can be touched stands in for its image
  for (const host of document.querySelectorAll(".plot-host")) {
    const spec = data.plots[host.dataset.plot];
    if (!spec) continue;
    const figure = host.closest("figure");
    const caption = figure.querySelector("figcaption");
    figure.classList.add("is-live");
    figure.hidden = host.hidden = caption.hidden = false;
    RockChoice.draw(host, spec, figure.querySelector("img")?.alt ?? caption.textContent);
  }

  // Token strips
  function drawStrips(host, strips) {
    const select = host.querySelector("select");
    const panels = [...host.querySelectorAll(".rollout")].map((rollout) => ({
      host: rollout.querySelector(".strip-host"),
      panel: rollout.querySelector(".panel"),
    }));
    select.append(...Object.entries(RockStrip.MEASURES).map(([value, { label }]) => RockStrip.element("option", { value }, label)));
    host.querySelector(".strip-controls").hidden = false;
    for (const { panel } of panels) panel.replaceChildren(RockStrip.element("p", { class: "muted" }, "Choose a token."));

    function draw() {
      const measure = select.value;
      const scale = RockStrip.scaleOf(strips, measure);
      host.querySelector(".legend-host").replaceChildren(RockStrip.legend(measure, scale));
      strips.forEach((strip, index) => {
        const { host: own, panel } = panels[index];
        RockStrip.draw(own, strip, { measure, scale, onSelect: (token) => RockStrip.panel(panel, token) });
      });
      RockChoice.mark();
    }

    select.addEventListener("change", draw);
    draw();
  }

  for (const host of document.querySelectorAll(".strips")) drawStrips(host, data.strips[Number(host.dataset.run)]);
})();
