"""``stream-gw prices``: prices of tokens, for all tenants or for one."""

from __future__ import annotations

import argparse
from collections.abc import Mapping
from typing import TYPE_CHECKING

from stream_fabric.accounts.records import Price
from stream_gw.cli.tenancy.session import Verb, actor, add_database_flags, checked, run_verb, show, table
from stream_gw.tenancy.models import TenantChange

if TYPE_CHECKING:
    from stream_gw.tenancy import Tenancy

_UNIT = "millionths of your currency per million tokens"


def add_flags(parser: argparse.ArgumentParser) -> None:
    common = add_database_flags(parser)
    verbs = parser.add_subparsers(dest="verb", required=True, metavar="VERB")
    change = verbs.add_parser("set", help="set the price of a model", parents=[common])
    listing = verbs.add_parser("list", help="list prices", parents=[common])
    delete = verbs.add_parser("delete", help="delete the price of a model", parents=[common])
    for verb in (change, delete):
        verb.add_argument(
            "model",
            help="name of the model; *: each model without a price of its own; MODEL@TIER: its requests of one tier",
        )
    for verb in (change, listing, delete):
        verb.add_argument("--tenant", help="prices of this tenant, which come first (default: of all tenants)")
    change.add_argument("--prompt", type=_amount, required=True, metavar="N", help=f"prompt tokens: {_UNIT}")
    change.add_argument("--output", type=_amount, required=True, metavar="N", help=f"output tokens: {_UNIT}")
    change.add_argument(
        "--cached", type=_amount, metavar="N", help="prompt tokens found in the cache (default: as prompt)"
    )


def run(args: argparse.Namespace) -> int:
    return run_verb(args, _VERBS, reads=frozenset({"list"}))


async def _set(tenancy: Tenancy, args: argparse.Namespace) -> None:
    await _change(tenancy, args, Price(args.prompt, args.output, args.cached))


async def _delete(tenancy: Tenancy, args: argparse.Namespace) -> None:
    await _change(tenancy, args, None)


async def _change(tenancy: Tenancy, args: argparse.Namespace, price: Price | None) -> None:
    given = {} if price is None else {args.model: price}
    checked(TenantChange(prices=given or {args.model: Price()}))  # the model's name
    async with tenancy.change(actor()) as session:
        if args.tenant is None:
            await session.prices.set(args.model, price)
            prices = await session.prices.read()
        else:
            held = (await session.tenants.find(args.tenant)).prices
            kept = {model: each for model, each in held.items() if model != args.model}
            prices = (await session.tenants.change(args.tenant, TenantChange(prices=kept | given))).prices
    show(args, prices, "\n".join(price_lines(prices)))


async def _list(tenancy: Tenancy, args: argparse.Namespace) -> None:
    async with tenancy.read() as session:
        if args.tenant is None:
            prices = await session.prices.read()
        else:
            prices = (await session.tenants.find(args.tenant)).prices
    show(args, prices, "\n".join(price_lines(prices)))


def price_lines(prices: Mapping[str, Price]) -> list[str]:
    """Format prices as the lines of a table."""
    if not prices:
        return ["no prices"]
    rows = [
        (model, str(price.prompt), str(price.prompt if price.cached is None else price.cached), str(price.output))
        for model, price in sorted(prices.items())
    ]
    return [f"prices, {_UNIT}:", *table(("model", "prompt", "cached", "output"), rows).splitlines()]


def _amount(text: str) -> int:
    if not text.isdecimal() or int(text) > 1 << 40:
        raise argparse.ArgumentTypeError(f"must be a whole number of {_UNIT}, got {text!r}")
    return int(text)


_VERBS: dict[str, Verb] = {"set": _set, "list": _list, "delete": _delete}
