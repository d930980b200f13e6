"""Brings the prompt of a chat into one form, from which prefix hints are hashed.

Dialects write the same conversation in different bytes, and clients of one dialect do too: key order, spaces, a text as
a string or as a part. Engines build the same prompt of them, so their KV cache serves all of these.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import takewhile
from typing import Any

import msgspec

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import PROMPT_CHOICES_MAX

Json = dict[str, Any]
_encode = msgspec.json.Encoder(order="sorted").encode
_encode_as_is = msgspec.json.Encoder().encode
IMAGE_TOKENS = 1500
"""Most tokens that the estimate of a prompt has for an image, whatever its bytes: models resize images."""
_IMAGE = b'"url":"data:image/'
_NOT_CARRIED = {
    "prompt_logprobs": "send the prompt to /v1/completions with echo and logprobs",
    "return_token_ids": "send logprobs with return_tokens_as_token_ids, and each token is token_id:<number>",
    "use_beam_search": "vLLM does not stream it; ask for several choices with n and logprobs",
}
"""vLLM's fields whose answer has no place in a stream, and the way to the same."""
_PLACED = "the platform chooses the replica and its KV cache; leave it out"
_CONTROLS = {
    "priority": "a request's place in the queue comes from service_tier",
    "lora_path": "send the adapter's name as model",
    "input_ids": "send token ids as the prompt of /v1/completions",
    "session_params": "send session_id",
    "custom_logit_processor": "clients cannot run code in the engine; leave it out",
    "rid": "the platform names requests; leave it out",
    **dict.fromkeys(
        ("kv_transfer_params", "ec_transfer_params", "bootstrap_host", "bootstrap_port", "bootstrap_room",
         "disagg_prefill_dp_rank", "routed_dp_rank", "data_parallel_rank", "id_slot"),
        _PLACED,
    ),
}  # fmt: skip
"""Fields of vLLM, SGLang and llama.cpp by which one client could reach beyond its own request, and what to send."""
_THOUGHTS = ("reasoning", "reasoning_content", "refusal", "annotations", "audio")
"""Fields of an assistant's message that clients repeat or leave out; templates leave them out of later prompts."""

_REMINDER = "<system-reminder>"


def estimated_tokens(prompt: Sequence[bytes], input_bytes: int, bytes_per_token: float) -> int:
    """Estimate the tokens of a prompt. ``prompt``: in the form that is hashed; ``input_bytes``: of other input."""
    text_bytes, tokens = input_bytes, 0.0
    for part in prompt:
        text_bytes += len(part)
        at = part.find(_IMAGE)
        while at >= 0:
            end = part.find(b'"', at + len(_IMAGE))
            text_bytes -= end - at
            tokens += min((end - at) / bytes_per_token, IMAGE_TOKENS)
            at = part.find(_IMAGE, end)
    return max(1, int(text_bytes / bytes_per_token + tokens))


def chat_prompt(messages: Iterable[Json], tools: Any) -> tuple[bytes, ...]:
    """Return the tools and each message of a body in OpenAI's format, in the form that is hashed."""
    parts = [_message(message) for message in messages]
    if tools:
        parts.insert(0, _encode(tools))
    return tuple(parts)


def _message(message: dict[str, Any]) -> bytes:
    if len(message) == 2 and isinstance(text := message.get("content"), str) and "role" in message:  # most messages
        return _encode_as_is({"role": message["role"], "content": text})
    kept = {name: value for name, value in sorted(message.items()) if value is not None and name not in _THOUGHTS}
    role, content, calls = kept.pop("role", None), kept.pop("content", None), kept.get("tool_calls")
    if isinstance(content, list) and len(content) == 1:
        content = _only_text(content[0], content)
    if isinstance(calls, list):
        content = content or None
        kept["tool_calls"] = [_call(call) for call in calls]
    said = {"role": role, **({} if content is None else {"content": content})}
    return b"{%b}" % b",".join([_encode(name) + b":" + _encode(value) for name, value in (said | kept).items()])


def _only_text(part: Any, otherwise: list[Any]) -> Any:
    """Return the text of a message that has one text part and nothing else."""
    if isinstance(part, dict) and part.get("type") == "text" and isinstance(part.get("text"), str):
        return part["text"]
    return otherwise


def _call(call: Any) -> Any:
    """Return a tool call with its arguments as a value: templates write them anew, in the order of their keys."""
    function = call.get("function") if isinstance(call, dict) else None
    if not isinstance(function, dict) or not isinstance(function.get("arguments"), str):
        return call
    try:  # text to text: a value of Python's takes three times as long
        arguments = msgspec.Raw(msgspec.json.format(function["arguments"].encode(), indent=-1))
    except (msgspec.DecodeError, RecursionError):
        return call
    called = {"name": function.get("name"), "arguments": arguments}
    return {"id": call.get("id"), "type": "function", "function": called}


# --- turns as chat templates demand them -------------------------------------------------------------------------


def in_turns(messages: list[Json]) -> list[Json]:
    """Return messages with one system message at most, at the beginning, and without two of the user in a row.

    A later system message becomes a reminder in the user's turn. Many chat templates refuse it, or leave it out.
    """
    made: list[Json] = []
    contents: list[list[Any]] = []
    """Contents of each message in ``made``, joined at the end: pair by pair, the first ones would be copied anew."""
    for message in messages:
        role, content = message["role"], message["content"]
        if role == "system" and made and made[-1]["role"] != "system":
            role, content = "user", _reminder_of(content)
        if made and role in ("system", "user") and made[-1]["role"] == role:
            contents[-1].append(content)
        else:
            made.append({**message, "role": role, "content": content})
            contents.append([content])
    return [
        message if len(parts) == 1 else {"role": message["role"], "content": _one_content(parts)}
        for message, parts in zip(made, contents, strict=True)
    ]


def reminder(text: str) -> str:
    """Return a system message's text as it stands in a turn of the user. The tag is that of agents' own reminders."""
    return text if text.lstrip().startswith(_REMINDER) else f"{_REMINDER}\n{text}\n</system-reminder>"


def _reminder_of(content: Any) -> Any:
    if isinstance(content, str):
        return reminder(content)
    return [part | {"text": reminder(part["text"])} if part["type"] == "text" else part for part in content]


def _one_content(contents: list[Any]) -> Any:
    """Return the content of a message that stands for several. The texts before the first list are one text."""
    texts = list(takewhile(lambda content: isinstance(content, str), contents))
    text = "\n\n".join(filter(None, texts))
    if len(texts) == len(contents):
        return text
    return [part for content in (text, *contents[len(texts) :]) for part in _parts(content)]


def _parts(content: Any) -> list[Json]:
    if isinstance(content, str):
        return [{"type": "text", "text": content}] if content else []
    parts: list[Json] = content
    return parts


def check_prompts(prompt: str | list[Any], n: int) -> int:
    """Return the number of prompts, each with ``n`` choices. Raises BadRequest."""
    if isinstance(prompt, str):
        return 1
    kinds = {type(part) for part in prompt}
    if len(kinds) != 1 or [] in prompt:
        raise BadRequest(
            "prompt must be a string, or a list of strings, of token ids or of lists of token ids; got "
            + (f"a list of {', '.join(sorted(kind.__name__ for kind in kinds))}" if prompt else "an empty list"),
            param="prompt",
        )
    if kinds == {int}:
        return 1
    if len(prompt) * n > PROMPT_CHOICES_MAX:
        raise BadRequest(
            f"prompt holds {len(prompt)} prompts with {n} choices each; the limit is {PROMPT_CHOICES_MAX} choices in "
            "all, so send several requests",
            param="prompt",
        )
    return len(prompt)


def check_answerable(fields: Mapping[str, msgspec.Raw]) -> None:
    """Check that a chat asks for no answer that streams cannot carry. Raises Unsupported."""
    if "functions" in fields and msgspec.json.decode(fields["functions"]):
        raise Unsupported("functions are not taken here; send them as tools, with tool_choice", param="functions")
    if "modalities" in fields and "audio" in (msgspec.json.decode(fields["modalities"]) or ()):
        raise Unsupported("this platform makes text only; send modalities without audio", param="modalities")


def check_controls(fields: Mapping[str, msgspec.Raw]) -> None:
    """Check that a request has no field that controls the engine for others too. Raises Unsupported."""
    for name in fields.keys() & _CONTROLS.keys():
        if bytes(fields[name]) != b"null" and not (name == "priority" and bytes(fields[name]) == b"0"):
            raise Unsupported(f"{name} is not taken from clients: {_CONTROLS[name]}", param=name)


def check_carried(fields: Mapping[str, msgspec.Raw]) -> None:
    """Check that a request asks vLLM for no field of an answer that streams cannot carry. Raises Unsupported."""
    for name, instead in _NOT_CARRIED.items():
        if bytes(fields.get(name, b"null")) not in (b"null", b"false"):
            raise Unsupported(f"{name} is not served here: {instead}", param=name)
