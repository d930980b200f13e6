"""A request's trace as OpenTelemetry's spans, made when it is over and sent from a thread.

Only what is told as an event is told as spans, from the same moments: an edge span, and under it, one after the other,
``place``, ``queue``, ``prefill``, ``decode`` and ``deliver`` as long as those took. The edge span of the request that
made a stream has the digits that its producer was given as parent, so that an engine's own spans belong to it.
"""

from __future__ import annotations

import logging
import secrets
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from stream_fabric.events import RequestTrace
from stream_fabric.limits import SPANS_BATCH_MAX, SPANS_CLOSE_S_MAX, SPANS_HELD_MAX, SPANS_SEND_S_MAX
from telemetry.semconv import VERSIONS, Names, Version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

_LINGER_S = 0.5
_OPERATIONS = {
    "openai.chat": "chat",
    "openai.completions": "text_completion",
    "openai.embeddings": "embeddings",
    "openai.rerank": "rerank",
}


class Spans(Protocol):
    def told(self, event: RequestTrace, parent: str) -> None:
        """``parent``: the client's span; empty: none. Never blocks and never raises."""

    def close(self) -> None:
        """Send what is there, for a bounded time. Blocks."""


class NoSpans:
    def told(self, event: RequestTrace, parent: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_spans(
    endpoint: str, version: Version, gateway: str, on_sent: Callable[[int], None], on_dropped: Callable[[int], None]
) -> Spans:
    """``endpoint``: an OTLP receiver over HTTP, as http://host:4318; empty: none. Whether it can be reached does not
    matter for the start.

    Raises ValueError where OpenTelemetry is not installed.
    """
    if not endpoint:
        return NoSpans()
    try:
        return OtlpSpans(endpoint, version, gateway, on_sent, on_dropped)
    except ModuleNotFoundError as error:
        raise ValueError("STREAM_GW_OTLP_ENDPOINT needs OpenTelemetry; pip install 'stream-gw[otel]'") from error


class OtlpSpans:
    def __init__(
        self,
        endpoint: str,
        version: Version,
        gateway: str,
        on_sent: Callable[[int], None],
        on_dropped: Callable[[int], None],
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url = endpoint.rstrip("/")
        url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
        self._exporter = OTLPSpanExporter(url, timeout=SPANS_SEND_S_MAX)
        self._maker = Maker(VERSIONS[version], gateway)
        self._on_sent = on_sent
        self._on_dropped = on_dropped
        self._waiting: deque[tuple[RequestTrace, str]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def told(self, event: RequestTrace, parent: str) -> None:
        if len(self._waiting) >= SPANS_HELD_MAX or self._closing:
            self._on_dropped(1)
            return
        self._waiting.append((event, parent))

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(SPANS_CLOSE_S_MAX)
        if self._thread.is_alive():
            log.warning("%d traces were not sent as spans", len(self._waiting))
        self._exporter.shutdown()  # type: ignore[no-untyped-call]

    def _run(self) -> None:
        while not (self._closing and not self._waiting):
            batch = [self._waiting.popleft() for _ in range(min(len(self._waiting), SPANS_BATCH_MAX))]
            if batch:
                self._send(batch)
            if len(self._waiting) < SPANS_BATCH_MAX:
                self._wake.wait(_LINGER_S)

    def _send(self, batch: list[tuple[RequestTrace, str]]) -> None:
        from opentelemetry.sdk.trace.export import SpanExportResult

        try:
            spans = [span for event, parent in batch for span in self._maker.spans(event, parent)]
            sent = self._exporter.export(spans) is SpanExportResult.SUCCESS
        except Exception:  # the thread's root: a fault in a span must not cost the others theirs, nor end the thread
            log.exception("spans cannot be sent")
            sent = False
        (self._on_sent if sent else self._on_dropped)(len(batch))


class Maker:
    """Spans of events."""

    def __init__(self, names: Names, gateway: str) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._names = names
        attributes = {"service.name": "stream-gw", "service.instance.id": gateway}
        self._resource = Resource(attributes, names.schema_url or None)
        self._scope = InstrumentationScope("stream-gw", schema_url=names.schema_url)

    def spans(self, event: RequestTrace, parent: str) -> Iterator[ReadableSpan]:
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id = int(event.trace_id or secrets.token_hex(16), 16)

        def context(span_id: str, remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

        made = event.role == "created" and event.stream
        edge = context(event.stream[-16:] if made else secrets.token_hex(8))
        failed = event.ended == "failed" or (event.ended == "refused" and event.http_status >= 500)
        operation = _OPERATIONS.get(event.dialect, "chat")
        began_us = event.at_us - event.wall_us + event.phases.resume_gap_us
        yield ReadableSpan(
            f"{operation} {event.model}".rstrip(),
            edge,
            context(parent, True) if parent else None,
            self._resource,
            self._attributes(event, operation),
            kind=SpanKind.SERVER,
            status=Status(StatusCode.ERROR, event.error_code) if failed else Status(StatusCode.UNSET),
            start_time=began_us * 1000,
            end_time=event.at_us * 1000,
            instrumentation_scope=self._scope,
        )
        for name, from_us, to_us in parts(event):
            yield ReadableSpan(
                name,
                context(secrets.token_hex(8)),
                edge,
                self._resource,
                {self._names.of("replica"): event.replica} if event.replica else {},
                start_time=from_us * 1000,
                end_time=to_us * 1000,
                instrumentation_scope=self._scope,
            )

    def _attributes(self, event: RequestTrace, operation: str) -> dict[str, str | int | float | bool | list[str]]:
        told: dict[str, str | int | float | bool | list[str]] = {
            "operation": operation,
            "provider": "stream-gw",
            "model": event.model,
            "response_model": event.model,
            "response": event.stream,
            "finish_reasons": [event.finish_reason] if event.finish_reason else [],
            "input_tokens": event.prompt_tokens,
            "cached_tokens": event.cached_tokens,
            "output_tokens": event.output_tokens,
            "session": event.session_hash,
            "error": event.error_code,
            "status": event.http_status,
            "streamed": event.transport != "whole",
            "ttft_s": event.ttft_us / 1e6,
            "tenant": event.tenant,
            "request": event.request_id,
            "role": event.role,
            "ended": event.ended,
            "pool": event.pool,
            "replica": event.replica,
            "placement": event.placement,
            "attempts": event.attempts,
            "residual_us": event.phases.residual_us,
        }
        return {self._names.of(word): value for word, value in told.items() if value not in ("", [])}


def parts(event: RequestTrace) -> Iterator[tuple[str, int, int]]:
    """Name, from and until, in microseconds: the phases one after the other, in the order in which most of them come.
    A phase that took no time is no span."""
    phases = event.phases
    at_us = event.at_us - event.wall_us + phases.resume_gap_us + phases.gateway_us
    for name, took_us in (
        ("place", phases.admission_us),
        ("queue", phases.pool_queue_us + phases.engine_queue_us),
        ("prefill", phases.prefill_us),
        ("decode", phases.decode_us),
        ("recover", phases.recovery_us),
        ("deliver", phases.fabric_us + phases.client_stall_us),
    ):
        if took_us:
            yield name, at_us, at_us + took_us
            at_us += took_us
