"""Create bodies as types, for the reference of the API: the fields that the gateway itself reads.

The parsers (``requests.py``, ``pooling/``) read field by field, so that an error names its field.
These types say the same to readers and to generated clients; ``tests/dialects/test_bodies.py`` holds them to the
parsers. Every other field goes to the engine, which accepts or refuses it.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stream_fabric.limits import BATCH_MAX, CHOICES_MAX, MESSAGES_MAX, PROMPT_CHOICES_MAX, REPAIRS_MAX, USER_CHARS_MAX
from stream_gw.dialects.pooling.embeddings import DIMENSIONS_MAX
from stream_gw.dialects.requests import DEADLINE_S_MAX, MODEL_CHARS_MAX, STOPS_MAX

_INT_MAX = 1 << 31
_TEXTS = {"type": "array", "items": {"type": "string"}, "minItems": 1, "maxItems": BATCH_MAX}
_TOKENS = {"type": "array", "items": {"type": "integer", "minimum": 0}, "minItems": 1}
_TOKEN_LISTS = {"type": "array", "items": _TOKENS, "minItems": 1, "maxItems": BATCH_MAX}
_Prompt = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [
                {"type": "string"},
                {**_TEXTS, "maxItems": PROMPT_CHOICES_MAX},
                {**_TOKENS, "items": {"type": "integer"}},
                {**_TOKEN_LISTS, "items": {**_TOKENS, "items": {"type": "integer"}}, "maxItems": PROMPT_CHOICES_MAX},
            ]
        }
    ),
]
_Input = Annotated[Any, Meta(extra_json_schema={"anyOf": [{"type": "string"}, _TEXTS, _TOKENS, _TOKEN_LISTS]})]
_TEXT = {
    "anyOf": [
        {"type": "string"},
        {
            "type": "object",
            "required": ["content"],
            "properties": {"content": {"type": "array", "minItems": 1, "items": {"type": "object"}}},
        },
    ]
}
_Side = Annotated[
    Any,
    Meta(
        extra_json_schema={
            "anyOf": [*_TEXT["anyOf"], {"type": "array", "items": _TEXT, "minItems": 1, "maxItems": BATCH_MAX}]
        }
    ),
]
_SECONDS = r"(([0-9]{1,3}|[12][0-9]{3}|3[0-5][0-9]{2})(\.[0-9]+)?|3600)"
_OnDisconnect = Annotated[str, Meta(pattern=rf"^(continue|cancel_after={_SECONDS})$", examples=["cancel_after=30"])]
Tier = Literal["priority", "fast", "interactive", "auto", "default", "scale", "standard", "flex", "batch", "free"]
Tokens = Annotated[int, Meta(ge=1, le=_INT_MAX)]
TokensOrNone = Annotated[int, Meta(ge=0, le=_INT_MAX)]
Repairs = Annotated[int, Meta(ge=0, le=REPAIRS_MAX)]
_Penalty = Annotated[float, Meta(ge=-2, le=2)]
_NotStreamed = Annotated[bool | None, Meta(extra_json_schema={"type": ["boolean", "null"], "enum": [False, None]})]


class Common(msgspec.Struct, kw_only=True):
    """Fields of every body that creates a stream."""

    model: Annotated[str, Meta(min_length=1, max_length=MODEL_CHARS_MAX, examples=["sim-small"])]
    """Name of the model; `GET /v1/models` lists them."""
    user: Annotated[str, Meta(max_length=USER_CHARS_MAX)] | None = None
    """Your user on whose behalf you ask. `GET /v1/streams` lists a user's running streams."""
    session_id: Annotated[str, Meta(min_length=1, max_length=USER_CHARS_MAX)] | None = None
    """Requests of one session go to the replica that holds their KV cache."""
    background: bool | None = None
    """True: the stream runs on when its last reader has left."""
    on_disconnect: _OnDisconnect | None = None
    """`continue`, or `cancel_after=<0 to 3600 seconds>`: what happens when the last reader has left."""
    service_tier: Tier | None = None
    """Tier in the queue: `priority` (also `fast`, `interactive`), `default` (`auto`, `scale`, `standard`), `flex`
    (`batch`), `free`."""
    fallback: bool | None = None
    """False: no smaller model of the plan's ladder answers."""
    deadline_s: Annotated[float, Meta(gt=0, le=DEADLINE_S_MAX)] | None = None
    """After this many seconds the stream fails with `deadline_exceeded`, wherever it is."""
    cache_salt: str | None = None
    """Requests with different salts share no KV cache."""


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = None
    """True: the last chunk has the usage."""


class _Generation(Common, kw_only=True):
    stream: bool | None = None
    """True: the answer is a stream of server-sent events."""
    stream_options: StreamOptions | None = None
    n: Annotated[int, Meta(ge=1, le=CHOICES_MAX)] | None = None
    """Number of choices."""
    max_tokens: Tokens | None = None
    """Maximum tokens of one choice."""
    max_completion_tokens: Tokens | None = None
    """Maximum tokens of one choice; goes before `max_tokens`."""
    temperature: Annotated[float, Meta(ge=0, le=2)] | None = None
    top_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    presence_penalty: _Penalty | None = None
    frequency_penalty: _Penalty | None = None
    stop: str | Annotated[list[str], Meta(max_length=STOPS_MAX)] | None = None
    """Strings that end a choice."""


class Message(msgspec.Struct):
    role: Annotated[str, Meta(examples=["user"])]
    content: str | list[dict[str, Any]] | None = None
    """Text, or parts as the engine takes them."""


class ChatBody(_Generation, kw_only=True):
    """Body of `POST /v1/chat/completions` in OpenAI's format. Other fields go to the engine unchanged.

    `conversation` (a string, or an object with `id`) counts as `session_id`. `prompt_cache_key` only chooses the
    replica.
    """

    messages: Annotated[list[Message], Meta(min_length=1, max_length=MESSAGES_MAX)]
    repair: Repairs | None = None
    """Replies to make again, at most, while they do not fit the JSON schema of `response_format`. Only with one choice
    that is not streamed; the plan may allow fewer."""


class CompletionsBody(_Generation, kw_only=True):
    """Body of `POST /v1/completions` in OpenAI's format. Other fields go to the engine unchanged.

    The engine gets `max_completion_tokens` as `max_tokens`, which it reads.
    """

    max_tokens: TokensOrNone | None = None
    """Maximum tokens of one choice; 0, only with `echo`: the prompt alone."""
    max_completion_tokens: TokensOrNone | None = None
    """Maximum tokens of one choice; goes before `max_tokens`."""
    prompt: _Prompt
    """A string, or a list of strings, of token ids, or of lists of token ids. Choice `i` of prompt `p` has the index
    `p * n + i`; all prompts have at most 128 choices together."""
    best_of: int | None = None
    """Must be absent or equal to `n`: the platform does not choose between choices."""


class EmbeddingsBody(Common, kw_only=True):
    """Body of `POST /v1/embeddings` in OpenAI's format. Other fields go to the engine unchanged."""

    input: _Input
    """A string, or a list of strings, of token ids, or of lists of token ids."""
    encoding_format: Literal["float", "base64"] | None = None
    dimensions: Annotated[int, Meta(ge=1, le=DIMENSIONS_MAX)] | None = None
    stream: _NotStreamed = None
    """The answer is one document; `true` is refused."""


class ClassifyBody(Common, kw_only=True):
    """Body of `POST /v1/classify` in vLLM's format. Other fields go to the engine unchanged."""

    input: _Input | None = None
    """A string, or a list of strings, of token ids, or of lists of token ids. Required without `messages`."""
    messages: Annotated[list[dict[str, Any]], Meta(min_length=1, max_length=MESSAGES_MAX)] | None = None
    """One chat, which the model's template joins to one input; instead of `input`."""
    stream: _NotStreamed = None
    """The answer is one document; `true` is refused."""


class ScoreBody(Common, kw_only=True):
    """Body of `POST /v1/score` in vLLM's format. Other fields go to the engine unchanged.

    Both sides are required: `queries` and `documents`, or `queries` and `items`, `data_1` and `data_2`, `text_1` and
    `text_2`. One text on the left is scored with each on the right; else text by text.
    """

    queries: _Side | None = None
    """A text, or a list of texts. A text may be an object with `content` in parts, for models that see images."""
    documents: _Side | None = None
    items: _Side | None = None
    """Another name of `documents`."""
    data_1: _Side | None = None
    data_2: _Side | None = None
    text_1: _Side | None = None
    text_2: _Side | None = None
    max_tokens_per_query: Annotated[int, Meta(ge=0, le=_INT_MAX)] | None = None
    """Longer texts on the left are cut to this length; 0: they are not cut."""
    max_tokens_per_doc: Annotated[int, Meta(ge=0, le=_INT_MAX)] | None = None
    """Longer texts on the right are cut to this length; 0: they are not cut."""
    stream: _NotStreamed = None
    """The answer is one document; `true` is refused."""


class RerankDocument(msgspec.Struct):
    text: str


class RerankBody(Common, kw_only=True):
    """Body of `POST /v1/rerank` in the format of Cohere, Jina and vLLM. Other fields go to the engine unchanged."""

    query: str
    documents: Annotated[list[str | RerankDocument], Meta(min_length=1, max_length=BATCH_MAX)]
    top_n: Annotated[int, Meta(ge=0, le=_INT_MAX)] | None = None
    """Number of best documents in the answer; 0: all."""
    stream: _NotStreamed = None
    """The answer is one document; `true` is refused."""
