// Markdown to DOM nodes, for text that grows. Text becomes text nodes and nothing is ever parsed as HTML.
//
// Blocks that can no longer change are built once; while an answer streams only its last block is built anew.

const DEPTH_MAX = 6; // lists and quotes within each other; deeper is shown as text
const SPAN_MAX = 4_000; // characters within which an inline mark must be closed: an unclosed one costs no more

// Whoever writes the text must not be able to make it slow: a pattern that may backtrack only sees lines of this length.
const LINE_MAX = 1_000;
const bounded = (pattern) => ({
  test: (line) => line.length <= LINE_MAX && pattern.test(line),
  exec: (line) => (line.length <= LINE_MAX ? pattern.exec(line) : null),
});

const FENCE = bounded(/^ {0,3}(`{3,}|~{3,})\s*([\w+#.-]*)[^`\n]*$/);
const HEADING = bounded(/^ {0,3}(#{1,6})\s+(.*)$/);
const HEADING_CLOSE = /(?:^|\s)#+$/;
const RULE = bounded(/^ {0,3}([-*_])(?:\s*\1){2,}\s*$/);
const ITEM = /^(\s*)([-*+]|\d{1,9}[.)])(\s+)(?=\S)/;
const QUOTE = /^ {0,3}> ?/;
const TABLE_RULE = bounded(/^ {0,3}\|?\s*:?-+:?\s*(\|\s*:?-+:?\s*)*\|?\s*$/);
const BLANK = /^\s*$/;

function linesOf(text) {
  const lines = [];
  for (let start = 0; start < text.length; ) {
    const newline = text.indexOf("\n", start);
    const end = newline < 0 ? text.length : newline + 1;
    lines.push({ start, end, text: text.slice(start, newline < 0 ? end : newline) });
    start = end;
  }
  return lines;
}

const opensBlock = (line) => FENCE.test(line) || HEADING.test(line) || RULE.test(line) || QUOTE.test(line) || ITEM.test(line);

const opensTable = (lines, at) =>
  lines[at].text.includes("|") && at + 1 < lines.length && lines[at + 1].text.includes("-") && TABLE_RULE.test(lines[at + 1].text);

/** Where each block ends. A block is {kind, lines}; blank lines between blocks belong to none. */
export function scan(text) {
  const lines = linesOf(text);
  const blocks = [];
  let at = 0;
  const take = (kind, end) => {
    blocks.push({ kind, lines: lines.slice(at, end) });
    at = end;
  };
  while (at < lines.length) {
    const line = lines[at].text;
    if (BLANK.test(line)) at += 1;
    else if (FENCE.test(line)) take("code", fenceEnd(lines, at));
    else if (HEADING.test(line)) take("heading", at + 1);
    else if (RULE.test(line)) take("rule", at + 1);
    else if (QUOTE.test(line)) take("quote", runEnd(lines, at, (each) => QUOTE.test(each)));
    else if (ITEM.test(line)) take("list", listEnd(lines, at));
    else if (opensTable(lines, at)) take("table", runEnd(lines, at, (each) => each.includes("|")));
    else take("paragraph", paragraphEnd(lines, at));
  }
  return blocks;
}

function runEnd(lines, at, belongs) {
  let end = at + 1;
  while (end < lines.length && belongs(lines[end].text)) end += 1;
  return end;
}

function fenceEnd(lines, at) {
  const [, fence] = FENCE.exec(lines[at].text);
  let end = at + 1;
  while (end < lines.length) {
    const line = lines[end].text.trim();
    end += 1;
    if (line.length >= fence.length && line === fence[0].repeat(line.length)) break;
  }
  return end;
}

function listEnd(lines, at) {
  const ordered = /\d/.test(ITEM.exec(lines[at].text)[2]);
  let end = at + 1;
  for (let look = end; look < lines.length; look += 1) {
    const line = lines[look].text;
    if (BLANK.test(line)) continue;
    const afterBlank = look > end;
    const item = ITEM.exec(line);
    const indented = /^\s{2,}/.test(line);
    const continues = indented || (item ? /\d/.test(item[2]) === ordered && !RULE.test(line) : !afterBlank && !opensBlock(line));
    if (!continues) break;
    end = look + 1;
  }
  return end;
}

function paragraphEnd(lines, at) {
  let end = at + 1;
  while (end < lines.length && !BLANK.test(lines[end].text) && !opensBlock(lines[end].text)) {
    if (opensTable(lines, end)) break;
    end += 1;
  }
  return end;
}

// Blocks

function element(name, className, ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

function renderBlock({ kind, lines }, depth) {
  const texts = lines.map((line) => line.text);
  switch (kind) {
    case "code":
      return codeBlock(texts);
    case "heading": {
      const [, marks, title] = HEADING.exec(texts[0]);
      const words = title.trimEnd().replace(HEADING_CLOSE, "").trimEnd();
      return element(`h${Math.min(marks.length + 1, 6)}`, "", ...inline(words)); // h1 is the page's own
    }
    case "rule":
      return element("hr");
    case "quote":
      return element("blockquote", "", ...renderBlocks(texts.map((line) => line.replace(QUOTE, "")).join("\n"), depth + 1));
    case "list":
      return list(texts, depth);
    case "table":
      return table(texts);
    default:
      return element("p", "", ...inline(texts.map((line) => line.trimStart()).join("\n")));
  }
}

function renderBlocks(text, depth) {
  if (depth > DEPTH_MAX) return [document.createTextNode(text)];
  return scan(text).map((block) => renderBlock(block, depth));
}

function codeBlock(texts) {
  const [, fence, language] = FENCE.exec(texts[0]);
  const last = texts.at(-1).trim();
  const isClosed = texts.length > 1 && last.length >= fence.length && last === fence[0].repeat(last.length);
  const code = element("code", "", texts.slice(1, isClosed ? -1 : undefined).join("\n"));
  const copy = element("button", "copy", "Copy");
  copy.type = "button";
  const pre = element("pre", "", code);
  pre.tabIndex = 0; // it scrolls sideways, so the keyboard must reach it
  return element("figure", "code", element("figcaption", "", element("span", "", language || "text"), copy), pre);
}

function list(texts, depth) {
  const first = ITEM.exec(texts[0]);
  const ordered = /\d/.test(first[2]);
  const node = element(ordered ? "ol" : "ul");
  if (ordered) node.start = Number.parseInt(first[2], 10);
  const items = [];
  for (const line of texts) {
    const item = ITEM.exec(line);
    if (item && item[1].length <= first[1].length + 1) {
      items.push({ indent: item[0].length, lines: [line.slice(item[0].length)] });
    } else {
      const { indent, lines } = items.at(-1);
      lines.push(line.slice(Math.min(indent, line.length - line.trimStart().length)));
    }
  }
  for (const { lines } of items) {
    const blocks = renderBlocks(lines.join("\n"), depth + 1);
    // The text of a tight item stands in the item itself.
    if (blocks[0]?.nodeName === "P") blocks.splice(0, 1, ...blocks[0].childNodes);
    node.append(element("li", "", ...blocks));
  }
  return node;
}

function cells(line) {
  const inner = line.trim().replace(/^\|/, "").replace(/(?<!\\)\|$/, "");
  return inner.split(/(?<!\\)\|/).map((cell) => cell.trim().replaceAll("\\|", "|"));
}

function table(texts) {
  const columns = cells(texts[0]);
  const aligns = cells(texts[1]).map((cell) => (cell.endsWith(":") ? (cell.startsWith(":") ? "center" : "right") : ""));
  const row = (name, values) =>
    element("tr", "", ...columns.map((_, at) => element(name, aligns[at] ?? "", ...inline(values[at] ?? ""))));
  const body = texts.slice(2).map((line) => row("td", cells(line)));
  const node = element("table", "", element("thead", "", row("th", columns)), element("tbody", "", ...body));
  const scroller = element("div", "table", node);
  scroller.tabIndex = 0;
  return scroller;
}

// Inline

const MARKS = [
  ["**", "strong"],
  ["__", "strong"],
  ["~~", "s"],
  ["*", "em"],
  ["_", "em"],
];
const NOT_LAST = ".,;:!?'\"*_]>"; // of an address within a sentence
const PARENTHESES_MAX = 4; // open at once in an address
const SPECIAL = /[\\`*_~[!\n]|https?:\/\//g;

/** The address if a link may go there, else null. */
export function safeHref(address) {
  try {
    const url = new URL(address);
    return ["http:", "https:", "mailto:"].includes(url.protocol) ? url.href : null;
  } catch {
    return null; // relative, or not an address: shown as text
  }
}

function link(href, ...children) {
  const node = element("a", "", ...children);
  node.href = href;
  node.target = "_blank";
  node.rel = "noopener noreferrer";
  return node;
}

/** Looks for closing marks not too far away, and remembers where there are none: each stretch is searched once. */
class Finder {
  constructor(text) {
    this.text = text;
    this.noneBefore = new Map();
  }

  find(needle, from, accept = () => true) {
    const limit = from + SPAN_MAX;
    let start = Math.max(from, this.noneBefore.get(needle) ?? 0);
    while (start < limit) {
      const found = this.text.slice(start, limit).indexOf(needle);
      if (found < 0) break;
      if (accept(start + found)) return start + found;
      start += found + 1;
    }
    this.noneBefore.set(needle, Math.max(start, limit - needle.length));
    return -1;
  }
}

/** `links`: false within a link, which holds no other. */
function inline(text, depth = 0, links = true) {
  const finder = new Finder(text);
  const nodes = [];
  let plain = "";
  const flush = () => {
    if (plain) nodes.push(document.createTextNode(plain));
    plain = "";
  };
  let at = 0;
  while (at < text.length) {
    SPECIAL.lastIndex = at;
    const special = SPECIAL.exec(text);
    if (!special) break;
    plain += text.slice(at, special.index);
    at = special.index;
    const made = depth < DEPTH_MAX ? span(finder, text, at, depth, links) : null;
    if (made) {
      flush();
      if (made.node) nodes.push(made.node);
      plain += made.text ?? "";
      at = made.end;
    } else {
      plain += special[0];
      at += special[0].length;
    }
  }
  plain += text.slice(at);
  flush();
  return nodes;
}

/** The inline element that opens at `at`, or null when the character is only a character. */
function span(finder, text, at, depth, links) {
  const char = text[at];
  if (char === "\\") return /[!-/:-@[-`{-~]/.test(text[at + 1] ?? "") ? { text: text[at + 1], end: at + 2 } : null;
  if (char === "\n") return { node: element("br"), end: at + 1 };
  if (char === "h") return links ? autolink(text, at) : null;
  if (char === "`") return codeSpan(finder, text, at);
  if (char === "[" || char === "!") return links ? linkSpan(finder, text, at, depth) : null;
  for (const [mark, name] of MARKS) {
    if (!text.startsWith(mark, at)) continue;
    const from = at + mark.length;
    if (/\s/.test(text[from] ?? " ")) return null;
    if (char === "_" && /\w/.test(text[at - 1] ?? "")) return null; // snake_case is a word
    const end = closing(finder, text, mark, from);
    if (end > from) return { node: element(name, "", ...inline(text.slice(from, end), depth + 1, links)), end: end + mark.length };
  }
  return null;
}

function closing(finder, text, mark, from) {
  return finder.find(mark, from, (end) => {
    const isDouble = mark.length === 1 && (text[end + 1] === mark || text[end - 1] === mark);
    const isInWord = mark[0] === "_" && /\w/.test(text[end + mark.length] ?? "");
    return !isDouble && !isInWord && !/\s/.test(text[end - 1]);
  });
}

function codeSpan(finder, text, at) {
  const [ticks] = /^`+/.exec(text.slice(at, at + 16));
  const end = finder.find(ticks, at + ticks.length);
  if (end < 0) return null;
  return { node: element("code", "", text.slice(at + ticks.length, end).replace(/^ (.+) $/, "$1")), end: end + ticks.length };
}

function linkSpan(finder, text, at, depth) {
  const open = text[at] === "!" ? at + 1 : at;
  if (text[open] !== "[") return null;
  const middle = finder.find("](", open);
  const end = middle < 0 ? -1 : addressEnd(finder, text, middle + 2);
  if (end < 0) return null;
  const label = text.slice(open + 1, middle);
  const href = safeHref(text.slice(middle + 2, end).trim().split(/\s/)[0]);
  if (!href) return null;
  // An image is a link too: the page loads nothing from elsewhere.
  const children = label.includes("[") ? [label] : inline(label, depth + 1, false);
  return { node: link(href, ...(children.length > 0 ? children : [href])), end: end + 1 };
}

/** Where the address that begins at `from` is closed: parentheses in it come in pairs, as in many a wiki's. */
function addressEnd(finder, text, from) {
  const first = finder.find(")", from);
  let end = first;
  let start = from;
  for (let unpaired = 0; end >= 0; unpaired -= 1) {
    const part = text.slice(start, end);
    if (start > from && /\s/.test(part)) break;
    unpaired += part.split("(").length - 1;
    if (unpaired === 0) return end;
    if (unpaired > PARENTHESES_MAX) break;
    start = end + 1;
    end = finder.find(")", start);
  }
  return first;
}

function autolink(text, at) {
  const [raw] = /^\S+/.exec(text.slice(at, at + 2_000));
  let unpaired = raw.split(")").length - raw.split("(").length;
  let end = raw.length;
  for (; end > 0; end -= 1) {
    const last = raw[end - 1];
    if (last === ")" && unpaired > 0) unpaired -= 1;
    else if (!NOT_LAST.includes(last)) break;
  }
  const address = raw.slice(0, end);
  const href = safeHref(address);
  return href && address.length > 8 ? { node: link(href, address), end: at + address.length } : null;
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
    this.settled = 0; // characters whose blocks are built for good
    this.open = []; // nodes of the blocks after them
    this.tail = null; // of an open code block: only its text grows
  }

  /** Shows `text`. When it continues the text before, only what can have changed is built. */
  set(text) {
    if (!text.startsWith(this.text)) this.clear();
    if (text === this.text) return;
    const added = text.slice(this.text.length);
    this.text = text;
    if (this.tail && !/[`~]/.test(added) && this.tail.isPlain) {
      this.tail.node.appendData(added);
      return;
    }
    this.build();
  }

  build() {
    const offset = this.settled;
    const rest = this.text.slice(offset);
    const blocks = scan(rest);
    const complete = rest.lastIndexOf("\n") + 1;
    // A half-written line may still join the block before it, so it settles nothing.
    let settling = 0;
    while (settling + 1 < blocks.length && blocks[settling + 1].lines[0].end <= complete) settling += 1;
    for (const node of this.open) node.remove();
    this.open = [];
    blocks.forEach((block, index) => {
      const node = renderBlock(block, 0);
      if (block.kind !== "code") node.dir = "auto"; // that of its own text
      this.root.append(node);
      if (index >= settling) this.open.push(node);
    });
    if (settling > 0) this.settled = offset + blocks[settling].lines[0].start;
    this.tail = this.openCode(blocks.at(-1));
  }

  /** While a fence is open, what comes without a fence in it is only more code. */
  openCode(block) {
    if (block?.kind !== "code" || block.lines.length < 2) return null;
    const node = this.open.at(-1).querySelector("code").firstChild;
    const source = block.lines.slice(1).map((line) => line.text).join("\n");
    if (!node || node.data !== source || block.lines.at(-1).text.length !== block.lines.at(-1).end - block.lines.at(-1).start) {
      return null;
    }
    return { node, isPlain: !/[`~]/.test(block.lines.at(-1).text) };
  }
}
