"""The gateway's metrics. Scraping only reads numbers that are kept anyway."""

from __future__ import annotations

from prometheus_client import CollectorRegistry, Counter, Gauge, generate_latest


class Metrics:
    def __init__(self) -> None:
        self.registry = CollectorRegistry()
        self.requests = Counter("requests_total", "Requests answered", ["route", "status"], registry=self.registry)
        self.cancels = Counter("cancels_total", "Cancels by result", ["result"], registry=self.registry)
        self.resumes = Counter("resumes_total", "Readers that continued after a cursor", registry=self.registry)
        self.stalled = Counter("stalled_readers_total", "Readers that took nothing", registry=self.registry)
        self.open_streams = Gauge("open_streams", "Streams with a reader here", registry=self.registry)
        self.open_sockets = Gauge("open_websockets", "WebSockets", registry=self.registry)
        self.lagging = Gauge("lagging_clients", "Readers that keep only a cursor", registry=self.registry)

    def render(self) -> bytes:
        return generate_latest(self.registry)
