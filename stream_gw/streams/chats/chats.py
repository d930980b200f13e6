"""The newest stream of each chat, as callers may see it."""

from __future__ import annotations

import logging

from stream_fabric.chats import ChatRecord
from stream_fabric.errors import FabricError, NotFound
from stream_fabric.limits import CHAT_READ_S
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import CancelReply
from stream_gw.auth import Principal
from stream_gw.streams.cancel import StreamCommands
from stream_gw.streams.chats.turn import chats_of, scopes
from stream_gw.streams.follow import StreamReads
from stream_gw.streams.parts import GatewayParts

log = logging.getLogger(__name__)


class ChatStreams:
    """Finds and stops the streams of chats, from any gateway.

    A caller that is limited to a user sees the chats of that user. Another caller sees the chats of its tenant that it
    asks for without a user, or with the same user as their requests.
    """

    def __init__(self, parts: GatewayParts, reads: StreamReads, commands: StreamCommands) -> None:
        self._parts = parts
        self._reads = reads
        self._commands = commands

    async def find(self, who: Principal, user: str | None, chat: str) -> tuple[ChatRecord, str | None] | None:
        """Return the chat's newest stream and its user if it runs, or if no reader has got its end until a moment ago.

        None: there is none, or it was cancelled. Raises Forbidden, or NotFound for another user.
        """
        who.require("read")
        record = await self._record(who, user, chat)
        if record is None:
            return None
        try:
            page, meta = await self._reads.read_head(who, record.stream)
        except NotFound:  # its log has expired, or it was never created
            return None
        return None if page.status == "cancelled" else (record, meta.user)

    async def stop(
        self, who: Principal, user: str | None, chat: str, named: str | None
    ) -> tuple[StreamId, CancelReply] | None:
        """Cancel the stream ``named``, or else the chat's newest one, which is then no more to resume.

        None: there is none. A newer stream than the named one goes on. Raises like ``find``, and for a text that is no
        stream's id.
        """
        who.require("cancel")
        record = await self._record(who, user, chat)
        stream = named or (None if record is None else record.stream)
        if stream is None:
            return None
        reply = await self._commands.cancel(who, stream)
        for scope in scopes(who, user):
            await chats_of(self._parts).unbind(who.tenant, scope, chat, StreamId(stream))
        return StreamId(stream), reply

    def note_read(self, who: Principal, user: str | None, chat: str, stream: StreamId) -> None:
        """Record that a reader has got the stream's end: from a moment later on there is nothing to resume."""
        self._parts.hub.spawn(self._expire(who, user, chat, stream))

    async def _expire(self, who: Principal, user: str | None, chat: str, stream: StreamId) -> None:
        for scope in scopes(who, user):
            try:
                await chats_of(self._parts).expire(who.tenant, scope, chat, stream, CHAT_READ_S)
            except FabricError as error:  # it expires by itself, later
                log.warning("chat not marked as read: stream=%s error=%r", stream, error)

    async def _record(self, who: Principal, user: str | None, chat: str) -> ChatRecord | None:
        return await chats_of(self._parts).find(who.tenant, _scope(who, user), chat)


def _scope(who: Principal, user: str | None) -> str:
    """Return the scope in which the caller looks. Raises NotFound."""
    if user is not None and not who.may_see(user):
        raise NotFound("this token belongs to another user")
    return who.user or user or ""
