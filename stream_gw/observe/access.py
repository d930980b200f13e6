"""Access records: every request that failed and a sample of the others, by the name of the request, never by what it
said."""

from __future__ import annotations

import logging

from stream_fabric.errors import StreamGwError
from stream_fabric.events import sampled
from stream_gw.trace import Over, ReaderTrace

log = logging.getLogger(__name__)
log.setLevel(logging.INFO)


class AccessLog:
    """``one_in``: of what went well, one in so many; 0: none."""

    def __init__(self, one_in: int) -> None:
        self._one_in = one_in

    def receive_over(self, over: Over) -> None:
        """A reader is over."""
        if over.ended not in ("failed", "refused", "stalled") and not (
            self._one_in and sampled(over.request_id, self._one_in)
        ):
            return
        log.info(
            "request",
            extra={
                "request": over.request_id,
                "stream": over.stream,
                "trace": over.trace_id,
                "tenant": over.tenant,
                "pool": over.pool,
                "role": over.role,
                "ended": over.ended,
                "status": over.http_status,
                "error": over.error_code,
                "tokens": over.tokens,
                "wall_ms": over.wall_us // 1000,
                "ttft_ms": over.ttft_us // 1000,
            },
        )

    def receive_refused(self, request_id: str, path: str, trace: ReaderTrace | None, error: StreamGwError) -> None:
        """A request was answered with an error; of one that is over by its trace, that has told it."""
        if trace is None or not trace.is_over:
            tenant = "" if trace is None else trace.tenant
            extra = {"request": request_id, "path": path, "tenant": tenant, "status": error.http_status}
            log.info("request", extra=extra | {"ended": "refused", "error": error.code})
