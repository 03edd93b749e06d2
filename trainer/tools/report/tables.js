"use strict";
// Tables whose columns sort the rows, and figures that are chosen by words of their titles.
function makeSortable(table) {
  const compare = new Intl.Collator("en", { numeric: true }).compare;
  const heads = [...table.tHead.rows[0].cells], body = table.tBodies[0];
  function sort(column, direction) {
    const key = (row) => row.cells[column].dataset.key ?? "";
    const isNumber = [...body.rows].every((row) => Number.isFinite(Number(key(row))));
    const order = (a, b) => (isNumber ? Number(a) - Number(b) : compare(a, b));
    // A run without a value is last in both directions.
    body.append(...[...body.rows].sort((a, b) => !key(a) - !key(b) || direction * order(key(a), key(b))));
    for (const head of heads) head.removeAttribute("aria-sort");
    heads[column].ariaSort = direction > 0 ? "ascending" : "descending";
    stored.set("sort", [column, direction]);
  }
  heads.forEach((head, column) => {
    head.querySelector("button").addEventListener("click", () => sort(column, head.ariaSort === "ascending" ? -1 : 1));
  });
  const kept = stored.get("sort");
  if (Array.isArray(kept) && heads[kept[0]]) sort(...kept);
}

function showFigures(filter) {
  const words = filter.toLowerCase().split(/\s+/).filter(Boolean);
  for (const part of document.querySelectorAll("section:has(figure)")) {
    const all = [...part.querySelectorAll("figure")];
    for (const one of all) {
      const title = one.querySelector("h3").textContent.toLowerCase();
      one.hidden = !words.every((word) => title.includes(word));
    }
    part.hidden = words.length > 0 && all.every(({ hidden }) => hidden);
  }
}
