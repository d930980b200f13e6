// The browser's storage. Where a browser denies it, for example because it blocks cookies, the page keeps everything in
// memory until it is left.

class Memory {
  constructor() {
    this.entries = new Map();
  }

  getItem(key) {
    return this.entries.get(key) ?? null;
  }

  setItem(key, value) {
    this.entries.set(key, String(value));
  }

  removeItem(key) {
    this.entries.delete(key);
  }
}

function storage(name) {
  try {
    return globalThis[name] ?? new Memory();
  } catch {
    return new Memory(); // naming it throws SecurityError
  }
}

export const local = storage("localStorage"); // shared by the tabs of this browser
export const tab = storage("sessionStorage"); // only of this tab

/** The browser keeps nothing once the page is left. */
export const isDenied = local instanceof Memory;

/** Whether an error of `setItem` says that the storage is full. Firefox has a name of its own for it. */
export const isFull = ({ name }) => name === "QuotaExceededError" || name === "NS_ERROR_DOM_QUOTA_REACHED";

/** Stores a value that may be lost when the storage is full. */
export function remember(key, value) {
  try {
    local.setItem(key, value);
  } catch (error) {
    if (!isFull(error)) throw error;
  }
}
