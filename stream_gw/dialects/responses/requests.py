"""Parses ``POST /v1/responses``, and derives the engine's body: a chat in OpenAI's format."""

from __future__ import annotations

import hashlib
from typing import Any

import msgspec
from msgspec import Raw

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import METADATA_PAIRS_MAX, USER_CHARS_MAX
from stream_gw.dialects.prompt import chat_prompt
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.responses.resource import CARRIES_THOUGHTS
from stream_gw.dialects.responses.tools import chat_tool_choice, chat_tools, own_tools
from stream_gw.dialects.responses.translate import Json, chat_messages, input_items
from stream_gw.dialects.whole import count_request

OPENAI, OPEN = "openai.responses", "open.responses"
COUNT = "openai.input_tokens"
TOP_LOGPROBS_MAX = 20
_TOKENS_MAX = 1 << 31
_TRANSLATED = (
    "background", "context_management", "conversation", "include", "input", "instructions", "max_output_tokens",
    "max_tool_calls", "metadata", "previous_response_id", "reasoning", "safety_identifier", "store", "text",
    "tool_choice", "tools", "top_logprobs", "truncation",
)  # fmt: skip
_IGNORED = (
    "access_programs", "background_options", "client_metadata", "moderation", "prompt_cache_options",
    "prompt_cache_retention", "stream_options",
)  # fmt: skip
"""Fields of OpenAI's own service: they change neither what is asked nor what is answered."""
_REFUSED = {
    "messages": "send input",
    "n": "ask once for each response",
    "response_format": "send text.format",
    "prompt": "prompts are not stored here, send instructions and input",
    "image": "no images are made here",
}
"""Fields that this API does not have, but the engine's has, and those that need what is not here; with what to do."""
_TOLD_TIERS = {"auto": "default", "scale": "default", "fast": "priority"}
"""Tiers as a response tells them, as in OpenAI's API, where the request may name them otherwise."""
_CALLERS = ("model", "user", "session_id", "service_tier")
"""Fields that say for whom a request is made, and where it waits."""
_WANTS_LOGPROBS = "message.output_text.logprobs"
_WANTS_THOUGHTS = "reasoning.encrypted_content"
_encode = msgspec.json.encode


class _Reasoning(msgspec.Struct):
    effort: str | None = None
    summary: str | None = None


class Compacting(msgspec.Struct, frozen=True):
    """The wish that a conversation be compacted before the answer."""

    threshold: int | None
    """Tokens of the prompt from which on it is; None: the platform chooses."""


class Asked(msgspec.Struct, frozen=True):
    """A request whose fields are valid, before its conversation is known."""

    fields: dict[str, Raw]
    items: list[Json]
    previous_response_id: str | None
    conversation: str | None
    store: bool
    background: bool
    stream: bool
    metadata: dict[str, str]
    instructions: str | None
    truncates: bool = False
    """True: items are left out where the whole exceeds the model's context."""
    compacting: Compacting | None = None

    def request(self, history: list[Json], dialect: str = OPENAI, *, left_out: int = 0) -> CreateRequest:
        """Return the request to create a stream. ``history``: the items of the conversation before this input.
        ``left_out``: number of items that are no longer in it.

        Raises BadRequest that names the field, its value and what is allowed.
        """
        made, messages, settings = _chat(self, history)
        if left_out:
            settings["truncated_items"] = left_out
        return msgspec.structs.replace(
            read_common(made, "chat"),
            max_tokens=settings.get("max_output_tokens"),
            logprobs="logprobs" in made,
            prompt=chat_prompt(messages, field(made, "tools", Any)),
            dialect=dialect,
            settings=Raw(_encode(settings)),
            asked=None if self.conversation is None else self.sent,  # the first answer makes it longer
        )

    @property
    def sent(self) -> Raw:
        """The client's fields."""
        return Raw(_encode(self.fields))

    def unread(self) -> CreateRequest:
        """Return the request without prompt and settings, for checks before its conversation is read.

        Raises BadRequest.
        """
        made = {name: raw for name, raw in self.fields.items() if name in _CALLERS}
        _add_callers(self, made, {})
        return read_common(made, "chat")

    def count(self, history: list[Json]) -> CreateRequest:
        """Return the request that counts the tokens of the prompt. Raises like ``request``."""
        return msgspec.structs.replace(count_request(_chat(self, history)[0]), dialect=COUNT)


def parse_responses(body: bytes, dialect: str = OPENAI) -> CreateRequest:
    """Parse and check a create body that stands alone. Raises BadRequest; Unsupported if it continues a response."""
    asked = read_asked(body)
    needs = {
        "previous_response_id": asked.previous_response_id,
        "conversation": asked.conversation,
        "truncation": asked.truncates or None,
        "context_management": asked.compacting,
    }
    for name, value in needs.items():
        if value is not None:
            raise Unsupported(f"{name} works with POST /v1/responses and its WebSocket alone", param=name)
    return asked.request([], dialect)


def read_asked(body: bytes) -> Asked:
    """Read the fields of a create body that the gateway itself needs. Raises BadRequest and Unsupported."""
    return asked_of(read_fields(body, "input"))


def asked_of(fields: dict[str, Raw]) -> Asked:
    """Do the same for a body whose fields are read."""
    for name, instead in _REFUSED.items():
        if field(fields, name, Any) is not None:
            raise Unsupported(f"{name} is not supported in a request for a response: {instead}", param=name)
    previous = field(fields, "previous_response_id", str | None)
    conversation = _conversation(field(fields, "conversation", Any))
    if previous is not None and conversation is not None:
        raise BadRequest("send previous_response_id or conversation, not both", param="previous_response_id")
    store = field(fields, "store", bool | None)
    background = field(fields, "background", bool | None) or False
    if background and store is False:
        raise BadRequest("a background response is stored; leave store out or send true", param="store")
    return Asked(
        fields,
        input_items(field(fields, "input", Any, required=previous is None and conversation is None) or []),
        previous,
        conversation,
        store is not False,
        background,
        field(fields, "stream", bool | None) or False,
        _metadata(field(fields, "metadata", Any)),
        field(fields, "instructions", str | None),
        _truncates(field(fields, "truncation", str | None)),
        _compacting(field(fields, "context_management", Any)),
    )


def _truncates(value: str | None) -> bool:
    if value not in (None, "auto", "disabled"):
        raise BadRequest("truncation must be auto or disabled", param="truncation")
    return value == "auto"


def _compacting(value: Any) -> Compacting | None:
    match value:
        case None | []:
            return None
        case [{"type": "compaction", **more}]:
            threshold = more.get("compact_threshold")
            if threshold is None or (type(threshold) is int and 0 < threshold <= _TOKENS_MAX):
                return Compacting(threshold)
    raise BadRequest(
        'context_management must be one object with type "compaction" and, if you like, a compact_threshold in tokens',
        param="context_management",
    )


def _conversation(value: Any) -> str | None:
    match value:
        case None | str():
            return value
        case {"id": str(name)}:
            return name
    raise BadRequest("conversation must be an id, or an object with an id", param="conversation")


def _metadata(value: Any) -> dict[str, str]:
    if value is None:
        return {}
    pairs = value.items() if isinstance(value, dict) else ()
    if (
        not isinstance(value, dict)
        or len(value) > METADATA_PAIRS_MAX
        or not all(isinstance(text, str) for _, text in pairs)
    ):
        raise BadRequest(f"metadata must be an object of at most {METADATA_PAIRS_MAX} strings", param="metadata")
    return value


def _chat(asked: Asked, history: list[Json]) -> tuple[dict[str, Raw], list[Json], Json]:
    """Return the fields of the body in OpenAI's chat format, its messages, and what the response repeats."""
    fields = asked.fields
    skipped = (*_TRANSLATED, *_IGNORED)
    made = {name: raw for name, raw in fields.items() if name not in skipped}
    messages = chat_messages(asked.instructions, [*history, *asked.items])
    made["messages"] = Raw(_encode(messages))
    settings: Json = {
        "instructions": asked.instructions,
        "previous_response_id": asked.previous_response_id,
        "store": asked.store,
        "background": asked.background,
        "metadata": asked.metadata,
    }
    if asked.truncates:
        settings["truncation"] = "auto"
    if asked.background:
        made["background"] = Raw(b"true")
    if asked.conversation is not None:
        settings["conversation"] = {"id": asked.conversation}
    _add_tools(fields, made, settings)
    _add_text(fields, made, settings)
    _add_sampling(fields, made, settings)
    _add_reasoning(fields, made, settings)
    _add_callers(asked, made, settings)
    return made, messages, settings


def _add_tools(fields: dict[str, Raw], made: dict[str, Raw], settings: Json) -> None:
    tools = own_tools(field(fields, "tools", Any))
    asked = field(fields, "tool_choice", Any)
    choice, allowed = chat_tool_choice(asked, chat_tools(tools))
    if tools:
        settings["tools"] = tools
    if asked is not None:
        settings["tool_choice"] = asked
    if allowed:
        made["tools"] = Raw(_encode(allowed))
        if choice is not None:
            made["tool_choice"] = Raw(_encode(choice))
    parallel = field(fields, "parallel_tool_calls", bool | None)
    if parallel is not None:
        settings["parallel_tool_calls"] = parallel
    if parallel is None or not allowed:
        made.pop("parallel_tool_calls", None)
    calls = bounded(fields, "max_tool_calls", 1, _TOKENS_MAX)
    if calls is not None:
        settings["max_tool_calls"] = calls


def _add_text(fields: dict[str, Raw], made: dict[str, Raw], settings: Json) -> None:
    text = field(fields, "text", dict[str, Any] | None)
    if text is None:
        return
    form = text.get("format") or {"type": "text"}
    kept: Json
    match form:
        case {"type": "text"}:
            kept = {"type": "text"}
        case {"type": "json_object"}:
            kept = {"type": "json_object"}
            made["response_format"] = Raw(_encode(kept))
        case {"type": "json_schema", "name": str(name), "schema": dict(schema)}:
            about, strict = form.get("description"), form.get("strict")
            kept = {"type": "json_schema", "name": name, "description": about, "schema": schema, "strict": strict}
            named = {key: value for key, value in kept.items() if key != "type" and value is not None}
            made["response_format"] = Raw(_encode({"type": "json_schema", "json_schema": named}))
        case _:
            raise BadRequest(
                "text.format must be of type text, json_object, or json_schema with a name and a schema", param="text"
            )
    verbosity = text.get("verbosity")
    if verbosity not in (None, "low", "medium", "high"):
        raise BadRequest("text.verbosity must be low, medium or high", param="text")
    settings["text"] = {"format": kept} | ({} if verbosity is None else {"verbosity": verbosity})


def _add_sampling(fields: dict[str, Raw], made: dict[str, Raw], settings: Json) -> None:
    for name, low, high in (("temperature", 0.0, 2.0), ("top_p", 0.0, 1.0), ("presence_penalty", -2.0, 2.0),
                            ("frequency_penalty", -2.0, 2.0)):  # fmt: skip
        value = field(fields, name, float | None)
        if value is None:
            made.pop(name, None)
            continue
        if not low <= value <= high:
            raise BadRequest(f"{name} must be {low:g} to {high:g}, got {value:g}", param=name)
        settings[name] = value
    limit = bounded(fields, "max_output_tokens", 1, _TOKENS_MAX)
    for name in ("max_completion_tokens", "max_tokens"):  # names of a chat, which some clients send here too
        other = bounded(fields, name, 1, _TOKENS_MAX)
        limit = other if limit is None else limit
        made.pop(name, None)
    if limit is not None:
        made["max_tokens"] = Raw(_encode(limit))
        settings["max_output_tokens"] = limit
    tops = bounded(fields, "top_logprobs", 0, TOP_LOGPROBS_MAX)
    include = field(fields, "include", list[str] | None) or []
    if _WANTS_THOUGHTS in include:
        settings[CARRIES_THOUGHTS] = True
    made.pop("logprobs", None)
    if tops or _WANTS_LOGPROBS in include:
        made |= {"logprobs": Raw(b"true"), "top_logprobs": Raw(_encode(tops or 0))}
        settings["top_logprobs"] = tops or 0


def _add_reasoning(fields: dict[str, Raw], made: dict[str, Raw], settings: Json) -> None:
    """Translate ``reasoning`` into what chat templates and vLLM read."""
    reasoning = field(fields, "reasoning", _Reasoning | None)
    if reasoning is None:
        return
    effort = reasoning.effort
    settings["reasoning"] = {"effort": effort, "summary": reasoning.summary}
    if effort == "none":
        own = field(fields, "chat_template_kwargs", dict[str, Any] | None) or {}
        # Models name their switch differently; a template passes over a name that it does not know
        made["chat_template_kwargs"] = Raw(_encode({"enable_thinking": False, "thinking": False, **own}))
    elif effort is not None:
        made.setdefault("reasoning_effort", Raw(_encode(effort)))


def _add_callers(asked: Asked, made: dict[str, Raw], settings: Json) -> None:
    """Set user and session."""
    fields = asked.fields
    key = field(fields, "prompt_cache_key", str | None)
    identifier = field(fields, "safety_identifier", str | None)
    settings["prompt_cache_key"], settings["safety_identifier"] = key, identifier
    if identifier and field(fields, "user", Any) is None:
        made["user"] = Raw(_encode(_short(identifier)))
    if asked.conversation and field(fields, "session_id", Any) is None:
        made["session_id"] = Raw(_encode(_short(asked.conversation)))
    tier = field(fields, "service_tier", str | None)
    if tier is not None:
        settings["service_tier"] = _TOLD_TIERS.get(tier, tier)


def _short(name: str) -> str:
    """Return a name within the limit: a longer one as its SHA-256 in hex."""
    return name if len(name) <= USER_CHARS_MAX else hashlib.sha256(name.encode()).hexdigest()
