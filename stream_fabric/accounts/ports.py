"""The ports of tenants: their accounts and their published records. Calls raise ``FabricError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from stream_fabric.accounts.account import Admitted, Exceeded, Settlement, Subject, Use
from stream_fabric.stream.ids import StreamId, TenantId


class Accounts(Protocol):
    """Limits of all tenants, exact for any number of gateways; see ``accounts.account``."""

    async def admit(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], tokens: int
    ) -> Admitted | Exceeded:
        """Admit a stream that will use about ``tokens``, and reserve them; a repeated call reserves nothing more."""

    async def settle(self, tenant: TenantId, settlements: Sequence[Settlement]) -> int:
        """Count what ended streams used instead of what they reserved. Returns how many held a reservation."""

    async def uses(self, tenant: TenantId, subjects: Sequence[Subject]) -> tuple[Use, ...]:
        """Read the use of each subject."""

    async def reserved(self, tenant: TenantId) -> dict[StreamId, tuple[str, ...]]:
        """Read the streams of the tenant that hold a reservation, each with its subjects."""


class TenantRecords(Protocol):
    """Published records of tenants, keys and plans; see ``accounts.records``. A revision orders the changes.

    The database assigns the revisions. Records are opaque bytes here.
    """

    async def publish(self, records: Mapping[str, tuple[int, bytes]], *, after: int = 0) -> None:
        """Publish records with their revisions, by name. An older revision never replaces a newer one.

        Raises FabricLost, and publishes nothing, when the highest published revision is lower than ``after``.
        """

    async def changes(self, since: int) -> tuple[int, dict[str, bytes]]:
        """Read the records with a revision after ``since``: (newest revision among them, records by name).

        It may return only some of them, the oldest first: call again with the returned revision until no record comes.
        """

    async def revision(self) -> int:
        """Return the highest published revision; 0: nothing is published, or Redis has lost it."""
