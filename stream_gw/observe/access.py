"""Access log: failed requests and a sample of the others. It never contains prompts or completions."""

from __future__ import annotations

import logging
from collections import Counter

from stream_fabric.errors import StreamGwError
from stream_fabric.events import sampled
from stream_fabric.limits import FAILURES_LOGGED_PER_S
from stream_fabric.ports import Clock
from stream_gw.observe.trace import ReaderOutcome, ReaderTrace

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)


class AccessLog:
    """Writes the access log. ``one_in``: log 1 in N successful requests; 0 logs none.

    Failures are logged up to a limit: a line takes as much CPU time as refusing the request itself.
    """

    def __init__(self, one_in: int, clock: Clock) -> None:
        self._one_in = one_in
        self._clock = clock
        self._second = 0
        self._failures: Counter[tuple[str, str]] = Counter()
        """Failures of the current second, by tenant and error."""

    def receive_outcome(self, outcome: ReaderOutcome) -> None:
        """Log a reader that has failed, was refused or stalled, or is in the sample."""
        failed = outcome.ended in ("failed", "refused", "stalled")
        if not failed and not (self._one_in and sampled(outcome.request_id, self._one_in)):
            return
        extra: dict[str, object] = {
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
        }
        if failed:
            self._log_failure(outcome.tenant, outcome.error_code, extra)
        else:
            log.info("request", extra=extra)

    def receive_refused(self, request_id: str, path: str, trace: ReaderTrace | None, error: StreamGwError) -> None:
        """Log a request that got an error response. A request whose trace has ended is already logged."""
        if trace is None or not trace.has_ended:
            tenant = "" if trace is None else trace.tenant
            extra = {"request": request_id, "path": path, "tenant": tenant, "status": error.http_status}
            self._log_failure(tenant, error.code, extra | {"ended": "refused", "error": error.code})

    def _log_failure(self, tenant: str, error: str, extra: dict[str, object]) -> None:
        second = self._clock.monotonic_us() // 1_000_000
        if second != self._second:
            self._second, self._failures = second, Counter()
        self._failures[tenant, error] += 1
        count = self._failures[tenant, error]
        if count <= FAILURES_LOGGED_PER_S:
            log.info("request", extra=extra)
        elif count == FAILURES_LOGGED_PER_S + 1:
            log.info("further failed requests not logged for a second", extra={"tenant": tenant, "error": error})
