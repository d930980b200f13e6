"""The record of a new stream's request, as the replica that runs it needs it."""

from __future__ import annotations

from array import array
from collections.abc import Sequence

import msgspec

from stream_fabric.accounts.records import row_days
from stream_fabric.errors import BadRequest
from stream_fabric.limits import QUEUE_WAIT_S_MAX, YIELD_WAIT_S_MAX
from stream_fabric.pool.home import home_partition
from stream_fabric.pool.placement import BATCH_TIER, FREE_TIER, TIERS
from stream_fabric.pool.plan import route_key
from stream_fabric.pool.records import EngineRequest, Work
from stream_fabric.stream.cursor import Epoch
from stream_fabric.stream.ids import StreamId, hashed_user, moved_to, new_stream_id
from stream_gw.auth import Principal
from stream_gw.dialects.facts import StreamFacts, encoded_meta
from stream_gw.dialects.prompt import estimated_tokens
from stream_gw.privacy.kv_isolation import salted_body
from stream_gw.streams.create_call import CreateCall
from stream_gw.streams.parts import GatewayParts

_NO_LIMIT = 1 << 31


def new_id(parts: GatewayParts, cell: str, now_ms: int) -> StreamId:
    """Make the id of a new stream, in one of the home partitions of its cell."""
    entropy = parts.random.token_bytes(10)
    stream, draw = new_stream_id(now_ms, entropy), int.from_bytes(entropy[4:8], "big")
    partitions, replicas = parts.log.partitions, len(parts.directory.by_pool.get(cell, ()))
    home = home_partition(cell, replicas, partitions, draw)
    return stream if home is None else moved_to(stream, home, partitions)


def make_work(
    parts: GatewayParts,
    call: CreateCall,
    epoch: Epoch,
    facts: StreamFacts,
    cell: str,
    now_ms: int,
    hashes: Sequence[int],
    *,
    salt: str,
    reserved: bool,
    media: bool,
) -> Work:
    """Make the record of the request that a replica will run. ``media`` False: its body holds none."""
    plan = parts.authenticator.keys.plan(call.who.tenant)
    request, trace, tenant, stream = call.request, call.trace, call.who.tenant, facts.stream
    estimates = parts.directory.estimates(cell, route_key(request.model, request.own_dialect, TIERS[request.tier]))
    # With max_tokens 0 an engine still makes one token
    limit = _NO_LIMIT if request.max_tokens is None else max(1, request.max_tokens)
    repairs = min(request.repairs, plan.repairs)
    deadline_ms = 0 if request.deadline_s is None else now_ms + int(request.deadline_s * 1000)
    body = salted_body(request.body, salt)
    plain = request.n == 1 and not request.structured and not media
    traceparent = trace.traceparent(stream)
    work = Work(
        EngineRequest(stream, request.kind, request.model, body, deadline_ms, traceparent, plain=plain),
        str(epoch),
        tenant,
        b"",
        _grace_s(parts, call),
        tier=min(request.tier, BATCH_TIER),
        free=request.tier == FREE_TIER,
        regions=trace.regions,
        share=plan.share,
        session=trace.session,
        prompt_tokens=estimated_tokens(request.prompt, request.input_bytes, estimates.bytes_per_token),
        # Most requests stop far below their limit
        output_tokens=max(1, int(min(limit, estimates.output_tokens))) * request.n,
        output_limit=min(limit * request.n * (1 + repairs), _NO_LIMIT),
        prefix=array("I", hashes).tobytes(),
        prices=trace.prices,
        reserved=reserved,
        key=call.who.key.id if call.who.key is not None else "",
        user_hash=hashed_user(tenant, trace.user),
        retention_s=plan.retention_s,
        retention_days=row_days(plan),
        repairs=repairs,
        wait_s=min(max(parts.settings.queue_wait_s, QUEUE_WAIT_S_MAX), YIELD_WAIT_S_MAX),
        moderated=plan.moderation == "all" and request.kind in ("chat", "completions"),
    )
    return msgspec.structs.replace(work, facts=encoded_meta(facts, trace.user, work, trace.pool))


def _grace_s(parts: GatewayParts, call: CreateCall) -> float | None:
    """Seconds that the stream runs on after its last reader has left; None: to its end."""
    request, settings = call.request, parts.settings
    if request.on_disconnect_s is not msgspec.UNSET:
        return request.on_disconnect_s
    if request.background:
        return None
    kept = call.kept or call.key is not None or request.session_id is not None
    return settings.kept_grace_s if kept else settings.plain_grace_s


def stream_user(who: Principal, requested: str | None) -> str | None:
    """Return the user of a new stream. Raises BadRequest when the token belongs to another user."""
    if who.user is None:
        return requested
    if requested is not None and requested != who.user:
        raise BadRequest(f"this token belongs to user {who.user!r}; leave user out or name that user", param="user")
    return who.user
