"""Parses the body of a create request, and derives the body for the engine."""

from __future__ import annotations

import hashlib
from itertools import accumulate
from typing import Any, Literal

import msgspec
from msgspec import UNSET, UnsetType

from stream_fabric.errors import BadRequest, TooDeep, Unsupported
from stream_fabric.limits import CHOICES_MAX, JSON_CONTAINERS_MAX, JSON_DEPTH_MAX, MESSAGES_MAX, USER_CHARS_MAX

Generated = Literal["chat", "completions"]
Kind = Literal[Generated, "embeddings", "rerank"]

OWN_FIELDS = (
    "session_id", "background", "on_disconnect", "stream", "stream_options", "service_tier", "deadline_s", "cache_salt",
)  # fmt: skip
TIERS = {"priority": 0, "interactive": 0, "auto": 1, "default": 1, "standard": 1, "flex": 2, "batch": 2}
"""Index into ``placement.TIERS`` by OpenAI's and our own names."""
DEADLINE_S_MAX = 24 * 3600.0
_NO_STRUCTURE = bytes(b for b in range(256) if b not in b'[]{}"')
_STEPS = bytes.maketrans(b"[{]}", b"\x01\x01\xff\xff")
_INTEGERS = (
    "n", "max_tokens", "max_completion_tokens", "min_tokens", "seed", "top_k", "top_logprobs", "dimensions", "top_n",
)  # fmt: skip
_EXACT_MAX = 1 << 53
"""Integers that a JSON number with a fraction has exactly are below this."""
STOPS_MAX = 16
_FIELDS_MAX = 1000
MODEL_CHARS_MAX = 256
GRACE_S_MAX = 3600.0


class CreateRequest(msgspec.Struct, frozen=True):
    """A valid create request."""

    kind: Kind
    model: str
    stream: bool
    n: int
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
    deadline_s: float | None = None
    """Seconds after which the stream fails, whether queued or running."""
    max_tokens: int | None = None
    """Maximum tokens of one choice."""
    prompt: tuple[bytes, ...] = ()
    """The parts that determine the KV prefix, as the client wrote them: tools and each message, or the prompt."""
    cache_salt: str | None = None
    """The client's salt of the KV cache: requests of different salts share none. The engine gets a hash of it."""
    input_bytes: int = 0
    """Bytes of other input, which shares no KV prefix with another request."""

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


def check_depth(body: bytes) -> None:
    """Check the nesting of the JSON. Raises TooDeep beyond the limit. Bodies with few brackets cost only a count."""
    if body.count(b"[") + body.count(b"{") <= JSON_DEPTH_MAX:
        return
    # Without escapes every quote begins or ends a string, so every second piece between quotes is outside of strings.
    # Each step is linear in time and memory for any body. A body that is not JSON fails later, in the parser.
    unescaped = body.replace(b"\\\\", b"").replace(b'\\"', b"")
    steps = b"".join(unescaped.translate(None, _NO_STRUCTURE).split(b'"')[::2]).translate(_STEPS)
    if len(steps) > 2 * JSON_CONTAINERS_MAX:
        raise TooDeep(f"the JSON has more than {JSON_CONTAINERS_MAX} arrays and objects, the limit")
    if max(accumulate(memoryview(steps).cast("b")), default=0) > JSON_DEPTH_MAX:
        raise TooDeep(f"the JSON is nested deeper than {JSON_DEPTH_MAX} levels, the limit")


def parse_create(body: bytes, kind: Generated) -> CreateRequest:
    """Parse and check a create body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, kind)
    if kind == "chat":
        messages = field(fields, "messages", list[_Message], required=True)
        if not messages:
            raise BadRequest("messages must have at least one message", param="messages")
    else:
        _check_prompt(field(fields, "prompt", str | list[str | int | list[int]], required=True))
    _check_sampling(fields)
    options = field(fields, "stream_options", _StreamOptions | None)
    return msgspec.structs.replace(
        request,
        n=bounded(fields, "n", 1, CHOICES_MAX) or 1,
        include_usage=bool(options and options.include_usage),
        logprobs=bytes(fields.get("logprobs", b"null")) not in (b"null", b"false"),
        max_tokens=field(fields, "max_completion_tokens", int | None) or field(fields, "max_tokens", int | None),
        prompt=_prompt(fields, kind),
    )


def read_common(fields: dict[str, msgspec.Raw], kind: Kind) -> CreateRequest:
    """Read the fields common to all kinds. Raises BadRequest."""
    _write_integers(fields)
    model = field(fields, "model", str, required=True)
    if not 0 < len(model) <= MODEL_CHARS_MAX:
        raise BadRequest(f"model must have 1 to {MODEL_CHARS_MAX} characters", param="model")
    session = field(fields, "session_id", str | None)
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
        n=1,
        include_usage=False,
        logprobs=False,
        user=user or None,
        session_id=session,
        background=field(fields, "background", bool | None) or False,
        on_disconnect_s=_parse_on_disconnect(field(fields, "on_disconnect", str | None)),
        body=_engine_body(fields),
        tier=TIERS[tier],
        deadline_s=deadline_s,
        cache_salt=field(fields, "cache_salt", str | None),
    )


def _prompt(fields: dict[str, msgspec.Raw], kind: Generated) -> tuple[bytes, ...]:
    """Return the parts of the prompt. The next request of a conversation begins with the same parts."""
    if kind == "completions":
        return (bytes(fields["prompt"]),)
    messages = msgspec.json.decode(fields["messages"], type=list[msgspec.Raw])
    tools = [bytes(fields["tools"])] if "tools" in fields else []
    return (*tools, *map(bytes, messages))


def read_fields(body: bytes) -> dict[str, msgspec.Raw]:
    """Return the body's fields as the client wrote them. Raises BadRequest when any part of the body is not JSON."""
    check_depth(body)
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
        _check_message_count(fields)  # before each message becomes an object
        msgspec.json.decode(body)  # Raw skips values without checking their strings and numbers
    except UnicodeDecodeError as error:
        raise BadRequest(f"the body must be UTF-8: {_shortened(str(error))}") from error
    except msgspec.MsgspecError as error:
        raise BadRequest(f"the body must be a JSON object: {_shortened(str(error))}") from error
    return fields


def _check_message_count(fields: dict[str, msgspec.Raw]) -> None:
    raw = bytes(fields.get("messages", b""))
    # Each message but the last is followed by a comma
    if raw[:1] != b"[" or raw.count(b",") < MESSAGES_MAX:
        return
    count = len(msgspec.json.decode(raw, type=list[msgspec.Raw]))
    if count > MESSAGES_MAX:
        raise BadRequest(f"messages holds {count} messages; the limit is {MESSAGES_MAX}", param="messages")


def _check_prompt(prompt: str | list[Any]) -> None:
    if isinstance(prompt, str):
        return
    kinds = {type(part) for part in prompt}
    if len(kinds) != 1 or [] in prompt:
        raise BadRequest(
            "prompt must be a string, or a list of one string, of token ids or of one list of token ids; got "
            + (f"a list of {', '.join(sorted(kind.__name__ for kind in kinds))}" if prompt else "an empty list"),
            param="prompt",
        )
    if kinds != {int} and len(prompt) > 1:
        raise Unsupported(f"prompt must be one prompt, got {len(prompt)}; send one request per prompt", param="prompt")


def _check_sampling(fields: dict[str, msgspec.Raw]) -> None:
    for name in ("max_tokens", "max_completion_tokens"):
        bounded(fields, name, 1, 1 << 31)
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
    for name in _INTEGERS:
        raw = bytes(fields.get(name, b""))
        if not raw or raw.isdigit():
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
        return msgspec.json.decode(raw, type=type_)
    except (msgspec.MsgspecError, UnicodeDecodeError, RecursionError) as error:
        value = _shortened(bytes(raw).decode("utf-8", "replace"), 60)
        raise BadRequest(f"{name} is not valid: {_shortened(str(error))}; got {value}", param=name) from error


def _parse_on_disconnect(text: str | None) -> float | UnsetType | None:
    """Return the grace period in seconds; None: never cancel; UNSET: the field is absent. Raises BadRequest."""
    if text is None:
        return UNSET
    if text == "continue":
        return None
    name, _, seconds = text.partition("=")
    try:
        grace_s = float(seconds)
    except ValueError:
        grace_s = -1.0
    if name != "cancel_after" or not 0 <= grace_s <= GRACE_S_MAX:
        raise BadRequest(
            f'on_disconnect must be "continue" or "cancel_after=<0 to {GRACE_S_MAX:g} seconds>", '
            f"got {_shortened(text, 60)!r}",
            param="on_disconnect",
        )
    return grace_s


def _engine_body(fields: dict[str, msgspec.Raw]) -> msgspec.Raw:
    """Join the client's fields unchanged, so that numbers and strings reach the engine as they were written."""
    kept = [msgspec.json.encode(name) + b":" + bytes(raw) for name, raw in fields.items() if name not in OWN_FIELDS]
    return msgspec.Raw(b"{" + b",".join(kept) + b"}")


def fingerprint(body: msgspec.Raw) -> str:
    """Return a digest of a body that is independent of key order and whitespace."""
    canonical = msgspec.json.encode(msgspec.json.decode(body), order="sorted")
    return hashlib.sha256(canonical).hexdigest()


def _shortened(text: str, chars_max: int = 200) -> str:
    return text if len(text) <= chars_max else text[:chars_max] + "…"
