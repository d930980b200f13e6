"""Sleep and wake of a vLLM server, by the HTTP endpoints of its development mode (as of vLLM 0.32).

Level 1 keeps the weights in the host's memory; level 2 drops them, and the wake reads them from the disk again. Both
drop the KV cache. On a CPU, or without ``--enable-sleep-mode``, a sleeping server holds requests and frees nothing.
"""

from __future__ import annotations

import aiohttp
import msgspec

from inference.engines.prometheus import sleep_level
from stream_fabric.errors import EngineFailed, Unsupported
from stream_fabric.limits import METRICS_BYTES_MAX, VLLM_SLEEP_S_MAX, VLLM_WAKE_S_MAX
from stream_fabric.ports import SleepLevel
from stream_fabric.process.http_client import read_start


class SleepPolicy(msgspec.Struct, frozen=True):
    """Time limits in seconds."""

    sleep_s: float = VLLM_SLEEP_S_MAX
    wake_s: float = VLLM_WAKE_S_MAX


class ServerSleep:
    """Sleep state of one server. ``session`` sends the API key.

    Calls raise EngineFailed and ``HTTP_ERRORS``; the caller limits their time.
    """

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url

    async def level(self) -> int | None:
        """Return the level at which the server sleeps; 0: awake; None: the server has no sleep endpoints."""
        async with self._session.get(f"{self._base_url}/is_sleeping") as response:
            body = await read_start(response, 1 << 12)
            if response.status != 200:
                return None
        try:
            if not msgspec.json.decode(body, type=dict[str, bool])["is_sleeping"]:
                return 0
        except (msgspec.MsgspecError, KeyError):  # some servers answer every path with their start page
            return None
        async with self._session.get(f"{self._base_url}/metrics") as response:
            text = await read_start(response, METRICS_BYTES_MAX)
        return sleep_level(text)

    async def sleep(self, level: SleepLevel) -> None:
        """Put the server to sleep once its running requests have ended; new requests wait. Raises Unsupported."""
        if await self.level() is None:
            raise Unsupported(
                "the model server cannot sleep (it is not vLLM, or not in development mode); start vLLM with "
                "--enable-sleep-mode, and for engine openai also with VLLM_SERVER_DEV_MODE=1"
            )
        await self._post(f"/sleep?level={level}&mode=wait")

    async def wake(self, level: int) -> None:
        """Wake the server from ``level``, with its weights loaded before it computes anything."""
        if level == 2:
            await self._post("/wake_up?tags=weights")
            await self._post("/collective_rpc", {"method": "reload_weights"})
            await self._post("/wake_up?tags=kv_cache")
        else:
            await self._post("/wake_up")
        if await self.level():
            raise EngineFailed("it reports that it still sleeps")

    async def _post(self, path: str, body: object = None) -> None:
        if self._session.closed:
            raise EngineFailed("its connection is closed")
        async with self._session.post(self._base_url + path, json=body) as response:
            answer = await read_start(response, 1 << 12)
            if response.status != 200:
                text = answer.decode(errors="replace")[:500]
                raise EngineFailed(f"{path.partition('?')[0]} answered {response.status}: {text}")
