"""The item of an input: a string or a user's message, of a chat or of the Responses API. Pure."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import BadRequest, BodyTooLarge, InvalidInput, StreamGwError
from stream_fabric.json_bounds import check_depth
from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX, INPUT_BYTES_MAX, INPUT_CONTAINERS_MAX
from stream_gw.dialects.responses.translate import Json, chat_messages

_CHAT_PARTS = ("text", "image_url", "input_audio")
_items: msgspec.json.Decoder[str | Json] = msgspec.json.Decoder(str | Json)


def check_input_id(input_id: str) -> None:
    """Raise BadRequest unless the id of an input has a fit length."""
    if not 0 < len(input_id) <= IDEMPOTENCY_KEY_CHARS_MAX:
        raise BadRequest(f"an input's id has 1 to {IDEMPOTENCY_KEY_CHARS_MAX} characters", param="id")


def read_item(raw: bytes) -> str | Json:
    """Decode an item. Raises BodyTooLarge, TooDeep or BadRequest."""
    if len(raw) > INPUT_BYTES_MAX:
        raise BodyTooLarge(f"the item has {len(raw)} bytes; the limit is {INPUT_BYTES_MAX}", param="item")
    check_depth(raw, INPUT_CONTAINERS_MAX)
    try:
        return _items.decode(raw)
    except msgspec.MsgspecError as error:
        raise BadRequest(f"item is not a string or a message: {str(error)[:200]}", param="item") from error


def user_message(item: Any) -> msgspec.Raw:
    """Return the item as a user's message of a chat, in JSON. Raises InvalidInput."""
    if isinstance(item, str):
        item = {"role": "user", "content": item}
    if not isinstance(item, dict) or item.get("type", "message") != "message" or item.get("role") != "user":
        raise InvalidInput("an input is a string or a message with role user", param="item")
    content = item.get("content")
    if not _is_of_chat(content):
        try:
            (message,) = chat_messages(None, [item])
        except StreamGwError as error:
            raise InvalidInput(error.message.replace("input.0", "item"), param="item") from error
        content = message["content"]
    if not content:
        raise InvalidInput("an input has text or other content", param="item")
    return msgspec.Raw(msgspec.json.encode({"role": "user", "content": content}))


def _is_of_chat(content: Any) -> bool:
    """Whether the content is that of a chat's message already."""
    if not isinstance(content, list):
        return isinstance(content, str)
    return all(
        isinstance(part, dict)
        and (kind := part.get("type")) in _CHAT_PARTS
        and isinstance(part.get(kind), str if kind == "text" else dict)
        for part in content
    )
