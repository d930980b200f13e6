"""Answers of model servers that are no chunks: documents and errors. Sans I/O."""

from __future__ import annotations

import contextlib
import logging
import re
from typing import Any

import msgspec

from inference.engines.upstream.chunk_fields import TokenCount
from stream_fabric.errors import BadRequest, ContextLengthExceeded, EngineFailed, EngineLost, ModelNotFound, TooMany
from stream_fabric.limits import ITEM_CHARS_MAX
from stream_fabric.ports import FrameSink
from stream_fabric.stream.frames import ChoiceEnd, Close, ErrorInfo, Open, Usage
from stream_fabric.stream.ids import StreamId

log = logging.getLogger(__name__)


class _DocumentUsage(msgspec.Struct):
    prompt_tokens: TokenCount | None = None
    total_tokens: TokenCount | None = None


class _Document(msgspec.Struct):
    usage: _DocumentUsage | None = None


class _Count(msgspec.Struct):
    count: TokenCount


_count_decoder = msgspec.json.Decoder(_Count)
_document_decoder = msgspec.json.Decoder(_Document)
_PARAM_CHARS_MAX = 200
ERROR_BYTES_MAX = 1 << 16
"""A longer error is not decoded: its text is its first characters."""
_ENGINE_DEAD = "EngineCore encountered an issue"
"""Start of vLLM's error message after its engine process has died."""
_NO_PATH = re.compile(r"((404 page|file) )?not found|method not allowed", re.IGNORECASE)
"""Messages of vLLM, llama.cpp and Ollama about a path that they do not have."""
_CONTEXT_EXCEEDED = re.compile(
    "maximum context length|maximum model length|model's context length|available context size"
    r"|max_(completion_)?tokens=\d+ cannot be greater than max_model_len|max_tokens must be at least 1, got 0"
)
"""Messages of vLLM, SGLang and llama.cpp about a request that exceeds the model's maximum context. vLLM's last one is
about a prompt that leaves no token for the output: gateways let ``max_tokens`` 0 pass only with ``echo``, where vLLM
makes one token."""


def put_item(sink: FrameSink, body: bytes) -> Usage:
    """Put an answer that is one JSON document into the sink, as a block with the document as text.

    Raises msgspec.MsgspecError, before anything is put, when the answer is not JSON.
    """
    usage = _document_decoder.decode(body).usage or _DocumentUsage()
    try:
        text = body.decode()
    except UnicodeDecodeError as wrong:  # in a part that the decoder skipped
        raise msgspec.DecodeError(str(wrong)) from wrong
    sink.frame(Open(0, 0, "item"))
    for at in range(0, len(text), ITEM_CHARS_MAX):
        sink.text(0, text[at : at + ITEM_CHARS_MAX], 0)
    sink.frame(Close(0))
    sink.frame(ChoiceEnd(0, "stop"))
    # For a rerank some servers send only the total, which is the prompt's
    return Usage(prompt=usage.prompt_tokens or usage.total_tokens or 0)


def only_count(body: bytes) -> bytes:
    """Return vLLM's answer of ``/tokenize`` without the tokens themselves. Raises msgspec.MsgspecError for another."""
    return msgspec.json.encode(_count_decoder.decode(body))


def engine_error(message: str) -> ErrorInfo:
    return ErrorInfo("engine_error", message, http_status=502)


def lost_error(stream: StreamId, lost: OSError) -> ErrorInfo:
    """Return the error of an answer that did not come or broke off."""
    told = str(lost) or "timed out"
    if lost.errno is not None:  # the system's words, which may name the server's address
        log.warning("no answer of the model server: stream=%s error=%s", stream, lost)
        told = "the connection failed"
    return ErrorInfo.of(EngineLost(f"the model server failed: {told}"))


def lacks_path(refused: ErrorInfo) -> bool:
    """Whether the server has no such path, as vLLM for what its model cannot do. Its error then says no more."""
    return refused.http_status in (404, 405) and _NO_PATH.fullmatch(refused.message.strip()) is not None


def upstream_error(raw: bytes | msgspec.Raw, status: int) -> ErrorInfo:
    """Return the error in a server's answer, in any known format. ``status``: of the response; 502 inside a stream."""
    if not 400 <= status < 600:  # not an error status: the client must not see it
        status = 502
    message, code = bytes(raw)[:2000].decode("utf-8", "replace")[:500], None
    param: str | None = None
    parsed: Any = None
    if len(bytes(raw)) <= ERROR_BYTES_MAX:
        with contextlib.suppress(msgspec.MsgspecError, RecursionError):
            parsed = msgspec.json.decode(raw)
    if isinstance(parsed, dict):
        parsed = parsed.get("error") or parsed.get("detail") or parsed
    if isinstance(parsed, str):
        message = parsed[:2000]
    elif isinstance(parsed, dict):
        message = str(parsed.get("message") or message)[:2000]
        code = parsed.get("code")
        if isinstance(told := parsed.get("param"), str):
            param = told[:_PARAM_CHARS_MAX]
    if not message.strip():
        message = "the model server sent an error without a message"
    if message.startswith(_ENGINE_DEAD):
        return ErrorInfo.of(EngineLost(message))
    if isinstance(code, int) and status == 502 and 400 <= code < 600:  # inside a stream the code is the only status
        status = code
    refused = 400 <= status < 500
    # The server has no room now: the request is right, and may be sent again
    kind = TooMany if status == TooMany.http_status else BadRequest if refused else EngineFailed
    if not isinstance(code, str) or code.isdecimal():  # vLLM repeats the status in the code
        code = kind.code
        if status == 400 and _CONTEXT_EXCEEDED.search(message):
            code = ContextLengthExceeded.code
        elif status == 404 and param == "model":
            code = ModelNotFound.code
    return ErrorInfo(code, message, kind.type, status, kind.retriable or not refused, param if refused else None)
