"""Load of a model server, polled from its metrics, where it shows them under vLLM's names."""

from __future__ import annotations

import asyncio
import logging
from typing import Final

import aiohttp

from inference.engines.prometheus import RestartingCounter, VllmMetrics, missing_metrics, read_metrics
from stream_fabric.errors import EngineLost
from stream_fabric.limits import METRICS_BYTES_MAX
from stream_fabric.process.http_client import read_start
from stream_fabric.stream.frames import ErrorInfo

log = logging.getLogger(__name__)

_POLL_EVERY_S = 1.0
SERVES_NONE: Final = (502, 503, 504)
"""Statuses of a proxy without a server behind it. llama.cpp answers 503 to most paths while it loads its model."""
_TIMEOUT_S = 5.0
_ENDS_S = 5.0
"""vLLM's API server ends within this time after its engine process has died, and answers for its metrics until then."""
_HEADERS = {"accept": "text/plain; version=0.0.4"}


class ServerLoad:
    """The last reading of a server's metrics, and counters that survive a restart of the server."""

    def __init__(self, base_url: str) -> None:
        self._url = base_url + "/metrics"
        self.metrics = VllmMetrics()
        self.missing: list[str] = []
        """Metrics that the agent relies on and the server lacks."""
        self.refused = False
        """True when the server takes no connection, or takes requests and serves none."""
        self._dead_until = 0.0
        """Until then on the loop's clock, an answer for the metrics does not mean that requests are served."""
        self.serves_none = False
        """Whether a proxy before the server, or the server while it loads its model, answered for want of a server."""
        self._has_served = False
        """Whether the path of the metrics has told more than that: else it tells nothing about the server."""
        self.cache_clears = 0
        """Number of times the server's whole prefix cache was lost."""
        self._queries = RestartingCounter()
        self._hits = RestartingCounter()

    @property
    def prefix_queries(self) -> int:
        """Number of tokens looked up in the prefix cache."""
        return self._queries.total

    @property
    def prefix_hits(self) -> int:
        """Number of tokens found in the prefix cache."""
        return self._hits.total

    def receive_end(self, error: ErrorInfo | None) -> None:
        """Take how a request ended: the server may have told that its engine process is dead.

        The pool would give the request back at once, if the replica were ready until the next reading.
        """
        if error is not None and error.code == EngineLost.code and not self.refused:
            self.refused = True
            self._dead_until = asyncio.get_running_loop().time() + _ENDS_S

    async def keep_polling(self, session: aiohttp.ClientSession) -> None:
        while True:
            await asyncio.sleep(_POLL_EVERY_S)
            await self.poll(session)

    async def poll(self, session: aiohttp.ClientSession) -> None:
        """Read the metrics once. Failures are only logged, because a server may have no metrics."""
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            async with session.get(self._url, headers=_HEADERS, timeout=timeout) as response:
                text, status = await read_start(response, METRICS_BYTES_MAX), response.status
        except aiohttp.ClientConnectorError as error:
            self.refused = True
            log.debug("model server takes no connection: url=%s error=%s", self._url, error)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.debug("read of the model server's metrics failed: url=%s error=%s", self._url, error)
        else:
            self.serves_none = self._has_served and status in SERVES_NONE
            self._has_served = self._has_served or status not in SERVES_NONE
            dead = asyncio.get_running_loop().time() < self._dead_until
            self.refused = self.refused and (self.serves_none or dead)
            if status == 200:
                self._receive(text)
            elif self.metrics.shown:  # a proxy's error: counters of 0 would look like a restart
                log.debug("read of the model server's metrics failed: url=%s status=%d", self._url, status)

    def _receive(self, text: bytes) -> None:
        self.metrics = metrics = read_metrics(text)
        restarted = self._queries.receive(metrics.prefix_queries)
        if self._hits.receive(metrics.prefix_hits) or restarted:
            self.cache_clears += 1  # the new process began with an empty cache
        lacks = missing_metrics(text)
        if lacks != self.missing:  # logged once for each change
            self.missing = lacks
            if lacks:
                log.warning(
                    "vLLM's metrics lack names that the agent relies on, their values count as 0; "
                    "use a version of vLLM that this release supports: missing=%s",
                    ", ".join(lacks),
                )
