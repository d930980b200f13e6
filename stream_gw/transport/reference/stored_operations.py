"""Table of the operations of conversations, and of what is stored beside a response."""

from __future__ import annotations

from typing import Any

from stream_fabric import errors as e
from stream_gw.responses import (
    ConversationLocked,
    ConversationNotFound,
    HistoryTooLong,
    ItemNotFound,
    NoStore,
    PreviousResponseNotFound,
    PreviousResponseRunning,
    ResponseNotFound,
    ResponseStorageFull,
    ResponsesUnavailable,
)
from stream_gw.tenancy import NoDatabase
from stream_gw.transport.reference.operation import JSON, Answer, Errors, Operation, Parameter
from stream_gw.transport.stored import bodies as b

_RESPONSE = Parameter("id", "Id of a response: `resp_` and 32 hex digits.")
_CONVERSATION = Parameter("id", "Id of a conversation: `conv_` and 32 hex digits.")
_ITEM = Parameter("item_id", "Id of an item.")
_STORE: Errors = (NoStore, ResponsesUnavailable, e.RateLimited, e.FabricUnavailable, e.FabricFault)
_ONE: Errors = (NoDatabase, ConversationNotFound, e.Unsupported, *_STORE)
_MORE: Errors = (e.TooDeep, e.TooMany, e.GatewayFull, ResponseStorageFull)
"""Errors of an operation that stores more."""
_CONVERSATIONS_ABOUT = (
    "Conversations are in the database of tenants; without one they are 404 `no_database`. They expire with the "
    "plan's `response_days` after their last change."
)


def stored_operations(create: Errors) -> tuple[Operation, ...]:
    """Return the operations. ``create``: errors of a request that starts a stream."""
    return (*_of("/v1/responses", create), *_of("/v1/open/responses", create), *_CONVERSATIONS, *_ITEMS)


def _of(base: str, create: Errors) -> tuple[Operation, ...]:
    is_open = base.startswith("/v1/open/")
    named = " as Open Responses" if is_open else ""
    items = Operation(
        "get", base + "/{id}/input_items", "Responses", f"List the input items of a response{named}",
        (Answer(200, "One page of the items that its request had.", {JSON: b.ItemsAnswer}),),
        "read", parameters=(_RESPONSE,), query=b.ItemsQuery, errors=(ResponseNotFound, ItemNotFound, *_STORE),
        open=is_open,
    )  # fmt: skip
    compact = Operation(
        "post", base + "/compact", "Responses", f"Compact a conversation{named}",
        (Answer(200, "The user's messages, and an item that stands for everything.", {JSON: b.CompactAnswer},
                ("X-Stream-Id", "X-Served-Model", "x-ratelimit", "x-budget-warning")),),
        "create",
        "The model summarises the items. The summary is sealed in `encrypted_content`: only this platform reads it, "
        "and only for the same tenant. Send `output` as the beginning of the next request's input.",
        body=b.CompactBody,
        errors=(*create, PreviousResponseNotFound, PreviousResponseRunning, HistoryTooLong, *_STORE),
        open=is_open,
    )  # fmt: skip
    return items, compact


_CONVERSATIONS = (
    Operation(
        "post", "/v1/conversations", "Responses", "Create a conversation",
        (Answer(200, "The conversation.", {JSON: b.ConversationAnswer}),),
        "create", _CONVERSATIONS_ABOUT,
        body=b.ConversationCreate, body_required=False,
        errors=(NoDatabase, e.Unsupported, *_MORE, *_STORE),
    ),
    Operation(
        "get", "/v1/conversations/{id}", "Responses", "Describe a conversation",
        (Answer(200, "The conversation.", {JSON: b.ConversationAnswer}),),
        "read", parameters=(_CONVERSATION,), errors=_ONE,
    ),
    Operation(
        "post", "/v1/conversations/{id}", "Responses", "Replace the metadata of a conversation",
        (Answer(200, "The conversation.", {JSON: b.ConversationAnswer}),),
        "create", parameters=(_CONVERSATION,), body=b.ConversationChange,
        errors=(*_MORE, *_ONE),
    ),
    Operation(
        "delete", "/v1/conversations/{id}", "Responses", "Delete a conversation with its items",
        (Answer(200, "It is deleted.", {JSON: b.ConversationDeleted}),),
        "create", "Its responses stay. Delete them by their own ids.", (_CONVERSATION,), errors=_ONE,
    ),
)  # fmt: skip

_ITEMS = (
    Operation(
        "get", "/v1/conversations/{id}/items", "Responses", "List the items of a conversation",
        (Answer(200, "One page.", {JSON: b.ItemsAnswer}),),
        "read", parameters=(_CONVERSATION,), query=b.ItemsQuery, errors=(ItemNotFound, *_ONE),
    ),
    Operation(
        "post", "/v1/conversations/{id}/items", "Responses", "Add items to a conversation",
        (Answer(200, "The items, with their ids.", {JSON: b.ItemsAnswer}),),
        "create", "400 `conversation_locked` while a response of the conversation runs.", (_CONVERSATION,),
        body=b.ItemsAdd, errors=(ConversationLocked, *_MORE, *_ONE),
    ),
    Operation(
        "get", "/v1/conversations/{id}/items/{item_id}", "Responses", "Get an item of a conversation",
        (Answer(200, "The item.", {JSON: dict[str, Any]}),),
        "read", parameters=(_CONVERSATION, _ITEM), errors=(ItemNotFound, *_ONE),
    ),
    Operation(
        "delete", "/v1/conversations/{id}/items/{item_id}", "Responses", "Delete an item of a conversation",
        (Answer(200, "The conversation.", {JSON: b.ConversationAnswer}),),
        "create", parameters=(_CONVERSATION, _ITEM), errors=(ItemNotFound, *_ONE),
    ),
)  # fmt: skip
