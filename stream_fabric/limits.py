"""Limits of the platform: each with its subject and the outcome when it is exceeded. Units are in the names.

The assertions at the end state how limits depend on each other.
"""

from __future__ import annotations

from typing import Final

# Requests. Errors name the limit.
BODY_BYTES_MAX: Final = 8 << 20  # body of a request; over: 413
TOKEN_BODY_BYTES_MAX: Final = 16 << 10  # body that asks for a capability token; over: 413
METADATA_BODY_BYTES_MAX: Final = 128 << 10  # body with the metadata of a conversation alone; over: 413
ADMIN_BODY_BYTES_MAX: Final = 1 << 20  # body of the admin API; over: 413
BODIES_BYTES_MAX: Final = 256 << 20  # received bytes of bodies that a gateway is reading; over: 503
TENANT_BODIES_BYTES_MAX: Final = 64 << 20  # of one tenant's among them; over: 429
HEADER_BYTES_MAX: Final = 32 << 10  # all headers of a request; over: 431
URL_BYTES_MAX: Final = 8 << 10  # over: 431
JSON_DEPTH_MAX: Final = 64  # nesting of a JSON body; over: 400
# Values of a JSON body; over: 400. Checking or decoding more would block the loop.
JSON_CONTAINERS_MAX: Final = 100_000  # objects and arrays
JSON_MEMBERS_MAX: Final = 100_000  # members of all objects together
JSON_STRINGS_MAX: Final = 300_000  # strings, names of members included
JSON_VALUES_MAX: Final = 1_200_000  # values in all: a prompt of the longest context has 1 Mi token ids
JSON_SLOW_NUMBERS_MAX: Final = 100  # numbers with over 63 digits, or with an exponent of 3 digits
HEAD_S_MAX: Final = 20.0  # time for a request's head; over: the connection is closed
BODY_S_MAX: Final = 60.0  # time for a request's body; over: 408
CHOICES_MAX: Final = 16  # choices (n) of one request; over: 400
PROMPT_CHOICES_MAX: Final = 128  # choices of all prompts (prompts times n) of one completions request; over: 400
MESSAGES_MAX: Final = 8192  # messages of one chat request; over: 400
BATCH_MAX: Final = 2048  # inputs of an embeddings request or documents of a rerank request; over: 400
USER_CHARS_MAX: Final = 128  # over: 400
IDEMPOTENCY_KEY_CHARS_MAX: Final = 256  # over: 400
UNREAD_BYTES_MAX: Final = 4 * BODY_BYTES_MAX  # body of a rejected request; over: the connection is cut
LINGER_S_MAX: Final = 30.0  # time to read a rejected request's body, so that the client can read the error; over: cut
LINGER_IDLE_S_MAX: Final = 2.0  # pause while reading a rejected request's body; over: the connection is closed
FAILURES_LOGGED_PER_S: Final = 20  # failed requests of one tenant and error in the log; further ones are only counted
COOKIE_BYTES_MAX: Final = 4096  # name and value; over: 400, because browsers drop larger cookies

# Connections.
WS_MESSAGE_BYTES_MAX: Final = BODY_BYTES_MAX  # over: close 1009
CONNECTIONS_MAX: Final = 60_000  # open connections of a gateway, fewer with few open files; over: further ones are cut
OPEN_FILES_KEPT: Final = 256  # open files that connections leave to the gateway, or a quarter of all
STREAMS_PER_SOCKET_MAX: Final = 128  # over: error too_many on that channel
SUBSCRIBERS_PER_STREAM_MAX: Final = 64  # readers of one stream on one gateway; over: 429
STREAMS_PER_GATEWAY_MAX: Final = 50_000  # over: 429, retriable
TENANT_PAGES_READ_MAX: Final = 8  # pages of logs that a gateway reads at once for one tenant's readers; more wait
OUTBOX_BYTES_MAX: Final = 64 << 10  # unsent bytes; over: only the cursor is kept, the log refills it
UNSENT_COUNTED_BYTES: Final = 128 << 10  # unsent bytes of one connection from which on they count for these limits:
TENANT_UNSENT_BYTES_MAX: Final = 64 << 20  # of one tenant at one gateway; over: 429, and further connections are cut
UNSENT_BYTES_MAX: Final = 256 << 20  # of all tenants; over: 503, and further connections are cut
OUTBOX_BYTES_LOW: Final = 16 << 10  # unsent bytes at which a connection counts as drained
STALL_S_MAX: Final = 30.0  # time in which a connection accepts too little; over: close 4408, the client resumes
STALL_BYTES_MIN: Final = 4 << 10  # bytes that a slow reader must accept within STALL_S_MAX
WS_AUTH_S_MAX: Final = 10.0  # time until the auth message; over: close 4401
WS_AUTH_BYTES_MAX: Final = 64 << 10  # the auth message; over: close 4401
WS_OPENING_MAX: Final = 4  # creates and subs of one socket that run at once; over: they wait for each other
WS_PENDING_MAX: Final = 1024  # commands of one socket that run at once; over: error too_many
WS_REPLIES_BYTES_MAX: Final = 256 << 10  # replies to a client that does not read; over: close 4408
RESPONSES_SOCKET_S_MAX: Final = 3600.0  # age of a Responses socket; over: websocket_connection_limit_reached, closed
RESPONSES_IN_FLIGHT_MAX: Final = 16  # responses of one Responses socket that run at once; more wait
RESPONSES_WAITING_MAX: Final = 128  # requests of one Responses socket that wait; over: error too_many
RESPONSE_LANES_MAX: Final = 32  # named lanes of one Responses socket; over: websocket_stream_limit_reached
LANE_NAME_CHARS_MAX: Final = 256  # stream_id of a lane; over: invalid_stream_id
SOCKET_HISTORY_BYTES_MAX: Final = 8 << 20  # compressed, that one Responses socket remembers; over: the oldest goes
TENANT_HISTORY_BYTES_MAX: Final = 64 << 20  # of one tenant's sockets on one gateway; over: nothing more is remembered
HISTORY_BYTES_MAX: Final = 256 << 20  # of all sockets on one gateway; over: as above

# Liveness.
SWEEP_EVERY_S: Final = 5.0  # interval of looks at connections; a silent SSE stream gets a heartbeat after one or two
WS_APP_PING_S: Final = 15.0  # interval of pings as messages
WS_PROTOCOL_PING_S: Final = 20.0  # interval of WebSocket pings
WATCHDOG_S: Final = 2.0  # interval at which gateways compare their streams with the log
FABRIC_AWAY_S_MAX: Final = 45.0  # time without an answer of Redis; over: readers get a retriable error
ORPHAN_GRACE_S: Final = 5.0  # time for a stream to reappear after Redis lost it; over: its readers get an error
RECOVERY_S_MAX: Final = 40.0  # time for the lease reapers to move a dead replica's stream; over: as above
SSE_RETRY_MS_MIN: Final = 250  # reconnect delay sent to EventSource clients (default 3 s), drawn at random up to the
SSE_RETRY_MS_MAX: Final = 1000  # longest one, so that the readers of a dead gateway do not all return at once

# Streams.
FLUSH_FLOOR_S: Final = 0.002  # minimum time between two flushes of an agent; first tokens and ends do not wait for it
NOTE_WAIT_S: Final = 0.002  # time that the note of a start waits for the first token, to leave in the same append
FLUSH_FRAMES_MAX: Final = 8  # frames of one append; more wait for the next
FLUSH_BYTES_MAX: Final = 8 << 10  # bytes of one append; more wait for the next
FRAME_BYTES_MAX: Final = 256 << 10  # one frame; an engine adapter splits longer text
STREAM_BYTES_MAX: Final = 8 << 20  # output of one stream; over: it ends failed, stream_too_large
PAGE_ENTRIES_MAX: Final = 64  # entries of one read of the log; more need another read
LIVE_TTL_S: Final = 3600  # time that Redis keeps a running stream without appends; over: it is gone
RETENTION_S: Final = 900  # time that an ended stream is kept; over: 404. OpenAI refuses to re-stream after 300 s
ZERO_RETENTION_S: Final = 60  # as RETENTION_S, of a stream that is deleted once it was read and that nobody has read
CHAT_TTL_S: Final = 4 * 3600  # time that a chat id leads to its newest stream; over: a resume by chat id finds nothing
CHAT_READ_S: Final = 20  # the same once a reader got the stream's end: pages that reload in this moment lose nothing
CHAT_BEFORE_BYTES_MAX: Final = 256 << 10  # message that a stream continues, kept for replays; over: not kept
PENDING_CANCEL_TTL_S: Final = 60  # time that a cancel is kept for a stream that does not exist yet
INPUT_BYTES_MAX: Final = 4 << 20  # one input of a running stream, with its images; over: 413
INPUT_CONTAINERS_MAX: Final = 1000  # objects and arrays of one input, which is checked on the event loop; over: 400
INPUTS_MAX: Final = 100  # inputs of one stream, each of which begins another answer; over: 429
INPUTS_PENDING_MAX: Final = 16  # inputs of one stream that wait until the producer takes them; over: 429
INPUTS_BYTES_MAX: Final = BODY_BYTES_MAX  # of one stream's durable inputs together; over: 429
EXPIRY_EVERY_S: Final = 30  # a live stream's expiry is set again when it was last set so long ago
USAGE_TTL_S: Final = 40 * 86_400  # an hour's usage of a tenant is kept for so long
BILL_LATE_S: Final = 10.0  # time for the bill of a fenced stream; over: another process writes it
BILLS_LATE_MAX: Final = 1000  # such bills that a process takes on at once
UNBILLED_KEPT_S: Final = 3600  # time after the last fence for which unbilled streams are listed
HEADS_MAX: Final = 50  # streams whose heads one script reads: Redis serves no other client during a script
ENDED_KEPT_S: Final = 10.0  # time that a producer re-checks its end, in case a failover loses it
UNCHECKED_KEPT_S: Final = 50.0  # the same while Redis is away; over: the stream may have expired, and is not repaired

# Leases.
LEASE_TTL_S: Final = 3.0  # lease of a replica; over: its streams move to other replicas
LEASE_TTL_S_MAX: Final = 60.0  # longest lease that may be set; one with more left is of before the clock went back
LEASE_RENEW_S: Final = 1.0  # interval of renewals
REAP_EVERY_S: Final = 0.5  # interval at which lease reapers look for expired leases

# Placement.
PIN_S: Final = 300  # time that a session stays bound to its replica after its last token; over: any replica
QUEUE_MAX: Final = 10_000  # requests queued in one pool; over: 503 with Retry-After
QUEUE_WAIT_S_MAX: Final = 60.0  # time in a queue; over: the stream ends failed, deadline_exceeded
YIELD_WAIT_S_MAX: Final = 3000.0  # time in a queue of a batch stream that has begun; over: as above
REQUEST_BYTES_MAX: Final = 1 << 30  # of all requests that a pool or cell keeps (queued or in flight); over: 503
TENANT_REQUEST_BYTES_MAX: Final = 256 << 20  # of one tenant's among them; over: 429
GONE_KEPT_S: Final = 60  # a gateway that has not read a pool for longer reads all of it
POOL_TTL_S: Final = 3600  # a pool that no replica renews is forgotten after so long
CANDIDATES_MAX: Final = 64  # replicas scored for one request; of larger pools the others are not considered
HOSTS_ASKED_MAX: Final = 2  # adjacent pools tried for one request; then it stays in its own pool
ATTEMPTS_MAX: Final = 3  # producers of one stream; then it ends failed with the last error
REPEATED_TOKENS_MAX: Final = 4096  # output tokens that a next producer generates again to compare them; over: failed
PREFIX_BLOCK_BYTES: Final = 512  # prompt bytes of one block hash; a rest is not hashed
PREFIX_BLOCKS_MAX: Final = 4096  # block hashes of one prompt; a longer prompt is matched by its beginning
PREFIX_SUMMARY_BLOCKS_MAX: Final = 8192  # block hashes of one replica (32 KiB); over: the oldest go

# Tenants.
TENANT_RECORDS_MAX: Final = 500  # records of tenants and plans in one read; more need another read
TENANT_RECORDS_PUBLISHED_MAX: Final = 100  # records of one publish, which blocks Redis; more take further calls
TENANT_KEYS_MAX: Final = 1000  # keys of one tenant that are not revoked, all in its record; over: 409
TENANT_LIST_MAX: Final = 1000  # rows of one page of the admin API; more need another page
LIMITS_WAIT_S_MAX: Final = 1.0  # wait for a tenant's account where limits may fail open; over: admitted without limits
TENANTS_READ_EVERY_S: Final = 1.0  # interval at which gateways read changes of tenants; a revoked key ends so soon
TENANTS_ASKED_EVERY_S: Final = 0.1  # the same while callers come with unknown keys: a new key is known so soon
TENANTS_PUBLISH_EVERY_S: Final = 5.0  # interval at which gateways compare what is published with the database

# Links to one stream.
LINKS_ENDED_S: Final = 25 * 3600  # time that a recall of links is kept, longer than any capability token lives
LINKS_LOOK_EVERY_S: Final = 1.0  # interval at which a gateway looks whether the links of its readers were ended

# Stored responses.
RESPONSE_BYTES_MAX: Final = 32 << 20  # request and output of one stored response (a setting); over: 400, or not stored
RESPONSES_HELD_BYTES_MAX: Final = 256 << 20  # compressed, of one tenant in Redis (a setting); over: 429
RESPONSES_STORED_BYTES_MAX: Final = 16 << 30  # compressed, of one tenant in the database (a setting); over: 429
RESPONSE_DAYS: Final = 30  # days that the database keeps a response (a setting, and a tenant's plan)
RESPONSE_DAYS_MAX: Final = 3_650  # as above, of a plan
RESPONSES_SCANNED_MAX: Final = 100  # responses that one script looks at to make room; over: there is none
RESPONSES_DUE_MAX: Final = 16  # responses that a gateway takes from one shard at once; more wait for the next look
RESPONSES_DUE_EVERY_S: Final = 1.0  # interval at which gateways look for responses whose streams have ended
RESPONSE_LOOK_S_MAX: Final = 30.0  # longest interval at which a running response is looked at
RESPONSE_RETRY_S: Final = 30.0  # time to write a response to the database; over: another gateway tries
RESPONSE_NO_LOG_S_MAX: Final = 60.0  # time in which the stream of a new response must exist; over: it is forgotten
RESPONSE_UNSAVED_S_MAX: Final = 86_400  # time that Redis keeps a response that the database does not take; over: lost
RESPONSE_SQL_S_MAX: Final = 3.0  # time for the database to answer a request; over: 503
RESPONSE_SQL_CALLS_MAX: Final = 128  # requests of a gateway that wait for the database of responses; over: 503
RESPONSE_SQL_TENANT_CALLS_MAX: Final = 64  # of one tenant's among them; over: 503
RESPONSES_COUNTED_EVERY_S: Final = 15.0  # interval at which a gateway counts those that wait, for its metrics
RESPONSES_SWEPT_MAX: Final = 500  # rows that one sweep deletes; more take further sweeps
RESPONSES_SWEEP_EVERY_S: Final = 60.0  # interval at which a gateway deletes rows that have expired
RESPONSE_CHAIN_MAX: Final = 1000  # responses before a new one that it builds on; over: 400
RESPONSE_HISTORY_BYTES_MAX: Final = BODY_BYTES_MAX  # of these together, or a conversation; over: 400, or a page ends
REFERENCED_BYTES_MAX: Final = 2 * RESPONSE_BYTES_MAX  # responses in which one request's references are found; over: 400
COMPACTION_KEPT_BYTES_MAX: Final = 1 << 20  # items that a compaction keeps as they are; over: nothing is compacted
COMPACTION_TOKENS_MAX: Final = 4096  # output tokens of the summary of a compaction; the rest is cut
CONVERSATION_ITEMS_ADDED_MAX: Final = 20  # items that one request adds to a conversation, as at OpenAI; over: 400
METADATA_PAIRS_MAX: Final = 16  # pairs of metadata, keys of 64 and values of 512 characters, as at OpenAI; over: 400

# Operations page.
OPS_VIEWERS_MAX: Final = 32  # viewers of the operations page on one gateway; over: 429
OPS_EVERY_S: Final = 2.0  # interval of snapshots, one for all viewers
OPS_WAIT_S_MAX: Final = 1.0  # time for Redis to answer; over: the last figures are shown with their age
OPS_HISTORY_S: Final = 10.0  # interval of queries to telemetry, one for all viewers
OPS_HISTORY_WAIT_S_MAX: Final = 10.0  # time for telemetry to answer; over: the last figures are shown with their age
OPS_POOLS_MAX: Final = 200  # pools in one snapshot, pools with problems first; the rest is counted
OPS_REPLICAS_MAX: Final = 500  # replicas in one snapshot, replicas with problems first; the rest is counted
OPS_LOAD_EVERY_S: Final = 10.0  # interval at which a gateway keeps each replica's load, for OPS_RECENT_S
OPS_LOADS_MAX: Final = 5000  # replicas whose load a gateway keeps; further ones have no history
OPS_RECENT_S: Final = 300.0  # time span of a gateway's own statistics; older requests are forgotten

# Engines.
ITEM_CHARS_MAX: Final = 16 << 10  # characters of one delta of a JSON answer; longer answers take several
METRICS_BYTES_MAX: Final = 4 << 20  # a model server's metrics page; the rest is not read
VLLM_START_S_MAX: Final = 1800.0  # time to start, with loading the model (a setting); over: the start failed
VLLM_WARM_UP_S_MAX: Final = 300.0  # time to the first token, which may compile kernels; over: the start failed
VLLM_STARTS_MAX: Final = 5  # failed starts in a row; then the agent exits
VLLM_BACKOFF_S_MIN: Final = 0.5  # delay before the second start; doubles with each start, with jitter
VLLM_BACKOFF_S_MAX: Final = 30.0  # longest delay between starts
VLLM_STEADY_S: Final = 60.0  # time that vLLM is ready until the delay starts from its minimum again
VLLM_SILENT_S_MAX: Final = 60.0  # time without any answer, metrics included; over: vLLM is killed and restarted
VLLM_SLEEP_S_MAX: Final = 120.0  # time to fall asleep; over: vLLM is restarted; with an engine by URL the agent exits
VLLM_WAKE_S_MAX: Final = 300.0  # time to wake; over: vLLM is restarted; with an engine by URL the agent exits
VLLM_TERM_S_MAX: Final = 10.0  # time from SIGTERM to SIGKILL
VLLM_TAIL_LINES_MAX: Final = 40  # last output lines of vLLM, kept for the error message; older lines are dropped
VLLM_LINE_CHARS_MAX: Final = 1000  # one output line of vLLM; the rest is cut
KV_BACKLOG_MAX: Final = 16_384  # unread batches of KV events; over: batches are lost and requested again
KV_REPLAY_S_MAX: Final = 5.0  # time to replay lost KV events; over: the cache counts as cleared
ARTIFACT_FILES_MAX: Final = 2000  # files of a model; over: its artifact hash is not reported
ARTIFACT_PIECE_BYTES: Final = 64 << 10  # bytes hashed at a file's beginning, middle and end
ARTIFACT_S_MAX: Final = 20.0  # time to hash a model; over: its artifact hash is not reported

# Moderation.
MODERATION_RULES_MAX: Final = 1000  # patterns and words of a file of rules; over: the process does not start
MODERATION_PIECE_CHARS: Final = 16_384  # characters of one text of a question to the endpoint; more take several
MODERATION_INPUTS_MAX: Final = 32  # texts of one question; more take further questions
MODERATION_ANSWER_BYTES_MAX: Final = 1 << 20  # its answer; over: it counts as failed
MODERATION_OVERLAP_CHARS: Final = 256  # checked characters that are checked again with the next ones
MODERATION_HOLD_CHARS: Final = 64  # checked characters of an answer that wait for the next check
MODERATION_LOCAL_CHARS: Final = 32  # characters of an answer that gather for a check by local rules alone
MODERATION_HELD_CHARS_MAX: Final = 1 << 20  # characters of an answer that wait for moderation; over: it fails

# Structured replies.
SCHEMA_BYTES_MAX: Final = 64 << 10  # JSON schema of one request; over: its reply is not checked
SCHEMAS_KEPT: Final = 64  # compiled schemas of a checking process; the others are compiled again
CHECK_S_MAX: Final = 2.0  # time of one check; over: the reply is not checked, and its schema never again
CHECK_WAIT_S_MAX: Final = 5.0  # time that a reply waits for its check; over: it is not checked
CHECKS_WAITING_MAX: Final = 256  # replies of a tenant at one agent that wait for their check; over: not checked
CHECK_MEMORY_BYTES_MAX: Final = 1 << 30  # address space of the checking process; over: the reply is not checked
CHECK_REASON_CHARS: Final = 300  # characters of the reason why a reply does not fit; the rest is cut
REPAIRS_MAX: Final = 3  # repairs of one reply (a request, a tenant's plan); over: 400
REPAIR_REPLY_CHARS_MAX: Final = 256 << 10  # reply that is sent back for a repair; over: it is not repaired

# Events.
EVENT_BYTES_MAX: Final = 512 << 10  # over: without prompt and completion; still over: dropped, counted
EVENTS_MEMORY_BYTES_MAX: Final = 16 << 20  # a process's undelivered events (a setting); over: dropped
EVENTS_SPOOL_BYTES_MAX: Final = 1 << 30  # a process's disk spool (a setting); over: dropped and counted
EVENTS_REDIS_BYTES_MAX: Final = 64 << 20  # unconsumed events in Redis (a setting); over: refused
FLEET_EVENTS_PER_MINUTE_MAX: Final = 120  # fleet events of a process; over: dropped, their number is in the next one
DECISIONS_PER_MINUTE_MAX: Final = 20  # decision events of one pool and kind; over: only the last one is emitted, later
TRACE_ONE_IN_MAX: Final = 1_000_000  # requests that a trace stands for (a setting); over: the event is no row
CONTENT_BYTES_MAX: Final = 64 << 10  # prompt or completion in a trace (a tenant's plan); the rest is cut
RETENTION_S_MAX: Final = 7 * 86_400  # time that Redis keeps an ended stream (a tenant's plan)
TRACE_RETENTION_DAYS_MAX: Final = 3_650  # time that ClickHouse keeps a trace (a tenant's plan)
CONTENT_BYTES: Final = 16 << 10  # default of the plan's bytes
CONTENT_PROMPTS_BYTES_MAX: Final = 16 << 20  # prompts held for traces; over: the oldest is dropped
REDACTIONS_MAX: Final = 64  # prompts and completions that wait for redaction; over: the trace has none
CONTENT_READS_MAX: Final = 64  # completions read from the log at once; over: the trace has none
SHED_TOLD_EVERY_S: Final = 10.0  # interval of events about rejected requests, per layer and pool
SHED_KINDS_MAX: Final = 16  # combinations of layer, pool and reason in these events; over: counted together
EVENTS_BATCH_MAX: Final = 500  # events of one batch; more wait for the next
EVENTS_BATCH_BYTES_MAX: Final = 512 << 10  # bytes of one batch; more wait for the next
EVENTS_SCRIPT_MAX: Final = 64  # events of one script call, which blocks Redis; more take further calls
EVENTS_LINGER_S: Final = 0.05  # time that events gather before they are sent
EVENTS_STUCK_S: Final = 1.0  # time until a batch is acknowledged; over: the transport counts as unavailable
EVENTS_SPOOL_PER_S: Final = 5000  # events sent from the spool beside live ones; more wait
EVENTS_CLOSE_S_MAX: Final = 3.0  # time to send events when a process ends; the rest goes to the spool

# Spans for OpenTelemetry.
SPANS_HELD_MAX: Final = 10_000  # traces waiting for export; over: dropped and counted
SPANS_BATCH_MAX: Final = 256  # traces of one export, about six spans each; more wait for the next
SPANS_SEND_S_MAX: Final = 5.0  # time of one export with its retries; over: dropped and counted
SPANS_CLOSE_S_MAX: Final = 6.0  # time to export when a process ends; the rest is lost

# The fabric.
COMMAND_TIMEOUT_S: Final = 5.0  # time for a Redis command with its retries; over: FabricUnavailable
RECONNECT_S_MAX: Final = 1.0  # longest delay between attempts to reconnect to Redis

assert FRAME_BYTES_MAX < STREAM_BYTES_MAX
assert REPAIR_REPLY_CHARS_MAX * REPAIRS_MAX < BODY_BYTES_MAX, "a repair is no larger request than a client may send"
assert STREAM_BYTES_MAX * 64 < CHECK_MEMORY_BYTES_MAX, "a reply of small values takes a multiple of its bytes"
assert CHOICES_MAX <= PROMPT_CHOICES_MAX < 256, "the simulator draws a choice's text from a byte"
assert BODY_BYTES_MAX * 8 <= TENANT_REQUEST_BYTES_MAX < REQUEST_BYTES_MAX, "one tenant must not fill a pool"
assert BODY_BYTES_MAX * 8 <= TENANT_BODIES_BYTES_MAX < BODIES_BYTES_MAX, "one tenant must not fill a gateway"
assert EXPIRY_EVERY_S * 2 < LIVE_TTL_S
assert INPUTS_PENDING_MAX < INPUTS_MAX and INPUT_BYTES_MAX < INPUTS_BYTES_MAX
assert FLUSH_BYTES_MAX < FRAME_BYTES_MAX
assert STREAMS_PER_GATEWAY_MAX < CONNECTIONS_MAX, "a stream has a connection of its own at most"
assert OUTBOX_BYTES_LOW < OUTBOX_BYTES_MAX < UNSENT_COUNTED_BYTES
assert TENANT_UNSENT_BYTES_MAX * 4 <= UNSENT_BYTES_MAX, "one tenant must not fill a gateway"
assert LEASE_RENEW_S * 2 < LEASE_TTL_S, "one lost renewal must not kill a lease"
assert LEASE_TTL_S + REAP_EVERY_S + 1 < 5, "no stream without a terminal or a producer after 5 s"
assert 2 * SWEEP_EVERY_S * 4 < 50, "load balancers cut a stream that is idle for 50 s; heartbeats may be lost"
assert RETENTION_S > 300
assert ENDED_KEPT_S < UNCHECKED_KEPT_S < ZERO_RETENTION_S, "a producer that checks its end finds it"
assert QUEUE_WAIT_S_MAX < YIELD_WAIT_S_MAX < LIVE_TTL_S - EXPIRY_EVERY_S, "Redis keeps a stream while it waits"
assert OPS_WAIT_S_MAX < OPS_EVERY_S < LEASE_TTL_S, "a viewer sees a dead replica within seconds"
assert UNREAD_BYTES_MAX > BODY_BYTES_MAX and LINGER_IDLE_S_MAX < LINGER_S_MAX
assert 0 < SSE_RETRY_MS_MIN < SSE_RETRY_MS_MAX
assert ITEM_CHARS_MAX * 6 < FRAME_BYTES_MAX, "a character takes at most 6 bytes in a JSON string"
assert EVENT_BYTES_MAX <= EVENTS_BATCH_BYTES_MAX <= 768 << 10, "Kafka refuses a batch over 1 MiB"
assert 4 * EVENTS_BATCH_BYTES_MAX <= EVENTS_MEMORY_BYTES_MAX <= EVENTS_SPOOL_BYTES_MAX
assert MODERATION_HOLD_CHARS < MODERATION_OVERLAP_CHARS < MODERATION_PIECE_CHARS // 2
assert CONTENT_BYTES_MAX * 2 < EVENT_BYTES_MAX
assert EVENTS_LINGER_S < EVENTS_STUCK_S < EVENTS_CLOSE_S_MAX
assert VLLM_BACKOFF_S_MIN < VLLM_BACKOFF_S_MAX < VLLM_STEADY_S
assert FABRIC_AWAY_S_MAX >= 30 + 2 * COMMAND_TIMEOUT_S, "a failover of 30 s must not end streams"
assert STALL_BYTES_MIN < OUTBOX_BYTES_LOW
assert STREAMS_PER_SOCKET_MAX <= WS_PENDING_MAX
assert RESPONSES_IN_FLIGHT_MAX < RESPONSE_LANES_MAX < RESPONSES_WAITING_MAX < WS_PENDING_MAX
assert SOCKET_HISTORY_BYTES_MAX * 8 <= TENANT_HISTORY_BYTES_MAX < HISTORY_BYTES_MAX, (
    "one tenant must not fill a gateway"
)
assert 2 * RESPONSE_SQL_TENANT_CALLS_MAX <= RESPONSE_SQL_CALLS_MAX, "one tenant must not hold up the others"
assert BODY_BYTES_MAX + 2 * STREAM_BYTES_MAX < RESPONSE_BYTES_MAX < RESPONSES_HELD_BYTES_MAX
assert RESPONSE_LOOK_S_MAX * 3 <= RETENTION_S and RESPONSE_RETRY_S * 10 < RESPONSE_UNSAVED_S_MAX
