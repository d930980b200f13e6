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
/** 32 hex digits that nobody else makes, on plain HTTP too. */
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

/** Frames up to `seq`. `cursor` is the position to persist together with what was made of the chunks. */
export interface DataItem<Chunk = any> {
  type: "data";
  cursor: string;
  seq: number;
  chunks: Chunk[];
}

/** The frames `from` to `to` are lost for good. */
export interface GapItem {
  type: "gap";
  cursor: string;
  seq: number;
  from: number;
  to: number;
}

/** Everything that was read above `to` is void; what follows continues after `to`. */
export interface ResetItem {
  type: "reset";
  cursor: string;
  seq: number;
  to: number;
}

export type Item<Chunk = any> = DataItem<Chunk> | GapItem | ResetItem;

export interface Ack {
  result: "accepted" | "already" | "pending" | "terminal" | "duplicate";
  at?: string;
  status?: Status;
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
  /** Aborting rejects the reader with the signal's reason, at once. */
  signal?: AbortSignal;
  /** What aborting does to the stream: "cancel" (the default) stops the generation, "detach" only stops reading. */
  abort?: "cancel" | "detach";
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
  /** Of the last item handed to the reader. */
  readonly cursor: string;
  readonly status: Status;
  readonly usage: any;
  readonly error: Error | null;
  /** The id, once there is one. */
  readonly ready: Promise<string>;
  /** Never rejects. A reader that stops reading without closing holds it back. */
  readonly done: Promise<Outcome>;
  next(): Promise<IteratorResult<Item<Chunk>>>;
  return(value?: unknown): Promise<IteratorResult<Item<Chunk>>>;
  [Symbol.asyncIterator](): this;
  text(): AsyncGenerator<string, void, void>;
  cancel(): Promise<Ack>;
  close(): void;
}

export interface StateDetail {
  error?: GatewayError;
  delayMs?: number;
}

export interface Options {
  /** http(s) or ws(s) address of the gateway; the page's own origin by default. */
  url?: string;
  /** Several addresses, taken in turn. */
  urls?: string[];
  token?: string;
  /** Asked before every connection; `refresh` is true when the last token was refused. */
  getToken?: (request: { refresh: boolean }) => string | Promise<string>;
  /** A WebSocket constructor, where there is no global one. */
  webSocket?: new (url: string, protocols: string[]) => any;
  fetch?: typeof globalThis.fetch;
  onState?: (state: State, detail: StateDetail) => void;
  random?: () => number;
  /** Disconnected for so long, everything fails with connection_lost. 15 minutes by default. */
  giveUpMs?: number;
  lagMs?: number;
  queueItems?: number;
  queueChars?: number;
}

export class StreamGateway {
  constructor(options?: Options);
  readonly state: State;
  create<Chunk = any>(body: object, options?: ReadOptions & { key?: string }): Stream<Chunk>;
  subscribe<Chunk = any>(streamId: string, options?: ReadOptions & { after?: string }): Stream<Chunk>;
  cancel(streamId: string): Promise<Ack>;
  input(streamId: string, item: object): Promise<Ack>;
  connect(): void;
  close(): void;
}
