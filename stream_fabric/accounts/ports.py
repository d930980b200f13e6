"""The ports of tenants: their accounts and their published records. Calls raise ``FabricError``."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from stream_fabric.accounts.account import Admitted, Exceeded, Settlement, Spent, Subject, Use
from stream_fabric.accounts.budgets import BudgetUse, Extended, Spend
from stream_fabric.events import Prices
from stream_fabric.stream.ids import StreamId, TenantId


class Accounts(Protocol):
    """Limits of all tenants, exact for any number of gateways; see ``accounts.account``."""

    async def admit(
        self,
        tenant: TenantId,
        stream: StreamId,
        subjects: Sequence[Subject],
        tokens: int,
        spend: Spend | None = None,
    ) -> Admitted | Exceeded | Spent:
        """Admit a stream that will use about ``tokens``, and reserve them; a repeated call reserves nothing more.

        ``spend``: what it asks of its budgets; None: it has none.
        """

    async def add(
        self, tenant: TenantId, stream: StreamId, subjects: Sequence[Subject], requests: int, tokens: int, call: str
    ) -> Admitted | Exceeded:
        """Add an input of a running stream to what it has reserved, if its limits have room. Figures below 0 give one
        back. ``call``: name of this call; one that is repeated within a minute counts once."""

    async def extend(self, tenant: TenantId, stream: StreamId, output_tokens: int, prompt_tokens: int = 0) -> Extended:
        """Grant a running stream up to ``output_tokens`` output tokens in total, as far as its budgets have room.

        ``prompt_tokens``: tokens of its prompt as the engine counted them; 0: as reserved. Figures are totals, so the
        call may be repeated. ``RESERVATION_LOST`` is granted where the account knows no reservation of the stream.
        """

    async def reprice(self, tenant: TenantId, stream: StreamId, prices: Prices) -> None:
        """Charge a stream's budgets at other prices, none of them higher, because another model answers.

        One that has been settled was charged at the prices of its admission.
        """

    async def settle(self, tenant: TenantId, settlements: Sequence[Settlement]) -> int:
        """Count what ended streams used instead of what they reserved. Returns how many held a reservation."""

    async def uses(self, tenant: TenantId, subjects: Sequence[Subject]) -> tuple[Use, ...]:
        """Read the use of each subject."""

    async def reserved(self, tenant: TenantId) -> dict[StreamId, tuple[str, ...]]:
        """Read the streams of the tenant that hold a reservation, each with its subjects."""

    async def budgets(self, tenant: TenantId, names: Sequence[str]) -> dict[str, BudgetUse]:
        """Read the counters of budgets by name; one that does not exist is empty."""

    async def raise_to(self, tenant: TenantId, counter: str, tokens: int, micro: int) -> None:
        """Raise what a budget's counter says was used to at least this; a repeated call changes nothing more."""


class Unbilled(Protocol):
    """Fenced streams that have no bill yet. ``StreamLog.fence`` adds each that has used something."""

    async def late(self, partition: int) -> list[tuple[StreamId, int]]:
        """Read streams of a partition whose bill is late, with the moment of their end in Unix ms.

        No other call reads streams of the partition until their bills would be late again.
        """

    async def remove(self, streams: Sequence[StreamId]) -> None:
        """Remove streams that have their bill."""


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
