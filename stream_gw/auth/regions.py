"""Regions that may serve a caller's requests. Pure."""

from __future__ import annotations

from stream_fabric.accounts.records import KeyRecord, PlanRecord
from stream_fabric.errors import RegionUnavailable, WrongRegion
from stream_fabric.pool.queue import Lane, sorted_regions


def allowed_regions(plan: PlanRecord, key: KeyRecord | None) -> Lane | None:
    """Return the regions of a plan, limited to those of the key; None: all."""
    own = None if key is None else key.regions
    if plan.regions is None or own is None:
        given = plan.regions if own is None else own
        return None if given is None else sorted_regions(given)
    return sorted_regions([region for region in own if region in plan.regions])


def check_region(gateway_region: str, regions: Lane | None) -> None:
    """Check that a gateway of this region may read and write the caller's text. Raises WrongRegion.

    A gateway without a region passes; its operator places no such demand.
    """
    if regions is not None and gateway_region and gateway_region not in regions:
        allowed = ", ".join(regions) or "none"
        raise WrongRegion(
            f"this gateway is in region {gateway_region!r}, and your requests may be served in: {allowed}; use a "
            "gateway of one of these regions"
        )


def pinned_regions(regions: Lane | None) -> Lane:
    """Return the regions that a request is bound to; empty: to none. Raises RegionUnavailable when none is allowed."""
    if regions is None:
        return ()
    if not regions:
        raise RegionUnavailable("your plan and this API key have no region in common; use another key")
    return regions
