"""Stored responses and conversations of OpenAI's Responses API: the one door of this room."""

from __future__ import annotations

from stream_gw.responses.compaction import compaction_of, summary_request, window_of
from stream_gw.responses.conversations import Conversations
from stream_gw.responses.errors import (
    ConversationLocked,
    ConversationNotFound,
    HistoryTooLong,
    ItemNotFound,
    NoStore,
    PreviousResponseNotFound,
    PreviousResponseRunning,
    ReferenceNotFound,
    ResponseNotFound,
    ResponseStorageFull,
    ResponsesUnavailable,
    ResponseTooLarge,
)
from stream_gw.responses.held import Outcome, StorePolicy
from stream_gw.responses.open import open_responses
from stream_gw.responses.packing import pack, unpack_lists
from stream_gw.responses.records import Conversation, History, Item, ItemPage, Order, ResponseRecord, stored_items
from stream_gw.responses.references import refers
from stream_gw.responses.seal import is_window
from stream_gw.responses.store import ResponseStore

__all__ = [
    "Conversation",
    "ConversationLocked",
    "ConversationNotFound",
    "Conversations",
    "History",
    "HistoryTooLong",
    "Item",
    "ItemNotFound",
    "ItemPage",
    "NoStore",
    "Order",
    "Outcome",
    "PreviousResponseNotFound",
    "PreviousResponseRunning",
    "ReferenceNotFound",
    "ResponseNotFound",
    "ResponseRecord",
    "ResponseStorageFull",
    "ResponseStore",
    "ResponseTooLarge",
    "ResponsesUnavailable",
    "StorePolicy",
    "compaction_of",
    "is_window",
    "open_responses",
    "pack",
    "refers",
    "stored_items",
    "summary_request",
    "unpack_lists",
    "window_of",
]
