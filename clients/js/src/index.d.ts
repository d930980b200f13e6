export type Dialect = "openai.chat" | "openai.completions" | (string & {});
export type Mode = "tokens" | "coalesce" | "snapshot";
export type State = "idle" | "connecting" | "connected" | "reconnecting" | "offline" | "closed";
export type Status = "new" | "live" | "completed" | "cancelled" | "failed" | "incomplete" | "detached" | (string & {});

export const BEGINNING: "1-0";
export const SUBPROTOCOL: "tokenstream.v1";
export const LIMITS: Readonly<{
  streams: number;
  requests: number;
  queueItems: number;
  queueChars: number;
  boundaries: number;
  triesWithoutProgress: number;
  requestTries: number;
  refreshes: number;
  policyCloses: number;
}>;

export function backoffMs(attempt: number, random?: () => number): number;
/** A unique id of 32 random hex digits; works on plain HTTP too. */
export function randomId(): string;
export function socketUrl(url: string): string;
export function textOf(chunks: readonly unknown[]): string;

export class GatewayError extends Error {
  constructor(
    code: string,
    message: string,
    details?: {
      retriable?: boolean;
      retryAfterS?: number | null;
      requestId?: string | null;
      closeCode?: number | null;
    },
  );
  readonly code: string;
  readonly retriable: boolean;
  readonly retryAfterS: number | null;
  readonly requestId: string | null;
  readonly closeCode: number | null;
}

/** Frames up to `seq`. Persist `cursor` together with what you made of the chunks. */
export interface DataItem<Chunk = any> {
  type: "data";
  cursor: string;
  seq: number;
  chunks: Chunk[];
}

/** The frames `from` to `to` are lost; no retry brings them back. */
export interface GapItem {
  type: "gap";
  cursor: string;
  seq: number;
  from: number;
  to: number;
}

/** Frames above `to` are void: discard what you read of them. The next item continues after `to`. */
export interface ResetItem {
  type: "reset";
  cursor: string;
  seq: number;
  to: number;
}

/** An input was applied at `seq` (the text after it is another answer), or refused for `reason`. */
export interface InputItem {
  type: "input";
  cursor: string;
  seq: number;
  id: string;
  result: "applied" | "refused";
  reason?: string;
}

export type Item<Chunk = any> = DataItem<Chunk> | GapItem | ResetItem | InputItem;

export interface Ack {
  result: "accepted" | "already" | "pending" | "terminal" | "duplicate";
  at?: string;
  status?: Status;
}

export interface InputOptions {
  /** The input's id: the same id adds it once, and the stream names it in its `input` item. A random one by default. */
  id?: string;
}

export interface Outcome {
  status: Status;
  usage: any;
  cursor: string;
  error: Error | null;
}

export interface ReadOptions {
  dialect?: Dialect;
  mode?: Mode;
  /** Aborting rejects the pending read with the signal's reason, at once. */
  signal?: AbortSignal;
  /** Effect of aborting: "cancel" (the default) stops the generation, "detach" only stops reading. */
  abort?: "cancel" | "detach";
}

/** Where a request waits for a replica: the place `position` of `of` in its pool's queue. */
export interface Place {
  position: number;
  of: number;
  /** Seconds until a replica that is starting is expected to be ready; null: none is starting. */
  warmingS: number | null;
}

export interface CreateOptions extends ReadOptions {
  /** Idempotency key: the same key and body generate again only after a retriable error. A random one by default. */
  key?: string;
  /** Called with the request's place while it waits in the queue, about once a second, and with null afterwards. */
  onPlace?: (place: Place | null) => void;
}

/**
 * One response. It has one reader: `for await (const item of stream)` or `for await (const text of stream.text())`.
 * The iteration ends when the stream completed, is incomplete or was cancelled (see `status`), and throws a
 * GatewayError when it failed. Leaving the loop early is `close()`.
 */
export class Stream<Chunk = any> implements AsyncIterableIterator<Item<Chunk>> {
  /** null until the gateway has accepted the create. */
  readonly id: string | null;
  /** The idempotency key of a create. */
  readonly key: string | null;
  readonly dialect: Dialect;
  /** Cursor of the last item that the reader has taken. */
  readonly cursor: string;
  readonly status: Status;
  readonly usage: any;
  /** Checks of the choices against the JSON schema of the request; null: it asks for none. */
  readonly structuredOutput: { choice: number; valid: boolean | null; repairs?: number; error?: object }[] | null;
  readonly error: Error | null;
  /** Number of the producer's epoch; above 1, another replica has taken the stream over. */
  readonly epoch: number;
  /** The gateway that delivers the stream, or did last; null: it is of an older release. */
  readonly gatewayId: string | null;
  /** Gateways' sockets that have delivered the stream, one after another. */
  readonly attachments: number;
  /** Resolves with the id once the gateway has accepted the create. */
  readonly ready: Promise<string>;
  /** Resolves at the end; never rejects. The end comes only while a reader iterates, or after `close()`. */
  readonly done: Promise<Outcome>;
  next(): Promise<IteratorResult<Item<Chunk>>>;
  return(value?: unknown): Promise<IteratorResult<Item<Chunk>>>;
  [Symbol.asyncIterator](): this;
  text(): AsyncGenerator<string, void, void>;
  cancel(): Promise<Ack>;
  /** Steers the stream with a string or a message with role "user". */
  input(item: string | object, options?: InputOptions): Promise<Ack>;
  close(): void;
}

export interface StateDetail {
  /** Why the client reconnects, or why it is closed. */
  error?: GatewayError;
  delayMs?: number;
}

export interface Options {
  /** http(s) or ws(s) address of the gateway; the page's own origin by default. */
  url?: string;
  /** Several addresses, tried in turn. */
  urls?: string[];
  token?: string;
  /** Called before each connection, and again after 60 s without a token. `refresh`: the last one was refused. */
  getToken?: (request: { refresh: boolean }) => string | Promise<string>;
  /** A WebSocket constructor, for hosts without a global one. */
  webSocket?: new (url: string, protocols: string[]) => any;
  fetch?: typeof globalThis.fetch;
  onState?: (state: State, detail: StateDetail) => void;
  random?: () => number;
  /** Time without a connection, in ms, after which everything fails with connection_lost (default: 15 minutes). */
  giveUpMs?: number;
  lagMs?: number;
  queueItems?: number;
  queueChars?: number;
}

export class StreamGateway {
  constructor(options?: Options);
  readonly state: State;
  /** Messages of types that this client does not know, because a newer gateway sent them. */
  readonly messagesPassedOver: number;
  create<Chunk = any>(body: object, options?: CreateOptions): Stream<Chunk>;
  subscribe<Chunk = any>(streamId: string, options?: ReadOptions & { after?: string }): Stream<Chunk>;
  cancel(streamId: string): Promise<Ack>;
  input(streamId: string, item: string | object, options?: InputOptions): Promise<Ack>;
  connect(): void;
  close(): void;
}
