"""Terms of a stream's bill, which its meta keeps: whoever ends a stream whose request is lost bills it by them."""

from __future__ import annotations

from typing import Self

import msgspec

from stream_fabric.events import Prices
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import Page


def bill_id(stream: StreamId) -> str:
    """Return the id of a stream's bill. It is the same whoever writes the bill: several events of it count once."""
    return f"{stream}:end"


class BillTerms(msgspec.Struct, frozen=True, omit_defaults=True):
    """Fields of a stream's ``Work`` that its bill needs, and the pool that it was sent to."""

    pool: str = ""
    tier: int = 1
    free: bool = False
    session: str = ""
    prices: Prices | None = None
    key: str = ""
    user_hash: str = ""
    retention_days: int = 0

    @classmethod
    def of(cls, work: Work, pool: str) -> Self:
        return cls(pool, work.tier, work.free, work.session, work.prices, work.key, work.user_hash, work.retention_days)


class _Facts(msgspec.Struct, frozen=True):
    model: str = ""
    kind: str = "chat"


class _Meta(msgspec.Struct, frozen=True):
    """The part of what gateways keep in a stream's meta that its bill needs."""

    facts: _Facts = _Facts()
    bill: BillTerms = BillTerms()
    """Empty in streams that a gateway of the release before has made."""


_decoder = msgspec.json.Decoder(_Meta)


def lost_work(stream: StreamId, page: Page) -> tuple[str, Work]:
    """Return pool and request of a stream as far as its bill needs them; the prompt is lost."""
    try:
        meta = _decoder.decode(page.facts)
    except msgspec.MsgspecError:  # written by another version
        meta = _Meta()
    terms = meta.bill
    # A fence has begun an epoch of its own; no producer ended a stream that is asked for here
    attempt = page.epoch.n - (page.status == "failed")
    fields = {
        "stream": stream, "kind": meta.facts.kind, "model": meta.facts.model, "body": msgspec.Raw(b"null"),
    }  # fmt: skip
    return terms.pool, Work(
        msgspec.convert(fields, EngineRequest),
        str(page.epoch._replace(n=attempt)),
        page.tenant,
        page.facts,
        None,
        tier=terms.tier,
        free=terms.free,
        session=terms.session,
        attempt=attempt,
        prices=terms.prices,
        key=terms.key,
        user_hash=terms.user_hash,
        retention_days=terms.retention_days,
    )
