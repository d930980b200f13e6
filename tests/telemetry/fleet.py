"""An hour of a fleet's life, made up: a thousand requests of mixed kinds, and what is wrong with some of them planted,
so that every question of the cookbook has an answer that is known. The same seed gives the same events."""

from __future__ import annotations

import random
from collections import defaultdict
from dataclasses import dataclass, field
from typing import Any

from stream_fabric.events import (
    AttemptTrace,
    CandidateScore,
    Event,
    FleetEvent,
    InputTimes,
    Phases,
    Prices,
    RequestTrace,
    What,
)
from stream_fabric.gap_histogram import itl_bucket
from stream_fabric.stream.ids import GatewayId, ReplicaId, StreamId, TenantId, new_stream_id

START_US = 1_795_168_800_000_000
"""2026-11-20 10:00 UTC."""
HOUR_US = 3_600_000_000
REQUESTS = 1000
PRICES = Prices(prompt=150_000, cached=15_000, output=600_000)

MODELS = {
    "llama-70b": ("llama", 4, 0.12, 14_000.0),
    "qwen-7b": ("qwen", 3, 0.03, 5_000.0),
    "phi-4": ("phi", 3, 0.02, 4_000.0),
}
"""Model → pool, replicas, milliseconds of prefill a token, microseconds of decode a token."""
TENANTS = ("acme", "globex", "initech")
REGIONS = ("eu", "us")
SLOWED = "phi-2"
"""In the second half hour its engine keeps requests waiting for 380 ms. Nothing else is wrong with its pool."""
SLOWED_US = 380_000
STEER_US = 900_000
"""Time from an input to the prefill of the next answer."""
DIED = "llama-3"
SPARE = "llama-5"
"""Warm until an operator activates it, after the other died."""
DIED_US = START_US + 20 * 60_000_000


@dataclass
class Fleet:
    events: list[Event] = field(default_factory=list)
    planted: dict[str, list[StreamId]] = field(default_factory=lambda: defaultdict(list))
    """Cause → its streams."""
    asked: dict[str, RequestTrace] = field(default_factory=dict)
    """Stream → the event of the request that made it, also where nobody told of it."""
    settled: dict[tuple[str, int, str], list[int]] = field(default_factory=lambda: defaultdict(lambda: [0, 0, 0, 0]))
    """The fabric's totals: (tenant, hour, model) → streams, prompt, cached, output."""
    held: dict[str, int] = field(default_factory=dict)
    """Stream → output tokens, as the fabric still holds them."""

    def of(self, kind: type) -> list[Any]:
        return [event for event in self.events if isinstance(event, kind)]


def fleet(seed: int = 7) -> Fleet:
    made = _Maker(random.Random(seed))
    for number in range(REQUESTS):
        made.request(number)
    made.around()
    made.fleet.events.sort(key=lambda event: event.at_us)
    return made.fleet


_KINDS = (
    ["slow client"] * 12
    + ["full queue"] * 12
    + ["cold prefix"] * 12
    + ["killed replica"] * 8
    + ["overloaded engine"] * 10
    + ["long answer"] * 8
    + ["resume gap"] * 10
    + ["admission slow"] * 8
    + ["failed"] * 6
    + ["cancelled"] * 20
    + ["left"] * 10
    + ["refused"] * 15
    + ["gateway died"] * 6
    + ["sampled out"] * 8
    + ["handed over"] * 5
    + ["attached"] * 10
    + ["billed twice"] * 2
    + ["unbilled"] * 2
    + ["streamed less"] * 2
    + ["settled more"] * 2
    + ["repaired reply"] * 6
    + ["reply checked"] * 12
    + ["reply does not fit"] * 3
    + ["steered"] * 8
)


class _Maker:
    def __init__(self, rng: random.Random) -> None:
        self.rng = rng
        self.fleet = Fleet()
        kinds = [*_KINDS, *["plain"] * (REQUESTS - len(_KINDS))]
        rng.shuffle(kinds)
        self.kinds = kinds
        self._numbers: dict[str, int] = defaultdict(int)

    def request(self, number: int) -> None:
        rng, kind = self.rng, self.kinds[number]
        model = rng.choices(list(MODELS), (5, 3, 3 if kind == "plain" else 0))[0]
        at = START_US + int((number + rng.random()) * HOUR_US / REQUESTS)
        if kind == "cold prefix":
            model = "llama-70b"
        if kind == "killed replica":
            model, at = "llama-70b", DIED_US - rng.randrange(500_000, 2_000_000)
        pool, replicas, prefill_ms, decode_us = MODELS[model]
        replica = ReplicaId(f"{pool}-{rng.randint(1, replicas)}")
        if kind == "killed replica":
            replica = ReplicaId(DIED)
        elif replica == DIED and DIED_US - 15_000_000 < at < DIED_US + 60_000_000:
            replica = ReplicaId("llama-1")
        tenant = TenantId(rng.choices(TENANTS, (5, 3, 2))[0])
        session = f"s-{tenant}-{model}-{rng.randrange(12)}"
        stream = new_stream_id(at // 1000, rng.randbytes(10))
        prompt = min(max(int(rng.lognormvariate(6.6, 0.5)), 130), 2000)
        share = min(max(rng.gauss(0.72, 0.06), 0.5), 0.9)
        output = min(max(int(rng.lognormvariate(5.0, 0.35)), 40), 400)
        if kind not in ("plain", "long answer"):
            output = 60 + output % 100
        if kind == "long answer":
            output = rng.randint(2500, 3500)
        if kind == "cold prefix":
            share, prompt = 0.0, rng.randint(1500, 2000)
        cached = int(prompt * share)
        self.fleet.planted[kind].append(stream)

        gateway = int(rng.uniform(200, 700))
        admission = int(rng.uniform(600, 1500))
        queue_us = int(rng.expovariate(1 / 3000))
        pool_queue = position = 0
        prefill = int(18_000 + (prompt - cached) * prefill_ms * 1000 * rng.uniform(0.95, 1.05))
        if kind == "cold prefix":
            prefill += int(prompt * prefill_ms * 4000)
        token_us = decode_us * rng.uniform(0.95, 1.05)
        decode = int(output * token_us)
        fabric = int(rng.uniform(1200, 3000))
        stall = recovery = 0
        placement = rng.choices(("pin", "prefix", "load"), (6, 3, 1))[0]
        if replica == SLOWED and at >= START_US + HOUR_US // 2:
            queue_us += SLOWED_US + int(rng.uniform(-5000, 5000))
        if kind == "full queue":
            pool_queue, position, placement = rng.randint(4_000_000, 9_000_000), rng.randint(10, 60), "queued"
        if kind == "admission slow":
            admission = rng.randint(1_500_000, 2_500_000)
        if kind == "overloaded engine":
            queue_us = rng.randint(3_000_000, 6_000_000)
        if kind == "slow client":
            stall = rng.randint(5_000_000, 20_000_000)
        attempts = 1
        if kind in ("killed replica", "handed over"):
            attempts, recovery = 2, rng.randint(3_000_000, 4_000_000)
        schema_check, repairs, check_us = "", 0, 0
        if kind in ("repaired reply", "reply checked", "reply does not fit"):
            schema_check = "invalid" if kind == "reply does not fit" else "valid"
            repairs = {"reply checked": 0, "repaired reply": 1}.get(kind, 2)
            check_us = rng.randint(2_500_000, 4_000_000) * repairs + rng.randint(1000, 4000)
        steer_us = 0
        if kind == "steered":
            steer_us = 2 * (STEER_US + prefill)
        residual = int(rng.gauss(0, 300))
        ttft = gateway + admission + pool_queue + queue_us + prefill + fabric // 2
        parts = Phases(
            gateway, admission, pool_queue, queue_us, prefill, decode, fabric, stall, 0, recovery, check_us,
            steer_us, residual,
        )  # fmt: skip
        trace_id = f"{rng.getrandbits(128):032x}"
        base = RequestTrace(
            id=f"req_{rng.getrandbits(96):024x}:{stream}",
            at_us=at + parts.total_us,
            gateway=GatewayId(f"gw-{1 + number % 2}"),
            role="created",
            ended="completed",
            tenant=tenant,
            wall_us=parts.total_us,
            phases=parts,
            stream=stream,
            request_id=f"req_{rng.getrandbits(96):024x}",
            trace_id=trace_id,
            user_hash=f"u{rng.randrange(40):02d}",
            model=model,
            pool=pool,
            replica=replica,
            session_hash=session,
            region=REGIONS[number % 2],
            dialect="openai.chat",
            transport=rng.choice(("sse", "sse", "ws")),
            tier="standard",
            finish_reason="stop",
            placement=placement,
            queue_position=position,
            scores=self._scores(pool, replicas, replica, cached),
            prompt_tokens=prompt,
            cached_tokens=cached,
            output_tokens=output,
            streamed_tokens=output,
            attempts=attempts,
            epochs=attempts,
            first_seq=1,
            last_seq=output + 4,
            ttft_us=ttft,
            price_micro=PRICES.of(prompt, cached, output),
            schema_check=schema_check,  # type: ignore[arg-type]
            repairs=repairs,
            inputs=2 if steer_us else 0,
            inputs_refused=1 if steer_us else 0,
            error_code="schema_mismatch" if schema_check == "invalid" else "",
        )
        self.fleet.asked[stream] = base
        self._tell(kind, base, token_us)

    def _scores(self, pool: str, replicas: int, taken: str, matched: int) -> tuple[CandidateScore, ...]:
        rng = self.rng
        scores = [
            CandidateScore(
                ReplicaId(f"{pool}-{n}"),
                round(rng.uniform(40, 90) if f"{pool}-{n}" != taken else rng.uniform(5, 20), 1),
                matched if f"{pool}-{n}" == taken else 0,
                rng.randrange(20),
                round(rng.uniform(5, 60), 1),
                "",
            )
            for n in range(1, replicas + 1)
        ]
        return tuple(sorted(scores, key=lambda score: score.score_ms))

    # --- what is told of it --------------------------------------------------------------------------------

    def _tell(self, kind: str, asked: RequestTrace, token_us: float) -> None:
        ended, output, generated = "completed", asked.output_tokens, asked.output_tokens
        if kind == "refused":
            parts = Phases(gateway_us=asked.phases.gateway_us, admission_us=3000)
            self._emit(
                asked, ended="refused", role="refused", http_status=503, error_code="pool_full", phases=parts,
                wall_us=parts.total_us, at_us=asked.at_us - asked.wall_us + parts.total_us, replica="", stream="",
                prompt_tokens=0, cached_tokens=0, output_tokens=0, streamed_tokens=0, first_seq=0, last_seq=0,
                ttft_us=0, price_micro=0, placement="", scores=(), finish_reason="", id=asked.request_id + ":",
            )  # fmt: skip
            self.fleet.planted["refused ids"].append(StreamId(asked.request_id))
            return
        if kind == "failed":
            ended = "failed"
        if kind in ("cancelled", "left"):
            output = asked.output_tokens // 2
            generated, ended = output + 6, "cancelled"
        self._attempts(kind, asked, ended, output, generated, token_us)
        self._settle(kind, asked, output)
        match kind:
            case "resume gap" | "gateway died":
                self._resumed(kind, asked)
            case "cancelled" | "left":
                self._halved(kind, asked, output)
            case "failed":
                self._emit(asked, ended="failed", error_code="engine_error", finish_reason="")
            case "sampled out":
                pass
            case "streamed less":
                self._emit(asked, streamed_tokens=output - 7)
            case "attached":
                self._emit(asked)
                wall = asked.wall_us // 2
                self._emit(
                    asked,
                    id=asked.id + ":2",
                    role="attached",
                    wall_us=wall,
                    gateway="gw-2",
                    ttft_us=0,
                    phases=Phases(gateway_us=400, decode_us=wall - 400),
                    streamed_tokens=output,
                    placement="",
                    scores=(),
                )
            case _:
                self._emit(asked)

    def _emit(self, asked: RequestTrace, **changes: Any) -> None:
        import msgspec

        self.fleet.events.append(msgspec.structs.replace(asked, **changes))

    def _halved(self, kind: str, asked: RequestTrace, output: int) -> None:
        import msgspec

        decode = asked.phases.decode_us // 2
        parts = msgspec.structs.replace(asked.phases, decode_us=decode)
        self._emit(
            asked, ended=kind, phases=parts, wall_us=parts.total_us, at_us=asked.at_us - asked.wall_us + parts.total_us,
            output_tokens=output, streamed_tokens=output if kind == "cancelled" else output - 3,
            last_seq=output + 3 if kind == "cancelled" else output, finish_reason="",
            cancel_point=f"1-{output + 2}" if kind == "cancelled" else "",
            prompt_tokens=asked.prompt_tokens if kind == "cancelled" else 0, cached_tokens=0, price_micro=0,
        )  # fmt: skip

    def _resumed(self, kind: str, asked: RequestTrace) -> None:
        """A first reader that went away after a third, and one that came back much later."""
        import msgspec

        third = asked.output_tokens // 3
        decode = asked.phases.decode_us // 3
        parts = msgspec.structs.replace(asked.phases, decode_us=decode, residual_us=0)
        first_end = asked.at_us - asked.wall_us + parts.total_us
        if kind == "resume gap":
            self._emit(
                asked, ended="left", phases=parts, wall_us=parts.total_us, at_us=first_end, output_tokens=third,
                streamed_tokens=third, last_seq=third + 2, finish_reason="", prompt_tokens=0, cached_tokens=0,
                price_micro=0,
            )  # fmt: skip
        gap = self.rng.randint(10_000_000, 30_000_000)
        again = Phases(gateway_us=900, decode_us=30_000, resume_gap_us=gap, residual_us=20)
        self._emit(
            asked, id=asked.id + ":2", role="resumed", gateway="gw-2", phases=again, wall_us=again.total_us,
            at_us=first_end + again.total_us, first_seq=third + 3, streamed_tokens=asked.output_tokens - third,
            ttft_us=0, placement="", scores=(), queue_position=0, region="us", request_id=f"{asked.request_id}b",
        )  # fmt: skip

    def _attempts(
        self, kind: str, asked: RequestTrace, ended: Any, output: int, generated: int, token_us: float
    ) -> None:
        phases = asked.phases
        common: dict[str, Any] = {
            "tenant": asked.tenant,
            "model": asked.model,
            "pool": asked.pool,
            "stream": asked.stream,
            "tier": asked.tier,
            "engine": "vllm",
            "hardware": "H200",
            "trace_id": asked.trace_id,
        }
        tell = self.fleet.events.append
        done = asked.at_us - phases.client_stall_us
        if kind in ("killed replica", "handed over"):
            lost = kind == "killed replica"
            tell(
                AttemptTrace(
                    id=f"{asked.stream}:1", at_us=done - phases.recovery_us // 2, replica=asked.replica,
                    ended="lost" if lost else "handed_over", epoch=1, attempt=1, region=_region(asked.replica),
                    prompt_tokens=asked.prompt_tokens, output_tokens=output // 2,
                    generated_tokens=0 if lost else output // 2, error_code="replica_lost" if lost else "",
                    prefill_us=0 if lost else phases.prefill_us, **common,
                )
            )  # fmt: skip
            generated = output - output // 2
        replica = asked.replica if asked.attempts == 1 else ReplicaId(f"{asked.pool}-1")
        if asked.attempts == 2 and asked.replica == replica:
            replica = ReplicaId(f"{asked.pool}-2")
        sketch = [0] * (itl_bucket(int(token_us)) + 1)
        sketch[itl_bucket(int(token_us))] = max(generated - 1, 0)
        bill = AttemptTrace(
            id=f"{asked.stream}:{asked.attempts}",
            at_us=done,
            replica=replica,
            ended=ended,
            epoch=asked.attempts,
            attempt=asked.attempts,
            region=_region(replica),
            waited_us=phases.pool_queue_us,
            inbox_us=phases.fabric_us // 4,
            engine_queue_us=phases.engine_queue_us,
            prefill_us=phases.prefill_us,
            decode_us=int(generated * token_us),
            check_us=phases.check_us,
            steer_us=phases.steer_us,
            inputs=_inputs(asked, done),
            believed_cached_tokens=int(asked.prompt_tokens * 0.7),
            prompt_tokens=asked.prompt_tokens,
            cached_tokens=asked.cached_tokens,
            output_tokens=output,
            generated_tokens=generated,
            finish_reason="stop" if ended == "completed" else "",
            error_code="engine_error" if ended == "failed" else "",
            last_seq=output + (3 if ended == "cancelled" else 4),
            billed=True,
            price_micro=PRICES.of(asked.prompt_tokens, asked.cached_tokens, output),
            itl_sketch=tuple(sketch),
            itl_max_us=int(token_us * 1.2),
            **common,
        )
        if kind != "unbilled":
            tell(bill)
        if kind == "billed twice":
            import msgspec

            tell(msgspec.structs.replace(bill, id=f"{asked.stream}:end", at_us=bill.at_us + 1000))

    def _settle(self, kind: str, asked: RequestTrace, output: int) -> None:
        done = asked.at_us - asked.phases.client_stall_us
        counted = output + 25 if kind == "settled more" else output
        self.fleet.held[asked.stream] = counted
        sums = self.fleet.settled[asked.tenant, done // HOUR_US, asked.model]
        for index, figure in enumerate((1, asked.prompt_tokens, asked.cached_tokens, counted)):
            sums[index] += figure

    def around(self) -> None:
        tell = self.fleet.events.append
        for pool, count, _, _ in MODELS.values():
            for number in range(1, count + 1):
                tell(
                    FleetEvent(
                        id=f"{pool}-{number}:lease", at_us=START_US - 60_000_000 + number, what="lease", source="agent",
                        pool=pool, replica=ReplicaId(f"{pool}-{number}"), state="ready",
                    )
                )  # fmt: skip
        self._before_and_after_death()
        tell(
            FleetEvent(
                id=f"{DIED}:dead", at_us=DIED_US, what="dead", source="reaper", pool="llama", replica=ReplicaId(DIED),
                reason="its lease expired", figures={"streams": 8},
            )
        )  # fmt: skip
        tell(
            FleetEvent(
                id="acme:budget_warning", at_us=DIED_US, what="budget_warning", source="gateway",
                state="tenant_month", reason="80 % are used", tenant=TenantId("acme"),
            )
        )  # fmt: skip

    def _before_and_after_death(self) -> None:
        """Its breaker opened two minutes before; afterwards requests were refused until an operator helped."""
        died, spare = ReplicaId(DIED), ReplicaId(SPARE)

        def tell(at_us: int, what: What, source: str, **more: Any) -> None:
            self.fleet.events.append(FleetEvent(f"{what}:{at_us}", at_us, what, source, pool="llama", **more))

        opened = DIED_US - 120_000_000
        failing = {"failures": 5.0, "open_s": 2.0}
        tell(opened, "breaker", "agent", replica=died, state="open", reason="engine_error", figures=failing)
        tell(
            opened + 2_000_000,
            "breaker",
            "agent",
            replica=died,
            state="half_open",
            reason="one request may try",
            figures=failing,
        )
        tell(
            opened + 2_400_000,
            "breaker",
            "agent",
            replica=died,
            state="closed",
            reason="its engine has answered",
            figures={"failures": 0, "open_s": 2.0},
        )
        tell(
            DIED_US + 6_000_000, "shed", "gw-1", state="pool", reason="pool_full",
            figures={"requests": 5, "within_s": 10},
        )  # fmt: skip
        tell(
            DIED_US + 8_000_000, "lease", "agent", replica=spare, state="ready", reason="its engine serves",
            asked_by="operator", figures={"streams": 0, "slots": 64, "room": 80},
        )  # fmt: skip


def _inputs(asked: RequestTrace, done: int) -> tuple[InputTimes, ...]:
    """Two inputs that were applied in the middle of the answer, and one that was refused."""
    if not asked.inputs:
        return ()
    answered_us = asked.phases.steer_us // 2
    began = done - answered_us * 2 - asked.phases.decode_us // 2
    applied = [InputTimes(began + n * answered_us - 8000, "applied", "", 8000, answered_us) for n in range(2)]
    return (*applied, InputTimes(done - 50_000, "refused", "waits_for_tools", 6000))


def _region(replica: str) -> str:
    return REGIONS[(int(replica[-1]) + 1) % 2]
