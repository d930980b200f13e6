"""Why a request took as long as it did: explicit rules over what was told of it and what was usual. Pure.

Each rule says how much of the client's time it would explain, or nothing. What stands out against the cohort goes
before what is as slow for everybody; then what cost most; then the order of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telemetry.ask.story import Row, Story

COST_US_MIN = 50_000
SHARE_MIN = 0.15
"""A cause that explains less of the client's time, or less than ``COST_US_MIN``, is none."""
EARLY_SHARE_MIN = 0.5
"""What comes before the first token is a cause also where it is so much of the time until then."""
COMMON_SHARE_MIN = 0.3
COMMON_US_MIN = 200_000
"""What is as long for everybody is told from here on: waiting is a cause also where all wait."""
SESSION_MIN = 5
"""A session of so many earlier requests is its own example, also where they found nothing cached."""
STALL_TIMES = 20
"""A gap between two tokens is a stall when it is so many times what the others are."""
ALSO_SHARE = 0.5
"""A second cause is told beside the first when it cost so much of it."""


@dataclass(frozen=True)
class Finding:
    cause: str
    cost_us: int
    says: str
    common: bool = False
    """As long for the others of its cohort too."""


Rule = Callable[[Story], Finding | None]


def findings(story: Story) -> list[Finding]:
    """Every cause that counts, the likeliest first."""
    found = [finding for rule in RULES if (finding := rule(story)) is not None]
    order = [rule.__name__ for rule in RULES]
    assert len(set(order)) == len(order)
    return sorted(found, key=lambda finding: (finding.common, -finding.cost_us))


def sentence(found: Sequence[Finding]) -> str:
    if not found:
        return "Nothing stands out."
    says = found[0].says
    also = [finding for finding in found[1:] if finding.cost_us >= ALSO_SHARE * found[0].cost_us]
    return says + (f" Also: {also[0].says[0].lower()}{also[0].says[1:]}" if also else "")


def shown(us: float) -> str:
    """Microseconds for people."""
    if not us:
        return "0 ms"
    if abs(us) < 1000:
        return f"{us / 1000:.2f} ms"
    if abs(us) < 10_000:
        return f"{us / 1000:.1f} ms"
    if abs(us) < 1_000_000:
        return f"{us / 1000:.0f} ms"
    return f"{us / 1_000_000:.1f} s" if abs(us) < 600_000_000 else f"{us / 60_000_000:.0f} min"


_EARLY = frozenset({"gateway_us", "admission_us", "pool_queue_us", "engine_queue_us", "fabric_us"})


def _waited(story: Story, cause: str, phase: str, value_us: int, says: str) -> Finding | None:
    """A rule for time that is nothing but waiting."""
    usual = story.usual
    cost = value_us - (int(usual.p50(phase)) if usual.enough else 0)
    if _counts(story, cost, early=phase in _EARLY) and (not usual.enough or value_us > usual.p95(phase)):
        return Finding(cause, cost, says)
    if usual.enough and value_us >= max(COMMON_US_MIN, COMMON_SHARE_MIN * story.wall_us):
        return Finding(cause, value_us, f"{says} Half of its cohort took {shown(usual.p50(phase))} there too.", True)
    return None


def _counts(story: Story, cost_us: float, *, early: bool = False) -> bool:
    """``early``: it comes before the first token."""
    if cost_us < COST_US_MIN:
        return False
    return cost_us >= SHARE_MIN * story.wall_us or (early and 0 < EARLY_SHARE_MIN * story.ttft_us <= cost_us)


# --- rules -----------------------------------------------------------------------------------------------------


def refused(story: Story) -> Finding | None:
    if story.outcome != "refused":
        return None
    code, status = story.error_code, story.fact("http_status")
    why = {
        "pool_full": "the pool's queue was full",
        "pool_busy": f"{int(story.fact('backlog_ms') or 0) / 1000:.1f} s of work were ahead of its tier "
        f"({story.fact('tier') or '?'}) in pool {story.fact('pool')}, more than may be",
        "no_replica": "no replica could serve the model",
        "too_many": "a limit of its caller was reached",
        "draining": "its gateway was going away",
        "fabric_unavailable": "Redis could not be reached",
    }.get(code, f"its gateway answered {code}")
    return Finding("refused", story.wall_us, f"It was refused with {status}: {why}.")


def killed_replica(story: Story) -> Finding | None:
    lost = [row for row in story.attempts if row["ended"] == "lost"]
    failed = story.outcome == "failed" and story.error_code == "replica_lost"
    recovery = story.spent("recovery_us")
    if not lost and not failed:
        return None
    if not failed and not _counts(story, recovery) and story.line:
        return None
    who = (lost[-1] if lost else story.attempts[-1])["replica"] if story.attempts else story.fact("replica")
    dead = next((row for row in story.fleet if row["what"] == "dead" and row["replica"] == who), None)
    how = f" ({dead['reason']})" if dead and dead["reason"] else ""
    if failed:
        return Finding(
            "killed replica", story.wall_us, f"Replica {who} died{how} and nobody could take its stream over."
        )
    to = (story.bill or {}).get("replica", "another")
    return Finding("killed replica", recovery, f"Replica {who} died{how}; {to} went on after {shown(recovery)}.")


def handed_over(story: Story) -> Finding | None:
    gave = [row for row in story.attempts if row["ended"] == "handed_over"]
    recovery = story.spent("recovery_us")
    if not gave or not _counts(story, recovery):
        return None
    to = (story.bill or {}).get("replica", "another")
    says = f"Replica {gave[-1]['replica']} gave the stream away, as one that drains or whose engine failed does"
    return Finding("handed over", recovery, f"{says}; {to} went on after {shown(recovery)}.")


def failed(story: Story) -> Finding | None:
    if story.outcome != "failed" or story.error_code == "replica_lost":
        return None
    who = (story.bill or {}).get("replica") or story.fact("replica") or "no replica"
    return Finding("failed", story.wall_us, f"It failed with {story.error_code} on {who}.")


def slow_client(story: Story) -> Finding | None:
    stall = story.spent("client_stall_us")
    return _waited(
        story, "slow client", "client_stall_us", stall, f"The client's connection took nothing more for {shown(stall)}."
    )


def resume_gap(story: Story) -> Finding | None:
    gap = story.spent("resume_gap_us")
    return _waited(
        story,
        "resume gap",
        "resume_gap_us",
        gap,
        f"Nobody read the stream for {shown(gap)}: its reader came back late.",
    )


def full_queue(story: Story) -> Finding | None:
    waited = story.spent("pool_queue_us")
    position = int(story.fact("queue_position") or 0)
    ahead = f", behind {position - 1} others" if position > 1 else ""
    return _waited(
        story, "full queue", "pool_queue_us", waited,
        f"No replica of pool {story.fact('pool')} had room: it waited {shown(waited)} in the pool's queue{ahead}.",
    )  # fmt: skip


def admission_slow(story: Story) -> Finding | None:
    took = story.spent("admission_us")
    return _waited(
        story, "admission slow", "admission_us", took, f"Its limits and its placement took {shown(took)} (Redis)."
    )


def gateway_slow(story: Story) -> Finding | None:
    took = story.spent("gateway_us")
    who = story.fact("gateway")
    return _waited(
        story, "gateway slow", "gateway_us", took,
        f"The request was understood only after {shown(took)}: a body that came slowly, or gateway {who} was busy.",
    )  # fmt: skip


def fabric_slow(story: Story) -> Finding | None:
    took = story.spent("fabric_us")
    return _waited(
        story, "fabric slow", "fabric_us", took, f"Between gateway and agent it was under way for {shown(took)}."
    )


def cold_share(story: Story) -> tuple[float, str]:
    """What of the prompt should have been cached, and by whose example."""
    cohort = story.usual.cached_share if story.usual.enough else 0.0
    told = story.session_members >= 2
    if story.session_members >= SESSION_MIN or (told and story.session_share > cohort):
        return story.session_share, "its session's earlier prompts"
    return cohort, "its cohort's prompts"


def cold_prefix(story: Story) -> Finding | None:
    prompt, cached, prefill = story.prompt_tokens, story.cached_tokens, story.spent("prefill_us")
    expected, whose = cold_share(story)
    if not prompt or expected < 0.3 or cached > 0.5 * expected * prompt:
        return None
    cost = int(prefill * (expected * prompt - cached) / (prompt - cached))
    if not _counts(story, cost, early=True):
        return None
    believed = max((int(row["believed_cached_tokens"]) for row in story.attempts), default=0)
    gone = f"; the gateway believed {believed} were" if believed > cached else ""
    return Finding(
        "cold prefix", cost,
        f"A cold prefix: {cached} of {prompt} prompt tokens were cached, where of {whose} {expected:.0%} are{gone}.",
    )  # fmt: skip


def overloaded_engine(story: Story) -> Finding | None:
    queue = story.spent("engine_queue_us")
    usual = story.usual
    who = (story.bill or {}).get("replica") or story.fact("replica")
    slow_us, per_token = _slow_tokens(story)
    queue_cost = queue - (int(usual.p50("engine_queue_us")) if usual.enough else 0)
    if usual.enough and queue <= usual.p95("engine_queue_us"):
        queue_cost = 0
    cost = max(queue_cost, 0) + slow_us
    if _counts(story, cost, early=queue_cost > slow_us):
        parts = []
        if queue_cost > 0:
            parts.append(f"it waited {shown(queue)} in the engine before its turn")
        if slow_us:
            parts.append(f"a token took {shown(per_token)}, usual are {shown(usual.p50('token_us'))}")
        return Finding("overloaded engine", cost, f"Replica {who} was overloaded: {' and '.join(parts)}.")
    return _waited(
        story, "overloaded engine", "engine_queue_us", queue,
        f"Replica {who} was overloaded: it waited {shown(queue)} in the engine before its turn.",
    )  # fmt: skip


def _slow_tokens(story: Story) -> tuple[int, float]:
    """(what tokens that came slower than usual cost, the time of one)."""
    bill, usual = story.bill, story.usual
    if bill is None or not usual.enough or not usual.p95("token_us"):
        return 0, 0.0
    tokens = int(bill["generated_tokens"])
    if tokens < 8 or not bill["decode_us"]:
        return 0, 0.0
    per_token = (int(bill["decode_us"]) - _stall_us(bill)) / tokens
    if per_token <= usual.p95("token_us"):
        return 0, per_token
    return int((per_token - usual.p50("token_us")) * tokens), per_token


def token_stall(story: Story) -> Finding | None:
    """One gap between two tokens far longer than all the others."""
    row = max(story.attempts, key=_stall_us, default=None)
    gap = _stall_us(row) if row is not None else 0
    if row is None or not _counts(story, gap):
        return None
    usual_us = (int(row["decode_us"]) - gap) / max(int(row["generated_tokens"]) - 2, 1)
    which = "two of its tokens"
    times = list(row.get("token_us") or ())
    if times and max(times[1:], default=0) >= gap:
        at = times.index(gap, 1)
        which = f"tokens {at} and {at + 1}"
    who = row["replica"]
    return Finding(
        "token stall", gap,
        f"Replica {who} made nothing for {shown(gap)} between {which}, where its other tokens took {shown(usual_us)}.",
    )  # fmt: skip


def _stall_us(row: Row) -> int:
    """The longest gap between a try's tokens, where it is no gap like the others; else 0."""
    gap, tokens = int(row.get("itl_max_us") or 0), int(row["generated_tokens"])
    if tokens < 8 or gap < STALL_TIMES * (int(row["decode_us"]) - gap) / (tokens - 2):
        return 0
    return gap


def long_answer(story: Story) -> Finding | None:
    usual, tokens = story.usual, story.output_tokens
    if not usual.enough or tokens <= max(usual.p95("output_tokens"), 2 * usual.p50("output_tokens")):
        return None
    cost = int((tokens - usual.p50("output_tokens")) * usual.p50("token_us"))
    if not _counts(story, cost):
        return None
    half = usual.p50("output_tokens")
    return Finding(
        "long answer", cost, f"The answer was long: {tokens} tokens, where half of its cohort have {half:.0f}."
    )


def unaccounted(story: Story) -> Finding | None:
    missing = abs(story.spent("residual_us"))
    if not _counts(story, missing):
        return None
    return Finding("unaccounted", missing, f"{shown(missing)} of its time are not accounted for by anybody.")


RULES: tuple[Rule, ...] = (
    refused,
    killed_replica,
    handed_over,
    failed,
    slow_client,
    resume_gap,
    full_queue,
    token_stall,
    overloaded_engine,
    cold_prefix,
    long_answer,
    admission_slow,
    gateway_slow,
    fabric_slow,
    unaccounted,
)
"""Of two that cost the same the earlier is told."""
