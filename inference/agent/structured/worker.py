"""Child process that checks replies against JSON schemas: ``python -m inference.agent.structured.worker``.

A schema can ask for exponential work, so its parent kills the process that takes too long. Nothing is fetched: a remote
``$ref`` fails. Patterns are matched in linear time; one with look-around or back references cannot be checked.
"""

from __future__ import annotations

import contextlib
import os
import resource
import struct
import sys
from collections import OrderedDict
from typing import Any, BinaryIO

import jsonschema_rs
import msgspec

from stream_fabric.limits import CHECK_MEMORY_BYTES_MAX, CHECK_REASON_CHARS, SCHEMA_BYTES_MAX, SCHEMAS_KEPT
from stream_fabric.stream.frames import Check

_SIZE = struct.Struct("<II")
_PATTERNS = jsonschema_rs.RegexOptions(size_limit=1 << 20, dfa_size_limit=1 << 20)


class Replies:
    """Checks replies, and keeps the compiled schemas that were used last."""

    def __init__(self) -> None:
        self._compiled: OrderedDict[bytes, Any] = OrderedDict()

    def check(self, schema: bytes, reply: bytes) -> Check:
        """Return whether the reply is JSON that fits the schema."""
        if len(schema) > SCHEMA_BYTES_MAX:
            return Check("unchecked", reason=f"the schema has {len(schema)} bytes; the limit is {SCHEMA_BYTES_MAX}")
        try:
            validator = self._validator(schema)
        except jsonschema_rs.ValidationError as wrong:
            return Check("unchecked", reason=_shortened(f"the schema cannot be checked: {wrong.message}"))
        except (msgspec.MsgspecError, ValueError, TypeError, RecursionError, jsonschema_rs.ReferencingError) as wrong:
            return Check("unchecked", reason=_shortened(f"the schema cannot be checked: {wrong}"))
        try:
            value = msgspec.json.decode(reply)
        except RecursionError:
            return Check("unchecked", reason="the reply is nested too deep")
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            return Check("invalid", reason=_shortened(f"it is not JSON: {wrong}"))
        try:
            error = next(validator.iter_errors(value), None)
        except (ValueError, TypeError, RecursionError) as wrong:
            return Check("unchecked", reason=_shortened(f"the reply cannot be checked: {wrong}"))
        if error is None:
            return Check("valid")
        return Check("invalid", _pointer(error.instance_path), _shortened(error.message))

    def _validator(self, schema: bytes) -> Any:
        found = self._compiled.get(schema)
        if found is None:
            parsed = msgspec.json.decode(schema, type=dict[str, Any] | bool)
            found = jsonschema_rs.validator_for(parsed, offline=True, pattern_options=_PATTERNS)
            self._compiled[schema] = found
            while len(self._compiled) > SCHEMAS_KEPT:
                self._compiled.popitem(last=False)
        self._compiled.move_to_end(schema)
        return found


def _pointer(path: list[str | int]) -> str:
    """Return a JSON pointer (RFC 6901), shortened."""
    parts = (str(part).replace("~", "~0").replace("/", "~1") for part in path)
    return _shortened("".join(f"/{part}" for part in parts))


def _shortened(text: str) -> str:
    clean = text.replace("\n", " ")
    return clean if len(clean) <= CHECK_REASON_CHARS else clean[:CHECK_REASON_CHARS] + "…"


def serve(source: BinaryIO, target: BinaryIO) -> None:
    """Answer questions until the parent closes the pipe: sizes, schema and reply; the answer is one line."""
    replies, encode = Replies(), msgspec.json.encode
    while len(head := source.read(_SIZE.size)) == _SIZE.size:
        schema_size, reply_size = _SIZE.unpack(head)
        schema, reply = source.read(schema_size), source.read(reply_size)
        try:
            check = replies.check(schema, reply)
        except MemoryError:
            check = Check("unchecked", reason="the check needs too much memory")
        target.write(encode(check) + b"\n")
        target.flush()


def question(schema: bytes, reply: bytes) -> bytes:
    """Encode a question as ``serve`` reads it."""
    return _SIZE.pack(len(schema), len(reply)) + schema + reply


def main() -> None:
    resource.setrlimit(resource.RLIMIT_AS, (CHECK_MEMORY_BYTES_MAX, CHECK_MEMORY_BYTES_MAX))
    with contextlib.suppress(OSError):
        os.nice(5)  # tokens go first
    with contextlib.suppress(BrokenPipeError, KeyboardInterrupt):
        serve(sys.stdin.buffer, sys.stdout.buffer)


if __name__ == "__main__":
    main()
