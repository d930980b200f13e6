"""Keeps a gateway's keys and plans as they are published, and finds the keys that were revoked."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from collections.abc import Callable
from typing import NamedTuple

import msgspec

from stream_fabric.accounts.ports import TenantRecords
from stream_fabric.accounts.records import Record, decode_record
from stream_fabric.errors import FabricError
from stream_fabric.limits import TENANTS_ASKED_EVERY_S, TENANTS_READ_EVERY_S
from stream_fabric.stream.ids import TenantId
from stream_gw.auth.keys import KeyStore

log = logging.getLogger(__name__)


class Revoked(NamedTuple):
    """Keys, or a user, of one tenant that may no longer be used. ``finish``: their streams may run to their end."""

    tenant: TenantId
    keys: frozenset[str]
    finish: bool
    user: str | None = None


class TenantFeed:
    """Reads changes of the published records every second, and when asked. The last serve while none can be read."""

    def __init__(
        self, records: TenantRecords, keys: KeyStore, on_skip: Callable[[str], None] = lambda kind: None
    ) -> None:
        """``on_skip`` is called with the kind of each record that cannot be decoded."""
        self._records = records
        self._keys = keys
        self._on_skip = on_skip
        self._revision = 0
        self._revoked: list[Revoked] = []
        """Found by a read that has not come to its end."""
        self._unread = False
        self._is_asked = asyncio.Event()
        self._next_read: asyncio.Future[bool] | None = None
        """Result of the next read, for those who wait for it; None: nobody does."""

    async def read(self) -> list[Revoked]:
        """Apply everything published since the last read; return what it revokes.

        Raises FabricError. What was found until then is returned by the next read that succeeds.
        """
        while True:
            revision, records = await self._records.changes(self._revision)
            for name, data in records.items():
                self._revoked += self._apply(name, data)
            if not records:
                revoked, self._revoked = self._revoked, []
                return revoked
            self._revision = revision

    def _apply(self, name: str, data: bytes) -> list[Revoked]:
        try:
            record = decode_record(name, data) if data else None
        except msgspec.MsgspecError as error:
            # A record of a newer version. What this gateway knows of the tenant holds until it is upgraded
            log.error("published record skipped: record=%s error=%s", name, error)
            self._on_skip(name.partition(":")[0])
            return []
        kind, _, rest = name.partition(":")
        if kind == "user":
            return self._apply_user(name, record)
        if kind != "tenant":
            self._keys.apply(name, record)
            return []
        tenant = TenantId(rest)
        before, finish = self._keys.usable(tenant), self._keys.plan(tenant).finish_revoked
        self._keys.apply(name, record)
        ended = frozenset(use.id for use in before - self._keys.usable(tenant))
        return [Revoked(tenant, ended, finish)] if ended else []

    def _apply_user(self, name: str, record: Record | None) -> list[Revoked]:
        _, of, user = name.split(":", 2)
        tenant, users = TenantId(of), self._keys.users
        was_suspended = users.is_suspended(tenant, user)
        self._keys.apply(name, record)
        if was_suspended or not users.is_suspended(tenant, user):
            return []
        return [Revoked(tenant, frozenset(), self._keys.plan(tenant).finish_revoked, user)]

    async def catch_up(self) -> bool:
        """Wait for the next read, which has all that was published before this call. False: it failed or took long."""
        if self._next_read is None:
            self._next_read = asyncio.get_running_loop().create_future()
            self._is_asked.set()
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(TENANTS_READ_EVERY_S):
                return await asyncio.shield(self._next_read)
        return False

    async def run(self, on_change: Callable[[list[Revoked]], None]) -> None:
        """Read until cancelled; ``on_change`` is called with revoked keys."""
        while True:
            await asyncio.sleep(TENANTS_ASKED_EVERY_S)
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(TENANTS_READ_EVERY_S - TENANTS_ASKED_EVERY_S):
                    await self._is_asked.wait()
            self._is_asked.clear()
            waiting, self._next_read = self._next_read, None
            revoked = await self._try_read()
            if waiting is not None:
                waiting.set_result(revoked is not None)
            if revoked:
                on_change(revoked)

    async def _try_read(self) -> list[Revoked] | None:
        """Read; None: that failed."""
        try:
            revoked = await self.read()
        except FabricError as error:
            if not self._unread:
                log.warning("tenants not read, the last ones serve: error=%s", error)
            self._unread = True
            return None
        self._unread = False
        return revoked
