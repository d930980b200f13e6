"""Checks of structured replies and of the models that take images."""

from __future__ import annotations

from stream_fabric.errors import FabricError
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.divided_pools import DividedPools
from stream_gw.cli.checks.report import Report

_SCHEMA = b'{"type":"object","required":["n"],"properties":{"n":{"type":"integer"}}}'


async def check_structured(report: Report) -> None:
    """Check that an agent of this host can check a reply against its schema, in the process that it starts for it."""
    from inference.agent.structured.checker import open_checker

    async with open_checker(lambda result: None) as checker:
        fits, misfits = (
            await checker.check(_SCHEMA, '{"n":1}', "doctor"),
            await checker.check(_SCHEMA, '{"n":"1"}', "doctor"),
        )
    if (fits.result, misfits.result) == ("valid", "invalid"):
        report.ok("checks of structured replies against their schema")
    else:
        remedy = (
            "pip install --force-reinstall jsonschema-rs, and give the agent 1 GiB of address space (ulimit -v); until "
            "then structured replies are passed on unchecked, and none is repaired"
        )
        report.missing("checks of structured replies", remedy, found=fits.reason or misfits.reason, needed=False)


async def check_images(report: Report, image_models: str, redis_url: str | None) -> None:
    """Check that the models which take images by the settings are served."""
    named = {name.strip() for name in image_models.split(",")} - {""}
    if not named:
        report.skipped("models that take images", "set STREAM_GW_IMAGE_MODELS where the chat page shall attach images")
        return
    if "*" in named and len(named) > 1:
        remedy = "set STREAM_GW_IMAGE_MODELS to * alone, or to the names alone: * stands for every model"
        report.missing("one meaning of STREAM_GW_IMAGE_MODELS", remedy, found=image_models, needed=False)
        return
    served = await _served(redis_url) if redis_url else None
    unknown = sorted(named - served - {"*"}) if served else []
    if unknown:
        remedy = "correct STREAM_GW_IMAGE_MODELS, or start a replica: names are those that clients use"
        found = f"no replica serves {', '.join(unknown)}; served are {', '.join(sorted(served or ()))}"
        report.missing("models that take images", remedy, found=found, needed=False)
    else:
        report.ok("models that take images", ", ".join(sorted(named)))


async def _served(url: str) -> set[str] | None:
    """Return the models of all live replicas. None: Redis does not answer; another check reports it."""
    client = RedisClient(url)
    try:
        await client.start()
        pools = DividedPools(client)
        return {model for name in await pools.pools() for info in await pools.replicas(name) for model in info.models}
    except FabricError:
        return None
    finally:
        await client.close()
