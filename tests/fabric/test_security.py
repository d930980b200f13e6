"""Redis with TLS, passwords and a user of few rights: alone, behind Sentinel, clustered; and what is told of refusals.

The contracts of the log and the pools run here once more, as the user that docs/runbook.md makes.
"""

from __future__ import annotations

import ast
import asyncio
import inspect
import logging
import os
import re
import urllib.request
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager
from pathlib import Path
from urllib.error import HTTPError

import pytest

from stream_fabric.errors import FabricUnavailable
from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.process.settings import FabricSettings
from stream_fabric.recovery.lease_reaper import LeaseReaper
from stream_fabric.redis.client import Partitions, RedisClient, logins
from stream_fabric.redis.index import RedisIndex
from stream_fabric.redis.pools import RedisPools
from stream_fabric.redis.streams import RedisStreamLog, check_partitions
from stream_fabric.redis.subscriber import Subscriber, partition_channels
from stream_fabric.redis.topology import slot_of
from stream_fabric.redis_url import RedisUrl
from stream_fabric.stream.ids import GatewayId, StreamId, TenantId, UserId
from tests.fabric import test_log_contract, test_pools
from tests.fabric.test_log_contract import PARTITIONS, Fabric, RedisFabric, batch, joined, text
from tests.fabric.test_pools import Pool
from tests.gateway.processes import Process, run_cli
from tests.support.redis import OPEN, RedisCluster, RedisServer, Secured, SentinelSetup
from tests.support.tls import Authority, need_tls
from tests.support.waiting import eventually
from tests.support.web import served

ROOT = Path(__file__).parents[2]
RUNBOOK = (ROOT / "docs" / "runbook.md").read_text()
ADMIN, LIMITED, OF_SENTINELS = "hunter2admin", "hunter2limited", "hunter2sentinel"
OF_TESTS = ("+pttl", "+scan", "+script|flush", "+pubsub|numsub", "+pubsub|shardnumsub")
"""Commands that the contract suites themselves need."""
AT_ONCE_S = 2.0
"""Far under the 5 s that an outage may last, and above what a busy machine needs for a handshake."""


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    need_tls()
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def stranger(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    """Whom nobody trusts."""
    return Authority(tmp_path_factory.mktemp("stranger"), "stranger")


def rights(cluster: bool = False) -> list[str]:
    """Rights that the runbook gives the Redis user."""
    line = re.search(r"^ACL SETUSER stream-gw on ><password> (.*)$", RUNBOOK, re.MULTILINE)
    more = re.search(r"In a Cluster also `([^`]+)`", RUNBOOK)
    assert line and more
    return line[1].split() + (more[1].split() if cluster else [])


def admit(server: RedisServer, *rights: str) -> None:
    server("ACL", "SETUSER", "stream-gw", "reset", "on", f">{LIMITED}", *rights)


def limited(url: str) -> str:
    """The URL as the runbook's user has it."""
    return url.replace(f":{ADMIN}@", f"stream-gw:{LIMITED}@")


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[RedisServer]:
    """TLS only, with a password and the runbook's user."""
    with RedisServer(Secured(authority, password=ADMIN)) as started:
        admit(started, *rights(), *OF_TESTS)
        yield started


@pytest.fixture
def own_server(authority: Authority) -> Iterator[RedisServer]:
    with RedisServer(Secured(authority, password=ADMIN)) as started:
        admit(started, *rights())
        yield started


@pytest.fixture(scope="module")
def cluster(authority: Authority) -> Iterator[RedisCluster]:
    with RedisCluster(secured=Secured(authority, password=ADMIN)) as started:
        for node in started.nodes:
            admit(node, *rights(cluster=True), *OF_TESTS)
        yield started


@asynccontextmanager
async def connected(url: str, timeout_s: float = 5.0) -> AsyncIterator[RedisClient]:
    client = RedisClient(url, timeout_s=timeout_s)
    try:
        await client.start()
        yield client
    finally:
        await client.close()


async def told(url: str) -> str:
    """Error of a start that cannot succeed; it must come at once, not after the time of an outage."""
    began = asyncio.get_running_loop().time()
    with pytest.raises(FabricUnavailable) as raised:
        async with connected(url):
            pass
    assert asyncio.get_running_loop().time() - began < AT_ONCE_S
    shown = f"{raised.value} {raised.value.__cause__!r}"
    assert "did not answer" not in shown
    assert "hunter2" not in shown
    return str(raised.value)


# --- URLs --------------------------------------------------------------------------------------------------


def test_a_url_with_every_parameter(authority: Authority) -> None:
    ca, client = authority.ca, authority.client
    url = RedisUrl.parse(
        f"rediss+sentinel://me:p%40ss@a:1,b:2/m?ca={ca}&cert={client.cert}&key={client.key}"
        "&sentinel_user=guard&sentinel_password=p%26+ss"
    )
    assert (url.ca, url.cert, url.key) == (str(ca), str(client.cert), str(client.key))
    assert (url.username, url.password) == ("me", "p@ss")
    assert (url.sentinel_user, url.sentinel_password) == ("guard", "p&+ss")
    servers, sentinels = logins(url)
    assert servers.ssl is not None and servers.ssl is sentinels.ssl
    assert servers.ssl.check_hostname
    for shown in (url, servers, sentinels):
        assert "p@ss" not in f"{shown!r} {shown}"
        assert "p&+ss" not in f"{shown!r} {shown}"


FILE = __file__  # is there, and holds no certificate


@pytest.mark.parametrize(
    ("url", "words"),
    [
        ("rediss://h?cafile=x", ["'cafile'", "allowed", "ca, cert, key"]),
        ("rediss://h?ssl_cert_reqs=none", ["'ssl_cert_reqs'", "allowed"]),
        ("redis://h?ca=x", ["'ca'", "rediss"]),
        ("rediss://h?sentinel_password=hunter2", ["'sentinel_password'", "+sentinel"]),
        ("redis+sentinel://h/m?password=hunter2", ["'password'", "sentinel_user, sentinel_password"]),
        ("rediss://h?ca=/nowhere/ca.pem", ["ca", "PEM", "/nowhere/ca.pem"]),
        (f"rediss://h?cert={FILE}&key=/nowhere/k.pem", ["key", "PEM", "/nowhere/k.pem"]),
        (f"rediss://h?cert={FILE}", ["cert", "key", "together"]),
        (f"rediss://h?key={FILE}", ["cert", "key", "together"]),
        (f"rediss://h?ca={FILE}&ca={FILE}", ["ca", "twice"]),
        ("rediss://h?ca=", ["ca", "empty"]),
        ("redis+sentinel://h/m?sentinel_user=u", ["sentinel_user", "sentinel_password", "together"]),
        (f"rediss://h?ca={FILE}", ["ca", "PEM"]),
        (f"rediss://h?cert={FILE}&key={FILE}", ["cert", "key", "PEM", "passphrase"]),
        ("redis://h:65536", ["65535"]),
    ],
)
def test_a_wrong_parameter_is_named_with_what_is_allowed(url: str, words: list[str]) -> None:
    with pytest.raises(ValueError) as raised:
        RedisClient(url)
    assert [word for word in words if word not in str(raised.value)] == []
    assert "hunter2" not in str(raised.value)


@pytest.mark.parametrize(
    "url",
    [
        "redis://:hunter2/x@h:6379/0",
        "redis://:hunter2?x@h:6379/0",
        "redis://:x?hunter2@h:6379/0",
        "redis://:x?hunter2=y@h:6379/0",
        "redis://:x@y?hunter2@h:6379/0",
        "redis://:hunter2#x@h:6379/0",
        "redis://:x#hunter2@h:6379/0",
        "redis://:[hunter2@h:6379/0",
        "redis://:hunter2℀@h:6379/0",
        "redis://user:hunter2",
        "redis://:hunter2@h:port/0",
        "redis+sentinel://h/m?sentinel_password=hunter2&sentinel_password=hunter2",
        "redis+sentinel://h/m?sentinel_password=x&hunter2",
    ],
)
def test_a_password_in_a_wrong_url_is_not_told(url: str) -> None:
    with pytest.raises(ValueError) as raised:
        RedisUrl.parse(url)
    if url.endswith("&hunter2"):  # a parameter without a value is named: it has the looks of one
        assert "'hunter2'" in str(raised.value)
    else:
        assert "hunter2" not in f"{raised.value} {raised.value.__cause__}"


def test_an_encrypted_key_is_refused_and_not_asked_for(authority: Authority, tmp_path: Path) -> None:
    key = tmp_path / "encrypted.key"
    authority.encrypt(authority.client.key, key, "hunter2")
    with pytest.raises(ValueError, match="passphrase"):
        RedisClient(f"rediss://h?cert={authority.client.cert}&key={key}")


def test_settings_do_not_show_the_url(monkeypatch: pytest.MonkeyPatch) -> None:
    settings = FabricSettings(redis_url="redis://:hunter2@h")
    assert "hunter2" not in f"{settings!r} {settings}"
    with pytest.raises(ValueError) as raised:
        FabricSettings(redis_url="rediss://:hunter2@h?ssl=1")
    assert "hunter2" not in str(raised.value)
    assert "allowed" in str(raised.value)


# --- one server --------------------------------------------------------------------------------------------


async def test_a_server_with_tls_only(server: RedisServer) -> None:
    assert server("CONFIG", "GET", "port")[1] == b"0"
    async with connected(server.url) as client:
        await written_and_heard(RedisFabric(client))


async def written_and_heard(fabric: Fabric) -> None:
    """Every way that bytes take: a script's call, its reply, a publish."""
    ear = await fabric.listen(fabric.name("g1"))
    stream = await fabric.create(fabric.name("g1"))
    await fabric.append(batch(stream, 1, 3))
    await eventually(lambda: ear.parts(), "the publish")
    assert joined((await fabric.watch(stream)).entries) == text(1, 3)
    await ear.close()


async def test_what_is_said_of_wrong_passwords(server: RedisServer) -> None:
    where = f"127.0.0.1:{server.port}"
    wrong = await told(server.url.replace(ADMIN, "hunter2wrong"))
    assert where in wrong and "refuses the password of user 'default'" in wrong and "user:password@" in wrong
    wrong = await told(limited(server.url).replace(LIMITED, "hunter2wrong"))
    assert where in wrong and "'stream-gw'" in wrong
    none = await told(server.url.replace(f":{ADMIN}@", ""))
    assert where in none and "asks for a password" in none and "user:password@" in none


async def test_what_is_said_of_certificates(server: RedisServer, authority: Authority, stranger: Authority) -> None:
    where = f"127.0.0.1:{server.port}"
    for url in (server.url.partition("?")[0], server.url.replace(str(authority.ca), str(stranger.ca))):
        unknown = await told(url)
        assert where in unknown and "does not verify" in unknown and "?ca=" in unknown
    other_name = await told(server.url.replace("127.0.0.1", "localhost"))
    assert f"localhost:{server.port}" in other_name and "'localhost'" in other_name and "does not verify" in other_name


async def test_what_is_said_of_a_certificate_that_has_expired(authority: Authority) -> None:
    expired = authority.issue("expired", "subjectAltName=IP:127.0.0.1", days=-1)
    with RedisServer(Secured(authority)) as server:
        server("CONFIG", "SET", "tls-cert-file", str(expired.cert), "tls-key-file", str(expired.key))
        said = await told(server.url)
    assert "certificate has expired" in said and "renew it" in said and "?ca=" not in said


async def test_a_server_that_asks_for_certificates(authority: Authority, stranger: Authority) -> None:
    with RedisServer(Secured(authority, clients=True, password=ADMIN)) as mutual:
        async with connected(mutual.url) as client:
            await written_and_heard(RedisFabric(client))
        without, _, _ = mutual.url.partition("&cert=")
        for url in (without, f"{without}&cert={stranger.client.cert}&key={stranger.client.key}"):
            refused = await told(url)
            assert f"127.0.0.1:{mutual.port}" in refused and "refuses TLS" in refused and "?cert=" in refused


async def test_a_server_without_hello_does_not_bring_the_password_into_an_error() -> None:
    """Redis repeats the arguments of a command that it does not know: before Redis 6 the password among them."""
    with RedisServer(OPEN, **{"rename-command HELLO": "NOHELLO"}) as old:
        assert "Redis 6 or later" in await told(f"redis://:hunter2@127.0.0.1:{old.port}/0")


async def test_a_server_that_is_no_redis_is_told_at_once(caplog: pytest.LogCaptureFixture) -> None:
    """As with the port of a gateway in the URL. asyncio would log a traceback at each attempt."""
    async with served([]) as url:
        where = url.removeprefix("http://")
        other = await told(f"redis://{where}/0")
    assert f"{where} does not answer as Redis does" in other and "host and port" in other
    assert not caplog.records


async def test_a_wrong_database_is_told_at_once(redis_url: str) -> None:
    url = RedisUrl.parse(redis_url)
    assert "no database 99" in await told(redis_url.rpartition("/")[0] + "/99")
    assert url.database == 0


@pytest.mark.parametrize("role", ["gateway", "agent", "controller"])
def test_a_role_with_a_wrong_password_ends_with_one_line(role: str, server: RedisServer) -> None:
    """As it runs: on uvloop, with the whole command line around it."""
    url = server.url.replace(ADMIN, "hunter2wrong")
    flags = {"gateway": ["--port", "0", "--dev-key", "k"], "agent": ["--sim", "itl_ms=5"], "controller": []}[role]
    done = run_cli(role, *flags, STREAM_GW_REDIS_URL=url)
    assert done.returncode == 1
    (line,) = done.stderr.splitlines()
    assert f"127.0.0.1:{server.port} refuses the password" in line
    assert "hunter2" not in line


# --- the user of few rights --------------------------------------------------------------------------------


@pytest.fixture(params=["single", "cluster"])
async def secured_client(request: pytest.FixtureRequest) -> AsyncIterator[RedisClient]:
    """As the runbook's user, on TLS."""
    of = request.getfixturevalue("server" if request.param == "single" else "cluster")
    async with connected(limited(of.url)) as client:
        yield client


@pytest.fixture
async def fabric(secured_client: RedisClient) -> AsyncIterator[Fabric]:
    fabric = RedisFabric(secured_client)
    yield fabric
    for stop in fabric.stop:
        await stop()


@pytest.fixture
def pool(secured_client: RedisClient) -> Pool:
    return Pool(secured_client)


for _suite in (test_log_contract, test_pools):
    for _name, _test in vars(_suite).items():
        if _name.startswith("test_") and {"fabric", "pool"} & set(inspect.signature(_test).parameters):
            globals()[_name] = _test


async def test_what_the_contracts_leave_out(secured_client: RedisClient) -> None:
    index, tenant, user = RedisIndex(secured_client), TenantId("acme"), UserId(os.urandom(4).hex())
    stream = StreamId("resp_1")
    assert await index.claim(tenant, user, stream, "print") == (stream, "print")
    await index.add_live(tenant, user, stream, 1)
    assert await index.live(tenant, user) == [stream]
    await index.remove_live(tenant, user, [stream])
    assert await index.live(tenant, user) == []
    assert (await check_partitions(secured_client, PARTITIONS)).count == PARTITIONS
    subscriber = Subscriber(secured_client, {}, lambda payload: None, lambda names: None)
    connection = await subscriber._connection(secured_client.topology.address(slot_of("p0")))
    assert await connection.call("PING") == b"PONG"
    connection.close()


def test_the_runbook_gives_the_rights_that_the_code_uses_and_no_more(server: RedisServer) -> None:
    known = {name.decode() for name in server("COMMAND", "LIST")}
    used: set[str] = set()
    folder = ROOT / "stream_fabric" / "redis"
    for path in folder.glob("*.py"):
        for node in ast.walk(ast.parse(path.read_text())):
            if isinstance(node, ast.Constant) and isinstance(node.value, str) and node.value.isupper():
                used.add(node.value.lower())
    for path in folder.glob("lua/*.lua"):
        used |= {name.lower() for name in re.findall(r"redis\.call\('(\w+)'", path.read_text())}
    # Anybody may say hello; info is what command is asked for, readonly an error; the rest is for Redis 6 or a database
    used = (used & known) - {"hello", "auth", "info", "publish", "subscribe", "select", "readonly"}
    given = {right.lstrip("+").partition("|")[0] for right in rights(cluster=True) if right.startswith("+")}
    assert given == used


async def test_what_is_said_of_missing_rights(own_server: RedisServer) -> None:
    url = limited(own_server.url)
    for missing in ("~sg:*", "&sg:*", "+command|info"):
        admit(own_server, *(right for right in rights() if right != missing))
        denied = await told(url)
        assert f"127.0.0.1:{own_server.port} denies user 'stream-gw'" in denied
        assert "docs/runbook.md" in denied
    # One that a script misses, under a client that runs: an outage that says what it is
    admit(own_server, *rights())
    async with connected(url, timeout_s=0.3) as client:
        fabric = RedisFabric(client)
        admit(own_server, *(right for right in rights() if right != "+xadd"))
        stream = await fabric.create()
        with pytest.raises(FabricUnavailable, match=r"denies user 'stream-gw'.*runbook"):
            await fabric.append(batch(stream, 1, 1))
        admit(own_server, *rights())
        await fabric.append(batch(stream, 1, 1))


# --- a password that changes under running processes -------------------------------------------------------


def change_password(server: RedisServer, password: str) -> None:
    """And end the connections that the old one has opened."""
    server("ACL", "SETUSER", "stream-gw", "resetpass", f">{password}")
    for kind in ("normal", "pubsub"):
        server("CLIENT", "KILL", "USER", "stream-gw", "TYPE", kind)


async def test_a_password_changed_while_running_is_an_outage(
    own_server: RedisServer, caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.DEBUG)
    slots = Partitions(PARTITIONS).slots
    async with connected(limited(own_server.url), timeout_s=0.3) as client:
        heard: list[bytes] = []
        subscriber = Subscriber(client, partition_channels("me", slots), heard.append, lambda names: None)
        log_, pools = RedisStreamLog(client, Partitions(PARTITIONS)), RedisPools(client)
        async with asyncio.TaskGroup() as tasks:
            background = [
                tasks.create_task(subscriber.run()),
                tasks.create_task(LeaseReaper(pools, log_, HostClock(), HostRandom()).run()),
            ]
            await subscriber.wait_ready()
            change_password(own_server, "hunter2new")
            await eventually(lambda: not subscriber.healthy, "the subscription to be lost")
            with pytest.raises(FabricUnavailable, match="refuses the password of user 'stream-gw'") as raised:
                await pools.pools()
            assert "did not answer" not in str(raised.value)
            await eventually(lambda: "failed, retrying: error=" in caplog.text, "the reaper's complaint")
            await eventually(
                lambda: "retrying: server=" in caplog.text,
                "the subscriber's complaint",
            )
            assert not any(task.done() for task in background)
            change_password(own_server, LIMITED)
            await eventually(lambda: subscriber.healthy, "the subscription to be back")
            assert await pools.pools() == []
            assert await client.execute(slots[0], client.publish, "sg:{p0}:>me", "again") == 1
            await eventually(lambda: heard == [b"again"])
            assert not any(task.done() for task in background)
            for task in background:
                task.cancel()
    assert "hunter2" not in caplog.text


@pytest.mark.platform
async def test_processes_outlive_a_changed_password(own_server: RedisServer) -> None:
    """A gateway, an agent and a controller: alive, not ready while refused, ready again, and nothing is told."""
    env = {"STREAM_GW_REDIS_URL": limited(own_server.url), "STREAM_GW_PARTITIONS": "4"}
    starts = (
        ["gateway", "--port", "0", "--dev-key", "k", "--ready-without-redis-s", "0"],
        ["agent", "--replica", "r", "--sim", "itl_ms=5", "--metrics-port", "0"],
        ["controller"],
    )
    processes: list[Process] = []
    try:
        for process in await asyncio.gather(*(asyncio.to_thread(Process, *flags, **env) for flags in starts)):
            processes.append(process)
        gateway, agent, controller = processes

        async def readiness() -> tuple[int, str]:
            return await asyncio.to_thread(_get, gateway.facts["url"] + "/readyz")

        assert (await readiness())[0] == 200
        change_password(own_server, "hunter2new")
        status, body = await readiness()
        assert status == 503
        assert "refuses the login" in body
        await eventually(lambda: "lease renewal failed" in agent.log, "the agent's complaint")
        await eventually(lambda: "failed, retrying: error=" in controller.log, "the controller's complaint")
        assert [process.poll() for process in processes] == [None, None, None]
        change_password(own_server, LIMITED)
        await eventually(lambda: _is(readiness, 200), "the gateway to be ready")
        assert [process.poll() for process in processes] == [None, None, None]
        assert "hunter2" not in body + "".join(process.log for process in processes)
    finally:
        for process in processes:
            process.close()


def _get(url: str) -> tuple[int, str]:
    try:
        with urllib.request.urlopen(url, timeout=10) as response:
            return response.status, response.read().decode()
    except HTTPError as error:
        with error:
            return error.code, error.read().decode()


async def _is(ask: Callable[[], Awaitable[tuple[int, str]]], status: int) -> bool:
    return (await ask())[0] == status


# --- Sentinel and cluster ----------------------------------------------------------------------------------


async def test_sentinels_with_tls_and_passwords_of_their_own(authority: Authority, stranger: Authority) -> None:
    with SentinelSetup(Secured(authority, password=ADMIN), OF_SENTINELS) as setup:
        for server in setup.servers:
            admit(server, *rights(), *OF_TESTS)
        await _refusals_of_sentinels(setup, stranger)
        async with connected(limited(setup.url)) as client:
            fabric = RedisFabric(client)
            ear = await fabric.listen("g1")
            old = setup.primary()
            old.kill()
            await eventually(lambda: setup.primary() is not old, "the sentinels to agree", 20)

            async def heard() -> bool:
                stream = await fabric.create(GatewayId("g1"))
                await fabric.append(batch(stream, 1, 2))
                return any(part[0] == stream for part in ear.parts())

            await eventually(lambda: _patiently(heard), "the new master to serve", 20)
            await ear.close()


async def _patiently(ask: Callable[[], Awaitable[bool]]) -> bool:
    try:
        return await ask()
    except FabricUnavailable:
        return False


async def _refusals_of_sentinels(setup: SentinelSetup, stranger: Authority) -> None:
    sentinel = f"the sentinel at 127.0.0.1:{setup.sentinels[0][0]}"
    wrong = await told(setup.url.replace(OF_SENTINELS, "hunter2wrong"))
    assert sentinel in wrong and "refuses the password" in wrong and "?sentinel_user=…&sentinel_password=…" in wrong
    none = await told(setup.url.replace(f"sentinel_password={OF_SENTINELS}&", ""))
    assert sentinel in none and "asks for a password" in none and "sentinel_password" in none
    unknown = await told(re.sub("ca=[^&]*", f"ca={stranger.ca}", setup.url))
    assert sentinel in unknown and "does not verify" in unknown
    master = await told(setup.url.replace(ADMIN, "hunter2wrong"))
    assert f"Redis at 127.0.0.1:{setup.primary().port} refuses the password" in master


async def test_a_clusters_slots_move_under_tls(cluster: RedisCluster) -> None:
    """ASK while keys lie on both sides, MOVED after, on connections to nodes that were not known before."""
    async with connected(limited(cluster.url)) as client:
        fabric = RedisFabric(client)
        ear = await fabric.listen("g1")
        partition = PARTITIONS - 1
        streams = [await fabric.create(GatewayId("g1"), partition) for _ in range(4)]
        for stream in streams:
            await fabric.append(batch(stream, 1, 2))
        move = cluster.move_slot(fabric.partitions.slots[partition])
        move.migrate(move.keys(100))
        for stream in streams:
            await fabric.append(batch(stream, 3, 4))
        move.finish()
        for stream in streams:
            await fabric.append(batch(stream, 5, 6))
            assert joined((await fabric.watch(stream)).entries) == text(1, 6)
        met = move.source("INFO", "errorstats").decode()
        assert "errorstat_ASK:" in met and "errorstat_MOVED:" in met

        async def heard() -> bool:
            stream = await fabric.create(GatewayId("g1"), partition)
            await fabric.append(batch(stream, 1, 1))
            return any(part[0] == stream for part in ear.parts())

        await eventually(heard, "the subscription to follow")
        await ear.close()


async def test_what_a_cluster_says_of_wrong_credentials(cluster: RedisCluster, stranger: Authority) -> None:
    first = f"127.0.0.1:{cluster.nodes[0].port}"
    assert f"Redis at {first} refuses the password" in await told(cluster.url.replace(ADMIN, "hunter2wrong"))
    assert f"Redis at {first} asks for a password" in await told(cluster.url.replace(f":{ADMIN}@", ""))
    unknown = await told(re.sub("ca=[^&]*", f"ca={stranger.ca}", cluster.url))
    assert first in unknown and "does not verify" in unknown
    admit(cluster.nodes[0], *(right for right in rights(cluster=True) if right != "+cluster|slots"))
    try:
        async with connected(limited(cluster.url)):
            pass  # another node is asked
    finally:
        admit(cluster.nodes[0], *rights(cluster=True), *OF_TESTS)
