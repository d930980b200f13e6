"""A real Apache Kafka for tests: one broker that is its own controller, on free loopback ports.

Its jars come from Maven Central once, into the user's cache folder. Blocking helpers.
"""

from __future__ import annotations

import fcntl
import os
import subprocess
import tempfile
from dataclasses import dataclass
from pathlib import Path

from tests.support.missing import missing
from tests.support.server import ServerProcess, find_binary, free_port, wait_for
from tests.support.tls import Authority

VERSION = "4.4.0"
_POM = f"""<project xmlns="http://maven.apache.org/POM/4.0.0">
  <modelVersion>4.0.0</modelVersion>
  <groupId>stream-gw</groupId>
  <artifactId>test-kafka</artifactId>
  <version>1</version>
  <packaging>pom</packaging>
  <dependencies>
    <dependency>
      <groupId>org.apache.kafka</groupId>
      <artifactId>kafka_2.13</artifactId>
      <version>{VERSION}</version>
      <exclusions>
        <!-- named, but not published -->
        <exclusion><groupId>org.apache.kafka</groupId><artifactId>kafka-tools-api</artifactId></exclusion>
      </exclusions>
    </dependency>
    <dependency>
      <groupId>org.apache.logging.log4j</groupId>
      <artifactId>log4j-slf4j-impl</artifactId>
      <version>2.25.5</version>
    </dependency>
  </dependencies>
</project>
"""
_LOG4J = """rootLogger.level = WARN
rootLogger.appenderRef.out.ref = out
appender.out.type = Console
appender.out.name = out
appender.out.layout.type = PatternLayout
appender.out.layout.pattern = %d %p %c: %m%n
"""
_CLUSTER = "c3RyZWFtLWd3LXRlc3RzMQ"


def jars() -> Path:
    """The folder of the jars; the first caller fetches them, others wait. Skips the test where they cannot be had, or
    fails it where ``CI`` is set."""
    find_binary("java")
    home = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache") / "stream-gw"
    ready = home / f"kafka-{VERSION}"
    home.mkdir(parents=True, exist_ok=True)
    with (home / f"kafka-{VERSION}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not ready.exists():
            maven = find_binary("mvn")
            with tempfile.TemporaryDirectory(dir=home) as folder:
                (Path(folder) / "pom.xml").write_text(_POM)
                command = [maven, "-q", "-B", "dependency:copy-dependencies", "-DincludeScope=runtime"]
                fetched = subprocess.run(
                    [*command, "-DoutputDirectory=lib"], cwd=folder, capture_output=True, text=True, timeout=300
                )
                if fetched.returncode:
                    missing(f"Kafka's jars cannot be fetched from Maven Central: {fetched.stdout[-500:]}")
                os.rename(Path(folder) / "lib", ready)
    return ready


@dataclass(frozen=True)
class Guarded:
    """Doors of a broker besides its open one: TLS for who shows a certificate (``mutual``), TLS with a login by PLAIN
    or SCRAM-SHA-512 (``login``), and one that tells clients to come to a name that its certificate is not for
    (``misnamed``)."""

    authority: Authority
    user: str
    password: str
    scram_password: str
    """Another than by PLAIN, so that one is not taken for the other."""


class KafkaServer(ServerProcess):
    """A broker whose data outlive its process, until ``close``.

    It listens on ``port``; and on ``behind_port``, where it tells clients that it is at ``proxy_port``: whoever begins
    there meets nothing but the proxy that a test puts between the two.
    """

    def __init__(self, guarded: Guarded | None = None, **config: str | int) -> None:
        self._jars = jars()
        self._guarded = guarded
        self.mutual_port = self.login_port = self.misnamed_port = 0
        super().__init__("kafka")
        self._config = config
        self.port = self.behind_port = self.proxy_port = 0

    @property
    def servers(self) -> str:
        return f"127.0.0.1:{self.port}"

    def start(self) -> KafkaServer:
        """Start, or start again with the same data on the same port; return when it answers."""
        if not self.port:
            self._make()
        # Read from the end, so that an earlier process's readiness is not taken for this one's
        began = len(self.log.encode())
        process = self.launch([*self._java("-Xmx256m", "-Xms64m"), "kafka.Kafka", self.folder / "server.properties"])

        def started() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"Kafka ended with {process.returncode}:\n{self.log[-2000:]}")
            with self.open_log() as log:
                log.seek(began)
                return b"Kafka Server started" in log.read()

        wait_for(started, "Kafka to start", timeout_s=60, every_s=0.02)
        return self

    def _java(self, *flags: str) -> list[str | Path]:
        fast = ["-XX:+UseSerialGC", "-XX:TieredStopAtLevel=1"]
        return [
            "java",
            *fast,
            *flags,
            f"-Dlog4j2.configurationFile={self.folder}/log4j2.properties",
            "-cp",
            f"{self._jars}/*",
        ]

    def _make(self) -> None:
        self.port, self.behind_port, self.proxy_port, control = (free_port() for _ in range(4))
        here = f"PLAINTEXT://127.0.0.1:{self.port},CONTROLLER://127.0.0.1:{control},BEHIND://127.0.0.1:"
        ones = ("offsets.topic", "transaction.state.log", "share.coordinator.state.topic")
        config: dict[str, str | int] = {
            "process.roles": "broker,controller",
            "node.id": 1,
            "listeners": f"{here}{self.behind_port}",
            "advertised.listeners": f"{here}{self.proxy_port}",
            "listener.security.protocol.map": "PLAINTEXT:PLAINTEXT,CONTROLLER:PLAINTEXT,BEHIND:PLAINTEXT",
            "inter.broker.listener.name": "PLAINTEXT",
            "controller.listener.names": "CONTROLLER",
            "controller.quorum.bootstrap.servers": f"127.0.0.1:{control}",
            "log.dirs": f"{self.folder}/data",
            "num.partitions": 6,
            **{f"{name}.replication.factor": 1 for name in ones},
            **{f"{name}.min.isr": 1 for name in ones[1:]},
            **{f"{name}.num.partitions": 4 for name in ones},
            "group.initial.rebalance.delay.ms": 0,
            "auto.create.topics.enable": "false",
            "num.network.threads": 2,
            "num.io.threads": 4,
            "log.cleaner.dedupe.buffer.size": 16 << 20,
            "log.segment.bytes": 64 << 20,
            "broker.session.timeout.ms": 3000,
            "broker.heartbeat.interval.ms": 500,
            **self._config,
        }
        users: list[str] = []
        if self._guarded is not None:
            users = self._guard(config, self._guarded)
        (self.folder / "log4j2.properties").write_text(
            _LOG4J + "logger.ready.name = kafka.server.KafkaRaftServer\nlogger.ready.level = INFO\n"
        )
        properties = self.folder / "server.properties"
        properties.write_text("".join(f"{name}={value}\n" for name, value in config.items()))
        formatted = subprocess.run(
            [
                *self._java(), "kafka.tools.StorageTool", "format", "--standalone",
                "--cluster-id", _CLUSTER, "-c", properties, *users,
            ],
            capture_output=True,
            text=True,
        )  # fmt: skip
        assert formatted.returncode == 0, formatted.stdout + formatted.stderr

    def _guard(self, config: dict[str, str | int], guarded: Guarded) -> list[str]:
        """Add its doors; returns what makes its users when the data folder is."""
        self.mutual_port, self.login_port, self.misnamed_port = (free_port() for _ in range(3))
        doors = {
            "MUTUAL": (self.mutual_port, "127.0.0.1", "SSL"),
            "LOGIN": (self.login_port, "127.0.0.1", "SASL_SSL"),
            "MISNAMED": (self.misnamed_port, "localhost", "SSL"),
        }
        for name, (port, host, protocol) in doors.items():
            config["listeners"] = f"{config['listeners']},{name}://127.0.0.1:{port}"
            config["advertised.listeners"] = f"{config['advertised.listeners']},{name}://{host}:{port}"
            config["listener.security.protocol.map"] = f"{config['listener.security.protocol.map']},{name}:{protocol}"
        server = guarded.authority.server
        both = self.folder / "server.pem"
        both.write_text(server.key.read_text() + server.cert.read_text())
        plain = "org.apache.kafka.common.security.plain.PlainLoginModule"
        scram = "org.apache.kafka.common.security.scram.ScramLoginModule"
        config |= {
            "ssl.keystore.type": "PEM",
            "ssl.keystore.location": str(both),
            "ssl.truststore.type": "PEM",
            "ssl.truststore.location": str(guarded.authority.ca),
            "listener.name.mutual.ssl.client.auth": "required",
            "listener.name.login.sasl.enabled.mechanisms": "PLAIN,SCRAM-SHA-512",
            "listener.name.login.plain.sasl.jaas.config": f'{plain} required user_{guarded.user}="{guarded.password}";',
            "listener.name.login.scram-sha-512.sasl.jaas.config": f"{scram} required;",
        }
        return ["--add-scram", f"SCRAM-SHA-512=[name={guarded.user},password={guarded.scram_password}]"]
