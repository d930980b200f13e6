"""The port to the newest stream of each chat, for clients that know only the chat's id."""

from __future__ import annotations

from typing import NamedTuple, Protocol

from stream_fabric.stream.ids import StreamId, TenantId


class ChatRecord(NamedTuple):
    """The newest stream of a chat. ``before``: what the message held that it continues; empty: it began one."""

    stream: StreamId
    before: bytes


class Chats(Protocol):
    """Newest stream by tenant, scope and chat id. A scope is a user, or empty: callers without a user."""

    async def bind(self, tenant: TenantId, scope: str, chat: str, record: ChatRecord) -> None:
        """Make the stream the chat's newest. The record expires."""

    async def find(self, tenant: TenantId, scope: str, chat: str) -> ChatRecord | None:
        """Return the newest stream; None: the chat has none."""

    async def unbind(self, tenant: TenantId, scope: str, chat: str, stream: StreamId) -> None:
        """Forget the stream, unless the chat has a newer one."""

    async def expire(self, tenant: TenantId, scope: str, chat: str, stream: StreamId, within_s: int) -> None:
        """Forget the stream after ``within_s``, unless the chat has a newer one."""
