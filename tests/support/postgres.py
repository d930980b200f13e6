"""A real PostgreSQL for tests: one server process on a free loopback port."""

from __future__ import annotations

import os
import pwd
import shutil
import signal
import subprocess
from pathlib import Path

from tests.support.server import ServerProcess, find_binary, free_port, wait_for
from tests.support.tls import Authority

_NEVER_ROOT = "nobody"
"""User of the server when the tests run as root: PostgreSQL refuses root."""
_READY = "database system is ready to accept connections"


def _binary(name: str) -> str:
    """Debian keeps the server's programs off the PATH."""
    found = sorted(Path("/usr/lib/postgresql").glob(f"*/bin/{name}"), key=lambda path: int(path.parts[-3]))
    return str(found[-1]) if found else find_binary(name)


class PostgresServer(ServerProcess):
    """One server whose user ``test`` may do everything; its data outlives ``stop``."""

    def __init__(self, authority: Authority | None = None) -> None:
        """``authority``: the server offers TLS, with a certificate of that authority for 127.0.0.1."""
        super().__init__("postgres")
        self.port = 0
        self._authority = authority

    @property
    def url(self) -> str:
        """URL of the database that always exists."""
        return f"postgresql://test:hunter2@127.0.0.1:{self.port}/postgres"

    def start(self) -> PostgresServer:
        data = self.folder / "data"
        if not data.exists():
            self._make(data)
        self.port = self.port or free_port()
        options: dict[str, str | Path] = {
            "listen_addresses": "127.0.0.1",
            "unix_socket_directories": self.folder,
            "fsync": "off",
        }
        if self._authority is not None:
            options |= {"ssl": "on", **self._certificate(self._authority)}
        flags = [part for name, value in options.items() for part in ("-c", f"{name}={value}")]
        starts = self.log.count(_READY)
        self.launch([*self._user(), _binary("postgres"), "-D", data, "-p", str(self.port), *flags])

        def is_ready() -> bool:
            assert self.process is not None and self.process.poll() is None, self.log
            return self.log.count(_READY) > starts

        wait_for(is_ready, "PostgreSQL", timeout_s=60)
        return self

    def stop(self) -> None:
        """Stop at once; SIGTERM would wait for the clients."""
        if self.process is not None:
            self.thaw()
            self.process.send_signal(signal.SIGINT)
            self.process.wait(30)
            self.process = None

    def close(self) -> None:
        self.stop()
        super().close()

    def _make(self, data: Path) -> None:
        if os.geteuid() == 0:
            shutil.chown(self.folder, _NEVER_ROOT)
        password = self.folder / "password"
        password.write_text("hunter2")
        password.chmod(0o644)
        flags = ["-U", "test", "-A", "scram-sha-256", "--pwfile", password, "-E", "UTF8", "--locale=C", "--no-sync"]
        command = [*self._user(), _binary("initdb"), "-D", data, *flags]
        made = subprocess.run(command, capture_output=True, text=True)
        assert made.returncode == 0, made.stderr

    def _certificate(self, authority: Authority) -> dict[str, Path]:
        """Copy the certificate to where the server's user may read it; PostgreSQL wants a key that nobody else may."""
        files = {"ssl_cert_file": self.folder / "server.pem", "ssl_key_file": self.folder / "server.key"}
        for source, to in zip((authority.server.cert, authority.server.key), files.values(), strict=True):
            shutil.copy(source, to)
            to.chmod(0o600)
            if os.geteuid() == 0:
                shutil.chown(to, _NEVER_ROOT)
        return files

    def _user(self) -> list[str]:
        if os.geteuid() != 0:
            return []
        user = pwd.getpwnam(_NEVER_ROOT)
        setpriv = [find_binary("setpriv"), f"--reuid={user.pw_uid}", f"--regid={user.pw_gid}", "--clear-groups"]
        return [*setpriv, "--pdeathsig=KILL"]  # a change of user forgets the signal that ``spawn`` asks for
