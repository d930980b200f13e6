"""Rules that name the likely cause of a slow request, from its events and from its cohort. Pure.

Each rule returns the time that its cause explains, or None. A cause that is unusual for the cohort comes before one
that is common in it, then the cause that explains more time, then the order of the rules.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

from telemetry.ask.why.story import Row, Story

COST_US_MIN = 50_000
SHARE_MIN = 0.15
"""Minimum share of the client's time that a cause explains; it also explains at least ``COST_US_MIN``."""
EARLY_SHARE_MIN = 0.5
"""Share of the time to first token from which a phase before it is a cause too."""
COMMON_SHARE_MIN = 0.3
COMMON_US_MIN = 200_000
"""Minimum time of a wait that is common in the cohort and is a cause all the same."""
SESSION_MIN = 5
"""Earlier requests from which a session is compared with itself instead of its cohort."""
STALL_TIMES = 20
"""Ratio of a gap to the mean gap from which the gap is a stall."""
ALSO_SHARE = 0.5
"""Share of the first cause's time from which a second cause is named too."""


@dataclass(frozen=True)
class Finding:
    """A likely cause of a slow or failed request, with the time that the cause explains."""

    cause: str
    cost_us: int
    says: str
    common: bool = False
    """True when the cohort's requests spend as much time there."""


Rule = Callable[[Story], Finding | None]


def findings(story: Story) -> list[Finding]:
    """Return all causes, the likeliest first."""
    found = [finding for rule in RULES if (finding := rule(story)) is not None]
    order = [rule.__name__ for rule in RULES]
    assert len(set(order)) == len(order)
    return sorted(found, key=lambda finding: (finding.common, -finding.cost_us))


def cause_sentence(found: Sequence[Finding]) -> str:
    """Describe the first cause, and a second one of similar cost."""
    if not found:
        return "Nothing is unusual."
    says = found[0].says
    also = [finding for finding in found[1:] if finding.cost_us >= ALSO_SHARE * found[0].cost_us]
    return says + (f" Also: {also[0].says[0].lower()}{also[0].says[1:]}" if also else "")


def duration(us: float) -> str:
    """Format microseconds as ms, s or min."""
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


def _wait_finding(story: Story, cause: str, phase: str, value_us: int, says: str) -> Finding | None:
    """Return the finding for a phase that is only waiting. None: the wait is no cause."""
    usual = story.cohort
    cost = value_us - (int(usual.p50(phase)) if usual.enough else 0)
    if _is_large(story, cost, early=phase in _EARLY) and (not usual.enough or value_us > usual.p95(phase)):
        return Finding(cause, cost, says)
    if usual.enough and value_us >= max(COMMON_US_MIN, COMMON_SHARE_MIN * story.wall_us):
        return Finding(
            cause, value_us, f"{says} This is common: the median of its cohort is {duration(usual.p50(phase))}.", True
        )
    return None


def _is_large(story: Story, cost_us: float, *, early: bool = False) -> bool:
    """Return True if the cost is large enough for a cause. ``early``: the phase comes before the first token."""
    if cost_us < COST_US_MIN:
        return False
    return cost_us >= SHARE_MIN * story.wall_us or (early and 0 < EARLY_SHARE_MIN * story.ttft_us <= cost_us)


# --- rules -----------------------------------------------------------------------------------------------------


def refused(story: Story) -> Finding | None:
    if story.outcome != "refused":
        return None
    code, status = story.error_code, story.fact("http_status")
    ahead_s = int(story.fact("backlog_ms") or 0) / 1000
    why = {
        "pool_full": "the queue of the pool was full",
        "pool_busy": f"pool {story.fact('pool')} had {ahead_s:.1f} s of work ahead of tier "
        f"{story.fact('tier') or '?'}, more than its limit",
        "no_replica": "no replica could serve the model",
        "too_many": "the caller reached a rate or concurrency limit",
        "draining": "its gateway was shutting down",
        "fabric_unavailable": "Redis could not be reached",
    }.get(code, f"the gateway answered {code}")
    return Finding("refused", story.wall_us, f"The request was refused with {status}: {why}.")


def killed_replica(story: Story) -> Finding | None:
    lost = [row for row in story.attempts if row["ended"] == "lost"]
    failed = story.outcome == "failed" and story.error_code == "replica_lost"
    recovery = _until_next_token_us(story)
    if not lost and not failed:
        return None
    if not failed and not _is_large(story, recovery) and story.line:
        return None
    who = (lost[-1] if lost else story.attempts[-1])["replica"] if story.attempts else story.fact("replica")
    dead = next((row for row in story.fleet if row["what"] == "dead" and row["replica"] == who), None)
    how = f" ({dead['reason']})" if dead and dead["reason"] else ""
    if failed:
        return Finding(
            "killed replica", story.wall_us, f"Replica {who} died{how} and no other replica could take its stream over."
        )
    to = (story.bill or {}).get("replica", "another")
    return Finding(
        "killed replica", recovery, f"Replica {who} died{how}; {to} continued the stream after {duration(recovery)}."
    )


def handed_over(story: Story) -> Finding | None:
    gave = [row for row in story.attempts if row["ended"] == "handed_over"]
    recovery = _until_next_token_us(story)
    if not gave or not _is_large(story, recovery):
        return None
    to = (story.bill or {}).get("replica", "another")
    says = f"Replica {gave[-1]['replica']} handed the stream over because it was draining or its engine failed"
    return Finding("handed over", recovery, f"{says}; {to} continued the stream after {duration(recovery)}.")


def _until_next_token_us(story: Story) -> int:
    """Return the time from replicas that were lost to the next tokens: prompts are computed, or answers made, again."""
    again = sum(int(row["engine_queue_us"]) + int(row["prefill_us"]) for row in story.attempts[1:])
    return story.spent("recovery_us") + again


def failed(story: Story) -> Finding | None:
    if story.outcome != "failed" or story.error_code == "replica_lost":
        return None
    who = (story.bill or {}).get("replica") or story.fact("replica") or "no replica"
    return Finding("failed", story.wall_us, f"The request failed with {story.error_code} on {who}.")


def slow_client(story: Story) -> Finding | None:
    stall = story.spent("client_stall_us")
    return _wait_finding(
        story, "slow client", "client_stall_us", stall, f"The client did not read for {duration(stall)}."
    )


def resume_gap(story: Story) -> Finding | None:
    gap = story.spent("resume_gap_us")
    return _wait_finding(
        story,
        "resume gap",
        "resume_gap_us",
        gap,
        f"The stream had no reader for {duration(gap)}: the client reconnected late.",
    )


def yielded(story: Story) -> Finding | None:
    gave = [row for row in story.attempts if row["ended"] == "yielded"]
    waited = story.spent("pool_queue_us")
    if not gave or not _is_large(story, waited):
        return None
    says = f"The batch stream gave its slot on replica {gave[-1]['replica']} to requests of higher tiers"
    return Finding("yielded", waited, f"{says} and waited {duration(waited)} in the queue.")


def full_queue(story: Story) -> Finding | None:
    if any(row["ended"] == "yielded" for row in story.attempts):
        return None
    waited = story.spent("pool_queue_us")
    position = int(story.fact("queue_position") or 0)
    ahead = f" behind {position - 1} others" if position > 1 else ""
    return _wait_finding(
        story, "full queue", "pool_queue_us", waited,
        f"No replica of pool {story.fact('pool')} had a free slot: the request waited {duration(waited)} in the "
        f"queue{ahead}.",
    )  # fmt: skip


def repaired_reply(story: Story) -> Finding | None:
    took, repairs = story.spent("check_us"), int(story.fact("repairs") or 0)
    if not repairs:
        if not story.fact("schema_check"):
            says = f"Moderation of the answer took {duration(took)} after its last token."
            return _wait_finding(story, "answer moderation", "check_us", took, says)
        return _wait_finding(
            story, "schema check", "check_us", took, f"The check of the reply against its schema took {duration(took)}."
        )
    if not _is_large(story, took):
        return None
    made, still = ("once" if repairs == 1 else f"{repairs} times"), story.fact("schema_check") == "invalid"
    end = ", and the last one does not fit either" if still else ""
    says = f"The reply did not fit its JSON schema and was made again {made}, which took {duration(took)}{end}."
    return Finding("repaired reply", took, says)


def steered(story: Story) -> Finding | None:
    took, inputs = story.spent("steer_us"), int(story.fact("inputs") or 0)
    if not _is_large(story, took):
        return None
    cut = "An input of the client" if inputs <= 1 else f"{inputs} inputs of the client"
    return Finding("steered", took, f"{cut} cut the answer; the prompt and first token after took {duration(took)}.")


def admission_slow(story: Story) -> Finding | None:
    took = story.spent("admission_us")
    return _wait_finding(
        story, "admission slow", "admission_us", took,
        f"Redis (key, limits, placement), stored responses or moderation of the prompt took {duration(took)}.",
    )  # fmt: skip


def gateway_slow(story: Story) -> Finding | None:
    took = story.spent("gateway_us")
    who = story.fact("gateway")
    return _wait_finding(
        story, "gateway slow", "gateway_us", took,
        f"Reading the request took {duration(took)}: the body came slowly, or gateway {who} was busy.",
    )  # fmt: skip


def fabric_slow(story: Story) -> Finding | None:
    took = story.spent("fabric_us")
    return _wait_finding(
        story, "fabric slow", "fabric_us", took, f"The way between gateway and agent took {duration(took)}."
    )


def expected_cached_share(story: Story) -> tuple[float, str]:
    """Return the share of the prompt expected in the cache, and which requests it is taken from."""
    cohort = story.cohort.cached_share if story.cohort.enough else 0.0
    told = story.session_members >= 2
    if story.session_members >= SESSION_MIN or (told and story.session_share > cohort):
        return story.session_share, "earlier prompts of its session"
    return cohort, "prompts of its cohort"


def cold_prefix(story: Story) -> Finding | None:
    prompt, cached, prefill = story.prompt_tokens, story.cached_tokens, story.spent("prefill_us")
    expected, whose = expected_cached_share(story)
    if not prompt or expected < 0.3 or cached > 0.5 * expected * prompt:
        return None
    cost = int(prefill * (expected * prompt - cached) / (prompt - cached))
    if not _is_large(story, cost, early=True):
        return None
    believed = max((int(row["believed_cached_tokens"]) for row in story.attempts), default=0)
    gone = f"; placement expected {believed}" if believed > cached else ""
    return Finding(
        "cold prefix", cost,
        f"Cold prefix: {cached} of {prompt} prompt tokens were cached; of {whose} it is {expected:.0%}{gone}.",
    )  # fmt: skip


def slow_prefill(story: Story) -> Finding | None:
    """Rule for a prompt that is slow to compute. What later attempts compute again belongs to the loss of a replica."""
    prefill, usual = int((story.bill or {}).get("prefill_us", 0)), story.cohort
    if not usual.enough or prefill <= usual.p95("prefill_us") or len(story.attempts) > 1 or cold_prefix(story):
        return None
    cost = prefill - int(usual.p50("prefill_us"))
    if not _is_large(story, cost, early=True):
        return None
    tokens = f"{story.prompt_tokens - story.cached_tokens} of {story.prompt_tokens} prompt tokens"
    half = duration(usual.p50("prefill_us"))
    return Finding(
        "slow prefill", cost,
        f"Prefill of {tokens} took {duration(prefill)}; the median of its cohort is {half}.",
    )  # fmt: skip


def overloaded_engine(story: Story) -> Finding | None:
    queue = story.spent("engine_queue_us")
    usual = story.cohort
    who = (story.bill or {}).get("replica") or story.fact("replica")
    slow_us, per_token = _slow_tokens(story)
    queue_cost = queue - (int(usual.p50("engine_queue_us")) if usual.enough else 0)
    if usual.enough and queue <= usual.p95("engine_queue_us"):
        queue_cost = 0
    cost = max(queue_cost, 0) + slow_us
    if _is_large(story, cost, early=queue_cost > slow_us):
        parts = []
        if queue_cost > 0:
            parts.append(f"the request waited {duration(queue)} in the engine's queue")
        if slow_us:
            parts.append(f"a token took {duration(per_token)} instead of {duration(usual.p50('token_us'))}")
        return Finding("overloaded engine", cost, f"Replica {who} was overloaded: {' and '.join(parts)}.")
    return _wait_finding(
        story, "overloaded engine", "engine_queue_us", queue,
        f"Replica {who} was overloaded: the request waited {duration(queue)} in the engine's queue.",
    )  # fmt: skip


def _slow_tokens(story: Story) -> tuple[int, float]:
    """Return the time lost to slow tokens, and the mean time per token, in µs."""
    bill, usual = story.bill, story.cohort
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
    """Rule for one gap between tokens that is far longer than the others."""
    row = max(story.attempts, key=_stall_us, default=None)
    gap = _stall_us(row) if row is not None else 0
    if row is None or not _is_large(story, gap):
        return None
    usual_us = (int(row["decode_us"]) - gap) / max(int(row["generated_tokens"]) - 2, 1)
    which = "two of its tokens"
    times = list(row.get("token_us") or ())
    if gap in times[1:]:  # not where it came after the times end; a wait after an input may be longer still
        at = times.index(gap, 1)
        which = f"tokens {at} and {at + 1}"
    who = row["replica"]
    return Finding(
        "token stall", gap,
        f"Replica {who} paused for {duration(gap)} between {which}; its other tokens took {duration(usual_us)} each.",
    )  # fmt: skip


def _stall_us(row: Row) -> int:
    """Return the longest gap between an attempt's tokens if it is a stall, else 0."""
    gap, tokens = int(row.get("itl_max_us") or 0), int(row["generated_tokens"])
    if tokens < 8 or gap < STALL_TIMES * (int(row["decode_us"]) - gap) / (tokens - 2):
        return 0
    return gap


def long_answer(story: Story) -> Finding | None:
    usual, tokens = story.cohort, story.output_tokens
    if not usual.enough or tokens <= max(usual.p95("output_tokens"), 2 * usual.p50("output_tokens")):
        return None
    cost = int((tokens - usual.p50("output_tokens")) * usual.p50("token_us"))
    if not _is_large(story, cost):
        return None
    half = usual.p50("output_tokens")
    return Finding(
        "long answer", cost, f"The answer was long: {tokens} tokens; the median of its cohort is {half:.0f}."
    )


def unaccounted(story: Story) -> Finding | None:
    missing = abs(story.spent("residual_us"))
    if not _is_large(story, missing):
        return None
    return Finding("unaccounted", missing, f"{duration(missing)} of the time belong to no phase.")


RULES: tuple[Rule, ...] = (
    refused,
    killed_replica,
    handed_over,
    failed,
    slow_client,
    resume_gap,
    yielded,
    full_queue,
    repaired_reply,
    steered,
    token_stall,
    overloaded_engine,
    cold_prefix,
    slow_prefill,
    long_answer,
    admission_slow,
    gateway_slow,
    fabric_slow,
    unaccounted,
)
"""Rules in order; the earlier one wins between causes of the same cost."""
