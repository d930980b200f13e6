// Colours code. highlight.js splits it into a tree of scopes; this module makes spans and text nodes of that tree.
// The library's HTML is never used, so nothing in a text can become an element.

import hljs from "./vendor/highlight/core.min.js";

const CHARS_MAX = 20_000; // longer code stays as it is: colouring it would hold the page up

// A language's module by each of its names. The grammar of TypeScript includes that of JavaScript.
const MODULES = {
  bash: ["bash", "sh", "shell", "zsh"],
  cpp: ["cpp", "c", "c++", "h", "hpp", "cc"],
  diff: ["diff", "patch"],
  go: ["go", "golang"],
  java: ["java"],
  json: ["json", "jsonc", "json5"],
  python: ["python", "py", "python3"],
  rust: ["rust", "rs"],
  sql: ["sql", "postgresql", "mysql", "sqlite"],
  typescript: ["typescript", "ts", "tsx", "javascript", "js", "jsx", "mjs"],
  xml: ["xml", "html", "svg", "xhtml"],
  yaml: ["yaml", "yml"],
};
const BY_NAME = new Map(Object.entries(MODULES).flatMap(([module, names]) => names.map((name) => [name, module])));

const loading = new Map();

function load(language) {
  if (!loading.has(language)) {
    const loaded = import(`./vendor/highlight/${language}.min.js`).then((module) => hljs.registerLanguage(language, module.default));
    loaded.catch(() => loading.delete(language)); // the next block tries again
    loading.set(language, loaded);
  }
  return loading.get(language);
}

/** Colours a `code` element in place. An unknown language leaves it as it is. */
export async function highlight(code, name) {
  const language = BY_NAME.get(name.toLowerCase());
  const text = code.textContent;
  if (!language || text.length > CHARS_MAX) return;
  await load(language);
  if (code.textContent !== text) return; // it has grown meanwhile
  const { _emitter: tree } = hljs.highlight(text, { language, ignoreIllegals: true });
  const coloured = document.createDocumentFragment();
  append(coloured, tree.rootNode);
  if (coloured.textContent === text) code.replaceChildren(coloured);
}

function append(parent, { children }) {
  for (const child of children) {
    if (typeof child === "string") parent.append(child);
    else {
      const span = document.createElement("span");
      const [scope] = (child.scope ?? "").split(/[.:]/);
      if (/^[a-z_-]+$/.test(scope)) span.className = `hl-${scope}`;
      append(span, child);
      parent.append(span);
    }
  }
}
