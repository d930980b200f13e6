"""Refuses requests that certainly exceed a model's maximum context, without its tokenizer.

A prompt's tokens are bounded from below: what is refused here, every engine refuses. Engines refuse the rest.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Any

import msgspec

from stream_fabric.errors import ContextLengthExceeded
from stream_gw.dialects.requests import CreateRequest

_TOKEN_CHARS_MAX = 128
"""Longest token of the vocabularies in use: a run of spaces or of one other character."""
_WIDE_SPACES = re.compile("[\x1c-\x1f\x85\xa0\u1680\u2000-\u200a\u2028\u2029\u202f\u205f\u3000]")
"""Spaces that are no ASCII space; tokenizers take a run of any spaces as one piece."""
_SPACES = b" \t\n\r\x0b\x0c"
_AS_WORDS = bytes(0x20 if byte in _SPACES else 0x78 for byte in range(256))
"""Maps each byte to a space or to a letter."""
_THOUGHTS = ("think>", "THINK]")
"""Ends of tags around thoughts, which chat templates leave out of later prompts."""


class _Body(msgspec.Struct):
    truncate_prompt_tokens: int | None = None
    """The engine cuts the prompt to this length."""
    chat_template: str | None = None
    """A template of the client may leave out messages."""


class _Part(msgspec.Struct):
    text: str | None = None


class _Message(msgspec.Struct):
    role: str = ""
    content: str | list[_Part] | None = None


_body_decoder = msgspec.json.Decoder(_Body)
_message_decoder = msgspec.json.Decoder(_Message)
_prompt_decoder: msgspec.json.Decoder[str | list[Any]] = msgspec.json.Decoder(str | list[str | int | list[int]])


def check_context(request: CreateRequest, context: int) -> None:
    """Check a request against the maximum context, in tokens. Raises ContextLengthExceeded if it certainly exceeds it.

    Only what every version of vLLM refuses is refused. Recent ones shorten the output to what the prompt leaves of the
    context, so the sum of prompt and ``max_tokens`` is theirs to judge. Embeddings and rerank too: inputs may be cut.
    """
    if request.kind not in ("chat", "completions"):
        return
    asked = request.max_tokens or 0
    if asked <= context and request.prompt_bytes < context:  # most requests: a token takes a byte at least
        return
    try:
        body = _body_decoder.decode(request.body)
    except msgspec.ValidationError:  # a field that the engine refuses
        return
    limit = f"{told_context(context)}, and "
    if asked > context:
        raise ContextLengthExceeded(f"{limit}max_tokens is {asked}; set it to less", param="max_tokens")
    if body.truncate_prompt_tokens is not None or body.chat_template is not None:
        return
    tokens, is_exact = prompt_tokens_least(request)
    if tokens >= context:  # the output needs one
        param = "messages" if request.kind == "chat" else "prompt"
        raise ContextLengthExceeded(
            f"{limit}{param} {'takes' if is_exact else 'takes at least'} {tokens}; shorten {param}, or use a model "
            "with a longer context",
            param=param,
        )


def told_context(context: int) -> str:
    """Return how an error tells the maximum context. Clients such as LiteLLM know OpenAI's and vLLM's words."""
    return f"This model's maximum context length is {context} tokens"


def prompt_tokens_least(request: CreateRequest) -> tuple[int, bool]:
    """Return the least number of tokens that the prompt can have, and whether it is exact."""
    if request.kind == "chat":
        return sum(map(least_tokens, _texts(request))), False
    prompt = _prompt_decoder.decode(request.prompt[0])
    parts = prompt if isinstance(prompt, list) else [prompt]
    if isinstance(parts[0], int):
        return len(parts), True
    # The longest of several prompts counts: the engine computes each by itself
    sizes = (least_tokens(part) if isinstance(part, str) else len(part) for part in parts)
    return max(sizes), isinstance(parts[0], list)


def _texts(request: CreateRequest) -> Iterator[str]:
    """Return the texts of a chat's messages that every template puts into the prompt.

    Tools, images and an assistant's thoughts are left out.
    """
    for raw in request.prompt:
        if raw[:1] != b"{":  # the tools
            continue
        try:
            message = _message_decoder.decode(raw)
        except msgspec.ValidationError:  # of a format that only the engine knows
            continue
        content = message.content
        texts = [content] if isinstance(content, str) else [part.text or "" for part in content or ()]
        if message.role == "assistant" and any(end in text for text in texts for end in _THOUGHTS):
            continue
        yield from texts


def least_tokens(text: str) -> int:
    """Return the least number of tokens of a text.

    Tokenizers split at spaces first, so no token has letters of two words; and no token is longer than a known length.
    """
    text = _WIDE_SPACES.sub(" ", text)
    words = (b" " + text.encode("utf-8", "replace").translate(_AS_WORDS)).count(b" x")
    return max(words, len(text) // _TOKEN_CHARS_MAX)
