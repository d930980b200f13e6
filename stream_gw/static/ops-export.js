// Export of what a part of the page shows, as CSV or JSON. A cell that a spreadsheet would run is made text.

import { el } from "./dom.js";

/** First characters of a formula in Excel, LibreOffice and Sheets, also in full width, and of a cell that hides one. */
const FORMULA = /^[\s\u0000-\u001f]*[=+\-@|%\uff1d\uff0b\uff0d\uff20]|^[\t\r\n]/u;

/** One cell. Numbers stay numbers; any other text that looks like a formula begins with an apostrophe. */
export function csvCell(value) {
  if (value === null || value === undefined) return "";
  if (typeof value === "number" || typeof value === "boolean") return String(value);
  const text = typeof value === "string" ? value : JSON.stringify(value);
  return `"${(FORMULA.test(text) ? `'${text}` : text).replaceAll('"', '""')}"`;
}

/** RFC 4180: a header, CRLF, every text quoted. */
export function toCsv(rows) {
  const names = [...new Set(rows.flatMap(Object.keys))];
  const lines = [names.map(csvCell), ...rows.map((row) => names.map((name) => csvCell(row[name])))];
  return lines.map((cells) => `${cells.join(",")}\r\n`).join("");
}

export function toJson(rows, about) {
  return `${JSON.stringify({ ...about, rows }, null, 2)}\n`;
}

function download(name, type, text) {
  const link = el("a");
  link.href = URL.createObjectURL(new Blob([text], { type }));
  link.download = name;
  link.click();
  setTimeout(() => URL.revokeObjectURL(link.href), 60_000); // the browser may read it after the click
}

/** Buttons that export `rows()` of the part `name`; `about()`: fields beside the rows in JSON. */
export function exportButtons(name, rows, about, announce) {
  const button = (label, type, write) => {
    const made = el("button", "", label);
    made.type = "button";
    made.setAttribute("aria-label", `Export ${name} as ${label}`);
    made.addEventListener("click", () => {
      const found = rows();
      const at = new Date().toISOString().slice(0, 19).replaceAll(":", "-");
      download(`stream-gw-${name.replaceAll(" ", "-")}-${at}Z.${label.toLowerCase()}`, type, write(found));
      announce(`Exported ${found.length} rows of ${name} as ${label}.`);
    });
    return made;
  };
  const group = el(
    "div",
    "exports",
    button("CSV", "text/csv;charset=utf-8", toCsv),
    button("JSON", "application/json", (found) => toJson(found, about())),
  );
  group.setAttribute("role", "group");
  group.setAttribute("aria-label", `Export ${name}`);
  return group;
}
