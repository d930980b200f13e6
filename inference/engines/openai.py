"""Any OpenAI-compatible server by URL: vLLM, SGLang, llama.cpp, Ollama."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Sequence

import aiohttp
import msgspec

from inference.agent.engines.chunks import ChunkReader, put_item, upstream_error
from inference.agent.engines.http import read_most
from inference.agent.engines.prometheus import Rising, VllmMetrics, missing, read_metrics
from inference.agent.engines.sleep import ServerSleep, SleepPolicy
from inference.agent.engines.sse import EventParser, EventTooLarge
from inference.agent.engines.warm_up import warm_up
from stream_fabric.errors import EngineFailed, EngineLost, StreamTooLarge, Unsupported
from stream_fabric.frames import ErrorInfo, Usage
from stream_fabric.ids import StreamId
from stream_fabric.limits import CHOICES_MAX, METRICS_BYTES_MAX, STREAM_BYTES_MAX
from stream_fabric.ports import EngineLoad, EngineRequest, FrameSink, Loaded, SleepLevel

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_SILENCE_S = 600.0
"""A server that says nothing for so long, prefill included, has lost the request."""
_CONNECTIONS_MAX = 4096
_LOAD_EVERY_S = 1.0
_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
}


class OpenAIEngine:
    """``base_url``: without ``/v1``. ``slots``: the sequences it runs at once, which such servers do not tell."""

    def __init__(
        self, base_url: str, api_key: str = "", slots: int = 256, sleep_policy: SleepPolicy | None = None
    ) -> None:
        self._base_url = base_url
        self._sleep_policy = sleep_policy or SleepPolicy()
        self._asleep = 0
        self._unsure = ""
        """What it was told and did not answer: it may fall asleep whenever what it still does is done."""
        self._models: Sequence[str] = ()
        self._slots = slots
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        self._session: aiohttp.ClientSession | None = None
        self._tasks: dict[StreamId, tuple[asyncio.Task[None], FrameSink]] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._poller: asyncio.Task[None] | None = None
        self._missing: list[str] = []
        self._refused = False
        self._clears = 0
        self._queries = Rising()
        self._hits = Rising()
        self._loaded = Loaded()
        self.metrics = VllmMetrics()

    async def start(self) -> Sequence[str]:
        self._session = aiohttp.ClientSession(
            headers=self._headers,
            connector=aiohttp.TCPConnector(limit=_CONNECTIONS_MAX),
            timeout=aiohttp.ClientTimeout(total=None, connect=_CONNECT_S, sock_read=_SILENCE_S),
            read_bufsize=1 << 18,
        )
        url = f"{self._base_url}/v1/models"
        try:
            timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
            async with self._session.get(url, timeout=timeout, allow_redirects=False) as response:
                body = await response.read()
                if (location := _redirect(response)) is not None:
                    raise EngineFailed(f"{url} redirects to {location}; set --upstream to where the server is")
                if response.status != 200:
                    raise EngineFailed(
                        f"{url} answered {response.status}; is it an OpenAI-compatible server, and the key right?"
                    )
                data = msgspec.json.decode(body)["data"]
                models = [item["id"] for item in data]
                self._loaded = Loaded(tuple(item["id"] for item in data if item.get("parent")))
        except (aiohttp.ClientError, TimeoutError) as error:
            raise EngineFailed(
                f"{url} does not answer ({error or 'timed out'}); start the model server first"
            ) from error
        except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
            raise EngineFailed(
                f"{url} did not answer with a list of models; is it an OpenAI-compatible server?"
            ) from error
        if not models:
            raise EngineFailed(f"{url} lists no model")
        self._models = models
        await self._look()
        if self.metrics.told:
            try:
                async with asyncio.timeout(_CONNECT_S):
                    self._asleep = await ServerSleep(self._session, self._base_url).level() or 0
            except (aiohttp.ClientError, TimeoutError) as error:
                raise EngineFailed(
                    f"{self._base_url} does not say whether it sleeps: {error or 'timed out'}"
                ) from error
            if self._asleep:
                log.warning("the model server sleeps at level %d; who put it to sleep is gone", self._asleep)
        self._poller = asyncio.create_task(self._poll(), name="engine-load")
        return models

    async def serving(self) -> None:
        assert self._poller is not None, "start comes first"
        await asyncio.wait([self._poller])
        if not self._poller.cancelled():
            self._poller.result()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if self._asleep:
            sink.end("failed", ErrorInfo.of(EngineLost("the model server sleeps; try again soon")))
        else:
            self._begin(request, sink)

    def _begin(self, request: EngineRequest, sink: FrameSink) -> None:
        task = asyncio.create_task(self._serve(request, sink), name=f"engine-{request.stream}")
        self._tasks[request.stream] = (task, sink)
        task.add_done_callback(lambda done: self._served(request, sink, done))

    def _served(self, request: EngineRequest, sink: FrameSink, task: asyncio.Task[None]) -> None:
        if self._tasks.get(request.stream) == (task, sink):
            del self._tasks[request.stream]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("request %s cannot be read from the model server", request.stream, exc_info=error)
            sink.end("failed", _broken(f"the model server's answer could not be read: {error!r}"))

    def abort(self, stream: StreamId) -> None:
        """Closing the connection is how these servers are told."""
        self._cancel(stream)

    def lose(self, error: EngineLost) -> None:
        """The server is known to be gone: end what it was asked now, not when its connections say so."""
        for stream in list(self._tasks):
            sink = self._cancel(stream)
            if sink is not None:
                sink.end("failed", ErrorInfo.of(error))

    def _cancel(self, stream: StreamId) -> FrameSink | None:
        """Forget a request; its sink, if it was still to be served."""
        task, sink = self._tasks.pop(stream, (None, None))
        if task is None or task.done():  # done: the task's callback is on its way to tell the sink, if it has to
            return None
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return sink

    def load(self) -> EngineLoad:
        metrics = self.metrics
        return EngineLoad(
            running=metrics.running if metrics.told else len(self._tasks),
            waiting=metrics.waiting,
            slots=self._slots,
            ready=not self._refused and not self._asleep,
            kv_used_ratio=metrics.kv_used_ratio,
            kv_capacity_tokens=metrics.kv_capacity_tokens,
            kv_clears=self._clears,
            prefix_queries_tokens=self._queries.total,
            prefix_hits_tokens=self._hits.total,
            metrics_missing=len(self._missing),
            asleep=self._asleep,
        )

    def loaded(self) -> Loaded:
        return self._loaded

    async def sleep(self, level: SleepLevel) -> bool:
        assert self._session is not None
        if self._asleep:
            return True
        if self._tasks or self.metrics.running or self.metrics.waiting:
            return False
        if not self.metrics.told:
            raise Unsupported("the model server is no vLLM, and knows no sleep")
        self._asleep = level  # nothing is begun from now on; and who fails at it may have lost its weights already
        try:
            async with asyncio.timeout(self._sleep_policy.sleep_s):
                await ServerSleep(self._session, self._base_url).sleep(level)
        except Unsupported:
            self._asleep = 0
            raise
        except TimeoutError:
            self._unsure = f"the model server did not sleep within {self._sleep_policy.sleep_s:g} s"
            raise EngineFailed(self._unsure) from None
        except (aiohttp.ClientError, OSError) as error:
            self._unsure = f"the model server does not say whether it sleeps: {error!r}"
            raise EngineFailed(self._unsure) from error
        self._clears += 1
        return True

    async def wake(self) -> None:
        assert self._session is not None
        if self._unsure:
            raise EngineFailed(self._unsure)
        try:
            async with asyncio.timeout(self._sleep_policy.wake_s):
                await ServerSleep(self._session, self._base_url).wake(self._asleep)
                await warm_up(self._begin, self.abort, self._models[0])
        except TimeoutError:
            raise EngineFailed(f"the model server did not wake within {self._sleep_policy.wake_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(f"the model server does not wake: {error!r}") from error
        except EngineFailed as failed:
            raise EngineFailed(f"the model server does not wake: {failed.message}") from failed
        self._asleep = 0

    async def close(self) -> None:
        tasks = [*(task for task, _ in self._tasks.values()), *self._ending, *([self._poller] if self._poller else [])]
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
        if self._session is not None:
            await self._session.close()

    async def _serve(self, request: EngineRequest, sink: FrameSink) -> None:
        usage: Usage | None = None
        try:
            if request.kind in ("chat", "completions"):
                try:
                    choices = _choices(request.body)
                except (msgspec.MsgspecError, ValueError, TypeError) as wrong:
                    message = f"n cannot be read: {wrong}"
                    sink.end("failed", ErrorInfo("invalid_request", message, "invalid_request_error", 400))
                    return
                reader = ChunkReader(request.stream, sink, choices, counts=self.metrics.told)
                error = await self._stream(request, reader)
                usage = reader.usage
            else:
                error, usage = await self._whole(request, sink)
        except EventTooLarge:
            error = _broken("an event of the model server passed the largest a stream may have")
        except msgspec.MsgspecError as wrong:
            error = _broken(f"the model server sent what cannot be read: {str(wrong)[:200]}")
        except (aiohttp.ClientError, TimeoutError, OSError) as lost:
            error = ErrorInfo.of(EngineLost(f"the model server failed: {lost or 'timed out'}"))
        if error is None:
            sink.end("completed", usage=usage)
        else:
            sink.end("failed", error)

    async def _stream(self, request: EngineRequest, reader: ChunkReader) -> ErrorInfo | None:
        body = bytes(request.body).rstrip()[:-1]
        comma = b"," if body.rstrip() != b"{" else b""
        # vLLM's own option, which others refuse: exact counts also of an answer that does not come to its end
        counts = b',"continuous_usage_stats":true' if self.metrics.told else b""
        body += comma + b'"stream":true,"stream_options":{"include_usage":true%b}}' % counts
        parser = EventParser(STREAM_BYTES_MAX)
        async with self._post(request, body) as response:
            if (refused := await _refusal(response)) is not None:
                return refused
            if response.content_type == "application/json":  # a server that does not stream what it was asked
                whole = await read_most(response, STREAM_BYTES_MAX + 1)
                if len(whole) > STREAM_BYTES_MAX:
                    raise EventTooLarge
                reader.receive(whole)
                return reader.end()
            try:
                async for chunk in response.content.iter_any():
                    for event in parser.receive(chunk):
                        reader.receive(event)
                    if reader.done:  # some servers keep the response open after it
                        return reader.end()
            except (aiohttp.ClientError, TimeoutError, OSError) as lost:
                if reader.end() is not None:
                    raise
                log.debug("the model server cut %s behind its end: %s", request.stream, lost)
                return None
            try:
                for event in parser.end():
                    reader.receive(event)
            except msgspec.MsgspecError:
                log.debug("the model server cut an event of %s", request.stream)  # and so the answer: end() says it
        return reader.end()

    async def _whole(self, request: EngineRequest, sink: FrameSink) -> tuple[ErrorInfo | None, Usage | None]:
        """An answer that is one JSON document: an item."""
        async with self._post(request, bytes(request.body)) as response:
            if (refused := await _refusal(response)) is not None:
                return refused, None
            body = await read_most(response, STREAM_BYTES_MAX + 1)
        if len(body) > STREAM_BYTES_MAX:
            return ErrorInfo.of(StreamTooLarge(f"the answer passed {STREAM_BYTES_MAX >> 20} MiB")), None
        return None, put_item(sink, body)

    def _post(self, request: EngineRequest, body: bytes) -> aiohttp.client._RequestContextManager:
        assert self._session is not None
        headers = {"content-type": "application/json", "x-request-id": request.stream}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        url = self._base_url + _PATHS[request.kind]
        return self._session.post(url, data=body, headers=headers, allow_redirects=False)

    async def _poll(self) -> None:
        while True:
            await asyncio.sleep(_LOAD_EVERY_S)
            await self._look()

    async def _look(self) -> None:
        """Read the server's own load, where it tells it under vLLM's names."""
        assert self._session is not None
        headers = {"accept": "text/plain; version=0.0.4"}
        timeout = aiohttp.ClientTimeout(total=_CONNECT_S)
        try:
            async with self._session.get(self._base_url + "/metrics", headers=headers, timeout=timeout) as response:
                text = await read_most(response, METRICS_BYTES_MAX) if response.status == 200 else b""
            self._heard(read_metrics(text))
            self._check(text)
            self._refused = False
        except aiohttp.ClientConnectorError as error:
            self._refused = True
            log.debug("the model server takes no connection: %s", error)
        except (aiohttp.ClientError, TimeoutError) as error:
            log.debug("the model server's metrics cannot be read: %s", error)

    def _check(self, text: bytes) -> None:
        """Said again only when it has changed."""
        lacks = missing(text)
        if lacks != self._missing:
            self._missing = lacks
            if lacks:
                log.warning(
                    "vLLM's metrics lack %s: this version of the agent relies on them, and takes what they would tell "
                    "for 0; is it another version of vLLM than the one it was made for?",
                    ", ".join(lacks),
                )

    def _heard(self, metrics: VllmMetrics) -> None:
        self.metrics = metrics
        anew = self._queries.receive(metrics.prefix_queries)
        if self._hits.receive(metrics.prefix_hits) or anew:
            self._clears += 1  # another process answers now, and its cache began empty


async def _refusal(response: aiohttp.ClientResponse) -> ErrorInfo | None:
    """Why the server does not serve the request, if it does not."""
    if response.status in (401, 403, 407):  # our key, not the client's
        log.error("the model server refuses this agent's key (%d); set upstream_api_key", response.status)
        return _broken("the model server refuses the platform's own key; its operator must set it right")
    if (location := _redirect(response)) is not None:  # followed it would be a GET, or go where nobody has set it to
        log.error("the model server redirects to %s; set upstream to where it is", location)
        return _broken("the model server redirects; the platform's operator must set its address right")
    if response.status != 200:
        return upstream_error(await read_most(response, 1 << 16), response.status)
    return None


def _redirect(response: aiohttp.ClientResponse) -> str | None:
    return response.headers.get("location") if 300 <= response.status < 400 else None


def _choices(body: msgspec.Raw) -> int:
    n = msgspec.json.decode(body, type=dict[str, msgspec.Raw]).get("n")
    return min(max(int(msgspec.json.decode(n) or 1), 1), CHOICES_MAX) if n is not None else 1


def _broken(message: str) -> ErrorInfo:
    return ErrorInfo("engine_error", message, http_status=502)
