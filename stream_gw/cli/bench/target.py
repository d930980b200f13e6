"""The measured servers over HTTP: any OpenAI-compatible one; resume and exact cancel with a gateway of ours."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator, Sequence
from typing import Any, Protocol

import aiohttp
import msgspec

from stream_fabric.process.http_client import open_session, read_start
from stream_fabric.system_errors import reason
from stream_gw.cli.bench.events import BadAnswer, Event, EventReader, decode_chunk
from stream_gw.cli.bench.workload import sample_text

_CONNECT_S = 10.0
_CONNECTIONS_MAX = 16_384
_PROBE_S = 60.0
_ERROR_BYTES_MAX = 1 << 16
_SLOW_BUFFER_BYTES = 4096
_SAMPLE_WORDS = (64, 192)


class Refused(Exception):
    """The server answered a request with an error. ``label`` is short and the same for the same error."""

    def __init__(self, label: str, message: str) -> None:
        super().__init__(message)
        self.label = label


class Answer(Protocol):
    """One answer that is being read. Leaving its context before the end cuts the connection to it."""

    @property
    def stream(self) -> str:
        """Id of the stream; empty: the server is no gateway of ours."""

    def events(self) -> AsyncIterator[Event]:
        """Yield the events up to the end. Raises OSError, aiohttp.ClientError, BadAnswer or Refused."""


class Cancelled(msgspec.Struct):
    """The gateway's answer to a cancel. ``at``: cursor of the last frame; None: not known yet."""

    result: str = ""
    at: str | None = None


class Transport(Protocol):
    """A way to the target. ``index`` chooses among its addresses."""

    def create(
        self, index: int, body: dict[str, Any], *, slow: bool = False
    ) -> contextlib.AbstractAsyncContextManager[Answer]: ...

    def resume(self, index: int, stream: str, after: str) -> contextlib.AbstractAsyncContextManager[Answer]: ...

    async def cancel(self, index: int, stream: str) -> Cancelled: ...

    async def close(self) -> None: ...


class Facts(msgspec.Struct):
    """Facts about the target, learned before the run."""

    urls: list[str]
    model: str
    server: str
    is_gateway: bool
    """It gave a stream id, so it can resume and cancel at a token."""
    words_per_token: float


class HttpTarget:
    """Requests over HTTP and SSE. ``urls``: with or without ``/v1``."""

    def __init__(self, urls: Sequence[str], key: str) -> None:
        self.urls = [_base_url(url) for url in urls]
        headers = {"authorization": f"Bearer {key}"} if key else {}
        self._session = open_session(
            total_s=None, connect_s=_CONNECT_S, headers=headers, connections_max=_CONNECTIONS_MAX
        )
        self.server = ""

    async def close(self) -> None:
        await self._session.close()

    @contextlib.asynccontextmanager
    async def create(self, index: int, body: dict[str, Any], *, slow: bool = False) -> AsyncIterator[Answer]:
        buffer_bytes = _SLOW_BUFFER_BYTES if slow else 1 << 16
        # A slow reader may read on for minutes after the server's last byte: the server takes the connection for idle,
        # and would close it under the next request
        headers = {"connection": "close"} if slow else {}
        async with self._session.post(
            f"{self._url(index)}/v1/chat/completions", json=body, headers=headers, read_bufsize=buffer_bytes
        ) as response:
            yield await self._answer(response)

    @contextlib.asynccontextmanager
    async def resume(self, index: int, stream: str, after: str) -> AsyncIterator[Answer]:
        query = {"after": after} if after else {}
        async with self._session.get(f"{self._url(index)}/v1/streams/{stream}", params=query) as response:
            yield await self._answer(response)

    async def cancel(self, index: int, stream: str) -> Cancelled:
        async with self._session.post(f"{self._url(index)}/v1/streams/{stream}/cancel") as response:
            if response.status != 200:
                raise await _refusal(response)
            return msgspec.json.decode(await response.read(), type=Cancelled)

    async def models(self, *, may_be_absent: bool) -> list[str]:
        """List the target's models. Raises ValueError with the remedy.

        ``may_be_absent``: return none for a server that has no such list.
        """
        url = f"{self.urls[0]}/v1/models"
        try:
            async with asyncio.timeout(_CONNECT_S), self._session.get(url) as response:
                body = await read_start(response, 1 << 20)
                if response.status in (401, 403):
                    raise ValueError(f"{url} refuses the key ({response.status}); set --key or OPENAI_API_KEY")
                self.server = response.headers.get("server", "")
                if response.status in (404, 405, 501) and may_be_absent:
                    return []
                if response.status != 200:
                    remedy = "give the server's base URL, or --model if it lists no models"
                    raise ValueError(f"{url} answered {response.status}; {remedy}")
                return [str(item["id"]) for item in msgspec.json.decode(body)["data"]]
        except (aiohttp.ClientError, OSError) as error:
            raise ValueError(f"{url} does not answer: {reason(error)}; is the server running?") from error
        except (msgspec.MsgspecError, KeyError, TypeError) as error:
            raise ValueError(f"{url} gave no list of models; is it an OpenAI-compatible server?") from error

    async def probe(self, model: str) -> Facts:
        """Send two short requests: they tell the words a token has, and whether the target is a gateway of ours.

        Raises ValueError when the target cannot serve the model.
        """
        models = await self.models(may_be_absent=bool(model))
        if not models and not model:
            raise ValueError(f"{self.urls[0]} lists no model; start a replica, or name one with --model")
        model = model or models[0]
        counts, stream = [], ""
        try:
            async with asyncio.timeout(_PROBE_S):
                for words in _SAMPLE_WORDS:
                    tokens, stream = await self._count_tokens(model, sample_text(words))
                    counts.append(tokens)
        except (aiohttp.ClientError, OSError, BadAnswer, Refused) as error:
            raise ValueError(f"model {model} does not answer: {reason(error)}") from error
        more = counts[1] - counts[0]
        words_per_token = (_SAMPLE_WORDS[1] - _SAMPLE_WORDS[0]) / more if more > 0 else 1.0
        return Facts(self.urls, model, self.server, bool(stream), words_per_token)

    async def _count_tokens(self, model: str, text: str) -> tuple[int, str]:
        """Return the prompt tokens of a message as the target counts them (0: it does not), and the stream's id."""
        body = request_body(model, [{"role": "user", "content": text}], 1)
        async with self.create(0, body) as answer:
            found = 0
            async for event in answer.events():
                chunk = event.chunk
                if chunk is not None and chunk.error is not None:
                    raise Refused(str(chunk.error.code or "error"), chunk.error.message)
                if chunk is not None and chunk.usage is not None:
                    found = chunk.usage.prompt_tokens or 0
            return found, answer.stream

    def _url(self, index: int) -> str:
        return self.urls[index % len(self.urls)]

    async def _answer(self, response: aiohttp.ClientResponse) -> _HttpAnswer:
        if response.status not in (200, 204):
            raise await _refusal(response)
        return _HttpAnswer(response)


class _HttpAnswer:
    def __init__(self, response: aiohttp.ClientResponse) -> None:
        self.stream = response.headers.get("x-stream-id", "")
        self._response = response

    async def events(self) -> AsyncIterator[Event]:
        reader, has_events, is_whole = EventReader(), False, self._response.status == 204
        async for piece in self._response.content.iter_any():
            for event in reader.receive(piece):
                has_events = True
                is_whole = is_whole or (event.chunk is not None and event.chunk.is_last)
                yield event
            if reader.done:
                return  # some servers keep the response open
        if is_whole:
            return  # some servers send no [DONE]
        if not has_events:
            raise BadAnswer(f"the server sent {self._response.content_type}, and no event of a stream")
        raise aiohttp.ClientPayloadError("the answer ended without a finish_reason and without [DONE]")


def request_body(model: str, messages: list[dict[str, Any]], tokens: int, *, exact: bool = False) -> dict[str, Any]:
    """Make the body of a streamed chat. ``exact``: ask for exactly this number of tokens, as vLLM and ours can."""
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": tokens,
        "stream": True,
        "stream_options": {"include_usage": True},
    }
    return body | {"ignore_eos": True} if exact else body


async def _refusal(response: aiohttp.ClientResponse) -> Refused:
    body = await read_start(response, _ERROR_BYTES_MAX)
    code, message = "", body[:300].decode("utf-8", "replace")
    with contextlib.suppress(BadAnswer):  # a proxy's or a framework's own form
        if (error := decode_chunk(body).error) is not None:
            code, message = str(error.code or ""), error.message or message
    return Refused(f"{response.status} {code}".strip(), f"{response.status}: {message}")


def _base_url(url: str) -> str:
    """Return the URL without ``/v1``."""
    return url.rstrip("/").removesuffix("/v1")
