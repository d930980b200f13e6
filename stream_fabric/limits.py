"""Every bound of the platform, with what happens at it and how bounds relate. Units are in the names."""

from __future__ import annotations

from typing import Final

# Requests. Over: 413, 431, 400, 429 with the limit's name.
BODY_BYTES_MAX: Final = 8 << 20
HEADER_BYTES_MAX: Final = 32 << 10
URL_BYTES_MAX: Final = 8 << 10
JSON_DEPTH_MAX: Final = 64
JSON_CONTAINERS_MAX: Final = 100_000  # checking more would hold the loop for everybody
HEAD_S_MAX: Final = 20.0  # a request's head takes longer: the connection is closed
BODY_S_MAX: Final = 60.0  # a request's body takes longer: 408
CHOICES_MAX: Final = 16
BATCH_MAX: Final = 2048  # inputs of one embeddings request, documents of one rerank request
USER_CHARS_MAX: Final = 128
IDEMPOTENCY_KEY_CHARS_MAX: Final = 256
UNREAD_BYTES_MAX: Final = 4 * BODY_BYTES_MAX  # of a body that nobody wants, thrown away; over: the connection is cut
LINGER_S_MAX: Final = 30.0  # a sender that was refused is heard out for so long, so that it can read why
LINGER_IDLE_S_MAX: Final = 2.0  # or until it has sent nothing for so long
COOKIE_BYTES_MAX: Final = 4096  # name and value; browsers drop a larger one. Over: 400

# Connections.
WS_MESSAGE_BYTES_MAX: Final = BODY_BYTES_MAX  # over: close 1009
STREAMS_PER_SOCKET_MAX: Final = 128  # over: error too_many on that channel
SUBSCRIBERS_PER_STREAM_MAX: Final = 64  # on one gateway; over: 429
STREAMS_PER_GATEWAY_MAX: Final = 50_000  # over: 503, retriable
OUTBOX_BYTES_MAX: Final = 64 << 10  # over: keep only the cursor, refill from the log when drained
OUTBOX_BYTES_LOW: Final = 16 << 10
STALL_S_MAX: Final = 30.0  # nothing accepted for so long: close 4408, resume with the cursor
WS_AUTH_S_MAX: Final = 10.0  # no auth message: close 4401

# Liveness.
SSE_HEARTBEAT_S: Final = 10.0  # load balancers cut silence at 50 to 60 s
WS_APP_PING_S: Final = 15.0
WS_PROTOCOL_PING_S: Final = 20.0
WATCHDOG_S: Final = 2.0
ORPHAN_GRACE_S: Final = 5.0  # a stream that the fabric lost is waited for so long before its reader is told
SSE_RETRY_MS_MIN: Final = 250  # an EventSource comes back after so long, by itself only after 3 s; spread, so that
SSE_RETRY_MS_MAX: Final = 1000  # the readers of a dead gateway do not all come at once

# Streams.
FLUSH_WINDOW_S: Final = 0.015
FLUSH_FRAMES_MAX: Final = 8
FLUSH_BYTES_MAX: Final = 8 << 10
FRAME_BYTES_MAX: Final = 256 << 10
STREAM_BYTES_MAX: Final = 8 << 20  # over: the stream ends failed, stream_too_large
PAGE_ENTRIES_MAX: Final = 64  # entries a read returns; a page is at most this times FLUSH_BYTES_MAX and a frame
LIVE_TTL_S: Final = 3600
RETENTION_S: Final = 900  # after the terminal; OpenAI refuses to re-stream after 300 s
PENDING_CANCEL_TTL_S: Final = 60
INPUTS_MAX: Final = 1000  # a stream's durable inputs; over: 429
ENDED_KEPT_S: Final = 10.0  # a producer re-checks an acknowledged end for so long, against a failover's lost tail

# Leases.
LEASE_TTL_S: Final = 3.0
LEASE_RENEW_S: Final = 1.0
REAP_EVERY_S: Final = 0.5

# Placement.
PIN_S: Final = 300  # a session stays bound to its replica for so long after its last token
QUEUE_MAX: Final = 10_000  # requests that wait in a pool; over: 503 with a Retry-After from the rate they leave at
QUEUE_WAIT_S_MAX: Final = 60.0  # over: the stream ends failed, deadline_exceeded
CANDIDATES_MAX: Final = 64  # replicas that placement looks at for one request
HOSTS_ASKED_MAX: Final = 2  # adjacent pools that are asked to take one request
ATTEMPTS_MAX: Final = 3  # producers a stream may have before its first token: the first and two more
PREFIX_BLOCK_BYTES: Final = 512
PREFIX_BLOCKS_MAX: Final = 4096  # of one prompt; what is longer is matched by its beginning
PREFIX_SUMMARY_BLOCKS_MAX: Final = 8192  # of one replica: 32 KiB in its lease, 4 MiB of prompts

# The operations page's feed.
OPS_VIEWERS_MAX: Final = 32  # who watch on one gateway; over: 429
OPS_EVERY_S: Final = 2.0  # a snapshot, one for all of them
OPS_WAIT_S_MAX: Final = 1.0  # Redis is waited for so long; then the figures before are shown, with their age
OPS_HISTORY_S: Final = 10.0  # telemetry is asked so often, whoever watches
OPS_HISTORY_WAIT_S_MAX: Final = 10.0  # over: it does not answer
OPS_POOLS_MAX: Final = 200  # of one snapshot, those in trouble first; the rest is counted
OPS_REPLICAS_MAX: Final = 500  # the same
OPS_RECENT_S: Final = 300.0  # a gateway remembers how its own requests went for so long

# Engines.
ITEM_CHARS_MAX: Final = 16 << 10  # of an answer that is one JSON document, in one delta
METRICS_BYTES_MAX: Final = 4 << 20  # of a model server's metrics; the rest is not read
VLLM_START_S_MAX: Final = 1800.0  # large models load for minutes; over: a failed start (a setting)
VLLM_WARM_UP_S_MAX: Final = 300.0  # its first token, which may compile kernels; over: a failed start
VLLM_STARTS_MAX: Final = 5  # starts in a row of which none became ready; then the agent gives up
VLLM_BACKOFF_S_MIN: Final = 0.5  # doubles from start to start, with jitter
VLLM_BACKOFF_S_MAX: Final = 30.0
VLLM_STEADY_S: Final = 60.0  # ready for so long: the backoff begins from its least again
VLLM_SILENT_S_MAX: Final = 60.0  # its server answers nothing for so long, not even its metrics: it is killed
VLLM_SLEEP_S_MAX: Final = 120.0  # to put its weights aside; over: it is started again, by URL the agent ends
VLLM_WAKE_S_MAX: Final = 300.0  # level 2 reads the weights again; over: it is started again, by URL the agent ends
VLLM_TERM_S_MAX: Final = 10.0  # from SIGTERM to SIGKILL
VLLM_TAIL_LINES_MAX: Final = 40  # of what it said last, kept for the error that tells of its end
VLLM_LINE_CHARS_MAX: Final = 1000  # of one of its lines; the rest is cut
KV_BACKLOG_MAX: Final = 16_384  # batches of KV events not yet read; over: they are lost, and asked for again
KV_REPLAY_S_MAX: Final = 5.0  # lost KV events are asked for again; over: counted as a clear
ARTIFACT_FILES_MAX: Final = 2000  # of a model; over: its artifact is not told
ARTIFACT_PIECE_BYTES: Final = 64 << 10  # of a file's beginning, middle and end
ARTIFACT_S_MAX: Final = 20.0  # over: not told

# Events. What is over a bound goes to the disk spool; what finds no room there either is dropped, and counted.
EVENT_BYTES_MAX: Final = 512 << 10  # over: without its prompt and completion; still over: dropped
EVENTS_MEMORY_BYTES_MAX: Final = 16 << 20  # of a process, not yet delivered (a setting)
EVENTS_SPOOL_BYTES_MAX: Final = 1 << 30  # of a process, on disk (a setting)
EVENTS_REDIS_BYTES_MAX: Final = 64 << 20  # of all processes, in Redis, not yet consumed (a setting)
FLEET_EVENTS_PER_MINUTE_MAX: Final = 120  # of a process, of its fleet; over: counted in the next one
DECISIONS_PER_MINUTE_MAX: Final = 20  # told of one pool and kind; over: the last one, once there is room
CONTENT_BYTES_MAX: Final = 64 << 10  # of a prompt, of a completion in a trace (a tenant's plan)
CONTENT_BYTES: Final = 16 << 10  # where the plan does not say how many
CONTENT_PROMPTS_BYTES_MAX: Final = 16 << 20  # of a gateway: prompts whose trace is not told yet; over: the oldest goes
CONTENT_READS_MAX: Final = 64  # completions being read from the log at once; over: told without
SHED_TOLD_EVERY_S: Final = 10.0  # requests refused meanwhile are one event for each layer and pool
SHED_KINDS_MAX: Final = 16  # layers, pools and reasons that are told apart; over: counted together
EVENTS_BATCH_MAX: Final = 500  # handed to the transport at once
EVENTS_BATCH_BYTES_MAX: Final = 512 << 10
EVENTS_SCRIPT_MAX: Final = 64  # appended in one script call: Redis serves nobody else meanwhile
EVENTS_LINGER_S: Final = 0.05  # events gather for so long
EVENTS_STUCK_S: Final = 1.0  # a batch that is not acknowledged after so long: the transport is away
EVENTS_SPOOL_PER_S: Final = 5000  # events from the spool, beside live ones
EVENTS_CLOSE_S_MAX: Final = 3.0  # at a process's end; what is left goes to the spool

# Spans for OpenTelemetry.
SPANS_HELD_MAX: Final = 10_000  # traces that wait to be sent; over: dropped and counted
SPANS_BATCH_MAX: Final = 256  # traces of one export, some six spans each
SPANS_SEND_S_MAX: Final = 5.0  # one export with its repetitions; over: dropped and counted
SPANS_CLOSE_S_MAX: Final = 6.0  # at a process's end; the rest is lost

# The fabric.
COMMAND_TIMEOUT_S: Final = 5.0
RECONNECT_S_MAX: Final = 1.0

assert FRAME_BYTES_MAX < STREAM_BYTES_MAX
assert FLUSH_BYTES_MAX < FRAME_BYTES_MAX
assert OUTBOX_BYTES_LOW < OUTBOX_BYTES_MAX
assert LEASE_RENEW_S * 2 < LEASE_TTL_S, "one lost renewal must not kill a lease"
assert LEASE_TTL_S + REAP_EVERY_S + 1 < 5, "no stream without a terminal or a producer after 5 s"
assert SSE_HEARTBEAT_S * 4 < 50, "a lost heartbeat must not meet a load balancer's idle limit"
assert RETENTION_S > 300
assert OPS_WAIT_S_MAX < OPS_EVERY_S < LEASE_TTL_S, "who watches sees a dead replica within seconds"
assert UNREAD_BYTES_MAX > BODY_BYTES_MAX and LINGER_IDLE_S_MAX < LINGER_S_MAX
assert 0 < SSE_RETRY_MS_MIN < SSE_RETRY_MS_MAX
assert ITEM_CHARS_MAX * 6 < FRAME_BYTES_MAX, "a character takes at most 6 bytes in a JSON string"
assert EVENT_BYTES_MAX <= EVENTS_BATCH_BYTES_MAX <= 768 << 10, "Kafka refuses a batch over 1 MiB"
assert 4 * EVENTS_BATCH_BYTES_MAX <= EVENTS_MEMORY_BYTES_MAX <= EVENTS_SPOOL_BYTES_MAX
assert CONTENT_BYTES_MAX * 2 < EVENT_BYTES_MAX
assert EVENTS_LINGER_S < EVENTS_STUCK_S < EVENTS_CLOSE_S_MAX
assert VLLM_BACKOFF_S_MIN < VLLM_BACKOFF_S_MAX < VLLM_STEADY_S
