// Promises whose outcome is set from outside, and promises that nobody has to await.

/** The promise, whose error counts as handled: whoever wants the outcome awaits it, and nobody has to. */
export function unawaited(promise) {
  promise.catch(() => {});
  return promise;
}

export function deferred() {
  const parts = {};
  unawaited((parts.promise = new Promise((resolve, reject) => Object.assign(parts, { resolve, reject }))));
  return parts;
}
