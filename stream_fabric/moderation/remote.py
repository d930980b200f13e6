"""Client of an OpenAI-compatible moderation endpoint."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import aiohttp
import msgspec

from stream_fabric.limits import MODERATION_ANSWER_BYTES_MAX
from stream_fabric.moderation.moderator import EndpointFailed
from stream_fabric.process.http_client import HTTP_ERRORS, read_body


class _Result(msgspec.Struct):
    flagged: bool
    categories: dict[str, bool | None] = {}


class _Answer(msgspec.Struct):
    results: list[_Result]


_decoder = msgspec.json.Decoder(_Answer)


class Endpoint:
    """Asks one endpoint. ``timeout_s``: time of a whole question."""

    def __init__(self, session: aiohttp.ClientSession, url: str, model: str, timeout_s: float) -> None:
        self._session = session
        self._url = url
        self._model = model
        self.timeout_s = timeout_s

    async def flagged(self, texts: Sequence[str]) -> str | None:
        """Return the categories of the first flagged text; None: none is flagged. Raises EndpointFailed."""
        body = {"input": list(texts)} | ({"model": self._model} if self._model else {})
        data = msgspec.json.encode(body)
        try:
            async with (
                asyncio.timeout(self.timeout_s),
                self._session.post(self._url, data=data, headers={"content-type": "application/json"}) as response,
            ):
                answer = await read_body(response, MODERATION_ANSWER_BYTES_MAX)
                if response.status != 200:
                    raise EndpointFailed(f"status {response.status}: {answer[:200].decode('utf-8', 'replace')}")
            results = _decoder.decode(answer).results
        except (*HTTP_ERRORS, msgspec.MsgspecError) as error:
            raise EndpointFailed(f"{type(error).__name__}: {error}") from error
        if len(results) != len(texts):
            raise EndpointFailed(f"{len(results)} results for {len(texts)} texts")
        for result in results:
            if result.flagged:
                return ",".join(sorted(name for name, hit in result.categories.items() if hit)) or "flagged"
        return None
