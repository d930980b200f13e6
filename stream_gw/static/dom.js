// DOM helpers of all pages. Text enters the DOM only as text nodes.

import { remember } from "./storage.js";

export const $ = (id) => document.getElementById(id);

export function icon(name) {
  const svg = document.createElementNS("http://www.w3.org/2000/svg", "svg");
  const use = document.createElementNS("http://www.w3.org/2000/svg", "use");
  use.setAttribute("href", `#i-${name}`);
  svg.setAttribute("aria-hidden", "true");
  svg.append(use);
  return svg;
}

/** An element with a class and children; strings become text nodes. */
export function el(name, className = "", ...children) {
  const node = document.createElement(name);
  if (className) node.className = className;
  node.append(...children);
  return node;
}

/** A button that shows an icon; `label` is its name and its tooltip. */
export function iconButton(name, label, onClick, className = "") {
  const button = el("button", className, icon(name));
  button.type = "button";
  button.title = label;
  button.setAttribute("aria-label", label);
  button.addEventListener("click", onClick);
  return button;
}

/** Makes a button switch between light and dark; its last child says to which. */
export function themeButton(button) {
  const systemDark = matchMedia("(prefers-color-scheme: dark)");
  const isDark = () => (document.documentElement.dataset.theme ?? (systemDark.matches ? "dark" : "light")) === "dark";
  const show = () => {
    button.lastElementChild.textContent = isDark() ? "Light theme" : "Dark theme";
  };
  button.addEventListener("click", () => {
    const theme = isDark() ? "light" : "dark";
    document.documentElement.dataset.theme = theme;
    remember("sgw.theme", theme);
    show();
  });
  systemDark.addEventListener("change", show);
  show();
}

/** Copies a text to the clipboard, also over plain HTTP, where the browser offers no clipboard API. False: refused. */
export async function copyText(text) {
  if (navigator.clipboard) {
    try {
      await navigator.clipboard.writeText(text);
      return true;
    } catch (error) {
      if (error.name !== "NotAllowedError") throw error;
    }
  }
  const area = el("textarea", "sr");
  area.value = text;
  (document.querySelector("dialog[open]") ?? document.body).append(area);
  const focused = document.activeElement;
  area.select();
  const isCopied = document.execCommand("copy");
  area.remove();
  focused?.focus();
  return isCopied;
}
