// Ids and pauses.

import { TIMES_MS } from "./limits.js";

/** A unique random id. crypto.randomUUID exists only on HTTPS and on loopback. */
export function randomId() {
  const bytes = crypto.getRandomValues(new Uint8Array(16));
  return Array.from(bytes, (byte) => byte.toString(16).padStart(2, "0")).join("");
}

/** Whether the client itself tries again after this error. */
export const isWaitedOut = ({ retriable, retryAfterS }) => retriable && (retryAfterS ?? 0) * 1000 <= TIMES_MS.waited;

/** Pause with full jitter, so that clients cut at one instant come back spread over the interval. */
export function backoffMs(attempt, random = Math.random) {
  return random() * Math.min(TIMES_MS.backoffMax, TIMES_MS.backoffMin * 2 ** attempt);
}
