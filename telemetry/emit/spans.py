"""OpenTelemetry spans of a request, made from its trace event when the request has ended, and sent from a thread.

Only sampled requests, which have an event, get spans, with the event's moments. An edge span covers the request. Its
children ``place``, ``queue``, ``prefill``, ``decode`` and ``deliver`` follow one after the other. The edge span of the
request that created a stream has the span id that its producer received as parent, so an engine's own spans are its
children.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator
from typing import TYPE_CHECKING, Protocol

from stream_fabric.events import RequestTrace
from stream_fabric.limits import SPANS_BATCH_MAX, SPANS_CLOSE_S_MAX, SPANS_HELD_MAX, SPANS_SEND_S_MAX
from stream_fabric.ports import Random
from telemetry.emit.semconv import VERSIONS, Names, Version

if TYPE_CHECKING:
    from opentelemetry.sdk.trace import ReadableSpan

log = logging.getLogger(__name__)

_LINGER_S = 0.5
_OPERATIONS = {
    "openai.chat": "chat",
    "openai.completions": "text_completion",
    "openai.embeddings": "embeddings",
    "openai.rerank": "rerank",
    "openai.classify": "classify",
    "openai.score": "score",
    "anthropic.messages": "chat",
    "vercel.ui": "chat",
    "openai.responses": "chat",
    "open.responses": "chat",
    "anthropic.count_tokens": "count_tokens",
}


class Spans(Protocol):
    """Sender of the spans of finished requests."""

    def receive(self, event: RequestTrace, parent: str) -> None:
        """Take a trace event for sending. ``parent``: the client's span id; empty: none. Never blocks, never raises."""

    def close(self) -> None:
        """Send the waiting traces. Blocks, for a bounded time."""


class NoSpans:
    def receive(self, event: RequestTrace, parent: str) -> None:
        pass

    def close(self) -> None:
        pass


def open_spans(
    endpoint: str,
    version: Version,
    gateway: str,
    on_sent: Callable[[int], None],
    on_dropped: Callable[[int], None],
    random: Random,
) -> Spans:
    """Open a sender of spans to ``endpoint``, an OTLP receiver such as http://host:4318. Empty: no spans are sent.

    The endpoint may be unreachable at the start. Raises ValueError when OpenTelemetry is not installed.
    """
    if not endpoint:
        return NoSpans()
    try:
        return OtlpSpans(endpoint, version, gateway, on_sent, on_dropped, random)
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
        random: Random,
    ) -> None:
        from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

        url = endpoint.rstrip("/")
        url = url if url.endswith("/v1/traces") else f"{url}/v1/traces"
        self._exporter = OTLPSpanExporter(url, timeout=SPANS_SEND_S_MAX)
        self._maker = SpanMaker(VERSIONS[version], gateway, random)
        self._on_sent = on_sent
        self._on_dropped = on_dropped
        self._waiting: deque[tuple[RequestTrace, str]] = deque()
        self._wake = threading.Event()
        self._closing = False
        self._thread = threading.Thread(target=self._run, name="spans", daemon=True)
        self._thread.start()

    def receive(self, event: RequestTrace, parent: str) -> None:
        if len(self._waiting) >= SPANS_HELD_MAX or self._closing:
            self._on_dropped(1)
            return
        self._waiting.append((event, parent))

    def close(self) -> None:
        self._closing = True
        self._wake.set()
        self._thread.join(SPANS_CLOSE_S_MAX)
        if self._thread.is_alive():
            log.warning("closing, spans not sent: traces=%d", len(self._waiting))
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
        except Exception:  # the thread's root: a fault in one batch must not end the thread
            log.exception("sending spans failed, dropped: traces=%d", len(batch))
            sent = False
        (self._on_sent if sent else self._on_dropped)(len(batch))


class SpanMaker:
    """Converts trace events to spans."""

    def __init__(self, names: Names, gateway: str, random: Random) -> None:
        from opentelemetry.sdk.resources import Resource
        from opentelemetry.sdk.util.instrumentation import InstrumentationScope

        self._names = names
        self._random = random
        attributes = {"service.name": "stream-gw", "service.instance.id": gateway}
        self._resource = Resource(attributes, names.schema_url or None)
        self._scope = InstrumentationScope("stream-gw", schema_url=names.schema_url)

    def spans(self, event: RequestTrace, parent: str) -> Iterator[ReadableSpan]:
        """Yield the edge span of a request, then its children. ``parent``: the client's span id; empty: none."""
        from opentelemetry.sdk.trace import ReadableSpan
        from opentelemetry.trace import SpanContext, SpanKind, Status, StatusCode, TraceFlags

        trace_id = int(event.trace_id or self._random.token_hex(16), 16)

        def context(span_id: str, remote: bool = False) -> SpanContext:
            return SpanContext(trace_id, int(span_id, 16), remote, TraceFlags(TraceFlags.SAMPLED))

        made = event.role == "created" and event.stream
        edge = context(event.stream[-16:] if made else self._random.token_hex(8))
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
        for name, from_us, to_us in phase_spans(event):
            yield ReadableSpan(
                name,
                context(self._random.token_hex(8)),
                edge,
                self._resource,
                {self._names.attribute("replica"): event.replica} if event.replica else {},
                start_time=from_us * 1000,
                end_time=to_us * 1000,
                instrumentation_scope=self._scope,
            )

    def _attributes(self, event: RequestTrace, operation: str) -> dict[str, str | int | float | bool | list[str]]:
        attributes: dict[str, str | int | float | bool | list[str]] = {
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
        return {self._names.attribute(word): value for word, value in attributes.items() if value not in ("", [])}


def phase_spans(event: RequestTrace) -> Iterator[tuple[str, int, int]]:
    """Yield (name, start, end) of each phase in Unix µs, one after the other, in their usual order.

    A phase that took no time is left out.
    """
    phases = event.phases
    at_us = event.at_us - event.wall_us + phases.resume_gap_us + phases.gateway_us
    for name, took_us in (
        ("place", phases.admission_us),
        ("queue", phases.pool_queue_us + phases.engine_queue_us),
        ("prefill", phases.prefill_us),
        ("decode", phases.decode_us),
        ("recover", phases.recovery_us),
        ("check", phases.check_us),
        ("steer", phases.steer_us),
        ("deliver", phases.fabric_us + phases.client_stall_us),
    ):
        if took_us:
            yield name, at_us, at_us + took_us
            at_us += took_us
