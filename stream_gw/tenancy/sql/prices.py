"""Prices for all tenants."""

from __future__ import annotations

import msgspec
from sqlalchemy import delete, insert, select, update

from stream_fabric.accounts.records import Price
from stream_fabric.errors import NotFound
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.transaction import Transaction

_PRICES = tables.prices


class PriceList:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def read(self) -> dict[str, Price]:
        """Return the prices by model; ``*``: each model that is not named."""
        reply = await self._transaction.connection.execute(select(_PRICES).order_by(_PRICES.c.model))
        return {row.model: msgspec.convert(row.price, Price) for row in reply}

    async def find(self, model: str) -> Price:
        """Raises NotFound."""
        price = (await self.read()).get(model)
        if price is None:
            raise NotFound(
                f"model {model[:64]!r} has no price; list the prices with stream-gw prices list", param="model"
            )
        return price

    async def set(self, model: str, price: Price | None) -> None:
        """Set the price of a model; None removes it."""
        before = (await self.read()).get(model)
        if price == before:
            return
        connection = self._transaction.connection
        await connection.execute(delete(_PRICES).where(_PRICES.c.model == model))
        if price is not None:
            await connection.execute(insert(_PRICES).values(model=model, price=msgspec.to_builtins(price)))
        changed = update(tables.revisions).where(tables.revisions.c.name == "prices")
        await connection.execute(changed.values(revision=self._transaction.next_revision()))
        await self._transaction.audit("price.set", f"price:{model}", before, price)
