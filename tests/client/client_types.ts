// What a user of the package writes. tsc must accept all of it but the lines marked as errors.
import {
  BEGINNING,
  GatewayError,
  LIMITS,
  StreamGateway,
  randomId,
  textOf,
  type Ack,
  type Item,
  type Outcome,
  type State,
  type Stream,
} from "stream-gw-client";

interface Chunk {
  choices: { index: number; delta: { content?: string } }[];
}

export async function read(token: string): Promise<string> {
  const states: State[] = [];
  const gateway = new StreamGateway({ urls: ["http://127.0.0.1:8080"], token, onState: (state) => states.push(state) });
  const stream: Stream<Chunk> = gateway.create<Chunk>({ model: "m", messages: [] }, { key: randomId(), mode: "tokens" });
  const id: string = await stream.ready;
  let text = "";
  for await (const item of stream) text += of(item);
  const outcome: Outcome = await stream.done;
  const added: Ack = await gateway.input(id, "Shorter.", { id: "mine" });
  await stream.input({ role: "user", content: added.result }, {});
  const ack: Ack = await gateway.cancel(id);
  for await (const part of gateway.subscribe(id, { after: BEGINNING, signal: AbortSignal.timeout(1000) }).text()) {
    text += part.trim();
  }
  gateway.close();
  return `${text} ${outcome.status} ${ack.at ?? ""} ${LIMITS.streams}`;
}

function of(item: Item<Chunk>): string {
  switch (item.type) {
    case "data":
      return item.chunks[0]?.choices[0]?.delta.content ?? textOf(item.chunks);
    case "gap":
      return `${item.from} to ${item.to}`;
    case "reset":
      return String(item.to);
    case "input":
      return item.reason ?? `${item.id} ${item.result}`;
  }
}

export const code = (error: unknown) => (error instanceof GatewayError && error.retriable ? error.code : null);

// @ts-expect-error an option that does not exist
new StreamGateway({ adress: "http://127.0.0.1:8080" });
// @ts-expect-error a mode that does not exist
new StreamGateway().create({}, { mode: "words" });
// @ts-expect-error the id is set by the client
new StreamGateway().subscribe("resp_0").id = "resp_1";
