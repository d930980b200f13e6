"""The JSON schema that a request asks for, and the request to repair a reply that does not fit it. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.limits import REPAIR_REPLY_CHARS_MAX
from stream_fabric.pool.records import EngineRequest
from stream_fabric.stream.frames import Check, MaybeRaw

_ANY_OBJECT = b'{"type":"object"}'
_REPAIR = (
    "Your reply does not fit the required JSON schema: {reason}{place}. Reply again with the whole corrected JSON and "
    "nothing else."
)


class _JsonSchema(msgspec.Struct):
    schema: MaybeRaw = None


class _Format(msgspec.Struct):
    type: str = ""
    json_schema: _JsonSchema | None = None


class _Guided(msgspec.Struct):
    json: MaybeRaw = None
    json_object: bool | None = None


class _Body(msgspec.Struct):
    response_format: _Format | None = None
    structured_outputs: _Guided | None = None
    guided_json: MaybeRaw = None
    continue_final_message: bool | None = None


_decoder = msgspec.json.Decoder(_Body)


def wanted_schema(request: EngineRequest) -> bytes | None:
    """Return the JSON schema that the reply must fit; None: the request asks for none.

    A reply that goes on with the client's own beginning is no whole JSON, and is not checked.
    """
    if request.plain or request.kind not in ("chat", "completions"):
        return None
    try:
        asked = _decoder.decode(request.body)
    except msgspec.MsgspecError:  # the engine refuses it
        return None
    if asked.continue_final_message:
        return None
    form, guided = asked.response_format, asked.structured_outputs
    if form is not None and form.type == "json_schema":
        return None if form.json_schema is None else _schema(form.json_schema.schema)
    if (form is not None and form.type == "json_object") or (guided is not None and guided.json_object):
        return _ANY_OBJECT
    return _schema(asked.guided_json if guided is None else guided.json)


def _schema(raw: msgspec.Raw | None) -> bytes | None:
    """Return a schema's JSON. vLLM takes it as an object, or as a string that holds the JSON."""
    text = b"null" if raw is None else bytes(raw)
    if text[:1] == b'"':
        text = msgspec.json.decode(text, type=str).encode()
    return None if text == b"null" else text


def repairing_request(request: EngineRequest, reply: str, check: Check) -> EngineRequest | None:
    """Return the request that asks for a better reply; None: the reply is too long to send it back."""
    if len(reply) > REPAIR_REPLY_CHARS_MAX:
        return None
    body: dict[str, Any] = msgspec.json.decode(request.body)
    place = f", at {check.path}" if check.path else ""
    wanted = _REPAIR.format(reason=check.reason, place=place)
    said = [{"role": "assistant", "content": reply}, {"role": "user", "content": wanted}]
    body["messages"] = [*body["messages"], *said]
    return msgspec.structs.replace(request, body=msgspec.Raw(msgspec.json.encode(body)))
