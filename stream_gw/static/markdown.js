// Renders Markdown that grows while it streams. markdown-it makes HTML; DOMPurify removes everything that is not on
// the list below.
//
// Each top-level block is rendered on its own. A finished block is rendered once; while an answer streams, only its
// last block is rendered again, and only the nodes of it that differ are replaced.

import MarkdownIt from "./vendor/markdown-it.esm.min.mjs";
import { copyText, el } from "./dom.js";
import createPurify from "./vendor/purify.es.mjs";

const COPIED_MS = 1600;
const NESTING_MAX = 20; // lists and quotes within each other; deeper ones are shown as text

const TAGS = [
  ...["p", "h2", "h3", "h4", "h5", "h6", "blockquote", "ul", "ol", "li", "hr", "pre", "code"],
  ...["table", "thead", "tbody", "tr", "th", "td", "strong", "em", "s", "a", "br"],
];
const CLASS = /^(?:right|center|language-[\w+#.-]{1,40})$/;
const ADDRESS = /^(?:https?:\/\/|mailto:)/i; // relative addresses are not links either

// Markdown to HTML. Raw HTML in the text stays text.

const markdown = new MarkdownIt({ html: false, linkify: true, breaks: true, maxNesting: NESTING_MAX });
// A reference could change a block that is already rendered.
markdown.disable(["reference"]);
markdown.linkify.set({ fuzzyLink: false, fuzzyEmail: false, fuzzyIP: false });
markdown.validateLink = (address) => ADDRESS.test(address);
markdown.core.ruler.push("page", ({ tokens }) => tokens.forEach(adapt));
// The page loads nothing from elsewhere, so an image becomes a link to it.
markdown.renderer.rules.image = (tokens, at) => {
  const { content, attrs } = tokens[at];
  const address = attrs.find(([name]) => name === "src")[1];
  const { escapeHtml } = markdown.utils;
  const label = escapeHtml(content || address);
  return isInLink(tokens, at) ? label : `<a href="${escapeHtml(address)}">${label}</a>`;
};

/** Adapts a block token to the page: its h1 is the page's own, and its policy forbids style attributes. */
function adapt(token) {
  if (token.type.startsWith("heading_")) token.tag = `h${Math.min(Number(token.tag[1]) + 1, 6)}`;
  const style = token.attrGet("style");
  if (style) token.attrs = style.endsWith("left") ? null : [["class", style.slice("text-align:".length)]];
}

function isInLink(tokens, at) {
  for (let before = at - 1; before >= 0; before -= 1) {
    if (tokens[before].type === "link_open") return true;
    if (tokens[before].type === "link_close") return false;
  }
  return false;
}

/** The top-level blocks of a text: their tokens, the line where each begins, and the line after it. */
function blocksOf(text) {
  const blocks = [];
  let open = null;
  for (const token of markdown.parse(text, {})) {
    if (open === null) {
      open = { tokens: [], begin: token.map[0], end: token.map[1] };
      blocks.push(open);
    }
    open.tokens.push(token);
    if (token.level === 0 && token.nesting <= 0) open = null;
  }
  return blocks;
}

// HTML to nodes

const purify = createPurify(window);
purify.addHook("uponSanitizeAttribute", (node, data) => {
  if (data.attrName === "class" && !CLASS.test(data.attrValue)) data.keepAttr = false;
});
purify.addHook("afterSanitizeAttributes", (node) => {
  if (node.localName !== "a") return;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
});

/** Nodes for HTML of any origin, without anything that runs, loads or restyles. */
export function sanitize(html) {
  return purify.sanitize(html, {
    ALLOWED_TAGS: TAGS,
    ALLOWED_ATTR: ["href", "class", "start"],
    ALLOWED_URI_REGEXP: ADDRESS,
    ALLOW_DATA_ATTR: false,
    ALLOW_ARIA_ATTR: false,
    RETURN_DOM_FRAGMENT: true,
  });
}

function render({ tokens }) {
  const fragment = sanitize(markdown.renderer.render(tokens, markdown.options, {}));
  for (const pre of fragment.querySelectorAll("pre")) pre.replaceWith(codeBlock(pre.querySelector("code")));
  for (const table of fragment.querySelectorAll("table")) {
    const scroller = el("div", "table");
    scroller.tabIndex = 0; // it scrolls sideways, so the keyboard must reach it
    table.replaceWith(scroller);
    scroller.append(table);
  }
  const node = fragment.firstElementChild;
  if (node.localName !== "figure") node.dir = "auto"; // the direction of its own text
  return node;
}

function codeBlock({ className, textContent }) {
  const copy = el("button", "copy", "Copy");
  copy.type = "button";
  copy.addEventListener("click", copyCode);
  const language = className.replace(/^language-/, "") || "text";
  const pre = el("pre", "", el("code", "", textContent.replace(/\n$/, "")));
  pre.tabIndex = 0;
  return el("figure", "code", el("figcaption", "", el("span", "", language), copy), pre);
}

async function copyCode({ target }) {
  const code = target.closest("figure").querySelector("pre").textContent;
  target.textContent = (await copyText(code)) ? "Copied" : "Not allowed";
  setTimeout(() => (target.textContent = "Copy"), COPIED_MS);
}

/**
 * Makes a node look like `made`, and returns the node that is shown. Nodes that do not differ stay in the document,
 * with the reader's selection, focus and scroll position.
 */
function patch(node, made) {
  if (node.isEqualNode(made)) return node;
  if (node.nodeType === Node.TEXT_NODE && made.nodeType === Node.TEXT_NODE) {
    let same = 0;
    while (same < node.length && node.data[same] === made.data[same]) same += 1;
    node.replaceData(same, node.length - same, made.data.slice(same));
    return node;
  }
  if (!node.cloneNode().isEqualNode(made.cloneNode())) {
    node.replaceWith(made);
    return made;
  }
  const children = [...made.childNodes];
  while (node.childNodes.length > children.length) node.lastChild.remove();
  children.forEach((child, at) => (at < node.childNodes.length ? patch(node.childNodes[at], child) : node.append(child)));
  return node;
}

let colours = null; // the highlighter, loaded with the first code block that has a language

/** Colours the code blocks of a node whose text is final. */
function colour(node) {
  for (const figure of node.matches("figure.code") ? [node] : node.querySelectorAll("figure.code")) {
    const language = figure.querySelector("figcaption span").textContent;
    if (language === "text") continue;
    colours ??= import("./highlight.js");
    // Without the highlighter, for example offline, the code stays as it is.
    colours.then(({ highlight }) => highlight(figure.querySelector("code"), language)).catch(() => (colours = null));
  }
}

/** Shows a growing text under `root`. */
export class MarkdownView {
  constructor(root) {
    this.root = root;
    this.clear();
  }

  clear() {
    this.root.replaceChildren();
    this.text = "";
    this.settled = 0; // characters whose blocks are final
    this.open = []; // nodes of the blocks after them
    this.code = null; // the text node of an open code block, and the newline that it does not show yet
  }

  /** Shows a text. Where it continues the previous text, renders only what can have changed. */
  set(given) {
    const text = given.replace(/\r\n?/g, "\n"); // as markdown-it counts lines
    if (!text.startsWith(this.text)) this.clear();
    if (text === this.text) return;
    const added = text.slice(this.text.length);
    this.text = text;
    if (this.code && !/[`~\0]/.test(added)) this.appendCode(added);
    else this.build();
  }

  /** Tells that the text is complete. */
  finish() {
    this.code = null; // its text node may be replaced by coloured ones
    for (const node of this.open) colour(node);
  }

  build() {
    const offset = this.settled;
    const rest = this.text.slice(offset);
    const lines = lineStarts(rest);
    const complete = rest.lastIndexOf("\n") + 1;
    const blocks = blocksOf(rest);
    // A block is final once the next one has begun; a half-written line may still join the block before it, unless
    // that is a code block, which something follows only when it is closed.
    let final = 0;
    const isFinal = (at) => blocks[at].tokens[0].type === "fence" || lines[blocks[at + 1].begin + 1] <= complete;
    while (final + 1 < blocks.length && isFinal(final)) final += 1;
    const shown = this.open;
    this.open = [];
    blocks.forEach((block, index) => {
      const made = render(block);
      const node = index < shown.length ? patch(shown[index], made) : made;
      if (index >= shown.length) this.root.append(node);
      if (index >= final) this.open.push(node);
      else colour(node);
    });
    for (const node of shown.slice(blocks.length)) node.remove();
    if (final > 0) this.settled = offset + lines[blocks[final].begin];
    this.code = this.openCode(blocks.at(-1), rest.slice(lines[blocks.at(-1)?.begin ?? 0]));
  }

  /** In an open code block that is not indented, text without a fence character is only more code. */
  openCode(block, source) {
    const [token] = block?.tokens ?? [];
    if (token?.type !== "fence" || token.content === "" || !source.startsWith(token.markup)) return null;
    const lastLine = source.slice(source.lastIndexOf("\n", source.length - 2) + 1);
    if (!source.endsWith(token.content) || /[`~]/.test(lastLine)) return null;
    const node = this.open.at(-1).querySelector("code").firstChild;
    return node && { node, newline: token.content.endsWith("\n") ? "\n" : "" };
  }

  appendCode(added) {
    const shown = this.code.newline + added;
    this.code.newline = shown.endsWith("\n") ? "\n" : "";
    this.code.node.appendData(this.code.newline ? shown.slice(0, -1) : shown);
  }
}

/** Where each line begins, and where the text ends. */
function lineStarts(text) {
  const starts = [0];
  for (let at = text.indexOf("\n"); at >= 0; at = text.indexOf("\n", at + 1)) starts.push(at + 1);
  if (starts.at(-1) < text.length) starts.push(text.length);
  return starts;
}
