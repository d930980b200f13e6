// Tables whose rows are reused, and ids that stay on one line.

import { copyText, el, icon } from "./dom.js";
import { sparkline } from "./ops-spark.js";

const LONG_CHARS = 18;
const ID_CHARS = 22;
const COPIED_MS = 1500;

/** An id shortened in its middle: its beginning says what it is, its end which one. */
export const shortened = (id, most = ID_CHARS) => (id.length > most ? `${id.slice(0, Math.ceil(most / 2))}…${id.slice(4 - Math.floor(most / 2))}` : id);

/** An id on one line: whole on hover, for screen readers and for search in the page. */
export function idNode(id, { canCopy = true, most = ID_CHARS } = {}) {
  const short = shortened(id, most);
  const shown = el("bdi", "", short);
  const node = el("span", "id", shown);
  node.title = id;
  if (short !== id) {
    shown.setAttribute("aria-hidden", "true");
    node.append(el("span", "sr", id));
  }
  if (canCopy) node.append(copyButton(id, "Copy id"));
  return node;
}

/** A button that copies a text and says so. */
export function copyButton(text, label) {
  const button = el("button", "copy", icon("copy"), el("span", "sr", label));
  button.type = "button";
  button.title = label;
  button.addEventListener("click", async (event) => {
    event.stopPropagation();
    const isCopied = await copyText(text);
    button.classList.toggle("copied", isCopied);
    button.lastElementChild.textContent = isCopied ? "Copied" : "Copying is not allowed";
    setTimeout(() => {
      button.classList.remove("copied");
      button.lastElementChild.textContent = label;
    }, COPIED_MS);
  });
  return button;
}

/** Shows `{text, id, sub, share, tone, title, spark}` in a cell; only a change is written. */
export function fill(cell, shown) {
  const content = typeof shown === "string" ? { text: shown } : shown;
  const seen = JSON.stringify(content);
  if (cell.seen === seen) return;
  cell.seen = seen;
  cell.dataset.tone = content.tone ?? "";
  cell.title = content.title ?? (content.text?.length > LONG_CHARS ? content.text : ""); // the full text, which the cell may cut off
  const parts = [];
  if (content.id) parts.push(idNode(content.id, { canCopy: content.canCopy }));
  else if (content.text !== undefined) parts.push(el("bdi", "value", content.text));
  if (content.sub) parts.push(el("bdi", "sub", content.sub));
  if (content.share !== undefined) {
    const meter = el("span", "meter", el("i"));
    meter.firstChild.style.width = `${Math.min(Math.max(content.share, 0), 1) * 100}%`;
    parts.push(meter);
  }
  if (content.spark) parts.push(sparkline(content.spark));
  cell.replaceChildren(...parts);
}

/** A table that reuses its rows by key. A column is `{title, name, of(row)}`; cells of the first one are headers. */
export class Table {
  constructor(caption, columns, { onRow = null } = {}) {
    this.columns = columns;
    this.onRow = onRow;
    this.rows = new Map();
    this.body = el("tbody");
    const heads = columns.map(({ title, name, about }) => {
      const head = el(title ? "th" : "td", name, title);
      if (title) head.scope = "col";
      if (about) head.title = about;
      return head;
    });
    const table = el("table", "", el("caption", "sr", caption), el("thead", "", el("tr", "", ...heads)), this.body);
    this.node = el("div", "scroll", table);
    this.node.tabIndex = 0;
    this.node.setAttribute("role", "region");
    this.node.setAttribute("aria-label", caption);
  }

  /** `rows`: `[key, row]` in order. */
  update(rows) {
    // Remove deleted rows first: a row that is moved loses the focus
    const kept = new Set(rows.map(([key]) => key));
    for (const [key, { node }] of this.rows) {
      if (kept.has(key)) continue;
      node.remove();
      this.rows.delete(key);
    }
    let before = null;
    for (const [key, row] of rows) {
      const line = this.rows.get(key) ?? this.add(key);
      line.row = row;
      this.columns.forEach(({ of }, index) => fill(line.cells[index], of(row)));
      const place = before ? before.nextSibling : this.body.firstChild;
      if (place !== line.node) this.body.insertBefore(line.node, place);
      before = line.node;
    }
  }

  add(key) {
    const cells = this.columns.map(({ name }, index) => {
      const cell = el(index ? "td" : "th", name);
      if (!index) cell.scope = "row";
      return cell;
    });
    const line = { node: el("tr", "", ...cells), cells, row: null };
    if (this.onRow) {
      // The whole row takes clicks; keyboards and screen readers use the button
      const button = el("button", "open");
      button.type = "button";
      cells[0].replaceChildren(button);
      line.cells[0] = button;
      line.node.className = "opens";
      line.node.addEventListener("click", () => {
        if (!getSelection()?.toString()) this.onRow(line.row, button);
      });
    }
    this.rows.set(key, line);
    return line;
  }
}
