"""Traces as OpenTelemetry's spans: what a gateway sends to a real OTLP receiver, and how spans are made of a trace."""

from __future__ import annotations

import asyncio
import queue
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from itertools import pairwise
from typing import Any

import pytest
from opentelemetry.proto.collector.trace.v1.trace_service_pb2 import ExportTraceServiceRequest

from stream_fabric.events import Phases, RequestTrace
from stream_fabric.limits import SPANS_HELD_MAX
from stream_fabric.process.host import HostRandom
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId
from telemetry.emit.semconv import VERSIONS
from telemetry.emit.spans import NoSpans, OtlpSpans, SpanMaker, open_spans, phase_spans
from tests.gateway.wire import MODEL, chat
from tests.metrics.conftest import Observed, fetch
from tests.support.server import free_port
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

TRACE, PARENT = "0af7651916cd43dd8448eb211c80319c", "b7ad6b7169203331"
STREAM = StreamId("resp_0192a1b2c3d47e5f8a9b0c1d2e3f4a5b")


class Receiver:
    """An OTLP receiver over HTTP. ``status``: what it answers with."""

    def __init__(self) -> None:
        self.requests: queue.SimpleQueue[ExportTraceServiceRequest] = queue.SimpleQueue()
        self.status = 200
        self.held = threading.Event()
        self.held.set()
        receiver = self

        class Handler(BaseHTTPRequestHandler):
            def do_POST(self) -> None:
                body = self.rfile.read(int(self.headers["content-length"]))
                assert self.path == "/v1/traces"
                assert self.headers["content-type"] == "application/x-protobuf"
                receiver.held.wait(20)
                if receiver.status == 200:
                    receiver.requests.put(ExportTraceServiceRequest.FromString(body))
                self.send_response(receiver.status)
                self.send_header("content-length", "0")
                self.end_headers()

            def log_message(self, *args: object) -> None: ...

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever, daemon=True)
        self._thread.start()
        self.spans: list[Any] = []

    def received(self) -> list[Any]:
        while not self.requests.empty():
            for resource in self.requests.get().resource_spans:
                for scope in resource.scope_spans:
                    self.spans += scope.spans
        return self.spans

    def close(self) -> None:
        self.held.set()
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()


@pytest.fixture
def receiver() -> Iterator[Receiver]:
    made = Receiver()
    yield made
    made.close()


def trace(**changes: Any) -> RequestTrace:
    told: dict[str, Any] = {
        "id": "x", "at_us": 1_700_000_001_000_000, "gateway": GatewayId("g"), "role": "created", "ended": "completed",
        "tenant": TenantId("acme"), "wall_us": 1_000_000, "stream": STREAM, "trace_id": TRACE, "model": "m",
        "dialect": "openai.chat", "finish_reason": "stop", "prompt_tokens": 11, "output_tokens": 7,
        "phases": Phases(
            gateway_us=1000, admission_us=2000, pool_queue_us=30_000, engine_queue_us=10_000, prefill_us=200_000,
            decode_us=700_000, fabric_us=5000, client_stall_us=50_000, residual_us=2000,
        ),
    }  # fmt: skip
    return RequestTrace(**told | changes)


def test_the_parts_follow_each_other_and_end_with_the_request() -> None:
    told = trace()
    found = list(phase_spans(told))
    assert [name for name, _, _ in found] == ["place", "queue", "prefill", "decode", "deliver"]
    began = told.at_us - told.wall_us
    assert found[0][1] == began + 1000
    assert all(one[2] == after[1] for one, after in pairwise(found))
    assert found[-1][2] == told.at_us - told.phases.residual_us


def test_a_reader_that_comes_back_began_when_it_came() -> None:
    told = trace(role="resumed", phases=Phases(gateway_us=1000, decode_us=299_000, resume_gap_us=700_000))
    assert list(phase_spans(told)) == [("decode", told.at_us - 299_000, told.at_us)]
    (edge, *_) = SpanMaker(VERSIONS["1.41"], "g", HostRandom()).spans(told, "")
    assert edge.start_time == (told.at_us - 300_000) * 1000
    assert edge.context.span_id != int(STREAM[-16:], 16), "that is the span of the request that made the stream"


@pytest.mark.parametrize(
    ("version", "ttft"), [("1.41", "stream_gw.ttft_s"), ("next", "gen_ai.response.time_to_first_chunk")]
)
def test_names_are_those_of_the_version(version: Any, ttft: str) -> None:
    (edge, *_) = SpanMaker(VERSIONS[version], "g", HostRandom()).spans(trace(ttft_us=240_000), PARENT)
    assert edge.name == "chat m"
    assert edge.attributes["gen_ai.usage.input_tokens"] == 11
    assert edge.attributes[ttft] == 0.24
    assert edge.attributes["stream_gw.tenant"] == "acme"


def test_a_failure_of_the_platform_is_an_error_and_a_wrong_request_is_none() -> None:
    maker = SpanMaker(VERSIONS["1.41"], "g", HostRandom())
    (failed, *_) = maker.spans(trace(ended="failed", error_code="engine_error"), "")
    (wrong, *_) = maker.spans(trace(ended="refused", role="refused", http_status=404, error_code="model_not_found"), "")
    assert (failed.status.is_ok, wrong.status.is_ok) == (False, True)
    assert wrong.attributes["error.type"] == "model_not_found"


async def test_a_gateway_sends_a_request_s_spans_under_its_client_s(observed: Observed, receiver: Receiver) -> None:
    flags = ("--gateway", "spans", "--otlp-endpoint", receiver.url)
    with await asyncio.to_thread(observed.platform.gateway, *flags) as process:
        gate = type(observed.platform.gates[0])(process.facts["url"], process.pid, observed.platform.key)
        headers = {"traceparent": f"00-{TRACE}-{PARENT}-01"}
        async with gate.create(chat(20), headers) as exchange:
            stream = exchange.headers["x-stream-id"]
            await exchange.rest()
        own, _ = await gate.finished(5)
        spans = await eventually(lambda: receiver.received() if len(receiver.received()) >= 8 else None, "spans")
        assert "traces_sent_total" in await fetch(process.facts["url"])
    edge = next(span for span in spans if span.span_id.hex() == stream[-16:])
    assert (edge.trace_id.hex(), edge.parent_span_id.hex(), edge.name) == (TRACE, PARENT, f"chat {MODEL}")
    assert edge.kind == edge.SPAN_KIND_SERVER
    told = {attribute.key: attribute.value for attribute in edge.attributes}
    assert told["gen_ai.response.id"].string_value == stream
    assert told["gen_ai.usage.output_tokens"].int_value == 20
    parts_ = [span for span in spans if span.parent_span_id == edge.span_id]
    assert {"place", "prefill", "decode"} <= {span.name for span in parts_}
    assert all(edge.start_time_unix_nano <= s.start_time_unix_nano <= s.end_time_unix_nano for s in parts_)
    alone = next(span for span in spans if span.span_id.hex() == own[-16:])
    assert alone.trace_id.hex() == own[5:] and not alone.parent_span_id
    body = "".join(str(span) for span in spans)
    assert "rivers" not in body and observed.platform.key not in body


async def test_a_receiver_that_does_not_answer_holds_nobody_up(receiver: Receiver) -> None:
    sent, dropped = 0, 0

    def count_sent(count: int) -> None:
        nonlocal sent
        sent += count

    def count_dropped(count: int) -> None:
        nonlocal dropped
        dropped += count

    receiver.held.clear()
    spans = OtlpSpans(receiver.url, "1.41", "g", count_sent, count_dropped, HostRandom())
    for _ in range(SPANS_HELD_MAX + 1000):
        spans.receive(trace(), "")
    assert 0 < dropped <= 1000, "so many are held, and no more"
    receiver.held.set()
    await eventually(lambda: sent, "what was held to be sent")
    await asyncio.to_thread(spans.close)


def test_a_receiver_that_is_not_there_is_counted() -> None:
    counted: list[int] = []
    spans = OtlpSpans(f"http://127.0.0.1:{free_port()}", "1.41", "g", lambda n: None, counted.append, HostRandom())
    spans.receive(trace(), "")
    spans.close()
    assert counted == [1]
    spans.receive(trace(), "")
    assert counted[-1] == 1, "closed"


def test_it_is_off_unless_it_is_asked_for() -> None:
    assert isinstance(open_spans("", "1.41", "g", print, print, HostRandom()), NoSpans)
