"""Records of stored responses and conversations, and their encoding. Items are dicts in the format of the Responses
API."""

from __future__ import annotations

import re
from collections.abc import Iterable
from typing import Any, Literal, NamedTuple

import msgspec

from stream_fabric.errors import BadRequest
from stream_fabric.stream.ids import StreamId

Item = dict[str, Any]
Order = Literal["asc", "desc"]

_ID_PREFIXES = {
    "function_call": "fc",
    "function_call_output": "fco",
    "custom_tool_call": "ctc",
    "custom_tool_call_output": "ctco",
    "reasoning": "rs",
    "compaction": "cmp",
}


_ID = re.compile(r"[^\x00-\x1f\x7f]{1,200}")


class ResponseRecord(msgspec.Struct, frozen=True, omit_defaults=True, kw_only=True):
    """One response: its request as it was created and, once its stream has ended, the whole response."""

    id: StreamId
    created_at: int
    """Unix time in seconds."""
    model: str
    input: list[Item]
    """The request's own input items, without those that ``previous_response_id`` or ``conversation`` stand for."""
    instructions: Any = None
    """A string or items; they are not carried into later responses."""
    metadata: dict[str, str] = {}
    previous_response_id: str | None = None
    conversation: str | None = None
    user: str | None = None
    """The user of the request, whom a credential may be bound to; None: no user."""
    store: bool = True
    background: bool = False
    expires_at: int = 0
    """Unix time in seconds at which the database forgets the response; 0: it is never written there. Set by
    ``ResponseStore.begun``."""
    response: dict[str, Any] | None = None
    """The whole response object as of its end; None: the stream runs."""

    @property
    def output(self) -> list[Item] | None:
        """Items that the model made; None: the stream runs."""
        return None if self.response is None else self.response["output"]


class History(list[Item]):
    """Items that a new response builds on. ``last_seq``: place of the last one in its conversation, if it has one.
    ``size``: their bytes, about."""

    def __init__(self, items: Iterable[Item] = (), last_seq: int | None = None, size: int = 0) -> None:
        super().__init__(items)
        self.last_seq = last_seq
        self.size = size


class ItemPage(NamedTuple):
    """A page of items, in the order that was asked for."""

    data: list[Item]
    has_more: bool

    def body(self) -> dict[str, Any]:
        """Return the page as the API shows it."""
        first, last = (self.data[0]["id"], self.data[-1]["id"]) if self.data else (None, None)
        return {"object": "list", "data": self.data, "first_id": first, "last_id": last, "has_more": self.has_more}


class Conversation(NamedTuple):
    id: str
    created_at: int
    """Unix time in seconds."""
    metadata: dict[str, str]
    user: str | None = None

    def body(self) -> dict[str, Any]:
        """Return the conversation as the API shows it."""
        return {"id": self.id, "object": "conversation", "created_at": self.created_at, "metadata": self.metadata}


def stored_items(items: list[Item], stem: str) -> list[Item]:
    """Return input items as they are stored: with a type, an id, and messages' content as parts.

    ``stem``: makes the ids of items that have none; a repeated call makes the same ones. Raises BadRequest.
    """
    return [_stored(item, f"{stem}i{number:x}") for number, item in enumerate(items)]


def _stored(item: Item, stem: str) -> Item:
    type_, given = item.get("type") or "message", item.get("id")
    if not isinstance(type_, str):
        raise BadRequest("the type of an item must be a string", param="input")
    if given is not None and not (isinstance(given, str) and _ID.fullmatch(given)):
        raise BadRequest("the id of an item must be a string of 1 to 200 printable characters", param="input")
    made = {"id": given or f"{_ID_PREFIXES.get(type_, 'msg')}_{stem}", "type": type_}
    if type_ != "message":
        return item | made
    content = item.get("content")
    if isinstance(content, str):
        is_output = item.get("role") == "assistant"
        part: Item = {"type": "output_text" if is_output else "input_text", "text": content}
        content = [part | {"annotations": []} if is_output else part]
    return item | made | {"content": content or [], "status": item.get("status") or "completed"}


def page_of(items: list[Item], after: str | None, limit: int, order: Order) -> ItemPage | None:
    """Return a page of all items, which are in the order of the conversation; None: no item has the id ``after``."""
    ordered = items if order == "asc" else items[::-1]
    begin = 0
    if after is not None:
        place = next((number for number, item in enumerate(ordered) if item.get("id") == after), None)
        if place is None:
            return None
        begin = place + 1
    return ItemPage(ordered[begin : begin + limit], begin + limit < len(ordered))
