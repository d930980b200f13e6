"""Engine ``openai``: any OpenAI-compatible server by URL, for example vLLM, SGLang, llama.cpp or Ollama."""

from __future__ import annotations

import asyncio
import contextlib
import logging
from base64 import b64encode
from collections.abc import Mapping, Sequence
from urllib.parse import unquote, urlsplit

import aiohttp
import msgspec

from inference.engines.served_models import LoadedModels
from inference.engines.server_load import SERVES_NONE, ServerLoad
from inference.engines.sleep import ServerSleep, SleepPolicy
from inference.engines.upstream.answer import Answer, AnswerBroken
from inference.engines.upstream.answers import engine_error, lacks_path, lost_error, only_count, put_item
from inference.engines.upstream.chunks import BodyReader, ChunkReader
from inference.engines.upstream.http1 import HttpClient
from inference.engines.upstream.refusal import refusal_of
from inference.engines.upstream.sse import EventParser, EventTooLarge
from inference.engines.upstream.steps import StepSocket
from inference.engines.warm_up import warm_up
from stream_fabric.errors import EngineFailed, EngineLost, ModelNotFound, StreamTooLarge, Unsupported
from stream_fabric.limits import PROMPT_CHOICES_MAX, STREAM_BYTES_MAX
from stream_fabric.pool.records import EngineLoad, EngineRequest, Loaded
from stream_fabric.ports import FrameSink, SleepLevel
from stream_fabric.process.http_client import open_session
from stream_fabric.stream.frames import ErrorInfo, Usage
from stream_fabric.stream.ids import StreamId

log = logging.getLogger(__name__)

_CONNECT_S = 5.0
_SILENCE_S = 600.0
"""A request fails when the server sends nothing for this time; prefill included."""
_STOPPING_SILENCE_S = 10.0
"""The same while the server takes no connection."""
_CONNECTIONS_MAX = 16_384
_IDLE_S = 2.0
"""A connection that was idle for longer is not used again: servers close theirs, vLLM's after 5 s."""
_OTHER_PATHS = {"classify": "/v1/classify", "score": "/v1/score"}
"""Paths of other servers than vLLM; asked when the first one does not exist."""
_PATHS = {
    "chat": "/v1/chat/completions",
    "completions": "/v1/completions",
    "embeddings": "/v1/embeddings",
    "rerank": "/v1/rerank",
    "classify": "/classify",
    "score": "/score",
    "tokenize": "/tokenize",
}


class _Running:
    """A request that is being served. ``answer``: the server's, once its head has come."""

    __slots__ = ("aborted", "answer", "sink", "task")

    def __init__(self, sink: FrameSink) -> None:
        self.sink = sink
        self.task: asyncio.Task[None] | None = None
        self.answer: Answer | None = None
        self.aborted = False


class OpenAIEngine:
    """An ``Engine`` by HTTP.

    ``base_url``: without ``/v1``. Its user and password are sent, unless there is an ``api_key``. ``slots``: sequences
    that the server runs at once, which no endpoint shows.
    ``steps``: path at which to listen for vLLM's plug-in; requests go by it while it is connected. Empty: by HTTP.
    """

    def __init__(
        self,
        base_url: str,
        api_key: str = "",
        slots: int = 256,
        sleep_policy: SleepPolicy | None = None,
        steps: str = "",
    ) -> None:
        url = urlsplit(base_url)
        self._base_url = base_url = url._replace(netloc=url.netloc.rpartition("@")[2]).geturl()
        self._sleep_policy = sleep_policy or SleepPolicy()
        self._asleep = 0
        self._sleep_unknown = ""
        """The failure of a sleep request without an answer: the server may still fall asleep at any time."""
        self._slots = slots
        self._headers = {"authorization": f"Bearer {api_key}"} if api_key else {}
        if url.username is not None and not api_key:
            login = f"{unquote(url.username)}:{unquote(url.password or '')}"
            self._headers = {"authorization": f"Basic {b64encode(login.encode()).decode()}"}
        self._session: aiohttp.ClientSession | None = None
        """For everything but the requests themselves."""
        self._client: HttpClient | None = None
        self._steps = StepSocket(steps, self._headers, silence_s=_SILENCE_S) if steps else None
        self._running: dict[StreamId, _Running] = {}
        self._ending: set[asyncio.Task[None]] = set()
        self._poller: asyncio.Future[list[None]] | None = None
        self.server_load = ServerLoad(base_url)
        self._sleeps = 0
        self._models = LoadedModels(base_url)

    async def listen(self) -> None:
        """Listen for vLLM's plug-in before vLLM starts. Without this call ``start`` does. Raises EngineFailed."""
        if self._steps is not None:
            await self._steps.listen()

    async def start(self) -> Sequence[str]:
        self._session = open_session(total_s=None, connect_s=_CONNECT_S, headers=self._headers, idle_s=_IDLE_S)
        self._client = HttpClient(
            self._base_url,
            self._headers,
            connect_s=_CONNECT_S,
            silence_s=_SILENCE_S,
            idle_s=_IDLE_S,
            connections_max=_CONNECTIONS_MAX,
        )
        await self._models.start(self._session)
        if self._steps is not None:
            await self._steps.start()
        await self.server_load.poll(self._session)
        if self.server_load.metrics.shown:
            await self._models.check_template(self._session)
            self._asleep = await _sleep_level(self._session, self._base_url)
            if self._asleep:
                log.warning("model server already sleeps: level=%d url=%s", self._asleep, self._base_url)
        reads = [self._models.keep_reading(self._session)] if self.server_load.metrics.shown else []
        polls = self.server_load.keep_polling(self._session), _fail_silent(self.server_load, self._running)
        self._poller = asyncio.gather(*polls, *reads)
        return self._models.names

    async def serving(self) -> None:
        assert self._poller is not None, "start comes first"
        await asyncio.wait([self._poller])
        if not self._poller.cancelled():
            self._poller.result()

    def submit(self, request: EngineRequest, sink: FrameSink) -> None:
        if self._asleep:
            sink.end("failed", ErrorInfo.of(EngineLost("the model server sleeps; try again soon")))
        else:
            self._start_task(request, sink)

    def _start_task(self, request: EngineRequest, sink: FrameSink) -> None:
        running = self._running[request.stream] = _Running(sink)
        running.task = asyncio.create_task(self._serve(request, running), name=f"engine-{request.stream}")
        running.task.add_done_callback(lambda done: self._on_served(request, running, done))

    def _on_served(self, request: EngineRequest, running: _Running, task: asyncio.Task[None]) -> None:
        """Forget a request whose task has ended; end its stream if the task failed."""
        if self._running.get(request.stream) is running:
            del self._running[request.stream]
        if not task.cancelled() and (error := task.exception()) is not None:
            log.error("read of the model server's answer failed: stream=%s", request.stream, exc_info=error)
            running.sink.end("failed", engine_error(f"the model server's answer cannot be read: {error!r}"))

    def abort(self, stream: StreamId) -> None:
        """Abort by closing the connection, which these servers notice."""
        self._cancel(stream)

    def fail_all(self, error: EngineLost) -> None:
        """End all requests with this error at once; the connections may notice much later that the server is gone."""
        for stream in list(self._running):
            sink = self._cancel(stream)
            if sink is not None:
                sink.end("failed", ErrorInfo.of(error))

    def _cancel(self, stream: StreamId) -> FrameSink | None:
        """Cancel and forget a request. Returns its sink, or None when the request has ended."""
        running = self._running.pop(stream, None)
        if running is None or running.task is None or running.task.done():  # done: the task's callback ends the sink
            return None
        running.aborted = True
        if running.answer is not None:  # the task hears of it in the next loop turn, in which a piece may come first
            running.answer.close()
        task, running.task = running.task, None  # a cancelled task keeps its frames, which know this request
        task.cancel()
        self._ending.add(task)
        task.add_done_callback(self._ending.discard)
        return running.sink

    def load(self) -> EngineLoad:
        load, metrics = self.server_load, self.server_load.metrics
        return EngineLoad(
            running=metrics.running if metrics.shown else len(self._running),
            waiting=metrics.waiting,
            slots=self._slots,
            waits_beside_slots=metrics.waiting > 0 and metrics.running < self._slots,
            ready=not load.refused and not self._asleep,
            kv_used_ratio=metrics.kv_used_ratio,
            kv_capacity_tokens=metrics.kv_capacity_tokens,
            kv_clears=load.cache_clears + self._sleeps,
            prefix_queries_tokens=load.prefix_queries,
            prefix_hits_tokens=load.prefix_hits,
            metrics_missing=len(load.missing),
            asleep=self._asleep,
            max_model_len=self._models.max_model_len,
        )

    def loaded(self) -> Loaded:
        return self._models.loaded

    async def sleep(self, level: SleepLevel) -> bool:
        assert self._session is not None
        if self._asleep:
            return True
        metrics = self.server_load.metrics
        if self._running or metrics.running or metrics.waiting:
            return False
        if not metrics.shown:
            raise Unsupported("the model server cannot sleep: it is not vLLM")
        self._asleep = level  # no request begins from now on, also after a failure: the weights may be gone
        try:
            async with asyncio.timeout(self._sleep_policy.sleep_s):
                await ServerSleep(self._session, self._base_url).sleep(level)
        except Unsupported:
            self._asleep = 0
            raise
        except TimeoutError:
            self._sleep_unknown = f"the model server did not fall asleep within {self._sleep_policy.sleep_s:g} s"
            raise EngineFailed(self._sleep_unknown) from None
        except (aiohttp.ClientError, OSError) as error:
            self._sleep_unknown = f"the model server did not answer whether it sleeps: {error!r}"
            raise EngineFailed(self._sleep_unknown) from error
        self._sleeps += 1  # its cache is empty now
        return True

    async def wake(self) -> None:
        assert self._session is not None
        if self._sleep_unknown:
            raise EngineFailed(self._sleep_unknown)
        try:
            async with asyncio.timeout(self._sleep_policy.wake_s):
                await ServerSleep(self._session, self._base_url).wake(self._asleep)
                await warm_up(self._start_task, self.abort, self._models.names[0])
        except TimeoutError:
            raise EngineFailed(f"the model server did not wake within {self._sleep_policy.wake_s:g} s") from None
        except (aiohttp.ClientError, OSError) as error:
            raise EngineFailed(f"the model server did not wake: {error!r}") from error
        except EngineFailed as failed:
            raise EngineFailed(f"the model server did not wake: {failed.message}") from failed
        self._asleep = 0

    async def close(self) -> None:
        tasks = {running.task for running in self._running.values()} | self._ending | {self._poller}
        ended = [task for task in tasks if task is not None]
        for task in ended:
            task.cancel()
        await asyncio.gather(*ended, return_exceptions=True)
        if self._client is not None:
            self._client.close()
        if self._steps is not None:
            self._steps.close()
        if self._session is not None:
            await self._session.close()

    async def _serve(self, request: EngineRequest, running: _Running) -> None:
        """Serve one request up to the end of its stream."""
        sink = running.sink
        usage: Usage | None = None
        try:
            if request.kind in ("chat", "completions"):
                try:
                    prompts, choices = request.prompts, min(request.choices, PROMPT_CHOICES_MAX)
                except msgspec.MsgspecError as wrong:
                    message = f"n or prompt is not valid: {wrong}"
                    sink.end("failed", ErrorInfo("invalid_request", message, "invalid_request_error", 400))
                    return
                counts = self.server_load.metrics.shown
                reader = ChunkReader(request.stream, sink, choices, counts=counts, prompts=prompts)
                error = await self._serve_stream(request, running, reader)
                self.server_load.receive_end(error)
                usage = reader.usage
            else:
                error, usage = await self._serve_document(request, sink)
        except EventTooLarge:
            error = engine_error("an event of the model server is larger than a stream may be")
        except (msgspec.MsgspecError, UnicodeDecodeError) as wrong:
            error = engine_error(f"the model server sent invalid JSON: {str(wrong)[:200]}")
        except OSError as lost:
            if not isinstance(lost, AnswerBroken | TimeoutError):  # a new connection failed
                self.server_load.refused = True  # else the pool gives the request back before the next reading
            error = lost_error(request.stream, lost)
        if running.aborted:  # the task did not wait since
            return
        if error is None:
            sink.end("completed", usage=usage)
        else:
            sink.end("failed", error)

    async def _serve_stream(self, request: EngineRequest, running: _Running, reader: ChunkReader) -> ErrorInfo | None:
        """Request a streamed answer and give its chunks to the reader. Returns its error, None if complete."""
        # vLLM's own option, which other servers refuse: exact token counts also when the answer is cut off
        counts = b',"continuous_usage_stats":true' if self.server_load.metrics.shown else b""
        ours = b',"stream":true,"stream_options":{"include_usage":true%b}}' % counts
        body = b"".join((memoryview(request.body)[:-1], ours))  # a long prompt is copied once
        events = BodyReader(running, reader, EventParser(STREAM_BYTES_MAX))
        with contextlib.closing(await self._post(request, body)) as answer:
            running.answer = answer
            if (refused := await self._refusal(request, answer)) is not None:
                return refused
            if _content_type(answer) == "application/json":  # the server does not stream this request
                whole = await answer.read_start(STREAM_BYTES_MAX + 1)
                if len(whole) > STREAM_BYTES_MAX:
                    raise EventTooLarge
                reader.receive(whole)
                return reader.end()
            try:
                await answer.deliver(events.receive)
            except OSError as lost:
                if reader.end() is not None:
                    raise
                log.debug("model server cut the connection after the end: stream=%s error=%s", request.stream, lost)
                return None
        try:
            events.end()
        except msgspec.MsgspecError:
            log.debug("model server cut an event: stream=%s", request.stream)  # reader.end() reports the cut answer
        return reader.end()

    async def _serve_document(self, request: EngineRequest, sink: FrameSink) -> tuple[ErrorInfo | None, Usage | None]:
        """Request an answer that is one JSON document, and put it into the stream as one item."""
        answer = await self._post(request, bytes(request.body))
        if answer.status in (404, 405) and (other := _OTHER_PATHS.get(request.kind)) is not None:
            answer.close()
            answer = await self._post(request, bytes(request.body), other)
        with contextlib.closing(answer):
            if request.kind == "tokenize" and answer.status in (404, 405):
                return ErrorInfo.of(Unsupported("the model server cannot count tokens: it has no /tokenize")), None
            if (refused := await self._refusal(request, answer)) is not None:
                return refused, None
            body = await answer.read_start(STREAM_BYTES_MAX + 1)
        if len(body) > STREAM_BYTES_MAX:
            return ErrorInfo.of(StreamTooLarge(f"the answer is larger than {STREAM_BYTES_MAX >> 20} MiB")), None
        return None, put_item(sink, only_count(body) if request.kind == "tokenize" else body)

    async def _post(self, request: EngineRequest, body: bytes, path: str = "") -> Answer:
        assert self._client is not None
        headers = {"content-type": "application/json", "x-request-id": request.stream}
        if request.traceparent:
            headers["traceparent"] = request.traceparent
        way = self._steps if self._steps is not None and self._steps.connected else self._client
        return await way.post(path or _PATHS[request.kind], headers, body)

    async def _refusal(self, request: EngineRequest, answer: Answer) -> ErrorInfo | None:
        """Return the error of an answer that refuses the request; None when the request is served."""
        refused = await refusal_of(answer)
        if refused is not None and lacks_path(refused):
            told = f"the server of model {request.model!r} has no {_PATHS[request.kind]}; use a model that serves it"
            return ErrorInfo.of(Unsupported(told))
        if refused is not None and refused.code == ModelNotFound.code:
            assert self._session is not None
            await self._models.read(self._session)  # else the pool places more of them here
        if refused is not None and answer.status in SERVES_NONE:
            assert self._session is not None
            if not self.server_load.serves_none:
                await self.server_load.poll(self._session)
            if self.server_load.serves_none:  # no request's fault, and no full server's: as a refused connection
                self.server_load.refused = True
                return ErrorInfo.of(EngineLost(f"the model server is not ready: {refused.message}"))
        return refused


async def _fail_silent(load: ServerLoad, running: Mapping[StreamId, _Running]) -> None:
    """Fail silent answers of a server that takes no connection: a vLLM that stops waits for them without end."""
    while True:
        await asyncio.sleep(_STOPPING_SILENCE_S / 10)
        for each in list(running.values()) if load.refused else ():
            if each.answer is not None:
                each.answer.fail_if_silent(_STOPPING_SILENCE_S)


async def _sleep_level(session: aiohttp.ClientSession, base_url: str) -> int:
    """Ask vLLM whether it sleeps; 0: it is awake. Raises EngineFailed."""
    try:
        async with asyncio.timeout(_CONNECT_S):
            return await ServerSleep(session, base_url).level() or 0
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{base_url} did not answer whether it sleeps: {str(error) or 'timed out'}") from error


def _content_type(answer: Answer) -> str:
    return answer.headers.get("content-type", "").partition(";")[0].strip().lower()
