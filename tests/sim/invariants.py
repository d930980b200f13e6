"""Invariants at the end of a schedule."""

from __future__ import annotations

from typing import TYPE_CHECKING

import msgspec

from stream_fabric.events import AttemptTrace
from stream_fabric.recovery.lease_reaper import NO_ROOM
from stream_fabric.stream.frames import (
    INPUT_PREFIX,
    STARTED_PREFIX,
    ChoiceEnd,
    Close,
    Delta,
    End,
    ErrorInfo,
    InputNote,
    Note,
    Open,
    Usage,
    coalesce,
    decode,
    is_end,
)
from stream_fabric.stream.ids import StreamId
from stream_fabric.stream.log import StreamState
from tests.sim.accounts import check_account
from tests.sim.client import Client, Spec
from tests.sim.hosts import SETTINGS
from tests.sim.witness import require

if TYPE_CHECKING:
    from tests.sim.world import World

ATTEMPTS_MAX = 3


def lossless(world: World) -> bool:
    """Redis has kept everything."""
    return not world.fabric.losses


def may_be_forgotten(world: World) -> bool:
    """Whether a request or a producer may have been lost without a trace."""
    return not lossless(world) or bool({"flaky", "stall", "frozen gateway", "frozen agent", "halfway"} & world.faults)


def unsaid(world: World) -> bool:
    """Whether an agent still has to send frames again."""
    agents = [host.agent for host in world.agents if host.alive and host.agent is not None]
    ended = [stream for agent in agents for stream in agent.streams.ended()]
    return any(stream.producer.pending for stream in ended)


def left_in_pools(world: World) -> list[str]:
    """Streams that a pool's lists still hold."""
    left = []
    for shard in world.fabric.shards:
        for name, pool in shard.pools.items():
            left += [f"{name}: {replica} has {list(flight)}" for replica, flight in pool.law.flights.items() if flight]
            left += [f"{name}: {replica}'s inbox has {len(box)}" for replica, box in pool.inboxes.items() if box]
            left += [f"{name}: {len(tier)} wait" for tier in pool.law.queue.tiers if tier]
            if lossless(world):  # what a failover brings back of streams that have ended is at nobody's
                left += [f"{name}: {stream} is at {where}" for stream, where in pool.law.at.items()]
                left += [f"{name}: the work of {stream} is kept" for stream in pool.works]
    return left


def check(world: World) -> None:
    for stream, state in world.fabric.streams():
        _check_stream(world, stream, state)
    for host in world.agents:
        if host.alive and host.agent is not None:
            require(not host.agent.running, f"6: {host.name} still runs {list(host.agent.running)}")
            require(not host.computes, f"5: the engine of {host.name} computes what nobody waits for")
    left = left_in_pools(world)
    require(not left, f"7: {'; '.join(left)}")
    for client in world.clients:
        _check_client(world, client)
    _check_speed(world)
    if "budget" in world.faults and lossless(world):
        check_account(world)


def lines_of(state: StreamState) -> list[bytes]:
    return [line for entry in state.entries for line in entry.frames.split(b"\n")]


def _check_stream(world: World, stream: StreamId, state: StreamState) -> None:
    require(state.status != "live", f"6: {stream} has no terminal")
    expected, epoch = 1, 1
    for entry in state.entries:
        lines = entry.frames.split(b"\n")
        require(entry.first == expected and entry.last == expected + len(lines) - 1, f"2: {stream} is not dense")
        require(entry.epoch >= epoch, f"1: {stream} has an older epoch after a newer one")
        expected, epoch = entry.last + 1, entry.epoch
    require(epoch == state.epoch.n, f"1: {stream} ends in epoch {epoch}, its meta in {state.epoch}")
    lines = lines_of(state)
    require(sum(map(is_end, lines)) == 1 and is_end(lines[-1]), f"4: {stream} has not one terminal at its end")
    end = decode(lines[-1])
    assert isinstance(end, End)
    require(end.status == state.status, f"2: {stream} is {state.status} and ends {end.status}")
    settled = world.fabric.settled(stream)
    require(len(settled) == 1, f"5: {stream} was settled {len(settled)} times")
    require(settled == [end.usage], f"5: {stream} ends with {end.usage}, and {settled} was settled")
    if stream in world.witness.cancels:
        at = world.witness.cancels[stream]
        require((state.status, state.last) == ("cancelled", at + 1), f"5: {stream} was cancelled at {at}")
    _check_inputs(world, stream, lines, end)
    spec = world.of[stream]
    if spec.kind in ("chat", "completions"):
        _check_text(world, stream, lines, spec)
    _check_moderation(world, stream, lines)
    if "checks" in world.faults and stream not in world.witness.takeovers and not _inputs_of(lines):
        _check_replies(world, stream, lines, spec, end)
    if lossless(world):
        _check_bill(world, stream, state)
        _check_outcome(world, stream, end, spec)
        producers = [replica for (name, _), replica in world.witness.writers.items() if name == stream]
        uncounted = world.chaos.yields + world.chaos.drains
        require(len(producers) <= ATTEMPTS_MAX + uncounted, f"6: {stream} had the producers {producers}")
    elif not world.faults - _PRODUCERS_LIVE and lines[0].startswith(STARTED_PREFIX):
        require(end.status in ("completed", "cancelled"), f"10: {stream} has its producer, and ends with {end.error}")


def _check_bill(world: World, stream: StreamId, state: StreamState) -> None:
    """Whatever ended the stream, it has one bill, of what was settled.

    Several events may tell it; they count once, because they have the same id and the same figures.
    """
    attempts = (event for event in world.events.events if isinstance(event, AttemptTrace))
    bills = {(each.id, each.prompt_tokens, each.output_tokens) for each in attempts if _bills(each, stream)}
    figures = [(prompt, output) for _, prompt, output in bills]
    wanted = [(state.usage.prompt, state.usage.output)] if state.begun else [(0, 0)] * len(bills)
    require(figures == wanted, f"5: {stream} is {state.status} with {wanted}, and its bills are {figures}")


def _bills(event: AttemptTrace, stream: StreamId) -> bool:
    return event.billed and event.stream == stream


def _check_moderation(world: World, stream: StreamId, lines: list[bytes]) -> None:
    """Check that nothing flagged is in the log."""
    texts: dict[int, str] = {}
    for frame in map(decode, lines) if world.flagged else ():
        if isinstance(frame, Delta):
            texts[frame.block] = texts.get(frame.block, "") + frame.text
    found = [text for text in texts.values() if world.flagged in text]
    require(not found, f"moderation: {stream} says what is flagged, {world.flagged!r}: {found}")


def _check_replies(world: World, stream: StreamId, lines: list[bytes], spec: Spec, end: End) -> None:
    """Check that a reply that ended by itself was checked, and made and billed again as often as its request says."""
    repairs = spec.fields.get("repair", 0)
    spoiled = bool(world.faults & {"engine", "dropped answer"})  # a repair that fails leaves the reply before it
    if end.status == "completed" and not spoiled and lossless(world):
        made, last = world.made[stream], world.made[stream][-1]
        # Nobody took it over: what a replica before the last one made of a stream that did not exist counts nowhere
        prompt = sum(prompt.tokens for replica, prompt, _ in made if replica == last[0])
        output = sum(each.tokens_made for replica, _, answers in made if replica == last[0] for each in answers)
        billed = (end.usage.prompt, end.usage.output) if end.usage else (0, 0)
        require(billed == (prompt, output), f"checks: {stream} bills {billed}, its replies took {prompt} and {output}")
    for frame in map(decode, lines):
        if isinstance(frame, ChoiceEnd) and frame.finish_reason == "stop":
            check = frame.check
            require(check is not None, f"checks: a reply of {stream} was not checked")
            assert check is not None
            fits = check.result != "invalid" or check.repairs == repairs or spoiled
            require(fits and check.repairs <= repairs, f"checks: {stream} has {check} with {repairs} repairs")


_PRODUCERS_LIVE = {"failover", "wipe", "drop", "cut", "slow", "leave", "gateway", "frozen gateway", "cancel"}


def _inputs_of(lines: list[bytes]) -> list[InputNote]:
    notes = [decode(line) for line in lines if line.startswith(INPUT_PREFIX)]
    return [msgspec.json.decode(note.body, type=InputNote) for note in notes if isinstance(note, Note) and note.body]


def _check_inputs(world: World, stream: StreamId, lines: list[bytes], end: End) -> None:
    """Check that each input is answered once at most, and each accepted one if nothing else has ended the stream."""
    answered = [note.id for note in _inputs_of(lines)]
    require(len(answered) == len(set(answered)), f"2: {stream} answers an input twice: {answered}")
    accepted = {name for name, result in world.chaos.inputs.get(stream, {}).items() if result == "accepted"}
    # An end whose reply was lost stays, because readers may have seen it
    if end.status == "completed" and lossless(world) and not world.faults & _REPLIES_LOST:
        require(accepted <= set(answered), f"5: {stream} ended without the inputs {accepted - set(answered)}")


_REPLIES_LOST = {"drop", "cut", "flaky", "stall", "frozen agent", "halfway"}


def _check_text(world: World, stream: StreamId, lines: list[bytes], spec: Spec) -> None:
    """Check that the text is a prefix of the undisturbed replica's response."""
    wanted = spec.said(world)
    # A longer prompt has the simulator say something else: of plain completions only the first producer's part is known
    rewritten = spec.kind == "completions" and stream in world.witness.takeovers
    rewritten = rewritten or any(note.result == "applied" for note in _inputs_of(lines)) or "repair" in spec.fields
    texts: dict[int, str] = {}
    ends: dict[int, str] = {}
    tokens, closed = 0, set()
    for line in lines[:-1]:
        match decode(line):
            case Open(block=block):
                require(block not in texts, f"2: {stream} opens block {block} twice")
                texts[block] = ""
            case Delta(block=block, text=text, tokens=count):
                require(block in texts and block not in closed, f"2: {stream} adds to block {block}, which is not open")
                texts[block] += text
                tokens += count
            case Close(block=block):
                require(block in texts and block not in closed, f"2: {stream} closes block {block} twice")
                closed.add(block)
            case ChoiceEnd(choice=choice, finish_reason=reason):
                require(choice not in ends, f"2: choice {choice} of {stream} ends twice")
                ends[choice] = reason
            case Note():
                pass
            case other:
                raise AssertionError(other)
    for block, text in texts.items() if not rewritten else ():
        whole = wanted.texts.get(block)
        require(whole is not None and whole.startswith(text), f"2: {stream} says {text!r}, undisturbed {whole!r}")
    end = decode(lines[-1])
    assert isinstance(end, End) and end.usage is not None
    if end.status == "completed" and not rewritten:
        require(texts == wanted.texts, f"4: {stream} ends clean with {texts} of {wanted.texts}")
        require(ends == wanted.ends, f"4: {stream} ends with {ends}, undisturbed with {wanted.ends}")
        require(closed == texts.keys(), f"4: {stream} leaves blocks open")
        require(end.usage.prompt == wanted.prompt_tokens, f"5: {stream} bills a prompt of {end.usage.prompt} tokens")
    if stream in world.witness.withdrawn:
        require(end.usage == Usage(), f"5: {stream} was withdrawn and bills {end.usage}")
    elif end.status != "completed" or "stop" not in spec.fields:  # what stopped it was made and not shown
        require(end.usage.output == tokens, f"5: {stream} shows {tokens} tokens and bills {end.usage.output}")
    else:
        require(end.usage.output >= tokens, f"5: {stream} shows {tokens} tokens and bills {end.usage.output}")


def _check_outcome(world: World, stream: StreamId, end: End, spec: Spec) -> None:
    """Redis has lost nothing: a stream fails for a reason only."""
    if end.status != "failed":
        return
    assert end.error is not None
    why, what = end.error.code, f"6: {stream} failed: {end.error}"
    taken = len(world.witness.takeovers.get(stream, ()))
    if why == "deadline_exceeded" or end.error == ErrorInfo.of(NO_ROOM):
        asleep = "sleep" in world.faults and bool({"agent", "frozen agent", "stall"} & world.faults)
        ended_s = world.witness.ended_at[stream]
        waited_s = SETTINGS.queue_wait_s
        begun = any(name == stream for name, _ in world.witness.writers)
        # Batch work that has not begun waits as long as any request, and the pool may yield all that time
        held_back = not begun and world.chaos.yielding_s(ended_s - waited_s, ended_s) > 0.75 * waited_s
        require("deadline_s" in spec.fields or "queue" in world.faults or asleep or held_back, what)
    elif why == "replica_lost" and " died, and it" in end.error.message:
        require(taken > 0 and (not spec.continuable or "without a finish reason" in end.error.message), what)
    elif why == "replica_lost" and stream in world.witness.unplaced:
        # Its `create` came through, each `place` was lost on its way, and the gateway that would have sent it again was
        # killed. Its client alone still has what was asked: no list has the stream, so nobody can rescue it, and a
        # terminal is all that the watchdog can give. One whose gateway asked for no place, or saw that it got none and
        # lived, or whose `place` a pool has heard, even if it then forgot it, is not among these. One is whose replica
        # died, and whose rescuer came before its `create`, which stood still with its gateway.
        require(not any(name == stream for name, _ in world.witness.writers), f"6: {stream} has no place, and frames")
    elif why == "replica_lost" and stream in world.witness.missed and "frozen gateway" in world.faults:
        # Its `create` was lost, and its gateway stood still before it asked again: the replica had given it up by then
        require(not any(name == stream for name, _ in world.witness.writers), f"6: {stream} has no stream, and frames")
    elif why == "replica_lost" and world.chaos.rescuers_stopped < 2:  # the watchdog waits for one, and the next
        require(taken >= ATTEMPTS_MAX - 1 or stream in world.witness.alone, what)
    elif why == "engine_lost":
        require(bool(world.faults & {"engine", "dropped answer"}), what)
        require(taken >= ATTEMPTS_MAX - 1 or stream in world.witness.alone or not spec.continuable, what)
    elif why == "replica_lost":
        pass
    elif why == "pool_full":
        require("queue" in world.faults, what)
    elif why == "moderation_unavailable":
        require("moderation" in world.faults, what)
    elif why == "fabric_unavailable":
        # The reply of its `place` was lost, and its gateway stood still until it was too late to ask again
        require(stream in world.witness.withdrawn and {"flaky", "frozen gateway"} <= world.faults, what)
    else:
        require(False, what)


def _check_client(world: World, client: Client) -> None:
    stream = client.stream
    if client.left:
        return
    require(bool(client.done), f"4: a client of {stream} hangs at {client.epoch}-{client.seq}")
    state = None if stream is None else world.fabric.state(stream)
    if lossless(world) and client.told and state is not None:
        require(
            _is_late(world, client) or not client.told,
            f"4: nothing was lost, yet a client of {stream} heard {client.told}",
        )
    require(client.done != "past", f"4: {stream} ended without a terminal for a client at {client.seq}")
    if client.done != "end":
        return
    assert stream is not None
    end = decode(client.applied[-1])
    assert isinstance(end, End)
    if state is not None and not (world.fabric.losses and _moved_on(world, client, state)):
        same = coalesce(client.applied) == coalesce(lines_of(state))
        require(same or "gap" in client.told, f"4: a client of {stream} has other frames than the log")
    if end.status == "completed" and "gap" not in client.told:
        _check_text(world, stream, client.applied, client.spec)


def _is_late(world: World, client: Client) -> bool:
    """Whether the client came, or came back, when its stream was deleted."""
    if client.stream is None or not world.fabric.is_deleted(client.stream):
        return False
    # Its gateway had looked for the stream and did not watch it yet, or could not hear of its end
    is_behind = client.reading is None or not client.reading.served or "cut" in world.faults
    return client.told == ["lost"] or (client.told == ["not_found"] and is_behind)


def _moved_on(world: World, client: Client, state: StreamState) -> bool:
    """The client had its terminal before a failover took that away and the stream ended otherwise."""
    return client.ended_at <= world.witness.lost_at + 0.1 or client.stream in world.witness.forked


_QUICK = {"agent", "cancel", "slow", "leave", "drop", "cut", "deadline"}


def _check_speed(world: World) -> None:
    """A dead replica's streams are somebody else's, or have ended, within seconds."""
    for at_s, stream in world.chaos.orphaned if not world.faults - _QUICK else ():
        ends = [world.witness.ended_at[stream], *world.witness.takeovers.get(stream, ())]
        took_s = min((end_s for end_s in ends if end_s >= at_s), default=at_s) - at_s
        # The reaper looks at the lease three times, then claims, reads and moves
        most_s = world.lease_ttl_s + 2.0 + 16 * world.network.latency_s
        require(took_s < most_s, f"6: {stream} was taken up {took_s:.1f} s after its producer died")
