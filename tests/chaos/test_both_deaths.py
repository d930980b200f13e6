"""A gateway and a replica die at once under streams of every dialect: each client's answer is whole.

The final objects are those of the official packages' own accumulators, and equal those of an undisturbed run.
"""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from tests.chaos.dialects import CHAT, COMPLETIONS, DIALECTS, MESSAGES, QUESTION, RESPONSES, Accumulators, Dialect
from tests.chaos.fleet import fleet, log_of
from tests.gateway.processes import Running
from tests.support.figures import Tell
from tests.support.redis import RedisServer
from tests.support.waiting import eventually

pytestmark = [pytest.mark.chaos, pytest.mark.timeout(120)]

TEXT = {"tokens": 160, "seed": 3}
PROMPTS = [QUESTION, "Write a function.", "Explain leases."]
FIELDS = {f"step{number}": {"type": "string"} for number in range(28)}
OBJECT = {"type": "object", "properties": FIELDS, "required": list(FIELDS)}
CALL = TEXT | {"tool": OBJECT}
REPLY = TEXT | {"schema": OBJECT}
THOUGHT = TEXT | {"think": True}
OF_CHATS = [dialect for dialect in DIALECTS if dialect is not COMPLETIONS]
CASES: dict[str, tuple[Dialect, dict[str, Any]]] = {dialect.name: (dialect, TEXT) for dialect in DIALECTS}
CASES |= {f"{dialect.name} with reasoning": (dialect, THOUGHT) for dialect in OF_CHATS}
CASES |= {f"{dialect.name} with a tool call": (dialect, CALL) for dialect in OF_CHATS}
CASES |= {f"{dialect.name} with a schema": (dialect, REPLY) for dialect in (CHAT, RESPONSES, MESSAGES)}
CASES |= {
    "three prompts": (COMPLETIONS, TEXT | {"prompt": PROMPTS}),
    "three prompts, one of which ends before": (COMPLETIONS, TEXT | {"prompt": PROMPTS, "stop": ["|"]}),
}


async def final_objects(calm: Running, accumulators: Accumulators) -> dict[str, Any]:
    """The final objects of the same requests on a platform that nothing happens to."""
    readers = {name: dialect.reader(calm.gates, asked) for name, (dialect, asked) in CASES.items()}
    await asyncio.gather(*(reader.read() for reader in readers.values()))
    return {name: accumulators.final(reader) for name, reader in readers.items()}


async def test_both_deaths_in_each_dialect(
    redis_server: RedisServer, calm: Running, accumulators: Accumulators, tell: Tell
) -> None:
    expected = await final_objects(calm, accumulators)
    async with (
        fleet(redis_server.url, sim="itl_ms=60,ttft_ms=20,max_num_seqs=64", agent_urls=("",)) as running,
        log_of(running.redis_url) as log,
    ):
        readers = {name: dialect.reader(running.gates, asked) for name, (dialect, asked) in CASES.items()}
        reading = {name: asyncio.create_task(reader.read()) for name, reader in readers.items()}
        await eventually(lambda: all(len(reader.kept) >= 15 for reader in readers.values()), "every stream to run")
        await running.add_agent("replica1")  # every stream is on the other one
        ended = [name for name, task in reading.items() if task.done()]
        assert not ended, f"ended before the deaths: {ended}"
        running.agents["replica0"].kill()
        running.gateways[0].kill()
        died_at = asyncio.get_running_loop().time()
        await asyncio.gather(*reading.values())
        tell(f"{len(readers)} streams whole {asyncio.get_running_loop().time() - died_at:.1f} s after both deaths")
        for name, reader in readers.items():
            assert len(reader.cut) == 1, f"{name}: its gateway did not die in the middle"
            frames, end = await log.whole(reader.stream)
            assert len({epoch for epoch, _ in frames}) >= 2, f"{name}: its replica did not die in the middle"
            assert end.status == "completed", f"{name}: {end}"
            assert accumulators.final(reader) == expected[name], name
        await log.until_no_slot_is_taken()
