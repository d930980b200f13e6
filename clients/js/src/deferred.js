// A promise whose outcome is set from outside.

export function deferred() {
  const parts = {};
  parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }));
  parts.promise.catch(() => {}); // whoever wants the outcome awaits the promise itself; nobody has to
  return parts;
}
