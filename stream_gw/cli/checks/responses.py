"""Checks of what keeps responses: the bounds of settings and plans against each other and against Redis' memory."""

from __future__ import annotations

from collections.abc import Sequence

from stream_fabric.accounts.records import PlanRecord
from stream_fabric.errors import FabricError
from stream_fabric.limits import RETENTION_S
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.tenancy.responses import RedisResponses
from stream_gw.auth import read_keys_file
from stream_gw.cli.checks.report import Report
from stream_gw.settings import GatewaySettings
from stream_gw.tenancy import DatabaseUnavailable, open_tenancy

_SHARE_MAX = 0.5
"""Largest share of Redis' memory that the stored responses of one tenant may take."""
_USED_MAX = 0.7
"""Share of Redis' memory in use from which plans that keep streams long are named."""
_WAITING_MAX = 200
"""Stored responses that may wait for the database: as many as one gateway writes in a second."""


async def check_responses(report: Report, settings: GatewaySettings, redis_url: str | None) -> None:
    """Check settings that hold or keep responses. ``redis_url`` None: Redis is not configured."""
    plans = await _plans(settings)
    if settings.database_url:
        _check_days(report, settings, plans)
    else:
        remedy = (
            "set STREAM_GW_DATABASE_URL; without it there are no conversations, and a stored response ends with its "
            "stream's retention"
        )
        report.skipped("stored responses and conversations in a database", remedy)
    _check_bounds(report, settings)
    _check_plans(report, plans)
    if redis_url:
        await _check_redis(report, settings, plans, redis_url)


async def _plans(settings: GatewaySettings) -> list[PlanRecord]:
    """Read the plans of the keys file and of the database; another check reports a source that cannot be read."""
    found: list[PlanRecord] = []
    try:
        if settings.keys_file is not None:
            found += [record for record in read_keys_file(settings.keys_file) if isinstance(record, PlanRecord)]
        if settings.database_url:
            pepper = settings.key_pepper.get_secret_value()
            async with (
                open_tenancy(settings.database_url, None, HostClock(), HostRandom(), pepper) as tenancy,
                tenancy.read() as session,
            ):
                found += await session.plans.page(limit=1000)
    except (ValueError, OSError, DatabaseUnavailable):
        pass
    return found


def _check_days(report: Report, settings: GatewaySettings, plans: Sequence[PlanRecord]) -> None:
    days = [settings.response_days, *(plan.response_days for plan in plans if plan.response_days is not None)]
    if not any(days):
        remedy = "set STREAM_GW_RESPONSE_DAYS, or response_days of a plan, above 0; the database keeps no response"
        report.missing("days that stored responses are kept", remedy, found="STREAM_GW_RESPONSE_DAYS 0", needed=False)
    else:
        report.ok("stored responses", f"kept for {max(days)} days at most")
    if not settings.token_secret.get_secret_value():
        remedy = (
            "set STREAM_GW_TOKEN_SECRET, the same on every gateway: it seals compactions, which otherwise only the "
            "process that made them can open"
        )
        report.missing("STREAM_GW_TOKEN_SECRET, for compactions", remedy, needed=False)


def _check_bounds(report: Report, settings: GatewaySettings) -> None:
    one, held, stored = (
        settings.response_bytes_max, settings.response_held_bytes_max, settings.response_stored_bytes_max,
    )  # fmt: skip
    for name, bound, where in (
        ("STREAM_GW_RESPONSE_HELD_BYTES_MAX", held, "Redis"),
        ("STREAM_GW_RESPONSE_STORED_BYTES_MAX", stored, "the database"),
    ):
        if 0 < bound < one:
            report.missing(
                f"room in {where} for one response of the largest size",
                f"set {name} to at least STREAM_GW_RESPONSE_BYTES_MAX, {one}: a large response is refused with 429 "
                "response_storage_full",
                found=f"{name} {bound}",
            )


def _check_plans(report: Report, plans: Sequence[PlanRecord]) -> None:
    for plan in plans:
        if plan.retention_s == 0 and plan.response_days:
            report.missing(
                f"one retention of plan {plan.name}",
                "set response_days of the plan to 0, or retention_s above 0: with retention_s 0 no response is stored",
                found=f"retention_s 0, response_days {plan.response_days}",
            )


async def _check_redis(report: Report, settings: GatewaySettings, plans: Sequence[PlanRecord], url: str) -> None:
    client = RedisClient(url)
    try:
        await client.start()
        waiting = await RedisResponses(client).unsaved()
        memory = _figures(await client.execute(0, "INFO", "memory"))
    except FabricError:
        return  # the check of Redis tells it
    finally:
        await client.close()
    if waiting and not settings.database_url:
        remedy = "set STREAM_GW_DATABASE_URL on a gateway: Redis keeps each for a day at most, then it is lost"
        found = f"{waiting} wait, and this environment has none"
        report.missing("a database for stored responses", remedy, found=found, needed=False)
    elif waiting > _WAITING_MAX:
        remedy = (
            "see why in the gateways' log: responses wait for the database (its disk may be full); Redis keeps each "
            "for a day at most, then it is lost"
        )
        report.missing("a database that takes stored responses", remedy, found=f"{waiting} wait", needed=False)
    elif waiting:
        report.ok("stored responses that wait for the database", str(waiting))
    limit, used = memory.get("maxmemory", 0), memory.get("used_memory", 0)
    if not limit:
        return
    if settings.response_held_bytes_max > _SHARE_MAX * limit:
        report.missing(
            "room in Redis beside the stored responses of one tenant",
            f"set STREAM_GW_RESPONSE_HELD_BYTES_MAX to at most {int(_SHARE_MAX * limit)}, or raise Redis' maxmemory: "
            "one tenant could take what the logs of all streams need",
            found=f"{settings.response_held_bytes_max >> 20} MiB of {limit >> 20} MiB",
            needed=False,
        )
    long = [plan for plan in plans if (plan.retention_s or 0) > RETENTION_S]
    if long and used > _USED_MAX * limit:
        longest = max(long, key=lambda plan: plan.retention_s or 0)
        report.missing(
            "memory in Redis for the retention of all plans",
            f"lower retention_s of plan {longest.name}, or raise Redis' maxmemory: Redis holds every ended stream so "
            "long",
            found=f"{100 * used // limit} % used; plan {longest.name} keeps streams {longest.retention_s} s",
            needed=False,
        )


def _figures(info: bytes) -> dict[str, int]:
    """Return the whole numbers of Redis' INFO."""
    lines = (line.partition(":") for line in info.decode(errors="replace").splitlines())
    return {name: int(value) for name, _, value in lines if value.isdecimal()}
