// The eventsource package on a running stream: its connection is cut, it resumes by Last-Event-ID, 204 ends it.
import { EventSource } from "eventsource";

const { BASE_URL, KEY, STREAM } = process.env;
const ids = [];
const chunks = [];
const asked = [];
let error;
const source = new EventSource(`${BASE_URL}/v1/streams/${STREAM}`, {
  fetch: (url, init) => {
    asked.push(init.headers["Last-Event-ID"] ?? null);
    return fetch(url, { ...init, headers: { ...init.headers, Authorization: `Bearer ${KEY}` } });
  },
});
source.addEventListener("open", () => console.error("open"));
source.addEventListener("message", ({ data, lastEventId }) => {
  ids.push(lastEventId);
  if (data !== "[DONE]") chunks.push(JSON.parse(data));
  if (ids.length === 10) console.error("ten");
});
source.addEventListener("error", (event) => {
  error = event.code;
  if (source.readyState === EventSource.CLOSED) console.log(JSON.stringify({ ids, chunks, asked, code: error }));
});
