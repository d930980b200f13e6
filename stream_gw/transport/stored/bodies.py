"""Bodies, queries and answers of conversations and compactions."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stream_fabric.limits import CONVERSATION_ITEMS_ADDED_MAX, METADATA_PAIRS_MAX
from stream_gw.responses import Item, Order

_MetaKey = Annotated[str, Meta(max_length=64)]
_MetaValue = Annotated[str, Meta(max_length=512)]
Metadata = Annotated[dict[_MetaKey, _MetaValue], Meta(max_length=METADATA_PAIRS_MAX)]
Items = Annotated[list[Item], Meta(max_length=CONVERSATION_ITEMS_ADDED_MAX)]


class ConversationCreate(msgspec.Struct):
    items: Items | None = None
    """Items that it begins with."""
    metadata: Metadata | None = None


class ConversationChange(msgspec.Struct):
    metadata: Metadata | None
    """Replaces the metadata; null: by none."""


class ItemsAdd(msgspec.Struct):
    items: Annotated[list[Item], Meta(min_length=1, max_length=CONVERSATION_ITEMS_ADDED_MAX)]


class ItemsQuery(msgspec.Struct):
    after: str | None = None
    """Id of an item: the page begins after it."""
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    """Most items of the page. Fewer come where they are large: `has_more` tells."""
    order: Order = "desc"
    """`desc`: the newest first."""


class CompactBody(msgspec.Struct):
    model: Annotated[str, Meta(min_length=1, max_length=256)]
    """The model that summarises."""
    input: str | list[Item] | None = None
    instructions: str | None = None
    previous_response_id: str | None = None


class ConversationAnswer(msgspec.Struct):
    id: str
    object: Literal["conversation"]
    created_at: int
    """Unix time in seconds."""
    metadata: dict[str, str]


class ConversationDeleted(msgspec.Struct):
    id: str
    object: Literal["conversation.deleted"]
    deleted: Literal[True]


class ItemsAnswer(msgspec.Struct):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str | None
    last_id: str | None
    has_more: bool


class CompactUsage(msgspec.Struct):
    input_tokens: int
    input_tokens_details: dict[str, int]
    output_tokens: int
    output_tokens_details: dict[str, int]
    total_tokens: int


class CompactAnswer(msgspec.Struct):
    id: str
    object: Literal["response.compaction"]
    created_at: int
    """Unix time in seconds."""
    output: list[dict[str, Any]]
    """All user messages, then the compaction item. It is the beginning of the input of a later response."""
    usage: CompactUsage
