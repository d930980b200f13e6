"""Answers of the API and parameters of its query strings, as types for the reference."""

from __future__ import annotations

from typing import Annotated, Any, Generic, Literal, TypeVar

import msgspec
from msgspec import Meta

from stream_fabric.accounts.records import Scope, TierName
from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX

_T = TypeVar("_T")
_NUMBER = "(0|[1-9][0-9]{0,14})"
CursorText = Annotated[str, Meta(pattern=f"^{_NUMBER}-{_NUMBER}$", examples=["1-57"])]
IdText = Annotated[str, Meta(extra_json_schema={"minLength": 1, "maxLength": IDEMPOTENCY_KEY_CHARS_MAX})]
"""Checked where it is used, with an error that names the field."""
Status = Literal["live", "completed", "cancelled", "failed", "incomplete"]
Dialect = Literal[
    "openai.chat", "openai.completions", "anthropic.messages", "vercel.ui", "openai.responses", "open.responses"
]  # fmt: skip


class ErrorObject(msgspec.Struct, kw_only=True):
    message: str
    """Cause, what it concerns, and what to do."""
    type: str
    """Kind of error, as OpenAI's clients know it."""
    code: str
    """Stable name of the error."""
    param: str | None
    """Field or parameter that is at fault."""
    request_id: str | None
    """Id of the request, also in the header `X-Request-Id`."""
    retriable: bool
    """True: the same request may succeed later."""
    stream_id: str = ""
    """Stream that can be resumed, if there is one."""
    cursor: str = ""
    """Cursor to resume the stream at."""


class Error(msgspec.Struct):
    """Body of every error."""

    error: ErrorObject


class StreamEvent(msgspec.Struct, omit_defaults=True):
    """One server-sent event of a stream."""

    data: str
    """A chunk of the dialect as JSON, `[DONE]`, or an error object as JSON."""
    event: str = ""
    """Type of the event, in the dialects `anthropic.messages` and of responses."""
    id: CursorText = ""
    """Cursor of the frame. An event without it is a part of the frame whose cursor follows."""


class FeedEvent(msgspec.Struct, omit_defaults=True):
    """One server-sent event of the operations feed."""

    data: str
    """A complete snapshot as JSON, or an error object as JSON."""
    id: str = ""
    """Unix time in milliseconds."""


# --- streams -------------------------------------------------------------------------------------------------


class FollowQuery(msgspec.Struct):
    after: CursorText | None = None
    """Cursor of the last frame that the client has; `1-0` is the beginning. `Last-Event-ID` goes before it."""
    dialect: Dialect | None = None
    """Format of the chunks; by default that of the create. One that cannot express the stream is 400 `unsupported`."""
    mode: Literal["tokens", "coalesce"] = "tokens"
    """`coalesce` joins adjacent deltas while the reader catches up."""


class RunningQuery(msgspec.Struct):
    user: Annotated[str, Meta(min_length=1)] | None = None
    """User whose streams to list. A credential with a user needs none."""


class StreamUsage(msgspec.Struct):
    """Tokens of a stream."""

    prompt: int
    """Includes `cached` and `written`."""
    cached: int
    written: int
    output: int
    """Includes `reasoning`."""
    reasoning: int


class StreamInfo(msgspec.Struct, kw_only=True):
    id: str
    object: Literal["stream"]
    epoch: str
    """Number of the epoch and its nonce, joined by a dot."""
    head: int
    """Seq of the last frame."""
    status: Status
    model: str
    created: int
    """Unix time in seconds."""
    user: str | None
    usage: StreamUsage | None
    """Usage that is billed; null while the stream runs."""


class StreamList(msgspec.Struct):
    object: Literal["list"]
    data: list[StreamInfo]


class CancelAnswer(msgspec.Struct):
    result: Literal["accepted", "already", "pending", "terminal"]
    """`accepted`: nothing comes after `at`. `already`: it was cancelled before. `terminal`: it had ended before.
    `pending`: no stream of the caller has this id yet; if it is created within a moment, it is cancelled."""
    at: str | None
    """Cursor of the last frame that any reader gets."""
    status: Status | None


class InputBody(msgspec.Struct):
    id: IdText
    """Idempotency id: the same input with an id that was seen before is a duplicate; another one is refused."""
    item: str | dict[str, Any]
    """A string, or a message with role `user`, of a chat or of the Responses API."""


class InputAnswer(msgspec.Struct):
    result: Literal["accepted", "duplicate"]


class InputTerminal(msgspec.Struct):
    """The answer has ended, so the stream takes no input."""

    result: Literal["terminal"]


class Candidate(msgspec.Struct):
    replica: str
    score_ms: float
    """Expected time to the first token plus a little for crowding; the least wins."""
    matched_tokens: int
    in_flight: int
    load_ms: float
    barred: str
    """Reason why it could not be chosen: `dead`, `full` or `over`; empty: it could."""


class Shift(msgspec.Struct):
    home: str
    to: str
    backlog_s: float
    shift_s: float


class Placement(msgspec.Struct, omit_defaults=True):
    at_unix_ms: int
    attempt: int
    replica: str | None
    """null: the request waited in the queue."""
    reason: Literal["pin", "prefix", "load", "spill", "only", "queued"]
    position: int
    """Position in the queue; 0: it was placed at once."""
    prompt_tokens: int
    output_tokens: int
    candidates: list[Candidate]
    shift: Shift | None = None
    """Present where an adjacent pool took the request."""


class Producer(msgspec.Struct, rename={"from_": "from"}):
    epoch: int
    from_: str
    """Cursor of its first frame."""
    replica: str = ""
    attempt: int = 0


class PlacementAnswer(msgspec.Struct):
    """Why the stream runs where it runs."""

    id: str
    placements: list[Placement]
    producers: list[Producer]
    head: str


# --- answers that are not streamed -----------------------------------------------------------------------------


class Usage(msgspec.Struct):
    prompt_tokens: int
    completion_tokens: int
    total_tokens: int
    prompt_tokens_details: dict[str, int]
    completion_tokens_details: dict[str, int]


class ChatMessage(msgspec.Struct, kw_only=True):
    role: Literal["assistant"]
    content: str | None
    refusal: str | None
    tool_calls: list[dict[str, Any]] = []
    reasoning_content: str = ""


class MismatchObject(msgspec.Struct):
    path: str
    """JSON pointer to the value that does not fit; empty: the whole reply."""
    message: str


class StructuredOutput(msgspec.Struct, omit_defaults=True):
    """Result of the check of a reply against the JSON schema of its request."""

    valid: bool | None
    """null: the schema or the reply could not be checked; `error` says why."""
    repairs: int = 0
    """Replies that did not fit and were replaced by this one."""
    error: MismatchObject | msgspec.UnsetType = msgspec.UNSET


class ChatChoice(msgspec.Struct):
    index: int
    message: ChatMessage
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET
    """Present if the request asks for JSON and the choice ended by itself."""


class ChatCompletion(msgspec.Struct):
    id: str
    object: Literal["chat.completion"]
    created: int
    model: str
    choices: list[ChatChoice]
    usage: Usage


class CompletionChoice(msgspec.Struct):
    index: int
    text: str
    logprobs: dict[str, Any] | None
    finish_reason: str | None
    structured_output: StructuredOutput | msgspec.UnsetType = msgspec.UNSET


class Completion(msgspec.Struct):
    id: str
    object: Literal["text_completion"]
    created: int
    model: str
    choices: list[CompletionChoice]
    usage: Usage


# --- account ---------------------------------------------------------------------------------------------------


class Model(msgspec.Struct):
    id: str
    object: Literal["model"]
    created: int
    owned_by: str
    """Pool that serves the model."""
    simulated: bool
    max_model_len: int | msgspec.UnsetType = msgspec.UNSET
    """Maximum context in tokens, where it is known."""
    input_modalities: list[Literal["text", "image"]] | msgspec.UnsetType = msgspec.UNSET
    """Kinds of content that a message may hold, where the operator has named the model in ``image_models``."""


class ModelList(msgspec.Struct):
    object: Literal["list"]
    data: list[Model]


class LimitsQuery(msgspec.Struct):
    model: str | None = None
    """Also describe the limits of this model."""
    user: str | None = None
    """Also describe the limits and budgets of this user."""
    session: str | None = None
    """Also describe the budget of this session."""


class LimitUse(msgspec.Struct):
    limit: int
    used: int
    remaining: int


class SubjectLimits(msgspec.Struct, omit_defaults=True):
    applies_to: Literal["tenant", "key", "user", "model"]
    key: str = ""
    model: str = ""
    requests_per_minute: LimitUse | None = None
    tokens_per_minute: LimitUse | None = None
    running_streams: LimitUse | None = None


class BudgetState(msgspec.Struct, omit_defaults=True):
    budget: Literal["request", "session", "user_day", "tenant_hour", "tenant_month"]
    tokens: LimitUse | None = None
    """Prompt and output tokens, those of running streams included."""
    micro: LimitUse | None = None
    """Millionths of the operator's currency."""
    resets_at: str = ""
    """Time in UTC, of a budget of a period."""


class LimitsAnswer(msgspec.Struct):
    object: Literal["limits"]
    plan: str
    highest_tier: TierName
    data: list[SubjectLimits]
    budgets: list[BudgetState]


class TokenAnswer(msgspec.Struct):
    token: str
    """The capability token. It is opaque to clients."""
    expires_at: int
    """Unix time in seconds."""
    scopes: list[Scope]


class ListPage(msgspec.Struct, Generic[_T]):
    """One page of a list."""

    object: Literal["list"]
    data: list[_T]
    has_more: bool
    last_id: str | int | None
    """Value of `after` for the next page."""
