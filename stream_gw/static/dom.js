// DOM helpers of both pages. Text enters the DOM only as text nodes.

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

/** Stores a value that may be lost when the storage is full. */
export function remember(key, value) {
  try {
    localStorage.setItem(key, value);
  } catch (error) {
    if (error.name !== "QuotaExceededError") throw error;
  }
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
