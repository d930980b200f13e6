"""KEDA's external scaler over real gRPC: figures, immediate changes, and never 0 for an unknown figure."""

from __future__ import annotations

import asyncio
import contextlib
import shutil
import subprocess
import sys
import time
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, ExitStack
from pathlib import Path
from typing import Any

import grpc
import pytest
from pydantic import ValidationError

from inference.control import externalscaler_pb2 as wire
from inference.control import keda
from inference.control.desired import STALE_S, DesiredReplicas
from inference.control.keda import METRIC, SERVICE, KedaScaler, Tls
from inference.control.metrics import ControllerMetrics
from inference.control.settings import ControllerSettings
from stream_fabric.pool.plan import PoolPlan
from stream_fabric.process.host import HostRandom
from stream_fabric.redis.client import RedisClient
from stream_fabric.redis.control import RedisControl
from tests.gateway.processes import Process, need_redis
from tests.gateway.wire import Gate, chat
from tests.support.redis import RedisServer
from tests.support.server import free_port
from tests.support.tls import Authority
from tests.support.waiting import eventually

FOLDER = Path(keda.__file__).parent


def plans(**counts: int) -> dict[str, PoolPlan]:
    return {pool: PoolPlan(count, 0, count) for pool, count in counts.items()}


def ref(pool: str = "p") -> Any:
    return wire.ScaledObjectRef(name="llm-pool", namespace="llm", scalerMetadata={"pool": pool, "scalerAddress": "x"})


class Asker:
    """As KEDA's operator asks."""

    def __init__(self, channel: grpc.aio.Channel) -> None:
        def method(kind: Any, name: str, answer: Any) -> Any:
            return kind(f"/{SERVICE}/{name}", lambda sent: sent.SerializeToString(), answer.FromString)

        self.spec = method(channel.unary_unary, "GetMetricSpec", wire.GetMetricSpecResponse)
        self.metrics = method(channel.unary_unary, "GetMetrics", wire.GetMetricsResponse)
        self.is_active = method(channel.unary_unary, "IsActive", wire.IsActiveResponse)
        self.stream = method(channel.unary_stream, "StreamIsActive", wire.IsActiveResponse)
        self.specs = method(channel.unary_stream, "StreamMetricSpec", wire.GetMetricSpecResponse)

    async def count(self, pool: str = "p") -> int:
        answer = await self.metrics(wire.GetMetricsRequest(scaledObjectRef=ref(pool), metricName=METRIC), timeout=5)
        (value,) = answer.metricValues
        assert value.metricName == METRIC and value.metricValue == value.metricValueFloat
        return int(value.metricValue)


class Stage:
    def __init__(self) -> None:
        self.desired = DesiredReplicas()
        self.metrics = ControllerMetrics()
        self.scaler = KedaScaler(self.desired, self.metrics, HostRandom())

    def plan(self, ago_s: float = 0.0, **counts: int) -> None:
        self.desired.receive(plans(**counts), asyncio.get_running_loop().time() - ago_s)

    def value(self, name: str, **labels: str) -> float | None:
        return self.metrics.registry.get_sample_value(name, labels)


@contextlib.asynccontextmanager
async def asking(port: int, credentials: grpc.ChannelCredentials | None = None) -> AsyncIterator[Asker]:
    where = f"127.0.0.1:{port}"
    made = grpc.aio.insecure_channel(where) if credentials is None else grpc.aio.secure_channel(where, credentials)
    async with made as channel:
        yield Asker(channel)


@contextlib.asynccontextmanager
async def staged() -> AsyncIterator[tuple[Stage, Asker]]:
    stage = Stage()
    async with stage.scaler.served("127.0.0.1", 0, None) as port, asking(port) as asker:
        yield stage, asker


async def refused(call: Any) -> grpc.StatusCode:
    with pytest.raises(grpc.aio.AioRpcError) as failed:
        await call
    code: grpc.StatusCode = failed.value.code()
    return code


async def test_it_tells_what_the_plans_want() -> None:
    async with staged() as (stage, asker):
        stage.plan(p=7, empty=0)
        (spec,) = (await asker.spec(ref())).metricSpecs
        assert (spec.metricName, spec.targetSizeFloat) == (METRIC, 1.0)
        assert await asker.count() == 7 and (await asker.is_active(ref())).result
        assert await asker.count("empty") == 0 and not (await asker.is_active(ref("empty"))).result
        assert stage.value("scaler_calls_total", call="GetMetrics") == 2


async def test_what_is_not_known_is_an_error_and_never_nothing() -> None:
    async with staged() as (stage, asker):
        unknown = grpc.StatusCode.UNAVAILABLE
        assert await refused(asker.count()) == unknown, "before the first look"
        stage.plan(p=3)
        assert await refused(asker.count("another")) == unknown
        assert await refused(asker.is_active(ref("another"))) == unknown
        stage.plan(ago_s=STALE_S + 1, p=3)
        assert await refused(asker.count()) == unknown, "who cannot look any more"
        assert await refused(asker.is_active(ref())) == unknown
        # Without one KEDA would have no autoscaler at all, so it is told whatever is known
        assert len((await asker.spec(ref())).metricSpecs) == 1
        assert stage.value("scaler_refusals_total", call="GetMetrics", code="unavailable") == 3
        assert await refused(asker.spec(ref(""))) == grpc.StatusCode.INVALID_ARGUMENT
        assert await refused(asker.spec(wire.ScaledObjectRef())) == grpc.StatusCode.INVALID_ARGUMENT
        assert await refused(asker.spec(ref("p" * 200))) == grpc.StatusCode.INVALID_ARGUMENT
        huge = wire.ScaledObjectRef(scalerMetadata={"pool": "p", "more": "x" * keda.MESSAGE_BYTES_MAX})
        assert await refused(asker.spec(huge)) == grpc.StatusCode.RESOURCE_EXHAUSTED


async def test_a_target_that_never_changes_has_no_stream() -> None:
    """KEDA takes that as it is; any other error it would try again for ever."""
    async with staged() as (_, asker):
        assert await refused(asker.specs(ref()).read()) == grpc.StatusCode.UNIMPLEMENTED


async def test_a_first_replica_is_told_at_once_and_what_is_not_known_is_not_said() -> None:
    async with staged() as (stage, asker):
        call = asker.stream(ref())
        answers = aiter(call)
        stage.plan(other=3)
        await eventually(lambda: stage.value("scaler_streams") == 1, "the stream")
        stage.plan(p=0, other=3)
        assert not (await anext(answers)).result, "as it is, once it is known"
        stage.plan(p=1, other=3)
        assert (await anext(answers)).result
        more = asyncio.ensure_future(anext(answers))
        for count, ago_s in ((5, 0.0), (5, STALE_S + 1), (6, 0.0)):
            stage.plan(ago_s=ago_s, p=count, other=3)
            assert await refused(asker.count("nobody's")) == grpc.StatusCode.UNAVAILABLE  # it has had its turn
        assert not more.done(), "only what is new"
        stage.plan(p=0)
        assert not (await more).result
        call.cancel()
        await eventually(lambda: stage.value("scaler_streams") == 0, "the stream to be gone")


async def test_streams_end_well_after_their_time_and_when_the_controller_leaves(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    stage = Stage()
    stage.plan(p=1)
    async with AsyncExitStack() as stack:
        async with stage.scaler.served("127.0.0.1", 0, None) as port:
            asker = await stack.enter_async_context(asking(port))
            with monkeypatch.context() as patch:
                patch.setattr(keda, "STREAM_S", 0.2)
                call = asker.stream(ref())
                assert [answer.result async for answer in call] == [True]
                assert await call.code() == grpc.StatusCode.OK
            last = asker.stream(ref())
            assert (await last.read()).result
            began = time.monotonic()
        assert await last.read() is grpc.aio.EOF, "as one that ended in time: KEDA comes back in two seconds"
        assert await last.code() == grpc.StatusCode.OK and time.monotonic() - began < 1.9
        assert await refused(asker.count()) == grpc.StatusCode.UNAVAILABLE


async def test_there_are_only_so_many_streams(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(keda, "STREAMS_MAX", 2)
    async with staged() as (stage, asker):
        stage.plan(p=1)
        calls = [asker.stream(ref()) for _ in range(2)]
        for call in calls:
            assert (await call.read()).result
        assert await refused(asker.stream(ref()).read()) == grpc.StatusCode.RESOURCE_EXHAUSTED
        assert await asker.count() == 1, "questions are answered all the same"
        calls.pop().cancel()
        await eventually(lambda: stage.value("scaler_streams") == 1, "one to be gone")
        assert (await asker.stream(ref()).read()).result


def credentials(authority: Authority, client: Authority | None) -> grpc.ChannelCredentials:
    own = (client.client.key.read_bytes(), client.client.cert.read_bytes()) if client else (None, None)
    made: grpc.ChannelCredentials = grpc.ssl_channel_credentials(authority.ca.read_bytes(), *own)
    return made


async def test_only_who_has_a_certificate_is_answered_and_a_new_one_of_ours_is_taken(tmp_path: Path) -> None:
    authority, other = Authority(tmp_path, "ours"), Authority(tmp_path, "other")
    stage = Stage()
    stage.plan(p=2)
    files = Tls(tmp_path / "tls.crt", tmp_path / "tls.key", tmp_path / "ca.crt")

    def put(server: Authority, ca: Authority) -> None:
        for source, to in zip((server.server.cert, server.server.key, ca.ca), files, strict=True):
            shutil.copyfile(source, to)

    async def count(credentials: grpc.ChannelCredentials | None) -> int:
        async with asking(port, credentials) as asker:
            return await asker.count()

    put(authority, authority)
    async with stage.scaler.served("127.0.0.1", 0, files) as port:
        assert await count(credentials(authority, authority)) == 2
        for wrong in (None, credentials(authority, None), credentials(authority, other), credentials(other, authority)):
            assert await refused(count(wrong)) == grpc.StatusCode.UNAVAILABLE
        files.cert.write_text("half of a file")
        assert await count(credentials(authority, authority)) == 2, "as it was"
        put(other, other)
        assert await count(credentials(other, other)) == 2
        assert await refused(count(credentials(authority, authority))) == grpc.StatusCode.UNAVAILABLE
    for broken, says in ((files.cert, "STREAM_GW_SCALER_CERT"), (files.client_ca, "STREAM_GW_SCALER_CLIENT_CA")):
        put(authority, authority)
        broken.write_text("nothing")
        with pytest.raises(ValueError, match=says):
            async with KedaScaler(stage.desired, stage.metrics, HostRandom()).served("127.0.0.1", 0, files):
                pass


async def test_a_port_that_is_taken_is_said() -> None:
    stage = Stage()
    async with stage.scaler.served("127.0.0.1", 0, None) as port:
        with pytest.raises(OSError, match=f"STREAM_GW_SCALER_PORT: cannot listen on 127.0.0.1:{port}"):
            async with Stage().scaler.served("127.0.0.1", port, None):
                pass


@pytest.mark.parametrize(
    ("given", "says"),
    [
        ({"scaler_port": 1}, "needs STREAM_GW_POOLS_FILE"),
        ({"scaler_port": 1, "pools_file": "p", "scaler_host": "0.0.0.0"}, "is not loopback"),
        ({"scaler_port": 1, "pools_file": "p", "scaler_cert": "c", "scaler_key": "k"}, "set all or none"),
    ],
)
def test_who_decides_the_fleet_is_not_open(given: dict[str, Any], says: str) -> None:
    with pytest.raises(ValidationError, match=says):
        ControllerSettings(**given)
    files = {"scaler_cert": "c", "scaler_key": "k", "scaler_client_ca": "a"}
    ControllerSettings(pools_file=Path("p"), scaler_port=1, scaler_host="0.0.0.0", **files)  # type: ignore[arg-type]
    ControllerSettings(pools_file=Path("p"), scaler_port=1, scaler_host="::1")


def test_what_is_committed_is_what_the_description_makes(tmp_path: Path) -> None:
    flags = [f"-I{FOLDER}", f"--python_out={tmp_path}", f"--pyi_out={tmp_path}", "externalscaler.proto"]
    subprocess.run([sys.executable, "-m", "grpc_tools.protoc", *flags], check=True, timeout=60)
    for made in tmp_path.iterdir():
        assert (FOLDER / made.name).read_text() == made.read_text(), "run: make proto"
    assert len(list(tmp_path.iterdir())) == 2


# --- real processes ------------------------------------------------------------------------------------------


@pytest.mark.platform
async def test_a_request_to_an_empty_pool_is_told_within_a_second_by_every_controller(
    redis_server: RedisServer, tmp_path: Path
) -> None:
    need_redis()
    declared = tmp_path / "pools.toml"
    declared.write_text('[pool.idle]\nmodels = ["idle"]\nreplicas_min = 0\nreplicas_max = 4\ncold_start_s = 40\n')
    env = {"STREAM_GW_REDIS_URL": redis_server.url, "STREAM_GW_PARTITIONS": "4"}
    ports = [free_port() for _ in range(2)]
    async with AsyncExitStack() as stack:
        processes = stack.enter_context(ExitStack())

        async def start(*flags: str) -> Process:
            return processes.enter_context(await asyncio.to_thread(Process, *flags, **env))

        controllers = [
            await start("controller", "--pools-file", str(declared), "--scaler-port", str(port)) for port in ports
        ]
        gateway = await start("gateway", "--port", "0", "--dev-key", "k")
        gate = Gate(gateway.facts["url"], gateway.pid, "k")
        client = RedisClient(redis_server.url)
        await client.start()
        stack.push_async_callback(client.close)
        control = RedisControl(client)
        askers = [await stack.enter_async_context(asking(port)) for port in ports]
        calls = [asker.stream(ref("idle")) for asker in askers]
        for call in calls:
            assert not (await asyncio.wait_for(call.read(), 30)).result

        async def listed() -> bool:
            return "idle" in [model["id"] for model in (await gate.ask("GET", "/v1/models")).json["data"]]

        await eventually(listed, "the gateway to have read it")

        async def told(call: Any) -> float:
            assert (await asyncio.wait_for(call.read(), 10)).result
            return time.monotonic() - asked_at

        asked_at = time.monotonic()
        async with gate.create(chat(20, model="idle")) as exchange:
            assert exchange.status == 200
            took_s = await asyncio.gather(*map(told, calls))
        print("told", ", ".join(f"{seconds * 1000:.0f} ms" for seconds in took_s), "after the request")
        assert max(took_s) < 5, took_s
        assert [await asker.count("idle") for asker in askers] == [1, 1], "each the same"

        # The leader leaves: its streams end well, and the other goes on with the same figure
        leads = await control.leader()
        (leader,) = [k for k, process in enumerate(controllers) if f"-{process.pid}-" in leads]
        await asyncio.to_thread(controllers[leader].terminate)
        assert await calls[leader].read() is grpc.aio.EOF
        assert await calls[leader].code() == grpc.StatusCode.OK
        assert await asyncio.to_thread(controllers[leader].wait) == 0
        assert await askers[1 - leader].count("idle") == 1
