"""How a vLLM server is put to sleep and woken: by the addresses of its development mode (read in 0.32).

Level 1 keeps the weights in the host's memory, level 2 nowhere: they are read again from where they came. Both throw
the KV cache away. On a CPU, and without ``--enable-sleep-mode``, it only holds requests back and frees nothing.
"""

from __future__ import annotations

import re

import aiohttp
import msgspec

from inference.agent.engines.http import read_most
from stream_fabric.errors import EngineFailed, Unsupported
from stream_fabric.limits import METRICS_BYTES_MAX, VLLM_SLEEP_S_MAX, VLLM_WAKE_S_MAX
from stream_fabric.ports import SleepLevel

_NO_WEIGHTS = re.compile(rb'^vllm:engine_sleep_state\{[^}]*sleep_state="discard_all"[^}]*\} 1', re.MULTILINE)
_WEIGHTS_ASIDE = re.compile(rb'^vllm:engine_sleep_state\{[^}]*sleep_state="weights_offloaded"[^}]*\} 1', re.MULTILINE)


class SleepPolicy(msgspec.Struct, frozen=True):
    sleep_s: float = VLLM_SLEEP_S_MAX
    wake_s: float = VLLM_WAKE_S_MAX


class ServerSleep:
    """``session`` carries the key. Calls raise EngineFailed and aiohttp's errors; whoever calls bounds their time."""

    def __init__(self, session: aiohttp.ClientSession, base_url: str) -> None:
        self._session = session
        self._base_url = base_url

    async def level(self) -> int | None:
        """At which it sleeps now, 0: it is awake; None: it knows of no sleep."""
        async with self._session.get(f"{self._base_url}/is_sleeping") as response:
            body = await read_most(response, 1 << 12)
            if response.status != 200:
                return None
        try:
            if not msgspec.json.decode(body, type=dict[str, bool])["is_sleeping"]:
                return 0
        except (msgspec.MsgspecError, KeyError):  # some servers answer anything with their start page
            return None
        async with self._session.get(f"{self._base_url}/metrics") as response:
            text = await read_most(response, METRICS_BYTES_MAX)
        # One that does not tell may have thrown its weights away: they are read again
        return 1 if _WEIGHTS_ASIDE.search(text) and not _NO_WEIGHTS.search(text) else 2

    async def sleep(self, level: SleepLevel) -> None:
        """Raises Unsupported where it cannot. What it runs ends first, and what comes meanwhile waits."""
        if await self.level() is None:
            raise Unsupported(
                "the model server knows no sleep (it is no vLLM, or not in its development mode); start vLLM with "
                "--enable-sleep-mode, by URL also with VLLM_SERVER_DEV_MODE=1"
            )
        await self._post(f"/sleep?level={level}&mode=wait")

    async def wake(self, level: int) -> None:
        """From the level that it sleeps at. Its weights are whole before anything is computed."""
        if level == 2:
            await self._post("/wake_up?tags=weights")
            await self._post("/collective_rpc", {"method": "reload_weights"})
            await self._post("/wake_up?tags=kv_cache")
        else:
            await self._post("/wake_up")
        if await self.level():
            raise EngineFailed("it says that it sleeps still")

    async def _post(self, path: str, body: object = None) -> None:
        if self._session.closed:
            raise EngineFailed("it is gone")
        async with self._session.post(self._base_url + path, json=body) as response:
            answer = await read_most(response, 1 << 12)
            if response.status != 200:
                said = answer.decode(errors="replace")[:500]
                raise EngineFailed(f"{path.partition('?')[0]} answered {response.status}: {said}")
