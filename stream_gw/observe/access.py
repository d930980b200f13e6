"""Access log: every failed request and a sample of the others. It never contains prompts or completions."""

from __future__ import annotations

import logging

from stream_fabric.errors import StreamGwError
from stream_fabric.events import sampled
from stream_gw.observe.trace import ReaderOutcome, ReaderTrace

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)


class AccessLog:
    """Writes the access log. ``one_in``: log 1 in N successful requests; 0 logs none."""

    def __init__(self, one_in: int) -> None:
        self._one_in = one_in

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Log a reader that has failed, was refused or stalled, or is in the sample."""
        if outcome.ended not in ("failed", "refused", "stalled") and not (
            self._one_in and sampled(outcome.request_id, self._one_in)
        ):
            return
        log.info(
            "request",
            extra={
                "request": outcome.request_id,
                "stream": outcome.stream,
                "trace": outcome.trace_id,
                "tenant": outcome.tenant,
                "pool": outcome.pool,
                "role": outcome.role,
                "ended": outcome.ended,
                "status": outcome.http_status,
                "error": outcome.error_code,
                "tokens": outcome.tokens,
                "wall_ms": outcome.wall_us // 1000,
                "ttft_ms": outcome.ttft_us // 1000,
            },
        )

    def receive_refused(self, request_id: str, path: str, trace: ReaderTrace | None, error: StreamGwError) -> None:
        """Log a request that got an error response. A request whose trace has ended is already logged."""
        if trace is None or not trace.has_ended:
            tenant = "" if trace is None else trace.tenant
            extra = {"request": request_id, "path": path, "tenant": tenant, "status": error.http_status}
            log.info("request", extra=extra | {"ended": "refused", "error": error.code})
