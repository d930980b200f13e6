"""A stream has its bill also if the process that ended it dies before it has written the bill."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys
import time

import msgspec
import pytest

from stream_fabric.events import Prices
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery import failover_reporter
from stream_fabric.recovery.bill_terms import BillTerms, bill_id
from stream_fabric.recovery.failover_reporter import FailoverReporter
from stream_fabric.recovery.late_bills import LateBills
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.redis.tenancy import unbilled as redis_unbilled
from stream_fabric.stream.frames import ErrorInfo
from stream_fabric.stream.ids import GatewayId, StreamId, partition_of
from tests.fabric.recovery.test_failover import Billed
from tests.fabric.test_pools import ACME, Pool, replica
from tests.support.waiting import eventually

LATE_S = 0.3
TERMS = BillTerms(pool="p", session="s", prices=Prices(output=3_000_000), key="k", user_hash="u", retention_days=9)
META = msgspec.json.encode({"facts": {"stream": "resp", "created": 1, "model": "m", "n": 1}, "bill": TERMS})

DIES = """
import asyncio, os, signal, sys
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.recovery.failover import Failover
from stream_fabric.recovery.lease_reaper import LOST
from stream_fabric.redis.client import Partitions, RedisClient
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog
from stream_fabric.stream.ids import partition_of

class Log(RedisStreamLog):
    async def fence(self, *args, **more):
        await super().fence(*args, **more)
        os.kill(os.getpid(), signal.SIGKILL)

async def main(url, way, pool, replica, stream):
    client = RedisClient(url)
    await client.start()
    log = Log(client, Partitions(4), replica)
    failover = Failover(RedisPools(client), log, HostClock(), HostRandom())
    if way == "rescue":
        await failover.rescue(pool, replica, stream, LOST, dead=True)
    (head,) = await log.heads(partition_of(stream, 4), [stream], None)
    await failover.end_orphan(stream, head, LOST)

asyncio.run(main(*sys.argv[1:]))
"""


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(redis_unbilled, "BILL_LATE_S", LATE_S)


class Bills(Billed):
    """A setting with a process that writes late bills."""

    def __init__(self, pool: Pool) -> None:
        super().__init__(pool)
        self.reporter = FailoverReporter(self.heard, HostClock(), self.log, self.unbilled)

    async def write_late(self, stream: StreamId) -> bool:
        """Write the late bills of the stream's partition. True: the stream has a bill."""
        await LateBills(self.log, self.unbilled, self.reporter, HostRandom()).write(partition_of(stream, 4))
        return any(bill.stream == stream for bill in self.heard.attempts)


@pytest.mark.parametrize("way", ["rescue", "orphan"])
@pytest.mark.parametrize("pool", ["redis"], indirect=True)
async def test_a_stream_whose_fencer_is_killed_has_its_bill(pool: Pool, way: str, redis_url: str) -> None:
    """The replica was alive and takes the stream off its list, or no list has it."""
    setting, lost = Bills(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost, META)
    before_us = time.time_ns() // 1000
    command = [sys.executable, "-c", DIES, redis_url, way, pool.name, lost, stream]
    killed = await asyncio.to_thread(subprocess.run, command, check=False, timeout=60)
    assert killed.returncode == -signal.SIGKILL
    after_us = time.time_ns() // 1000
    assert await setting.log.settled(stream) is not None
    await pool.pools.remove_in_flight(pool.name, lost, [stream])
    await eventually(lambda: setting.write_late(stream), "the bill")
    (bill,) = [bill for bill in setting.heard.attempts if bill.stream == stream]
    assert (bill.id, bill.ended, bill.billed) == (bill_id(stream), "failed", True)
    assert (bill.tenant, bill.pool, bill.model, bill.endpoint) == (ACME, "p", "m", "chat")
    assert (bill.prompt_tokens, bill.output_tokens, bill.price_micro) == (3, 7, 21)
    assert (bill.key, bill.user_hash, bill.session_hash, bill.retention_days) == ("k", "u", "s", 9)
    assert (bill.epoch, bill.attempt) == (1, 1), "the fence is no attempt"
    assert before_us - 2000 <= bill.at_us <= after_us, "it is of the hour in which the stream ended"


async def test_a_bill_that_is_delivered_is_written_once(pool: Pool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its writer lives on, or ends in order; one that dies before the event has left its memory owes the bill still."""
    monkeypatch.setattr(failover_reporter, "_LOOK_S", 0.01)
    monkeypatch.setattr(failover_reporter, "_DELIVERED_S", 0.05)
    setting, lost = Bills(pool), replica("lost")
    await pool.renew(lost)

    async def fence() -> StreamId:
        stream = await setting.produced(lost, META)
        failover = setting.rescuer(reporter=setting.reporter)
        await failover.rescue(pool.name, lost, stream, LOST, dead=True)
        assert [bill.stream for bill in setting.heard.attempts].count(stream) == 1
        return stream

    async def is_owed(stream: StreamId) -> bool:
        slot, key, _ = setting.log._slot_and_keys(stream)
        key = key.replace(stream + ":", "unbilled")
        return await pool.client.execute(slot, "ZSCORE", key, stream) is not None

    async def is_noted(stream: StreamId) -> bool:
        return not await is_owed(stream)

    stream = await fence()
    assert await is_owed(stream), "the event may be in memory"
    running = asyncio.create_task(setting.reporter.run())
    await eventually(lambda: is_noted(stream), "the writer to note it")
    monkeypatch.setattr(failover_reporter, "_DELIVERED_S", 3600.0)
    stream = await fence()
    running.cancel()
    await asyncio.gather(running, return_exceptions=True)
    assert not await is_owed(stream), "the process ends, and its sink delivers what it has"
    killed = await fence()
    setting.heard.events.clear()
    await eventually(lambda: setting.write_late(killed), "the bill again")


@pytest.mark.parametrize("by", ["its reader", "its tenant"])
async def test_a_stream_that_is_deleted_before_its_bill_has_it(pool: Pool, by: str) -> None:
    """Its plan keeps nothing and a gateway has read it to its end, or its tenant deletes it."""
    setting, lost = Bills(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost, META, retention_s=0)
    await setting.log.fence(stream, None, "bb", ErrorInfo.of(LOST))
    log = setting.log
    assert await (log.forget(stream, GatewayId("g")) if by == "its reader" else log.delete(stream, ACME))
    await eventually(lambda: setting.write_late(stream), "the bill")
    (bill,) = [bill for bill in setting.heard.attempts if bill.stream == stream]
    assert (bill.id, bill.ended, bill.tenant, bill.pool) == (bill_id(stream), "failed", ACME, "p")
    assert (bill.model, bill.endpoint, bill.output_tokens, bill.price_micro) == ("m", "chat", 7, 21)
    assert (bill.key, bill.user_hash, bill.session_hash, bill.retention_days) == ("k", "u", "s", 9)


async def test_a_stream_that_is_gone_is_owed_no_longer(pool: Pool, caplog: pytest.LogCaptureFixture) -> None:
    setting, lost = Bills(pool), replica("lost")
    await pool.renew(lost)
    stream = await setting.produced(lost, META)
    await setting.log.fence(stream, None, "bb", ErrorInfo.of(LOST))
    slot, key, _ = setting.log._slot_and_keys(stream)
    await pool.client.execute(slot, "DEL", f"{key}m", f"{key}l")

    async def is_logged() -> bool:
        return not await setting.write_late(stream) and stream in caplog.text

    await eventually(is_logged, "the log")
    assert stream not in dict(await setting.unbilled.late(partition_of(stream, 4)))
