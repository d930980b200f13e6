// Renders JSON Schema as readable rows. Text enters the DOM only as text nodes.

import { el } from "./dom.js";

const DEPTH_MAX = 6;

/** A paragraph whose `code` is marked. */
export function prose(text, className = "", name = "p") {
  const parts = text.split(/`([^`]+)`/);
  return el(name, className, ...parts.map((part, i) => (i % 2 ? el("code", "", part) : part)));
}

export class Schemas {
  constructor(named) {
    this.named = named;
  }

  /** The schema that a reference names, and the name. */
  resolve(schema) {
    const name = schema.$ref?.split("/").at(-1);
    return name ? { ...this.named[name], $name: name, ...(schema.description && { description: schema.description }) } : schema;
  }

  /** A schema's type and bounds in a few words. */
  type(schema) {
    return el("span", "type", this.words(schema));
  }

  words(schema) {
    const found = this.resolve(schema);
    const several = found.anyOf ?? found.oneOf;
    if (several && !found.enum) return [...new Set(several.map((each) => this.words(each)))].join(" or ");
    if (found.enum) return found.enum.map((value) => JSON.stringify(value)).join(", ");
    if (found.$name) return shortened(found.$name);
    if (found.type === "array") return `list of ${found.items ? this.words(found.items) : "anything"}${bounds(found)}`;
    if (found.type === "object") return this.#words(found);
    return `${[found.type ?? "anything"].flat().join(" or ")}${bounds(found)}`;
  }

  #words({ properties, additionalProperties }) {
    if (properties || !additionalProperties || additionalProperties === true) return "object";
    return `object of ${this.words(additionalProperties)}`;
  }

  /** Named schemas directly within a schema: those whose fields a reader may want to see. */
  #inner(schema) {
    if (schema.$ref) return [schema];
    const several = schema.anyOf ?? schema.oneOf ?? [];
    const within = [...several, schema.items, schema.additionalProperties].filter((each) => each && typeof each === "object");
    return within.flatMap((each) => this.#inner(each));
  }

  /** Fields of a schema behind a summary. `open`: the fields show at once. */
  block(schema, { open = false, depth = 0 } = {}) {
    const inner = this.#inner(schema);
    if (!inner.length) return this.type(schema);
    const blocks = inner.map((each) => this.#named(this.resolve(each), open, depth));
    const direct = inner.length === 1 && schema.$ref;
    return el("div", "schema", ...(direct ? [] : [this.type(schema)]), ...blocks);
  }

  #named(found, open, depth) {
    const details = el("details", "fields-of", el("summary", "", el("code", "", shortened(found.$name))));
    const fill = () => {
      if (details.childElementCount > 1) return;
      if (found.description) details.append(prose(found.description, "muted"));
      details.append(this.#fields(found, depth));
    };
    details.open = open;
    if (open) fill();
    else details.addEventListener("toggle", fill, { once: true }); // most are never opened
    return details;
  }

  #fields(schema, depth) {
    const required = new Set(schema.required);
    const rows = Object.entries(schema.properties ?? {}).map(([name, field]) => {
      const label = el("div", "name", el("code", "", name), required.has(name) ? el("span", "required", "required") : "");
      const about = el("div", "about", this.type(field));
      if (field.default !== undefined && field.default !== null) {
        about.append(el("span", "muted", ` default ${JSON.stringify(field.default)}`));
      }
      if (field.description) about.append(prose(field.description));
      if (depth < DEPTH_MAX) for (const each of this.#inner(field)) about.append(this.#named(this.resolve(each), false, depth + 1));
      return el("div", "field", label, about);
    });
    return el("div", "fields", ...(rows.length ? rows : [el("p", "muted", "no fields")]));
  }
}

/** The name of a generic type as a reader writes it: ListPage_Tenant_ is ListPage of Tenant. */
function shortened(name) {
  return name.replace(/^(\w+?)_(\w+)_$/, "$1 of $2");
}

function bounds(schema) {
  const told = [];
  const { minimum, maximum, exclusiveMinimum, minLength, maxLength, minItems, maxItems, pattern } = schema;
  if (exclusiveMinimum !== undefined) told.push(`above ${exclusiveMinimum}`);
  range(told, minimum, maximum, "");
  range(told, minLength, maxLength, " characters");
  range(told, minItems, maxItems, " items");
  if (pattern && pattern.length <= 60) told.push(pattern);
  return told.length ? ` (${told.join(", ")})` : "";
}

function range(told, low, high, unit) {
  if (low !== undefined && high !== undefined) told.push(low === high ? `${low}${unit}` : `${low} to ${high}${unit}`);
  else if (low !== undefined) told.push(`at least ${low}${unit}`);
  else if (high !== undefined) told.push(`at most ${high}${unit}`);
}
