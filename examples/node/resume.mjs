// stream-gw-client in Node: a reader that stops in the middle, another that goes on, and an exact cancel.
import { StreamGateway, textOf } from "stream-gw-client";
import WebSocket from "ws"; // Node 22 has a WebSocket of its own

const { BASE_URL = "http://127.0.0.1:8080", BASE_URLS = BASE_URL, API_KEY = "sk-dev", MODEL = "sim-small" } = process.env;
const urls = BASE_URLS.split(",");
const connect = (urls) => new StreamGateway({ urls, token: API_KEY, webSocket: WebSocket });
const messages = [{ role: "user", content: "Tell me of rivers." }];
const body = { model: MODEL, max_tokens: 40, messages, on_disconnect: "continue" };

const first = connect(urls);
const begun = first.create(body);
process.stdout.write("first reader: ");
for await (const item of begun) {
  if (item.type === "data") process.stdout.write(textOf(item.chunks));
  if (item.seq >= 10) break;
}
const { id, cursor } = begun;
first.close(); // the generation goes on
console.log(`\nleft ${id} at ${cursor}`);

const second = connect(urls.toReversed());
const rest = second.subscribe(id, { after: cursor });
process.stdout.write("second reader: ");
for await (const text of rest.text()) process.stdout.write(text);
console.log(`\n${rest.status}, tokens: ${rest.usage.output}`);

const long = second.create({ ...body, max_tokens: 5000 });
await long.next();
const ack = await long.cancel();
console.log(`cancel: ${ack.result} at ${ack.at}`);
second.close();
