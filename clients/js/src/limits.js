// Limits of the client and its waiting times.

/** Limits, each with what happens at it. The options change all but `streams` and `requests`. */
export const LIMITS = Object.freeze({
  streams: 128, // streams open at once; over: create and subscribe throw too_many
  requests: 256, // cancels and inputs without an answer; over: they reject with too_many
  queueItems: 512, // items a slow reader leaves waiting; at it: unsubscribe until drained
  queueChars: 1 << 20, // the same in characters of JSON
  boundaries: 1024, // positions remembered to tell a reader how far a reset takes it back
  triesWithoutProgress: 8, // subscriptions in a row that brought nothing new; over: the stream fails
  requestTries: 8, // times a request refused as retriable is sent
  refreshes: 2, // new tokens in a row that the gateway refused; over: everything fails
  policyCloses: 3, // 1008 or 1009 in a row, of sockets that were not `steady`; over: everything fails
});

export const TIMES_MS = Object.freeze({
  backoffMin: 250,
  backoffMax: 8_000,
  connect: 10_000, // until `hi`
  connectNoToken: 20_000, // the same without a token: a gateway waits 10 s for one, and closes within 5 s more
  token: 60_000, // until getToken is called again: it may ask a person, or hang
  ping: 15_000, // until `hi` tells better
  watch: 5_000, // between two looks at the clock for a connection that is silent for too long
  lag: 3_000, // a head above our cursor is believed to be on its way for so long
  waited: 60_000, // longest retry_after_s that is waited out; a longer one, such as a budget's, is told
  steady: 5_000, // a socket that lived so long proves that counts of failures may start again
  giveUp: 900_000, // what the gateway keeps of an ended stream; later there is nothing to resume
});
