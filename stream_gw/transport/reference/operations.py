"""Table of the API's operations: every route of the gateway, with its parameters, bodies, answers and errors."""

from __future__ import annotations

from typing import Any

from stream_fabric import errors as e
from stream_gw.admin.usage import UsageAnswer, UsageQuery, UsageUnavailable
from stream_gw.auth import TokenRequest
from stream_gw.dialects import bodies
from stream_gw.dialects.anthropic import bodies as anthropic
from stream_gw.transport.reference import answers as a
from stream_gw.transport.reference.admin_operations import ADMIN
from stream_gw.transport.reference.chat_operations import chat_operations
from stream_gw.transport.reference.operation import EVENTS, JSON, TEXT, Answer, Errors, Operation, Parameter
from stream_gw.transport.reference.response_operations import response_operations
from stream_gw.transport.reference.stored_operations import stored_operations

_KEY = Parameter(
    "Idempotency-Key",
    "A repeat with the same key and body attaches to the stream that the first request made.",
    "header",
    a.IdText,
)
_LAST_EVENT = Parameter("Last-Event-ID", "Cursor of the last frame that the client has.", "header", a.CursorText)
_TRACE = Parameter("traceparent", "W3C trace context; sets the trace id of the request.", "header")
_VERSION = Parameter("anthropic-version", "Version of Anthropic's API. Every date is accepted.", "header")
_STREAM = Parameter("id", "Id of a stream: `resp_` and 32 hex digits.")
_STREAM_HEADERS = ("X-Stream-Id", "X-Stream-Epoch", "Link")
_SERVED = "X-Served-Model"
_CHECKED = "X-Structured-Output"
_FABRIC: Errors = (e.FabricUnavailable, e.FabricFault)
_ONE_STREAM: Errors = (e.NotFound, *_FABRIC)
_CREATE: Errors = (
    e.Unsupported, e.TooDeep, e.ContextLengthExceeded, e.ModelNotFound, e.IdempotencyMismatch, e.TooMany, e.RateLimited,
    e.Draining, e.GatewayFull, e.NoReplica, e.PoolFull, e.PoolBusy, e.FabricFull,
    e.RegionUnavailable, *_FABRIC,
)  # fmt: skip
_WHOLE: Errors = (e.EngineFailed, e.EngineLost, e.ReplicaLost, e.StreamLost, e.StreamTooLarge, e.DeadlineExceeded)
_ATTACHED: Errors = (e.CursorInvalid, e.CursorGone)
_LIMIT_HEADERS = ("x-ratelimit", "x-budget-warning")
_EMPTY = Answer(204, "The stream has ended, and the client has all of it.")
_EVENTS_ABOUT = (
    "An event is one `data:` line with a chunk, and an `id:` line with its cursor. `[DONE]` follows the last one. "
    "A comment comes after 10 s of silence at most. An error within the stream is an event with the same error object."
)


def _create(path: str, summary: str, body: Any, answer: Any) -> Operation:
    return Operation(
        "post", path, "Create", summary,
        (
            Answer(200, "The whole answer or, with `\"stream\": true`, its events.",
                   {JSON: answer, EVENTS: a.StreamEvent}, (*_STREAM_HEADERS, _SERVED, _CHECKED, *_LIMIT_HEADERS)),
            _EMPTY,
        ),
        "create",
        f"With `\"stream\": true`: {_EVENTS_ABOUT}",
        (_KEY, _LAST_EVENT, _TRACE),
        body=body,
        errors=(*_CREATE, *_WHOLE, *_ATTACHED),
    )  # fmt: skip


def _create_whole(path: str, summary: str, body: Any) -> Operation:
    return Operation(
        "post", path, "Create", summary,
        (Answer(200, "The engine's document, unchanged.", {JSON: dict[str, Any]},
                ("X-Stream-Id", _SERVED, *_LIMIT_HEADERS)),),
        "create",
        "The answer is not streamed and cannot be followed. It is a stream like any other for queue, cancel and list.",
        (_KEY, _TRACE),
        body=body,
        errors=(*_CREATE, *_WHOLE),
    )  # fmt: skip


_CREATES = (
    _create("/v1/chat/completions", "Create a chat completion", bodies.ChatBody, a.ChatCompletion),
    _create("/v1/completions", "Create a text completion", bodies.CompletionsBody, a.Completion),
    Operation(
        "post", "/v1/messages", "Create", "Create a message in Anthropic's format",
        (
            Answer(200, "The whole message or, with `\"stream\": true`, its events.",
                   {JSON: anthropic.AnthropicMessage, EVENTS: anthropic.MessageEvent},
                   (*_STREAM_HEADERS, _CHECKED, "request-id", "x-ratelimit", "anthropic-ratelimit")),
            _EMPTY,
        ),
        "create",
        "An event has an `event:` line with its type. Pings come after 10 s of silence at most. The stream can be "
        "followed and cancelled like any other, in this dialect or another one.",
        (_KEY, _LAST_EVENT, _TRACE, _VERSION),
        body=anthropic.MessagesBody,
        errors=(*_CREATE, *_WHOLE, *_ATTACHED),
        anthropic=True,
    ),
    Operation(
        "post", "/v1/messages/count_tokens", "Create", "Count the tokens of a message's prompt",
        (Answer(200, "The number of tokens, from the model's own tokenizer.", {JSON: anthropic.TokenCountAnswer},
                ("X-Stream-Id", "request-id", "x-ratelimit", "anthropic-ratelimit")),),
        "create",
        "A replica of the model counts. Nothing is generated, and no tokens are charged.",
        (_KEY, _TRACE, _VERSION),
        body=anthropic.CountTokensBody,
        errors=(*_CREATE, *_WHOLE),
        anthropic=True,
    ),
    _create_whole("/v1/embeddings", "Embed texts", bodies.EmbeddingsBody),
    _create_whole("/v1/rerank", "Rank documents by a query", bodies.RerankBody),
    _create_whole("/v1/classify", "Classify texts", bodies.ClassifyBody),
    _create_whole("/v1/score", "Score pairs of texts", bodies.ScoreBody),
)  # fmt: skip

_STREAMS = (
    Operation(
        "get", "/v1/streams", "Streams", "List a user's running streams",
        (Answer(200, "The tenant's running streams of the user, newest first.", {JSON: a.StreamList}),),
        "read", query=a.RunningQuery, errors=(e.NotFound, *_FABRIC),
    ),
    Operation(
        "get", "/v1/streams/{id}", "Streams", "Replay and follow a stream",
        (
            Answer(200, "The frames after the cursor, then the stream as it goes on.", {EVENTS: a.StreamEvent},
                   _STREAM_HEADERS),
            _EMPTY,
        ),
        "read", f"Any gateway answers, also when another one created the stream. {_EVENTS_ABOUT}",
        (_STREAM, _LAST_EVENT, _TRACE), a.FollowQuery, cookie=True,
        errors=(e.CursorInvalid, e.Unsupported, e.CursorGone, e.TooMany, e.LinkEnded, *_ONE_STREAM),
    ),
    Operation(
        "get", "/v1/streams/{id}/info", "Streams", "Describe a stream",
        (Answer(200, "The stream's status and head.", {JSON: a.StreamInfo}),),
        "read", parameters=(_STREAM,), errors=_ONE_STREAM,
    ),
    Operation(
        "get", "/v1/streams/{id}/placement", "Streams", "Explain where a stream runs",
        (Answer(200, "Each placement with its candidates, and each producer.", {JSON: a.PlacementAnswer}),),
        "read", parameters=(_STREAM,), errors=_ONE_STREAM,
    ),
    Operation(
        "post", "/v1/streams/{id}/cancel", "Streams", "Cancel a stream",
        (Answer(200, "The cancel, and the last frame that any reader gets.", {JSON: a.CancelAnswer}),),
        "cancel", parameters=(_STREAM,), errors=_ONE_STREAM,
    ),
    Operation(
        "delete", "/v1/streams/{id}/links", "Streams", "End the links to a stream",
        (Answer(204, "The links are ended."),),
        "cancel",
        "Capability tokens that read this stream alone are refused, and within 2 s those who watch by one are "
        "disconnected. New ones may be minted.",
        parameters=(_STREAM,), errors=_ONE_STREAM,
    ),
    Operation(
        "post", "/v1/streams/{id}/input", "Streams", "Steer a running stream with a user's message",
        (
            Answer(202, "The input is durable: the answer is cut, and another one follows in the same stream.",
                   {JSON: a.InputAnswer}),
            Answer(409, "The answer has ended.", {JSON: a.InputTerminal}),
        ),
        "input", parameters=(_STREAM,), body=a.InputBody,
        errors=(
            e.InvalidInput, e.SteeringUnsupported, e.ContextLengthExceeded, e.ContentFiltered, e.TooDeep,
            e.IdempotencyMismatch, e.TooMany, e.TooManyPendingInputs, e.RateLimited, e.ModerationUnavailable,
            e.FabricFull, *_ONE_STREAM,
        ),
    ),
)  # fmt: skip

_ACCOUNT = (
    Operation(
        "get", "/v1/models", "Account", "List the models",
        (Answer(200, "The models that the credential may use.", {JSON: (a.ModelList, anthropic.AnthropicModelList)}),),
        about="With the header `anthropic-version` in Anthropic's format.", parameters=(_VERSION,),
    ),
    Operation(
        "get", "/v1/models/{id}", "Account", "Describe a model",
        (Answer(200, "The model.", {JSON: (a.Model, anthropic.AnthropicModel)}),),
        about="With the header `anthropic-version` in Anthropic's format.",
        parameters=(Parameter("id", "Id of the model; it may contain slashes."), _VERSION),
        errors=(e.ModelNotFound,), route="/v1/models/{id:path}",
    ),
    Operation(
        "get", "/v1/limits", "Account", "Show limits and what is left of them",
        (Answer(200, "The limits of the caller's plan.", {JSON: a.LimitsAnswer}),),
        query=a.LimitsQuery, errors=_FABRIC,
    ),
    Operation(
        "get", "/v1/usage", "Account", "Sum up billed usage",
        (Answer(200, "One page of sums.", {JSON: UsageAnswer}),),
        "read",
        "Of the caller's tenant. A token with a user sees that user's usage only, and any token its key's. Bills "
        "arrive within seconds: `complete_until` tells up to which moment they are counted.",
        query=UsageQuery, errors=(e.TooMany, UsageUnavailable),
    ),
    Operation(
        "post", "/v1/tokens", "Account", "Mint a capability token",
        (Answer(200, "The token.", {JSON: a.TokenAnswer}),),
        about="Only an API key may mint. A token has no more rights than its key.",
        body=TokenRequest, body_required=False, errors=(e.TooDeep,),
    ),
    Operation(
        "post", "/v1/cookie", "Account", "Put the capability token into a cookie",
        (Answer(204, "The cookie is set.", headers=("Set-Cookie",)),),
        "read", "For a browser's `EventSource`, which cannot send an `Authorization` header. An API key is refused.",
    ),
    Operation(
        "delete", "/v1/cookie", "Account", "Remove the cookie",
        (Answer(204, "The cookie is removed.", headers=("Set-Cookie",)),), None,
    ),
)  # fmt: skip


_KNOWN_TAG = Parameter("If-None-Match", "Tag of the body that the client has.", "header")


def _document(path: str, summary: str, about: str) -> Operation:
    return Operation(
        "get", path, "Service", summary,
        (
            Answer(200, about, {JSON: dict[str, Any]}, ("ETag",)),
            Answer(304, "The document with the tag of `If-None-Match` is still valid."),
        ),
        None, parameters=(_KNOWN_TAG,),
    )  # fmt: skip


_SERVICE = (
    _document("/openapi.json", "Get this document", "The OpenAPI document."),
    _document("/asyncapi.json", "Get the document of the WebSocket", "The AsyncAPI document."),
    Operation(
        "get", "/healthz", "Service", "Tell whether the process lives",
        (Answer(200, "It does.", {TEXT: str}),), None,
    ),
    Operation(
        "get", "/readyz", "Service", "Tell whether the gateway takes requests",
        (Answer(200, "It does.", {TEXT: str}), Answer(503, "It does not, and why.", {TEXT: str})), None,
    ),
    Operation(
        "get", "/metrics", "Service", "Get the metrics for Prometheus",
        (Answer(200, "The metrics, in the format that `Accept` asks for.",
                {TEXT: str, "application/openmetrics-text": str}),),
        None,
    ),
)  # fmt: skip


def _page(path: str, summary: str) -> Operation:
    page = Answer(200, "The page. It asks for a key where it needs one.", {"text/html": str}, ("ETag",))
    known = Answer(304, "The page has not changed.")
    return Operation("get", path, "Pages", summary, (page, known), None, parameters=(_KNOWN_TAG,))


_PAGES = (
    _page("/", "Open the chat page"),
    _page("/watch", "Open the page that follows a shared answer"),
    _page("/ops", "Open the operations page"),
    _page("/docs", "Open the reference of this API"),
    Operation(
        "get", "/static/{path}", "Pages", "Get a file of the pages",
        (Answer(200, "The file.", {"*/*": str}, ("ETag",)), Answer(304, "The file has not changed.")),
        None, parameters=(Parameter("path", "Path of the file."), _KNOWN_TAG), errors=(e.NotFound,), route="/static",
    ),
)  # fmt: skip

_CHATS = chat_operations(
    (*_CREATE, *_ATTACHED), _ONE_STREAM, (*_STREAM_HEADERS, _SERVED, *_LIMIT_HEADERS), (_KEY, _TRACE)
)

OPERATIONS: tuple[Operation, ...] = (
    *_CREATES,
    *response_operations((*_CREATE, *_WHOLE, *_ATTACHED), _ONE_STREAM),
    *stored_operations((*_CREATE, *_WHOLE)),
    *_STREAMS,
    *_CHATS,
    *_ACCOUNT,
    *ADMIN,
    *_SERVICE,
    *_PAGES,
)
"""Every route of the gateway."""
