"use strict";
// Tables sort by a click on a head, or by Enter and Space on it. What is missing stays last, whichever way.
const collator = new Intl.Collator("en");
const missing = new Set(["", "–", "—", "-", "NaN"]);

function keyOf(cell, kind) {
  const text = cell.textContent.trim();
  if (missing.has(text)) return null;
  if (kind !== "number") return text;
  const number = Number(cell.dataset.sort ?? text);
  return Number.isNaN(number) ? null : number;
}

function order(a, b) {
  return typeof a === "number" ? (a < b ? -1 : a > b ? 1 : 0) : natural(a, b);
}

// Texts with the numbers in them as numbers: "layer 2" before "layer 10", "gan 0.01" before "gan 0.1".
function natural(a, b) {
  const [left, right] = [a, b].map((text) => text.split(/(\d+(?:\.\d+)?)/));
  for (let i = 0; i < Math.min(left.length, right.length); i++) {
    const found = i % 2 ? left[i] - right[i] : collator.compare(left[i], right[i]);
    if (found) return found;
  }
  return left.length - right.length;
}

function sort(table, head) {
  const column = head.cellIndex;
  const descending = head.getAttribute("aria-sort") === "ascending";
  const body = table.tBodies[0];
  const rows = Array.from(body.rows, (row) => ({ row, key: keyOf(row.cells[column], head.dataset.kind) }));
  rows.sort((a, b) => {
    if (a.key === null || b.key === null) return (a.key === null) - (b.key === null);
    return descending ? order(b.key, a.key) : order(a.key, b.key);
  });
  body.append(...rows.map(({ row }) => row));
  for (const other of head.parentElement.cells) other.removeAttribute("aria-sort");
  head.setAttribute("aria-sort", descending ? "descending" : "ascending");
}

for (const table of document.querySelectorAll("table")) {
  for (const head of table.tHead.rows[0].cells) {
    const button = document.createElement("button");
    button.type = "button";
    button.append(...head.childNodes);
    button.addEventListener("click", () => sort(table, head));
    head.append(button);
  }
}

// Paper cannot be unfolded.
const unfolded = [];
window.addEventListener("beforeprint", () => {
  for (const details of document.querySelectorAll("details.paper:not([open])")) {
    details.open = true;
    unfolded.push(details);
  }
});
window.addEventListener("afterprint", () => {
  for (const details of unfolded.splice(0)) details.open = false;
});
