"""Real Redis servers for tests: one, a pair, a cluster, a Sentinel setup. Blocking helpers; no fixed ports or paths."""

from __future__ import annotations

import shutil
import socket
import subprocess
import tempfile
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, Self

import hiredis

from tests.support.server import ServerProcess, Started, find_binary, free_port, spawn, wait_for

if TYPE_CHECKING:
    from tests.support.tls import Authority

SLOTS = 16384


@dataclass(frozen=True)
class Secured:
    """Security of a server; the default is open to anybody."""

    tls: Authority | None = None
    clients: bool = False
    """Clients need certificates."""
    password: str = ""
    """Password of the default user, who may do everything."""

    def config(self, port: int) -> dict[str, str | int]:
        config: dict[str, str | int] = {"port": 0 if self.tls else port}
        if self.tls:
            config |= {"tls-port": port, **self.tls.config(clients=self.clients)}
        if self.password:
            config |= {"requirepass": self.password}
        return config

    def url(self, kind: str, hosts: str, path: str = "", query: str = "") -> str:
        """For a client that has what it needs; ``query`` is added to it."""
        parameters = [query] if query else []
        if self.tls:
            parameters.append(f"ca={self.tls.ca}")
            if self.clients:
                parameters += [f"cert={self.tls.client.cert}", f"key={self.tls.client.key}"]
        scheme = kind.replace("redis", "rediss", 1) if self.tls else kind
        login = f":{self.password}@" if self.password else ""
        return f"{scheme}://{login}{hosts}{path}" + ("?" + "&".join(parameters) if parameters else "")


OPEN = Secured()


class Wire:
    """One blocking connection. Error replies raise ``hiredis.ReplyError``."""

    def __init__(self, port: int, secured: Secured = OPEN) -> None:
        self._socket = socket.create_connection(("127.0.0.1", port), 5.0)
        self._reader = hiredis.Reader()
        try:
            if secured.tls:
                self._socket = secured.tls.context().wrap_socket(self._socket, server_hostname="127.0.0.1")
            if secured.password:
                self("AUTH", secured.password)
        except BaseException:
            self.close()
            raise

    def __call__(self, *args: str | bytes | int) -> Any:
        self._socket.sendall(hiredis.pack_command(args))  # type: ignore[arg-type]
        while (reply := self._reader.gets()) is False:
            data = self._socket.recv(65536)
            if not data:
                raise ConnectionError("closed by the server")
            self._reader.feed(data)
        if isinstance(reply, hiredis.ReplyError):
            raise reply
        return reply

    def close(self) -> None:
        self._socket.close()


def call(port: int, *args: str | bytes | int, secured: Secured = OPEN) -> Any:
    """One command on a connection of its own."""
    wire = Wire(port, secured=secured)
    try:
        return wire(*args)
    finally:
        wire.close()


class RedisServer(ServerProcess):
    """One server process without persistence, on a free loopback port."""

    def __init__(self, secured: Secured = OPEN, **config: str | int) -> None:
        super().__init__("redis")
        self.secured = secured
        self._config = config
        self.port = 0

    @property
    def url(self) -> str:
        return self.secured.url("redis", f"127.0.0.1:{self.port}", "/0")

    def start(self) -> RedisServer:
        binary = find_binary("redis-server", "valkey-server")
        for _ in range(5):
            port = self.port or free_port()
            if self._launch(binary, port):
                self.port = port
                return self
        raise RuntimeError(f"no Redis server could be started:\n{self.log[-2000:]}")

    def _launch(self, binary: str, port: int) -> bool:
        config: dict[str, str | int] = {
            "bind": "127.0.0.1",
            **self.secured.config(port),
            "save": "",
            "appendonly": "no",
            "dir": str(self.folder),
            "repl-diskless-sync-delay": 0,
            "hz": 50,
            **({"masterauth": self.secured.password} if self.secured.password else {}),
            **self._config,
        }
        if config.get("cluster-enabled") == "yes":
            config.setdefault("cluster-port", free_port())
            config.setdefault("cluster-config-file", str(self.folder / "nodes.conf"))
        args = [part for name, value in config.items() for part in (f"--{name}", str(value))]
        process = self.launch([binary, *args])

        def answers() -> bool:
            return process.poll() is not None or call(port, "PING", secured=self.secured) == b"PONG"

        wait_for(answers, "PING", every_s=0.005)
        # Another server may hold the port: the one that answers must be ours
        if process.poll() is None:
            info: bytes = call(port, "INFO", "server", secured=self.secured)
            if b"process_id:%d\r" % process.pid in info:
                return True
        self.kill()
        return False

    def __call__(self, *args: str | bytes | int) -> Any:
        return call(self.port, *args, secured=self.secured)

    def configure(self, name: str, value: str | int) -> None:
        """Set a parameter of the running server and of its later starts."""
        self("CONFIG", "SET", name, value)
        self._config[name] = value

    def restart(self) -> None:
        """Kill, and start again on the same port, empty."""
        self.kill()
        (self.folder / "nodes.conf").unlink(missing_ok=True)
        self.start()

    def follow(self, primary: RedisServer) -> None:
        """Become a replica and wait for the first sync."""
        self("REPLICAOF", "127.0.0.1", primary.port)
        wait_for(lambda: b"master_link_status:up" in self("INFO", "replication"), "the replica's sync")


PATIENT_MS = 15_000
"""Node timeout of a cluster that no test disturbs: a node may stand still for so long before it is replaced."""


class RedisCluster(Started):
    """Three primaries with a replica each."""

    def __init__(self, primaries: int = 3, node_timeout_ms: int = 1000, secured: Secured = OPEN) -> None:
        """``node_timeout_ms``: time after which a silent primary is replaced."""
        self.secured = secured
        self._node_timeout_ms = node_timeout_ms
        config: dict[str, str | int] = {
            "cluster-enabled": "yes",
            "cluster-node-timeout": PATIENT_MS,  # also the limit of a handshake; a MEET that exceeds it is lost
            "cluster-require-full-coverage": "no",
            "cluster-allow-replica-migration": "no",
            "cluster-replica-validity-factor": 0,
        }
        if secured.tls:
            config["tls-cluster"] = "yes"
        self.nodes = [RedisServer(secured, **config) for _ in range(primaries * 2)]
        self._primaries = primaries

    @property
    def url(self) -> str:
        return self.secured.url("redis+cluster", ",".join(f"127.0.0.1:{node.port}" for node in self.nodes))

    def start(self) -> Self:
        for number, node in enumerate(self.nodes, 1):
            node.start()
            node("CLUSTER", "SET-CONFIG-EPOCH", number)
        first = self.nodes[0]
        step = SLOTS // self._primaries
        for number, node in enumerate(self.nodes[: self._primaries]):
            end = SLOTS - 1 if number == self._primaries - 1 else (number + 1) * step - 1
            node("CLUSTER", "ADDSLOTSRANGE", number * step, end)
        bus = int(first("CONFIG", "GET", "cluster-port")[1])
        for node in self.nodes[1:]:
            node("CLUSTER", "MEET", "127.0.0.1", first.port, bus)

        def all_met() -> bool:
            return all(
                len(nodes := node("CLUSTER", "NODES").splitlines()) == len(self.nodes)
                and not any(b"handshake" in line for line in nodes)
                for node in self.nodes
            )

        wait_for(all_met, "the cluster's nodes to meet")
        for number, node in enumerate(self.nodes[self._primaries :]):
            primary = self.nodes[number]("CLUSTER", "MYID")
            wait_for(lambda n=node, p=primary: n("CLUSTER", "REPLICATE", p) == b"OK", "CLUSTER REPLICATE")
        self.wait_ok()
        for node in self.nodes:
            node.configure("cluster-node-timeout", self._node_timeout_ms)
        return self

    def alive(self) -> list[RedisServer]:
        return [node for node in self.nodes if node.process is not None]

    def wait_ok(self) -> None:
        """Every live node sees all slots served, and every replica is in step."""

        def settled(node: RedisServer) -> bool:
            info = node("CLUSTER", "INFO")
            slots = node("CLUSTER", "SLOTS")
            replication = node("INFO", "replication")
            return (
                b"cluster_state:ok" in info
                and f"cluster_slots_ok:{SLOTS}".encode() in info
                and sum(end - start + 1 for start, end, *_ in slots) == SLOTS
                and (b"role:master" in replication or b"master_link_status:up" in replication)
            )

        wait_for(lambda: all(settled(node) for node in self.alive()), "cluster_state:ok", 20.0, 0.02)

    def primary_of(self, slot: int) -> RedisServer:
        """The live node that says it serves the slot."""

        def find() -> RedisServer | None:
            for node in self.alive():
                for start, end, primary, *_ in node("CLUSTER", "SLOTS"):
                    if start <= slot <= end and primary[1] == node.port:
                        return node
            return None

        node = wait_for(find, f"a primary of slot {slot}")
        assert isinstance(node, RedisServer)
        return node

    def kill_primary_of(self, slot: int) -> RedisServer:
        node = self.primary_of(slot)
        node.kill()
        return node

    def wait_failover(self, slot: int, killed: RedisServer, timeout_s: float = 20.0) -> RedisServer:
        """Wait until another node serves the slot, for every live node's view."""

        def taken() -> bool:
            views = []
            for node in self.alive():
                views += [p[1] for start, end, p, *_ in node("CLUSTER", "SLOTS") if start <= slot <= end]
            return len(views) == len(self.alive()) and killed.port not in views and len(set(views)) == 1

        wait_for(taken, "a replica to take over", timeout_s, 0.02)
        return self.primary_of(slot)

    def move_slot(self, slot: int) -> SlotMove:
        """Begin to move a slot; ``finish`` completes it, ``migrate`` moves some keys."""
        source = self.primary_of(slot)
        primaries = {self.primary_of(s).port: self.primary_of(s) for s in range(0, SLOTS, SLOTS // 8)}
        target = next(node for port, node in sorted(primaries.items()) if port != source.port)
        return SlotMove(self, slot, source, target)

    def close(self) -> None:
        for node in self.nodes:
            node.close()


class SlotMove:
    """A slot on its way from one primary to another, step by step."""

    def __init__(self, cluster: RedisCluster, slot: int, source: RedisServer, target: RedisServer) -> None:
        self.slot, self.source, self.target = slot, source, target
        self._cluster = cluster
        self._source_id = source("CLUSTER", "MYID")
        self._target_id = target("CLUSTER", "MYID")
        target("CLUSTER", "SETSLOT", slot, "IMPORTING", self._source_id)
        source("CLUSTER", "SETSLOT", slot, "MIGRATING", self._target_id)

    def keys(self, count: int = 1000) -> list[bytes]:
        reply: list[bytes] = self.source("CLUSTER", "GETKEYSINSLOT", self.slot, count)
        return reply

    def migrate(self, keys: list[bytes]) -> None:
        if keys:
            password = self.target.secured.password
            auth = ("AUTH", password) if password else ()
            self.source("MIGRATE", "127.0.0.1", self.target.port, "", 0, 5000, *auth, "KEYS", *keys)

    def finish(self) -> None:
        """Move what is left and hand the slot over."""
        while keys := self.keys():
            self.migrate(keys)
        self.target("CLUSTER", "SETSLOT", self.slot, "NODE", self._target_id)
        self.source("CLUSTER", "SETSLOT", self.slot, "NODE", self._target_id)


class SentinelSetup(Started):
    """A primary, a replica and three sentinels that agree within a second. The sentinels have a password of their own
    where ``sentinel_password`` is given."""

    def __init__(self, secured: Secured = OPEN, sentinel_password: str = "") -> None:
        self.secured = secured
        self.sentinels_secured = replace(secured, password=sentinel_password)
        self.servers = [RedisServer(secured), RedisServer(secured)]
        self.sentinels: list[tuple[int, subprocess.Popen[bytes]]] = []
        self._dir = Path(tempfile.mkdtemp(prefix="stream-gw-sentinel-"))

    @property
    def url(self) -> str:
        hosts = ",".join(f"127.0.0.1:{port}" for port, _ in self.sentinels)
        password = self.sentinels_secured.password
        return self.secured.url(
            "redis+sentinel", hosts, "/mymaster", f"sentinel_password={password}" if password else ""
        )

    def start(self) -> Self:
        binary = find_binary("redis-sentinel", "valkey-sentinel")
        primary, replica = self.servers
        primary.start()
        replica.start()
        replica.follow(primary)
        for number in range(3):
            port = free_port()
            conf = self._dir / f"{number}.conf"
            own, data = self.sentinels_secured, self.secured
            lines = [f"{name} {value}" for name, value in own.config(port).items()]
            lines += ["bind 127.0.0.1", f"dir {self._dir}", f"logfile {self._dir}/{number}.log"]
            lines += [f"sentinel monitor mymaster 127.0.0.1 {primary.port} 2"]
            lines += ["sentinel down-after-milliseconds mymaster 500", "sentinel failover-timeout mymaster 3000"]
            lines += [f"sentinel auth-pass mymaster {data.password}"] if data.password else []
            lines += [f"sentinel sentinel-pass {own.password}"] if own.password else []
            conf.write_text("\n".join(lines) + "\n")
            process = spawn([binary, str(conf)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
            self.sentinels.append((port, process))
        for port, _ in self.sentinels:
            # They say hello every two seconds and ask for replicas every ten: a missed round costs as much again
            wait_for(lambda p=port: self._sees_all(p), "the sentinels to find each other", 45, every_s=0.05)
        return self

    def _sees_all(self, port: int) -> bool:
        flat = call(port, "SENTINEL", "MASTER", "mymaster", secured=self.sentinels_secured)
        facts = dict(zip(flat[::2], flat[1::2], strict=True))
        return facts[b"num-other-sentinels"] == b"2" and facts[b"num-slaves"] == b"1" and facts[b"flags"] == b"master"

    def primary(self) -> RedisServer:
        _, port = call(
            self.sentinels[0][0], "SENTINEL", "GET-MASTER-ADDR-BY-NAME", "mymaster", secured=self.sentinels_secured
        )
        return next(server for server in self.servers if server.port == int(port))

    def fail_over(self) -> None:
        """Order a failover, as for the maintenance of the primary's host."""
        call(self.sentinels[0][0], "SENTINEL", "FAILOVER", "mymaster", secured=self.sentinels_secured)

    def close(self) -> None:
        for _, process in self.sentinels:
            process.kill()
            process.wait()
        for server in self.servers:
            server.close()
        shutil.rmtree(self._dir, ignore_errors=True)
