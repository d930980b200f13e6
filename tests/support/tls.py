"""Certificates for tests, made when they are needed: an authority, a server's certificate and a client's."""

from __future__ import annotations

import functools
import shutil
import ssl
import subprocess
from dataclasses import dataclass
from pathlib import Path

from tests.support.missing import missing
from tests.support.server import find_binary

_LOOPBACK = "subjectAltName=IP:127.0.0.1"


@dataclass(frozen=True)
class Certificate:
    cert: Path
    key: Path


class Authority:
    """A certificate authority of the test's own. A server's certificate is for 127.0.0.1, not for localhost."""

    def __init__(self, folder: Path, name: str = "authority") -> None:
        self._openssl = find_binary("openssl")
        self._folder = folder
        self._own = Certificate(folder / f"{name}.pem", folder / f"{name}.key")
        usage = ("-addext", "keyUsage=critical,keyCertSign,cRLSign")  # Python 3.13 trusts no authority without it
        self._run("req", "-x509", *self._new(self._own, name), "-out", self.ca, "-days", "2", *usage)
        self.server = self.issue(f"{name}-server", _LOOPBACK)
        self.client = self.issue(f"{name}-client")

    @property
    def ca(self) -> Path:
        return self._own.cert

    def issue(self, name: str, extension: str = "", subject: str = "", days: int = 2) -> Certificate:
        """``subject``: as ``/O=group/CN=user``; else the name. ``days`` -1: it has expired."""
        issued = Certificate(self._folder / f"{name}.pem", self._folder / f"{name}.key")
        request, extensions = self._folder / f"{name}.csr", self._folder / f"{name}.cnf"
        extensions.write_text(f"authorityKeyIdentifier=keyid\nsubjectKeyIdentifier=hash\n{extension}\n")
        self._run("req", "-new", *self._new(issued, name, subject), "-out", request)
        self._run(
            "x509", "-req", "-in", request, "-CA", self._own.cert, "-CAkey", self._own.key, "-CAcreateserial",
            "-out", issued.cert, "-days", str(days), "-extfile", extensions,
        )  # fmt: skip
        return issued

    def encrypt(self, key: Path, to: Path, passphrase: str) -> None:
        self._run("ec", "-in", key, "-aes256", "-passout", f"pass:{passphrase}", "-out", to)

    @staticmethod
    def _new(to: Certificate, name: str, subject: str = "") -> list[str]:
        key = ["-newkey", "ec", "-pkeyopt", "ec_paramgen_curve:prime256v1", "-nodes", "-keyout", str(to.key)]
        return [*key, "-subj", subject or f"/CN={name}"]

    def _run(self, *args: str | Path) -> None:
        subprocess.run([self._openssl, *args], check=True, capture_output=True, timeout=30)

    def context(self) -> ssl.SSLContext:
        """A client's, that shows a certificate to whoever asks."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self.client.cert, self.client.key)
        return context

    def server_context(self, certificate: Certificate | None = None) -> ssl.SSLContext:
        """A server's; without a certificate, that of ``server``."""
        shown = certificate or self.server
        context = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
        context.load_cert_chain(shown.cert, shown.key)
        return context

    def config(self, *, clients: bool = False) -> dict[str, str]:
        """A server's or a sentinel's settings; ``clients``: they need certificates too."""
        return {
            "tls-cert-file": str(self.server.cert),
            "tls-key-file": str(self.server.key),
            "tls-ca-cert-file": str(self.ca),
            "tls-auth-clients": "yes" if clients else "no",
            "tls-replication": "yes",
        }


@functools.cache
def _speaks_tls(binary: str) -> bool:
    # It reads in order and ends at the first setting that it does not know: ours, unless it knows no TLS
    done = subprocess.run([binary, "--tls-port", "0", "--no-such-setting", "x"], capture_output=True, timeout=30)
    return b"no-such-setting" in done.stdout + done.stderr


def need_tls() -> None:
    """Skip where the installed Redis was built without TLS; fail where ``CI`` is set."""
    binary = find_binary("redis-server", "valkey-server")
    if not _speaks_tls(shutil.which(binary) or binary):
        missing(f"needs a Redis that was built with TLS; {binary} was not")
