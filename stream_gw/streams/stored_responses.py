"""Responses of streams that outlive their logs: what the store of responses keeps of a create."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from typing import Any, NamedTuple

import msgspec

from stream_fabric.errors import StreamGwError
from stream_gw.auth import Principal
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.responses.requests import Asked
from stream_gw.observe.trace import ReaderTrace
from stream_gw.responses import (
    History,
    NoStore,
    PreviousResponseNotFound,
    ResponseRecord,
    ResponseStore,
    is_window,
    refers,
)
from stream_gw.streams.gateway import Gateway


class StoredRequest:
    """Stores the request of a new response; an ``OnNamed``."""

    def __init__(self, store: ResponseStore, who: Principal, asked: Asked, last_seq: int | None) -> None:
        """``last_seq``: place of the last item of the conversation that the response builds on, if it has one."""
        self._store = store
        self._who = who
        self._asked = asked
        self._last_seq = last_seq

    async def named(self, facts: StreamFacts, user: str | None) -> None:
        asked = self._asked
        record = ResponseRecord(
            id=facts.stream,
            created_at=facts.created,
            model=facts.model,
            input=asked.items,
            instructions=asked.instructions,
            metadata=asked.metadata,
            previous_response_id=asked.previous_response_id,
            conversation=asked.conversation,
            user=user,
            store=asked.store,
            background=asked.background,
        )
        await self._store.begun(self._who.tenant, record, History((), self._last_seq))

    async def withdrawn(self, facts: StreamFacts) -> None:
        await self._store.withdrawn(self._who.tenant, facts.stream)


class Prepared(NamedTuple):
    """A request with what it builds on."""

    history: History
    asked: Asked
    """The request as it is stored: the items that it refers to are in it."""
    expanded: Asked
    """The request as the engine gets it: every compaction is a message."""


@contextlib.contextmanager
def failures_traced(who: Principal, dialect: str, make_trace: Callable[[], ReaderTrace]) -> Iterator[None]:
    """Trace a request that fails by our fault before there is one that creates a stream, so that alerts count it."""
    try:
        yield
    except StreamGwError as error:
        if error.http_status >= 500:
            trace = make_trace()
            trace.tenant, trace.dialect = who.tenant, dialect
            trace.finish("refused", error=error)
        raise


async def check_early(
    gateway: Gateway, who: Principal, asked: Asked, key: str | None = None, *, prepares: bool = False
) -> None:
    """Check a request before anything stored is read or unpacked for it. Raises like the create of its stream."""
    stored = asked.previous_response_id is not None or asked.conversation is not None
    if stored or any(refers(item) or item.get("type") == "compaction" for item in asked.items):
        await gateway.checks.check(who, asked.unread(), key, prepares=prepares)


async def with_history(
    store: ResponseStore | None,
    who: Principal,
    asked: Asked,
    count: Callable[[int], None],
    known: History | None = None,
) -> Prepared:
    """Read what a new response builds on. ``known``: the items up to the end of the previous response, where the
    caller has them. ``count``: counts the bytes that are read.

    Raises Forbidden for a caller that may not read what it builds on, PreviousResponseNotFound, NoStore, and what
    ``ResponseStore.history`` and ``resolved`` raise, and what ``count`` does.
    """
    if store is None:
        if known is not None:
            return Prepared(known, asked, asked)
        if asked.previous_response_id is not None:
            raise PreviousResponseNotFound(asked.previous_response_id)
        if asked.conversation is not None:
            raise NoStore("this gateway stores no conversations; send the whole input")
        return Prepared(History(), asked, asked)
    history = History() if known is None else History(store.expanded(who.tenant, known), size=known.size)
    is_stored = known is None and (asked.previous_response_id is not None or asked.conversation is not None)
    if is_stored or any(map(refers, asked.items)):
        who.require("read")  # the answer can repeat what is stored
    if is_stored:
        history = await store.history(
            who.tenant, asked.previous_response_id, asked.conversation, user=who.user, count=count
        )
    asked = _with_items(asked, await store.resolved(who.tenant, asked.items, history, user=who.user, count=count))
    if any(map(is_window, asked.items)):
        history = History((), history.last_seq)
    return Prepared(history, asked, _with_items(asked, store.expanded(who.tenant, asked.items)))


def _with_items(asked: Asked, items: list[dict[str, Any]]) -> Asked:
    return asked if items is asked.items else msgspec.structs.replace(asked, items=items)


async def read_stored(store: ResponseStore | None, who: Principal, response: str) -> bytes | None:
    """Return a whole response that the store has; None: it has none."""
    record = None if store is None else await store.read(who.tenant, response, user=who.user)
    return None if record is None or record.response is None else msgspec.json.encode(record.response)


async def delete_stored(store: ResponseStore | None, who: Principal, response: str) -> bool:
    """Delete a response from the store; False: it has none."""
    return store is not None and await store.delete(who.tenant, response, user=who.user)
