"""The chat of a request, and how its new stream becomes the chat's newest."""

from __future__ import annotations

from collections.abc import Awaitable
from dataclasses import dataclass

from stream_fabric.chats import ChatRecord, Chats
from stream_fabric.stream.ids import StreamId
from stream_gw.auth import Principal
from stream_gw.streams.parts import GatewayParts


@dataclass(frozen=True)
class ChatTurn:
    """The chat of a request for a stream.

    ``before``: what the message holds that the stream continues; empty: it begins one, or that is not kept.
    """

    chat: str
    before: bytes = b""


def bindings(
    parts: GatewayParts, who: Principal, user: str | None, turn: ChatTurn, stream: StreamId
) -> list[Awaitable[None]]:
    """Return the calls that make a new stream its chat's newest. ``user``: the stream's."""
    # A tenant without retention keeps no content beside its streams
    before = b"" if parts.authenticator.keys.plan(who.tenant).retention_s == 0 else turn.before
    record = ChatRecord(stream, before)
    return [chats_of(parts).bind(who.tenant, scope, turn.chat, record) for scope in scopes(who, user)]


def scopes(who: Principal, user: str | None) -> list[str]:
    """Return the scopes in which a stream of the user is found: a backend may begin what its user's page resumes."""
    if who.user is not None:
        return [who.user]
    return ["", user] if user else [""]


def chats_of(parts: GatewayParts) -> Chats:
    """Return the port."""
    assert parts.chats is not None, "only a simulation has none, and it has no chats"
    return parts.chats
