"use strict";
// Everything on the page reads without this script; it sorts, filters and switches the theme.
(() => {
  const root = document.documentElement;
  const theme = document.getElementById("theme");
  const themes = ["auto", "light", "dark"];
  theme.hidden = false;
  theme.addEventListener("click", () => {
    const next = themes[(themes.indexOf(root.dataset.theme || "auto") + 1) % themes.length];
    if (next === "auto") delete root.dataset.theme;
    else root.dataset.theme = next;
    theme.textContent = "Theme: " + next;
  });

  const value = (row, column) => {
    const cell = row.cells[column];
    const number = parseFloat(cell.dataset.v);
    return Number.isNaN(number) ? cell.textContent.trim().toLowerCase() : number;
  };
  const compare = (a, b) =>
    typeof a === typeof b ? (a < b ? -1 : a > b ? 1 : 0) : typeof a === "number" ? -1 : 1;

  for (const table of document.querySelectorAll("table.sortable")) {
    const heads = [...table.tHead.rows[0].cells];
    heads.forEach((head, column) => {
      const button = document.createElement("button");
      button.type = "button";
      button.append(...head.childNodes);
      head.append(button);
      button.addEventListener("click", () => {
        // Figures first from the largest, words from A: what a reader looks for.
        const first = head.classList.contains("number") ? "descending" : "ascending";
        const other = first === "ascending" ? "descending" : "ascending";
        const order = head.getAttribute("aria-sort") === first ? other : first;
        heads.forEach((h) => h.removeAttribute("aria-sort"));
        head.setAttribute("aria-sort", order);
        const sign = order === "ascending" ? 1 : -1;
        const rows = [...table.tBodies[0].rows];
        rows.sort((a, b) => sign * compare(value(a, column), value(b, column)));
        table.tBodies[0].append(...rows);
      });
    });
  }

  for (const tools of document.querySelectorAll(".tools[data-table]")) {
    const table = document.getElementById(tools.dataset.table);
    const words = tools.querySelector("input");
    const part = tools.querySelector("select");
    const count = tools.querySelector("output");
    tools.hidden = false;
    const apply = () => {
      const wanted = words.value.trim().toLowerCase();
      const rows = [...table.tBodies[0].rows];
      for (const row of rows) {
        const inPart = !part.value || row.cells[1].textContent === part.value;
        row.hidden = !(inPart && row.textContent.toLowerCase().includes(wanted));
      }
      const shown = rows.filter((row) => !row.hidden).length;
      count.textContent = shown + " of " + rows.length + " shown";
    };
    words.addEventListener("input", apply);
    part.addEventListener("change", apply);
    apply();
  }

  let opened = [];
  addEventListener("beforeprint", () => {
    opened = [...document.querySelectorAll("details:not([open])")];
    opened.forEach((item) => { item.open = true; });
  });
  addEventListener("afterprint", () => opened.forEach((item) => { item.open = false; }));
})();
