"""What an agent tells of each of its tries at a stream, once it is over."""

from __future__ import annotations

from typing import Protocol

from inference.agent.lease import LeasePolicy
from inference.agent.running import RunningStream
from stream_fabric.events import AttemptEnd, AttemptTrace
from stream_fabric.ids import ReplicaId
from stream_fabric.placement import TIERS
from stream_fabric.ports import EventSink


class Clock(Protocol):
    def now_us(self) -> int: ...


class Tries:
    def __init__(self, sink: EventSink, clock: Clock, replica: ReplicaId, policy: LeasePolicy) -> None:
        self._sink = sink
        self.clock = clock
        self._replica = replica
        self._policy = policy

    def tell(self, stream: RunningStream, ended: AttemptEnd, batch: float = 0.0) -> None:
        """``ended`` by its terminal, which then is the stream's bill, or by another's hand. ``batch``: how many
        sequences decoded at once with it; 0: unknown."""
        work, producer, policy = stream.work, stream.producer, self._policy
        billed = ended in ("completed", "cancelled", "failed", "incomplete")
        used = producer.usage if billed else producer.usage_at(producer.acked)
        times = stream.times
        timing = times.timing()
        self._sink.emit(
            AttemptTrace(
                id=f"{work.request.stream}:{work.epoch}",
                at_us=self.clock.now_us(),
                stream=work.request.stream,
                tenant=work.tenant,
                model=work.request.model,
                pool=policy.pool,
                replica=self._replica,
                ended=ended,
                epoch=work.parsed_epoch().n,
                attempt=work.attempt,
                engine=policy.engine,
                region=policy.region,
                hardware=policy.hardware,
                tier=TIERS[work.tier],
                trace_id=work.request.traceparent[3:35] or work.request.stream[5:],
                waited_us=timing.waited_us,
                inbox_us=max(timing.taken_us - timing.handed_us, 0),
                engine_queue_us=timing.queue_us,
                prefill_us=timing.prefill_us,
                decode_us=timing.decode_us,
                queue_estimated=times.estimated,
                believed_cached_tokens=stream.matched_tokens,
                prompt_tokens=used.prompt,
                cached_tokens=used.cached,
                output_tokens=used.output,
                reasoning_tokens=used.reasoning,
                generated_tokens=times.generated,
                finish_reason=stream.finish_reason,
                error_code=stream.error_code,
                last_seq=producer.last,
                billed=billed,
                price_micro=work.prices.of(used.prompt, used.cached, used.output) if billed and work.prices else 0,
                itl_sketch=times.sketch(),
                itl_max_us=times.itl_max_us,
                token_us=times.token_us(),
                decoding_us=int(batch * timing.decode_us),
            )
        )
