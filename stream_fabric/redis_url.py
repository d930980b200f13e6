"""Redis URLs of a single server, Sentinel or a cluster. Pure, except that named files must exist."""

from __future__ import annotations

import os
from dataclasses import dataclass, field
from typing import NamedTuple
from urllib.parse import unquote, urlsplit


class Address(NamedTuple):
    host: str
    port: int

    def __str__(self) -> str:
        return f"{self.host}:{self.port}"


_MODES = {
    "redis": ("single", False),
    "rediss": ("single", True),
    "redis+sentinel": ("sentinel", False),
    "rediss+sentinel": ("sentinel", True),
    "redis+cluster": ("cluster", False),
    "rediss+cluster": ("cluster", True),
}
_FILES = ("ca", "cert", "key")
_SENTINEL_PARAMETERS = ("sentinel_user", "sentinel_password")


@dataclass(frozen=True)
class RedisUrl:
    """A parsed URL: ``redis://host:6379/0``, ``redis+sentinel://a:26379,b:26379/mymaster``, or
    ``redis+cluster://a:6379,b:6379``. ``rediss`` instead of ``redis``: with TLS. Credentials: ``user:password@``.

    With TLS: ``?ca=<path>`` trusts that CA in place of the system's; ``?cert=<path>&key=<path>`` sends a client
    certificate. With Sentinel: ``?sentinel_user=…&sentinel_password=…``. Reserved characters are percent-encoded.
    """

    mode: str
    addresses: tuple[Address, ...]
    username: str | None
    password: str | None = field(repr=False)
    database: int
    master: str
    tls: bool
    ca: str | None = None
    cert: str | None = None
    key: str | None = None
    sentinel_user: str | None = None
    sentinel_password: str | None = field(default=None, repr=False)

    @classmethod
    def parse(cls, url: str) -> RedisUrl:
        """Parse a URL. Raises ValueError; its text says what is allowed and repeats no part of a password."""
        try:
            parts = urlsplit(url)
        except ValueError:  # its text may contain the password
            raise ValueError(
                "the Redis URL cannot be parsed; percent-encode reserved characters, also in the password"
            ) from None
        if parts.scheme not in _MODES:
            given = f"one that starts with {parts.scheme}:" if parts.scheme else "one without a scheme"
            raise ValueError(f"a Redis URL starts with one of {', '.join(f'{m}://' for m in _MODES)}; got {given}")
        mode, tls = _MODES[parts.scheme]
        if parts.fragment or "@" in parts.path or ("@" in parts.query and "@" not in parts.netloc):
            raise ValueError(
                "percent-encode '/', '?', '#' and '@' in the Redis URL's password, as %2F, %3F, %23 and %40"
            )
        credentials, _, hosts = parts.netloc.rpartition("@")
        user, colon, password = credentials.partition(":")
        default_port = 26379 if mode == "sentinel" else 6379
        addresses = []
        for number, host in enumerate(hosts.split(","), 1):
            name, _, port = host.rpartition(":") if ":" in host else (host, "", "")
            if not name or (port and not (port.isdecimal() and 0 < int(port) < 65536)):
                raise ValueError(
                    f"host number {number} of the Redis URL must be host:port, with a port up to 65535; "
                    "separate hosts by commas"
                )
            addresses.append(Address(name.strip("[]"), int(port or default_port)))
        path = parts.path.strip("/")
        if mode == "single" and path and not path.isdecimal():
            raise ValueError(f"the path of a redis:// URL is the database number; got {path!r}")
        return cls(
            mode=mode,
            addresses=tuple(addresses),
            username=unquote(user) or None,
            password=unquote(password) if colon else None,
            database=int(path or 0) if mode == "single" else 0,
            master=path or "mymaster",
            tls=tls,
            **_parameters(parts.query, mode, tls),
        )


def _parameters(query: str, mode: str, tls: bool) -> dict[str, str]:
    """Parse and check the query parameters of a Redis URL. Raises ValueError."""
    allowed = (*(_FILES if tls else ()), *(_SENTINEL_PARAMETERS if mode == "sentinel" else ()))
    hint = f"allowed here: {', '.join(allowed) or 'none'} (ca, cert and key with rediss, sentinel_… with +sentinel)"
    found: dict[str, str] = {}
    for item in query.split("&") if query else ():
        name, _, value = item.partition("=")
        if name not in allowed:
            # Only a name is repeated: it may be the end of a password that contains a question mark
            shown = repr(name) if name.isidentifier() and len(name) <= 32 else "(not shown)"
            raise ValueError(f"the Redis URL has the unknown parameter {shown}; {hint}")
        if name in found:
            raise ValueError(f"the Redis URL has {name} twice; {hint}")
        if not value:
            raise ValueError(f"{name} of the Redis URL is empty; {hint}")
        found[name] = unquote(value)
    for name in _FILES:
        if name in found and not os.path.isfile(found[name]):
            raise ValueError(
                f"{name} of the Redis URL must be the path of a PEM file; there is none at {found[name]!r}"
            )
    for name, other in (("cert", "key"), ("key", "cert"), ("sentinel_user", "sentinel_password")):
        if name in found and other not in found:
            raise ValueError(f"the Redis URL has {name} but not {other}; give both together")
    return found
