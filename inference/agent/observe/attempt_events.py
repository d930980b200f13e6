"""Attempt events: one for each attempt at a stream, when it is over, with its bill."""

from __future__ import annotations

from inference.agent.observe.gpu_time import GpuPrice
from inference.agent.replica import LeasePolicy
from inference.agent.running import RunningStream
from stream_fabric.events import AttemptEnd, AttemptTrace
from stream_fabric.pool.cells import pool_of
from stream_fabric.pool.placement import TIERS
from stream_fabric.ports import Clock, EventSink
from stream_fabric.recovery.bill_terms import bill_id
from stream_fabric.stream.ids import ReplicaId


class AttemptEvents:
    def __init__(self, sink: EventSink, clock: Clock, replica: ReplicaId, policy: LeasePolicy) -> None:
        self._sink = sink
        self._clock = clock
        self._replica = replica
        self._policy = policy
        self._gpu_price = GpuPrice(policy.gpu_hour_micro)

    def report(self, stream: RunningStream, ended: AttemptEnd, batch: float = 0.0, gpu_s: float = 0.0) -> None:
        """Emit the event of an ended attempt, with the stream's bill if the attempt wrote the stream's terminal.

        ``batch``: mean number of sequences that decoded together with the stream; 0: unknown.
        ``gpu_s``: share of the replica's busy time.
        """
        gpu_us = int(gpu_s * 1e6)
        work, producer, policy = stream.work, stream.producer, self._policy
        billed = ended in ("completed", "cancelled", "failed", "incomplete")
        used = producer.usage if billed else producer.usage_at(producer.acked)
        timing = stream.timing.summary()
        self._sink.emit(
            AttemptTrace(
                id=bill_id(work.request.stream) if billed else f"{work.request.stream}:{work.epoch}",
                at_us=self._clock.now_us(),
                stream=work.request.stream,
                tenant=work.tenant,
                model=work.request.model,
                pool=pool_of(policy.pool),
                replica=self._replica,
                ended=ended,
                epoch=work.parsed_epoch().n,
                attempt=work.attempt,
                engine=policy.engine,
                region=policy.region,
                hardware=policy.hardware,
                tier=TIERS[work.rank],
                trace_id=work.request.traceparent[3:35] or work.request.stream[5:],
                waited_us=timing.waited_us,
                inbox_us=max(timing.taken_us - timing.handed_us, 0),
                engine_queue_us=timing.queue_us,
                prefill_us=timing.prefill_us,
                decode_us=timing.decode_us,
                check_us=timing.check_us,
                steer_us=timing.steer_us,
                inputs=stream.timing.inputs,
                queue_estimated=stream.timing.estimated,
                believed_cached_tokens=stream.matched_tokens,
                prompt_tokens=used.prompt,
                cached_tokens=used.cached,
                output_tokens=used.output,
                reasoning_tokens=used.reasoning,
                generated_tokens=stream.timing.generated,
                finish_reason=stream.finish_reason,
                error_code=stream.error_code,
                last_seq=producer.last,
                billed=billed,
                price_micro=work.prices.of(used.prompt, used.cached, used.output) if billed and work.prices else 0,
                itl_sketch=stream.timing.sketch(),
                itl_max_us=stream.timing.itl_max_us,
                token_us=stream.timing.token_us(),
                # Tokens of repairs are generated after decode_us, so a repaired attempt tells no speed
                decoding_us=0 if stream.timing.repairs else int(batch * timing.decode_us),
                key=work.key,
                user_hash=work.user_hash,
                session_hash=work.session,
                endpoint=work.request.kind,
                gpu_us=gpu_us,
                gpu_cost_micro=self._gpu_price.cost_of(gpu_us),
                retention_days=work.retention_days,
            )
        )
