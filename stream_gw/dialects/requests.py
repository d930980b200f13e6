"""Parses the body of a create request, and derives the body for the engine."""

from __future__ import annotations

import functools
from typing import Any, Literal

import msgspec
from msgspec import UnsetType

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.json_bounds import check_depth
from stream_fabric.limits import CHOICES_MAX, MESSAGES_MAX, REPAIRS_MAX, USER_CHARS_MAX
from stream_gw.dialects.prompt import chat_prompt, check_answerable, check_carried, check_controls, check_prompts
from stream_gw.dialects.sessions import cache_key_of, conversation_of, grace_of

Generated = Literal["chat", "completions"]
Kind = Literal[Generated, "embeddings", "rerank", "classify", "score", "tokenize"]

OWN_FIELDS = (
    "session_id", "background", "on_disconnect", "stream", "stream_options", "service_tier", "deadline_s", "cache_salt",
    "fallback", "repair",
)  # fmt: skip
TIERS = {"priority": 0, "fast": 0, "interactive": 0, "auto": 1, "default": 1, "scale": 1, "standard": 1, "flex": 2,
         "batch": 2, "free": 3}  # fmt: skip
"""Index into ``placement.TIERS`` by OpenAI's and our own names."""
DEADLINE_S_MAX = 24 * 3600.0
_ENGINE_INTEGERS = (
    "min_tokens", "seed", "top_k", "top_logprobs", "prompt_logprobs", "priority", "truncate_prompt_tokens",
)  # fmt: skip
_INTEGERS = {
    *_ENGINE_INTEGERS, "n", "best_of", "max_tokens", "max_completion_tokens", "dimensions", "top_n",
    "max_tokens_per_query", "max_tokens_per_doc",
}  # fmt: skip
_ENGINE_TYPES: dict[str, Any] = {
    **dict.fromkeys(_ENGINE_INTEGERS, int | None),
    **dict.fromkeys(("min_p", "repetition_penalty", "length_penalty"), float | None),
    **dict.fromkeys(
        ("ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "include_stop_str_in_output", "echo",
         "add_generation_prompt", "continue_final_message", "add_special_tokens", "parallel_tool_calls"),
        bool | None,
    ),
    **dict.fromkeys(("stop_token_ids", "allowed_token_ids"), list[int] | None),
    **dict.fromkeys(("bad_words", "modalities"), list[str] | None),
    "logit_bias": dict[str, float] | None,
    "logprobs": bool | int | None,
    **dict.fromkeys(("chat_template_kwargs", "response_format"), dict[str, msgspec.Raw] | None),
    "tools": list[dict[str, msgspec.Raw]] | None,
    "tool_choice": str | dict[str, msgspec.Raw] | None,
    "reasoning_effort": str | None,
}  # fmt: skip
"""Types of fields that only the engine reads. A wrong one is told before the request waits for a replica."""
_EXACT_MAX = 1 << 53
"""Integers that a JSON number with a fraction has exactly are below this."""
STOPS_MAX = 16
_FIELDS_MAX = 1000
_TOKENS_MAX = 1 << 31
_SCHEMAS = ("response_format", "structured_outputs", "guided_json")
"""Fields that ask for a reply of a form."""
MODEL_CHARS_MAX = 256


class CreateRequest(msgspec.Struct, frozen=True):
    """A valid create request."""

    kind: Kind
    model: str
    stream: bool
    n: int
    """Number of choices of the answer: the body's ``n`` for each prompt."""
    include_usage: bool
    logprobs: bool
    user: str | None
    session_id: str | None
    background: bool
    on_disconnect_s: float | UnsetType | None
    """Seconds from the last reader's leaving to cancellation; None: never cancelled; UNSET: not in the request."""
    body: msgspec.Raw
    """Body for the engine: the client's, without the fields that only the gateway reads."""
    tier: int = 1
    """Index into ``placement.TIERS``."""
    fallback: bool = True
    """True: a smaller model may answer while the pool of the model is saturated, if the plan allows it."""
    deadline_s: float | None = None
    """Seconds after which the stream fails, whether queued or running."""
    max_tokens: int | None = None
    """Maximum tokens of one choice."""
    prompt: tuple[bytes, ...] = ()
    """The parts that determine the KV prefix, in one form for all dialects: tools and each message, or the prompt."""
    cache_salt: str | None = None
    """The client's salt of the KV cache: requests of different salts share none. The engine gets a hash of it."""
    cache_key: str | None = None
    """OpenAI's ``prompt_cache_key``: requests with the same one go to the same replica, but are no session."""
    structured: bool = False
    """True: the body may ask for a reply of a form."""
    repairs: int = 0
    """Further replies to make while they do not fit the JSON schema; the tenant's plan may allow fewer."""
    input_bytes: int = 0
    """Bytes of other input, which shares no KV prefix with another request."""
    dialect: str = ""
    """Dialect of the request; empty: OpenAI's of the kind."""
    message_id: str = ""
    """Id of the client's message that the answer continues; empty: the answer begins a message."""
    settings: msgspec.Raw | None = None
    """Settings that the dialect repeats in its answers."""
    asked: msgspec.Raw | None = None
    """JSON that a repeat by idempotency key sends again, where the body may differ by then; None: the body."""
    compaction: str = ""
    """Sealed content of the compaction that the answer begins with; empty: it begins with none."""

    @property
    def own_dialect(self) -> str:
        """Dialect of the request and, without another wish, of its answer."""
        return self.dialect or f"openai.{self.kind}"

    @property
    def affinity(self) -> str | None:
        """Name under which requests go to the replica that holds their KV cache; None: they have none in common."""
        return self.session_id or self.cache_key

    @property
    def prompt_bytes(self) -> int:
        """Size of the prompt and of all other input, in bytes."""
        return sum(map(len, self.prompt)) + self.input_bytes


class _Name:
    """A field's name. The type is our own, so that the decoder calls our hook for each name."""

    __slots__ = ("text",)

    def __init__(self, text: str) -> None:
        self.text = text


class _Message(msgspec.Struct):
    role: str
    content: str | list[dict[str, Any]] | None = None


class _StreamOptions(msgspec.Struct):
    include_usage: bool | None = None


def parse_create(body: bytes, kind: Generated) -> CreateRequest:
    """Parse and check a create body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body, "messages" if kind == "chat" else "prompt")
    if kind == "completions":
        _use_one_limit(fields)
    request = read_common(fields, kind)
    n = request.n
    if kind == "chat":
        messages = field(fields, "messages", list[dict[str, Any]], required=True)
        if not messages:
            raise BadRequest("messages must have at least one message", param="messages")
        try:
            msgspec.convert(messages, list[_Message])
        except msgspec.ValidationError as error:
            raise _not_valid("messages", fields["messages"], error) from error
        check_answerable(fields)
        prompt = chat_prompt(messages, field(fields, "tools", Any))
    else:
        _check_best_of(fields, n)
        n *= check_prompts(field(fields, "prompt", str | list[str | int | list[int]], required=True), n)
        prompt = (bytes(fields["prompt"]),)
    options = field(fields, "stream_options", _StreamOptions | None)
    return msgspec.structs.replace(
        request,
        n=n,
        include_usage=bool(options and options.include_usage),
        logprobs=bytes(fields.get("logprobs", b"null")) not in (b"null", b"false"),
        max_tokens=field(fields, "max_completion_tokens", int | None) or field(fields, "max_tokens", int | None),
        prompt=prompt,
        repairs=read_repairs(fields, request, n),
    )


def read_repairs(fields: dict[str, msgspec.Raw], request: CreateRequest, n: int = 1) -> int:
    """Read ``repair`` of a body in OpenAI's format. Raises BadRequest, or Unsupported where nothing can be repaired."""
    repairs = bounded(fields, "repair", 0, REPAIRS_MAX) or 0
    if not repairs:
        return 0
    if request.stream:
        why = "a streamed reply cannot be taken back; send stream false"
    elif request.kind != "chat" or n != 1:
        why = "only a chat with one choice is repaired"
    elif not any(_asks_for_json(fields.get(name)) for name in _SCHEMAS):
        why = "the request asks for no JSON; send response_format"
    else:
        return repairs
    raise Unsupported(f"repair is not possible for this request: {why}", param="repair")


def _asks_for_json(raw: msgspec.Raw | None) -> bool:
    value = None if raw is None else msgspec.json.decode(raw)
    return bool(value) and not (isinstance(value, dict) and value.get("type") == "text")


def read_common(fields: dict[str, msgspec.Raw], kind: Kind) -> CreateRequest:
    """Read the fields common to all kinds. Raises BadRequest."""
    for name in fields.keys() & _ENGINE_TYPES.keys():
        field(fields, name, _ENGINE_TYPES[name])
    check_controls(fields)
    if kind in ("chat", "completions"):
        check_carried(fields)
        _check_sampling(fields, _least_tokens(fields, kind))
    model = field(fields, "model", str, required=True)
    if not 0 < len(model) <= MODEL_CHARS_MAX:
        raise BadRequest(f"model must have 1 to {MODEL_CHARS_MAX} characters", param="model")
    session = field(fields, "session_id", str | None)
    session = conversation_of(fields) if session is None else session
    user = field(fields, "user", str | None)
    for name, value, least in (("session_id", session, 1), ("user", user, 0)):
        if value is not None and not least <= len(value) <= USER_CHARS_MAX:
            raise BadRequest(f"{name} must have {least} to {USER_CHARS_MAX} characters, got {len(value)}", param=name)
    tier = field(fields, "service_tier", str | None) or "default"
    if tier not in TIERS:
        raise BadRequest(
            f"service_tier must be one of {', '.join(TIERS)}; got {_shortened(tier, 60)!r}", param="service_tier"
        )
    deadline_s = field(fields, "deadline_s", float | None)
    if deadline_s is not None and not 0 < deadline_s <= DEADLINE_S_MAX:
        raise BadRequest(
            f"deadline_s must be above 0 and at most {DEADLINE_S_MAX:g}, got {deadline_s:g}", param="deadline_s"
        )
    return CreateRequest(
        kind=kind,
        model=model,
        stream=field(fields, "stream", bool | None) or False,
        n=bounded(fields, "n", 1, CHOICES_MAX) or 1,
        include_usage=False,
        logprobs=False,
        user=user or None,
        session_id=session,
        cache_key=cache_key_of(fields),
        background=field(fields, "background", bool | None) or False,
        on_disconnect_s=grace_of(field(fields, "on_disconnect", str | None)),
        body=_engine_body(fields),
        tier=TIERS[tier],
        fallback=field(fields, "fallback", bool | None) is not False,
        deadline_s=deadline_s,
        cache_salt=field(fields, "cache_salt", str | None),
        structured=not fields.keys().isdisjoint(_SCHEMAS),
    )


def check_one_choice(request: CreateRequest, answer: str) -> None:
    """Check a request of a dialect whose answers have one choice. Raises Unsupported."""
    if request.n != 1:
        raise Unsupported(f"n must be 1: {answer} has one choice", param="n")


def read_fields(body: bytes, later: str = "") -> dict[str, msgspec.Raw]:
    """Return the body's fields as the client wrote them. Raises BadRequest when any part of the body is not JSON.

    ``later``: a field that the caller decodes, as far as it is not JSON itself.
    """
    commas = check_depth(body)
    seen: set[str] = set()

    def name_once(_: type, text: str) -> _Name:
        if text in seen:
            raise BadRequest(f"{_shortened(text, 60)} occurs more than once", param=_shortened(text, 60))
        if len(seen) == _FIELDS_MAX:
            raise BadRequest(f"the body has more than {_FIELDS_MAX} fields, the limit")
        seen.add(text)
        return _Name(text)

    try:
        named = msgspec.json.decode(body, type=dict[_Name, msgspec.Raw], dec_hook=name_once)
        fields = {name.text: raw for name, raw in named.items()}
        if commas >= MESSAGES_MAX:  # each message but the last is followed by one
            _check_message_count(fields)  # before each message becomes an object
        for name, raw in fields.items():
            if name != later:  # Raw skips values without checking their strings and numbers
                msgspec.json.decode(raw)
        _write_integers(fields)
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be UTF-8: {_shortened(str(error))}") from error
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body must be a JSON object: {_shortened(str(error))}") from error
    return fields


def _check_message_count(fields: dict[str, msgspec.Raw]) -> None:
    raw = bytes(fields.get("messages", b""))
    count = len(msgspec.json.decode(raw, type=list[msgspec.Raw])) if raw[:1] == b"[" else 0
    if count > MESSAGES_MAX:
        raise BadRequest(f"messages holds {count} messages; the limit is {MESSAGES_MAX}", param="messages")


def _use_one_limit(fields: dict[str, msgspec.Raw]) -> None:
    """Write ``max_completion_tokens`` as ``max_tokens``, the only limit that engines read of a completion.

    Raises BadRequest.
    """
    limit = bounded(fields, "max_completion_tokens", _least_tokens(fields, "completions"), _TOKENS_MAX)
    fields.pop("max_completion_tokens", None)
    if limit is not None:
        fields["max_tokens"] = msgspec.Raw(b"%d" % limit)


def _check_best_of(fields: dict[str, msgspec.Raw], n: int) -> None:
    """Refuse ``best_of`` unless it changes nothing. Raises Unsupported."""
    best_of = field(fields, "best_of", int | None)
    if best_of not in (None, n):
        raise Unsupported(
            f"best_of must be absent or equal to n, which is {n}; got {_shortened(str(best_of))}. Ask for that many "
            "choices with n and logprobs, and choose the best yourself",
            param="best_of",
        )


def _least_tokens(fields: dict[str, msgspec.Raw], kind: Kind) -> int:
    """Return the least ``max_tokens``: 0 for a completion that only echoes its prompt, with its logprobs."""
    return 0 if kind == "completions" and field(fields, "echo", bool | None) else 1


def _check_sampling(fields: dict[str, msgspec.Raw], least_tokens: int) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        bounded(fields, name, least_tokens, _TOKENS_MAX)
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
                            ("frequency_penalty", -2.0, 2.0)):  # fmt: skip
        value = field(fields, name, float | None)
        if value is not None and not low <= value <= high:
            raise BadRequest(f"{name} must be {low:g} to {high:g}, got {value:g}", param=name)
    stop = field(fields, "stop", str | list[str] | None)
    if isinstance(stop, list) and len(stop) > STOPS_MAX:
        raise BadRequest(f"stop must have at most {STOPS_MAX} strings, got {len(stop)}", param="stop")


def bounded(fields: dict[str, msgspec.Raw], name: str, low: int, high: int) -> int | None:
    """Read an optional integer within ``low`` to ``high``. Raises BadRequest."""
    value: int | None = field(fields, name, int | None)
    if value is not None and not low <= value <= high:
        raise BadRequest(f"{name} must be {low} to {high}, got {_shortened(str(value))}", param=name)
    return value


def _write_integers(fields: dict[str, msgspec.Raw]) -> None:
    """Write ``18.0`` as ``18``: OpenAI and vLLM take both, and the agent and the simulator read integers."""
    for name in fields.keys() & _INTEGERS:
        raw = bytes(fields[name])
        if raw.isdigit():
            continue
        value: object = msgspec.json.decode(raw)
        if isinstance(value, float) and value.is_integer() and abs(value) < _EXACT_MAX:
            fields[name] = msgspec.Raw(b"%d" % int(value))


def field(fields: dict[str, msgspec.Raw], name: str, type_: Any, *, required: bool = False) -> Any:
    """Read a field as ``type_``; None when it is absent. Raises BadRequest."""
    raw = fields.get(name)
    if raw is None:
        if required:
            raise BadRequest(f"{name} is missing", param=name)
        return None
    try:
        return _decoder(type_).decode(raw)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        raise _not_valid(name, raw, error) from error


def _not_valid(name: str, raw: msgspec.Raw, error: Exception) -> BadRequest:
    value = _shortened(bytes(raw)[:400].decode("utf-8", "replace"), 60)
    return BadRequest(f"{name} is not valid: {_shortened(str(error))}; got {value}", param=name)


@functools.cache  # msgspec reads a union or a list anew for each value: 2.3 µs instead of 0.8
def _decoder(type_: Any) -> msgspec.json.Decoder[Any]:
    return msgspec.json.Decoder(type_)


def _engine_body(fields: dict[str, msgspec.Raw]) -> msgspec.Raw:
    """Join the client's fields unchanged, so that numbers and strings reach the engine as they were written."""
    kept = [msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items() if name not in OWN_FIELDS]
    return msgspec.Raw(b"{" + b",".join(kept) + b"}")


def _shortened(text: str, chars_max: int = 200) -> str:
    return text if len(text) <= chars_max else text[:chars_max] + "…"
