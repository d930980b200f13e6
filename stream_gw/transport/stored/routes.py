"""HTTP handlers of conversations, of a response's input items, and of compaction."""

from __future__ import annotations

import msgspec
from msgspec import Raw
from starlette.types import Send

from stream_fabric.errors import BadRequest
from stream_fabric.limits import METADATA_BODY_BYTES_MAX
from stream_fabric.stream.ids import created_ms
from stream_gw.auth import Principal, Scope, bearer
from stream_gw.dialects.requests import read_common
from stream_gw.dialects.responses.translate import check_items
from stream_gw.responses import History, NoStore, ResponseStore, compaction_of, stored_items
from stream_gw.streams.context.asides import Asides
from stream_gw.streams.context.summary import summarised
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.transport.connection import CONNECTION, EdgeHttp
from stream_gw.transport.endpoint import Handler
from stream_gw.transport.http import JSON, Request, parse, query_as
from stream_gw.transport.stored.bodies import CompactBody, ConversationChange, ConversationCreate, ItemsAdd, ItemsQuery
from stream_gw.transport.whole_response import WholeResponse

_BASES = ("/v1/responses", "/v1/open/responses")
"""Paths of responses in both profiles."""


class StoredRoutes:
    def __init__(self, gateway: Gateway) -> None:
        self._gateway = gateway

    def handlers(self) -> dict[str, dict[str, Handler]]:
        """Return the handlers by path and method."""
        conversation: dict[str, Handler] = {
            "get": self.get_conversation, "post": self.change_conversation, "delete": self.delete_conversation
        }  # fmt: skip
        return {
            **{f"{base}/compact": {"post": self.compact} for base in _BASES},
            **{f"{base}/{{id}}/input_items": {"get": self.input_items} for base in _BASES},
            "/v1/conversations": {"post": self.create_conversation},
            "/v1/conversations/{id}": conversation,
            "/v1/conversations/{id}/items": {"get": self.list_items, "post": self.add_items},
            "/v1/conversations/{id}/items/{item_id}": {"get": self.get_item, "delete": self.delete_item},
        }

    async def _open(self, request: Request, scope: Scope) -> tuple[ResponseStore, Principal]:
        """Count the call, and return the store and the caller.

        Raises Unauthenticated, Forbidden, NoStore or RateLimited.
        """
        who = request.from_caller(self._gateway.authenticate(bearer(request.scope["headers"])))
        who.require(scope)
        store = self._gateway.parts.responses
        if store is None:
            raise NoStore("this gateway stores no responses")
        await self._gateway.count_stored(who)
        return store, who

    # --- responses -----------------------------------------------------------------------------------------

    async def input_items(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "read")
        query = query_as(request, ItemsQuery)
        page = await store.input_items(
            who.tenant, request.path_params["id"], query.after, query.limit, query.order, user=who.user
        )
        await request.json(200, page.body())

    async def compact(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "create")
        asked, own_bytes = await request.parsed(who.tenant, lambda body: (parse(body, CompactBody), len(body)))
        if asked.previous_response_id is not None:
            who.require("read")  # the summary tells what is stored
        await self._gateway.checks.check(who, read_common({"model": Raw(msgspec.json.encode(asked.model))}, "chat"))
        with self._gateway.bodies.adding(who.tenant) as count:  # as long as the items are here
            history = await store.history(who.tenant, asked.previous_response_id, None, user=who.user, count=count)
            own = [{"role": "user", "content": asked.input}] if isinstance(asked.input, str) else asked.input or []
            stem, size = self._gateway.parts.random.token_hex(16), own_bytes + history.size
            read = await off_loop(own_bytes, lambda: store.expanded(who.tenant, stored_items(own, stem)))
            items = History([*history, *read], size=size)
            if not items:
                raise BadRequest("give input or previous_response_id: there is nothing to compact", param="input")
            await self._answer_compaction(request, store, who, asked, items)

    async def _answer_compaction(
        self, request: Request, store: ResponseStore, who: Principal, asked: CompactBody, items: History
    ) -> None:
        """Have the model summarise the items, as a stream like any other, and answer with the summary."""
        connection: EdgeHttp = request.scope["state"][CONNECTION]
        connection.skip_body()
        asides = Asides(
            self._gateway,
            who,
            request.trace(self._gateway.parts.tracer, "whole"),
            lambda opened: WholeResponse(connection, opened.id, opened.facts),
        )
        opened, summary, usage = await summarised(asides, asked.model, asked.instructions, items, items.size)
        made = {
            "id": opened.id,
            "object": "response.compaction",
            "created_at": created_ms(opened.id) // 1000,
            "usage": {
                "input_tokens": usage.prompt_tokens,
                "input_tokens_details": {"cached_tokens": usage.prompt_tokens_details.cached_tokens},
                "output_tokens": usage.completion_tokens,
                "output_tokens_details": {"reasoning_tokens": usage.completion_tokens_details.reasoning_tokens},
                "total_tokens": usage.prompt_tokens + usage.completion_tokens,
            },
        }

        def encoded() -> bytes:
            output = compaction_of(store.seals, who.tenant, opened.id, items, summary)
            return msgspec.json.encode(made | {"output": output})

        body = await off_loop(items.size, encoded)
        await request.answer(200, body, [JSON, (b"x-stream-id", opened.id.encode()), *opened.headers])

    # --- conversations -------------------------------------------------------------------------------------

    async def create_conversation(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "create")

        def read(body: bytes) -> ConversationCreate:
            asked = parse(body or b"{}", ConversationCreate)
            check_items(store.expanded(who.tenant, asked.items or []))
            return asked

        asked = await request.parsed(who.tenant, read)
        made = await store.conversations.create(who.tenant, asked.metadata or {}, asked.items or [], who.user)
        await request.json(200, made.body())

    async def get_conversation(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "read")
        found = await store.conversations.read(who.tenant, request.path_params["id"], who.user)
        await request.json(200, found.body())

    async def change_conversation(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "create")
        asked = parse(await request.body(who.tenant, METADATA_BODY_BYTES_MAX), ConversationChange)
        id_, metadata = request.path_params["id"], asked.metadata or {}
        changed = await store.conversations.change(who.tenant, id_, metadata, who.user)
        await request.json(200, changed.body())

    async def delete_conversation(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "create")
        id_ = request.path_params["id"]
        await store.conversations.delete(who.tenant, id_, who.user)
        await request.json(200, {"id": id_, "object": "conversation.deleted", "deleted": True})

    # --- items of a conversation -----------------------------------------------------------------------------

    async def list_items(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "read")
        query = query_as(request, ItemsQuery)
        page = await store.conversations.items(
            who.tenant, request.path_params["id"], query.after, query.limit, query.order, who.user
        )
        await request.json(200, page.body())

    async def add_items(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "create")

        def read(body: bytes) -> ItemsAdd:
            asked = parse(body, ItemsAdd)
            check_items(store.expanded(who.tenant, asked.items))
            return asked

        asked = await request.parsed(who.tenant, read)
        added = await store.conversations.add(who.tenant, request.path_params["id"], asked.items, who.user)
        await request.json(200, added.body())

    async def get_item(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "read")
        params = request.path_params
        await request.json(200, await store.conversations.item(who.tenant, params["id"], params["item_id"], who.user))

    async def delete_item(self, request: Request, send: Send) -> None:
        store, who = await self._open(request, "create")
        params = request.path_params
        found = await store.conversations.delete_item(who.tenant, params["id"], params["item_id"], who.user)
        await request.json(200, found.body())
