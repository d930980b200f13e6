"""The AsyncAPI document as a check of messages."""

from __future__ import annotations

import json
from functools import cache
from typing import Any

import jsonschema_rs
import msgspec

from stream_gw.transport.reference.asyncapi import make_asyncapi
from stream_gw.transport.reference.operations import OPERATIONS


@cache
def document() -> dict[str, Any]:
    """The document as a gateway serves it."""
    made: dict[str, Any] = json.loads(msgspec.json.encode(make_asyncapi(OPERATIONS)))
    return made


def tags(action: str, *channels: str) -> set[str]:
    """Tags of the messages that the gateway sends (``send``) or receives on the channels, with those of replies."""
    found: set[str] = set()
    for operation in document()["operations"].values():
        if operation["channel"]["$ref"].rpartition("/")[2] not in (channels or ("stream",)):
            continue
        own, replies = operation["messages"], operation.get("reply", {}).get("messages", [])
        mine, other = (own, replies) if operation["action"] == action else (replies, own)
        found |= {message["$ref"].rpartition("/")[2] for message in mine}
        assert not {message["$ref"] for message in other} & {message["$ref"] for message in mine}
    return found


def fits(message: dict[str, Any]) -> bool:
    """Whether the document has a message of ``tokenstream.v1`` like this."""
    return message.get("t") in document()["components"]["messages"] and _validator(message["t"]).is_valid(message)


def assert_fits(message: dict[str, Any]) -> None:
    """Fail for a message whose kind, fields or values the document does not have."""
    kind = message["t"]
    assert kind in document()["components"]["messages"], message
    _validator(kind).validate(message)
    name = document()["components"]["messages"][kind]["payload"]["$ref"].rpartition("/")[2]
    unknown = message.keys() - document()["components"]["schemas"][name]["properties"].keys()
    assert not unknown, f"the document does not have the fields {unknown} of {message}"


def assert_message(name: str, message: dict[str, Any]) -> None:
    """Fail for a message of the other sockets that is not like the document's message of this name."""
    _validator(name).validate(message)


@cache
def _validator(kind: str) -> jsonschema_rs.Draft7Validator:
    components = document()["components"]
    return jsonschema_rs.Draft7Validator({**components["messages"][kind]["payload"], "components": components})
