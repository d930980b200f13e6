// The reference page: renders /openapi.json. It needs no key and sends nothing else.

import { $, el, themeButton } from "./dom.js";
import { prose, Schemas } from "./docs-schema.js";

const METHODS = ["get", "post", "put", "patch", "delete"];

/** Id of an operation in this page's address. */
const anchor = (operation) => operation.operationId;

class Reference {
  constructor(document) {
    this.document = document;
    this.schemas = new Schemas(document.components.schemas);
    /** Sections and links of each operation, with the words that the filter looks at. */
    this.entries = [];
  }

  render(content, contents) {
    const { info, tags } = this.document;
    content.replaceChildren(el("section", "intro", ...info.description.trim().split("\n\n").map((text) => prose(text))));
    contents.replaceChildren();
    for (const tag of tags) this.#group(tag, content, contents);
    this.#socket(content, contents);
    content.append(this.none);
  }

  none = el("p", "muted none", "No operation matches the filter.");

  filter(text) {
    const words = text.toLowerCase().split(/\s+/).filter(Boolean);
    let shown = 0;
    for (const entry of this.entries) {
      const matches = words.every((word) => entry.words.includes(word));
      entry.section.hidden = entry.link.hidden = !matches;
      shown += matches;
    }
    for (const group of document.querySelectorAll("[data-group]")) {
      group.hidden = !group.querySelector("[data-entry]:not([hidden])");
    }
    document.querySelector(".intro").hidden = words.length > 0;
    this.none.hidden = shown > 0;
  }

  #group(tag, content, contents) {
    const heading = el("h2", "", tag.name);
    const section = el("section", "group", heading, prose(tag.description, "muted"));
    const list = el("ul");
    const part = el("div", "", el("h2", "", tag.name), list);
    section.dataset.group = part.dataset.group = tag.name;
    for (const [path, item] of Object.entries(this.document.paths)) {
      const operations = METHODS.filter((method) => item[method]?.tags.includes(tag.name));
      for (const method of operations) this.#add(path, method, item[method], section, list);
    }
    content.append(section);
    contents.append(part);
  }

  #add(path, method, operation, section, list) {
    const article = this.#operation(path, method, operation);
    const link = el("a", "", badge(method), el("span", "", ...pieces(path)));
    link.href = `#${anchor(operation)}`;
    link.title = operation.summary;
    const item = el("li", "", link);
    const scopes = (operation.security ?? []).flatMap(Object.values).flat();
    const words = [method, path, operation.summary, operation.description ?? "", ...scopes].join(" ").toLowerCase();
    article.dataset.entry = item.dataset.entry = "";
    this.entries.push({ section: article, link: item, words });
    section.append(article);
    list.append(item);
  }

  #operation(path, method, operation) {
    const title = el("h3", "", badge(method), pathOf(path));
    const link = el("a", "self", "#");
    link.href = `#${anchor(operation)}`;
    link.setAttribute("aria-label", `Link to ${method.toUpperCase()} ${path}`);
    title.append(link);
    const article = el("article", "operation", title, el("p", "summary", operation.summary, credential(operation)));
    article.id = anchor(operation);
    if (operation.description) article.append(prose(operation.description, "muted"));
    if (operation.parameters) article.append(el("h4", "", "Parameters"), this.#parameters(operation.parameters));
    if (operation.requestBody) {
      const [media, { schema }] = Object.entries(operation.requestBody.content)[0];
      const told = operation.requestBody.required ? media : `${media}, optional`;
      article.append(el("h4", "", "Body ", el("span", "muted", told)), this.schemas.block(schema, { open: true }));
    }
    article.append(el("h4", "", "Responses"), this.#responses(operation.responses));
    return article;
  }

  #parameters(parameters) {
    const rows = parameters.map(({ name, in: place, required, description, schema }) =>
      el(
        "div",
        "field",
        el("div", "name", el("code", "", name), el("span", "muted", required ? `${place}, required` : place)),
        el("div", "about", this.schemas.type(schema), description ? prose(description) : ""),
      ),
    );
    return el("div", "fields", ...rows);
  }

  #responses(responses) {
    const entries = Object.entries(responses);
    const isError = ([, answer]) => answer.content?.["application/json"]?.schema.$ref?.endsWith("/Error");
    const list = el("div", "responses", ...entries.filter((each) => !isError(each)).map((each) => this.#response(...each)));
    const errors = entries.filter(isError);
    if (!errors.length) return list;
    const rows = errors.map(([status, { description }]) =>
      el("div", "field", el("div", "name", code(status)), el("div", "about", prose(description.replaceAll(", ", " ")))),
    );
    const count = errors.length === 1 ? "1 error status" : `${errors.length} error statuses`;
    const schema = errors[0][1].content["application/json"].schema;
    const told = el("details", "errors", el("summary", "", count), el("div", "fields", ...rows), this.schemas.block(schema));
    list.append(told);
    return list;
  }

  #response(status, { description, content = {}, headers = {} }) {
    const part = el("div", "response", el("p", "", code(status), prose(description, "", "span")));
    for (const [media, { schema }] of Object.entries(content)) {
      const row = el("div", "media", el("span", "muted", media));
      if (schema.type !== "string") row.append(this.schemas.block(schema));
      part.append(row);
    }
    const names = Object.keys(headers);
    if (names.length) part.append(el("p", "headers muted", "Headers: ", names.join(", ")));
    return part;
  }

  #socket(content, contents) {
    const { path, subprotocol, client } = this.document["x-websocket"];
    const title = el("h3", "", el("span", "method ws", "WS"), pathOf(path));
    const article = el("article", "operation", title, el("p", "summary", `Many streams on one socket: subprotocol ${subprotocol}`));
    article.id = "websocket";
    article.append(prose("Each message is one JSON object in a text frame; `t` names its kind. These are the client's.", "muted"));
    for (const each of client.anyOf) article.append(this.schemas.block(each));
    article.dataset.entry = "";
    const section = el("section", "group", el("h2", "", "WebSocket"), article);
    const link = el("a", "", el("span", "method ws", "WS"), el("span", "", path));
    link.href = "#websocket";
    const item = el("li", "", link);
    item.dataset.entry = "";
    const part = el("div", "", el("h2", "", "WebSocket"), el("ul", "", item));
    section.dataset.group = part.dataset.group = "WebSocket";
    content.append(section);
    contents.append(part);
    this.entries.push({ section: article, link: item, words: `ws websocket ${path} ${subprotocol}` });
  }
}

function badge(method) {
  return el("span", `method ${method}`, method === "delete" ? "DEL" : method.toUpperCase());
}

function code(status) {
  return el("span", `status s${status[0]}`, status);
}

/** A path with its parameters marked. */
function pathOf(path) {
  return el("code", "path", ...pieces(path));
}

/** The pieces of a path, with places to break a line before its slashes. */
function pieces(path) {
  const parts = path.split(/(\{[^}]+\}|(?=\/))/).filter(Boolean);
  return parts.flatMap((part) => [...(part.startsWith("/") ? [el("wbr")] : []), part.startsWith("{") ? el("em", "", part) : part]);
}

function credential({ security = [] }) {
  if (!security.length) return el("span", "badge", "no key");
  const scopes = Object.values(security[0]).flat();
  return el("span", "badge", scopes.length ? `scope ${scopes.join(", ")}` : "any key");
}

const isNarrow = matchMedia("(max-width: 860px)");

/** The list of operations is open beside the reference, and closed above it on a narrow screen. */
function showMenu() {
  const fit = () => {
    $("menu").open = !isNarrow.matches;
  };
  isNarrow.addEventListener("change", fit);
  $("contents").addEventListener("click", (event) => {
    if (event.target.closest("a") && isNarrow.matches) $("menu").open = false;
  });
  fit();
}

function showCurrent() {
  const id = location.hash.slice(1);
  for (const link of document.querySelectorAll("#contents a")) {
    if (link.getAttribute("href") === `#${id}`) link.setAttribute("aria-current", "true");
    else link.removeAttribute("aria-current");
  }
}

async function start() {
  themeButton($("theme"));
  showMenu();
  const response = await fetch("/openapi.json");
  if (!response.ok) throw new Error(`the gateway answered ${response.status}`);
  const reference = new Reference(await response.json());
  reference.render($("content"), $("contents"));
  $("filter").addEventListener("input", () => reference.filter($("filter").value));
  reference.filter("");
  addEventListener("hashchange", showCurrent);
  showCurrent();
  document.getElementById(location.hash.slice(1))?.scrollIntoView();
}

start().catch((error) => {
  $("note").textContent = `The reference cannot be shown: ${error.message}. Reload the page to try again.`;
});
