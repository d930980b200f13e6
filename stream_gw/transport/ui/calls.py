"""Calls of a chat that both transports make: begin an answer, find the one to resume."""

from __future__ import annotations

from typing import NamedTuple

import msgspec
from msgspec import Raw

from stream_fabric.errors import BadRequest
from stream_fabric.stream.cursor import BEGINNING
from stream_fabric.stream.ids import StreamId
from stream_gw.auth import Principal
from stream_gw.dialects.base import Encoder
from stream_gw.dialects.requests import read_fields
from stream_gw.dialects.ui.encoder import UiEncoder
from stream_gw.dialects.ui.replay import Before
from stream_gw.dialects.ui.requests import DIALECT, parse_turn
from stream_gw.observe.metrics import Metrics
from stream_gw.observe.trace import ReaderTrace
from stream_gw.streams.chats.chats import ChatStreams
from stream_gw.streams.chats.turn import ChatTurn
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.off_loop import off_loop
from stream_gw.streams.opened import OpenedStream

_NAMED_MAX = 20


class ChatReader:
    """A page that reads an answer of a chat: what an open response or channel keeps of it."""

    __slots__ = ("_chat", "_chats", "_user", "stream", "who")

    def __init__(self, chats: ChatStreams, who: Principal, user: str | None, chat: str, stream: StreamId) -> None:
        self._chats = chats
        self.who = who
        self._user = user
        self._chat = chat
        self.stream = stream

    def note_end(self) -> None:
        """Record that the page has got the answer's end."""
        self._chats.note_read(self.who, self._user, self._chat, self.stream)

    async def stop(self) -> None:
        """Cancel the answer; nothing of it is then to resume."""
        await self._chats.stop(self.who, self._user, self._chat, self.stream)


class ChatAnswer(NamedTuple):
    """An answer of a chat that a page is about to read."""

    reader: ChatReader
    opened: OpenedStream
    before: bytes | None = None
    """The message before this answer, for a page that has nothing of it; None: the page has it."""

    async def encoder(self) -> Encoder | None:
        """Return the encoder of a page that has nothing of the message; None: any encoder of the dialect will do."""
        if self.before is None or not self.opened.facts.message_id:
            return None
        encoder = await self.opened.encoder(DIALECT)
        assert isinstance(encoder, UiEncoder)
        encoder.replay(Before.of(self.before) if self.before else None)
        return encoder


class ChatCalls:
    def __init__(self, gateway: Gateway, metrics: Metrics) -> None:
        self._gateway = gateway
        self._metrics = metrics
        self.chats = ChatStreams(gateway.parts, gateway.reads, gateway.commands)

    async def begin(self, who: Principal, body: bytes, trace: ReaderTrace, key: str | None) -> ChatAnswer | None:
        """Create the stream that a body of ``useChat`` asks for. ``key``: idempotency key.

        None: the key is bound to a stream that has ended without a frame. Raises StreamGwError.
        """
        fields = await off_loop(len(body), lambda: read_fields(body, "messages"))
        if bytes(fields.get("model", b"null")) == b"null":
            fields["model"] = Raw(msgspec.json.encode(self._only_model(who)))
        turn = await off_loop(len(body), lambda: parse_turn(fields))
        chat = ChatTurn(turn.chat, turn.before)
        call = CreateCall(who, turn.request, trace, key=key, kept=True, dialect=DIALECT, chat=chat)
        opened = await self._gateway.streams.create(call)
        return None if opened is None else self._answer(who, turn.request.user, turn.chat, opened)

    async def resume(self, who: Principal, user: str | None, chat: str, trace: ReaderTrace) -> ChatAnswer | None:
        """Open the chat's newest answer from its first frame. None: nothing is to resume. Raises StreamGwError."""
        found = await self.chats.find(who, user, chat)
        if found is None:
            return None
        record, owner = found
        self._metrics.resumes.inc()
        opened = await self._gateway.reads.follow(who, record.stream, BEGINNING, trace, exact=False, dialect=DIALECT)
        return None if opened is None else self._answer(who, owner, chat, opened, record.before)

    def _answer(
        self, who: Principal, user: str | None, chat: str, opened: OpenedStream, before: bytes | None = None
    ) -> ChatAnswer:
        return ChatAnswer(ChatReader(self.chats, who, user, chat, opened.id), opened, before)

    def _only_model(self, who: Principal) -> str:
        """Return the model of a request that names none: the only one that the caller may use. Raises BadRequest."""
        found = sorted(model for model in self._gateway.served(who) if who.may_use(model))
        if len(found) == 1:
            return found[0]
        mine = f"{', '.join(found[:_NAMED_MAX])}{', …' if len(found) > _NAMED_MAX else ''}" if found else "none"
        raise BadRequest(
            "model is missing; name one in the body, for example with new DefaultChatTransport({ body: { model } }). "
            f"Models that you may use: {mine}",
            param="model",
        )
