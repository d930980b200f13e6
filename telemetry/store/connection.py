"""Connections to ClickHouse: a server by URL, or the engine in this process on a folder. The only importer of
clickhouse_connect.

    http://user:password@host:8123/database    a server; https:// with TLS
    chdb:///var/lib/stream-gw/telemetry        the embedded engine; one process opens the folder, others ask it

The driver blocks and a client serves one call at a time, so each use has a client and a thread of its own. Limits of
the embedded engine: a second process cannot open the folder, and a process cannot open a second folder. A table with
the Kafka engine makes the folder impossible to open again, so ``Store.command`` takes this package's statements only.
"""

from __future__ import annotations

import asyncio
import logging
import os
import re
import ssl
import threading
from collections.abc import Callable, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, TypeVar
from urllib.parse import SplitResult, parse_qsl, urlencode, urlsplit, urlunsplit

from stream_fabric.system_errors import reason
from telemetry.store.errors import StoreRefused, StoreUnavailable

if TYPE_CHECKING:
    from clickhouse_connect.driver.client import Client

T = TypeVar("T")

QUERY_ROWS_MAX = 10_000
"""Maximum rows that a query returns; more are cut off and ``Rows.truncated`` is set."""
QUERY_S_MAX = 30.0
"""Time in which a server computes a query, in seconds."""
QUERY_ANSWER_S_MAX = 35.0
"""Time in which a server answers a query, in seconds."""
QUERY_WAIT_S_MAX = 50.0
"""The same with the wait for other queries of this process. Callers wait for 60 s, and so learn the reason."""
_QUERY_MEMORY_BYTES_MAX = 2 << 30
ANSWER_S_MAX = 60.0
"""Time in which a server answers, in seconds; over: the call has failed, though the server may go on with it."""
MIGRATION_S_MAX = 3600.0
"""The same for a statement of a migration, which may rewrite the rows of a month."""

WRITE_SETTINGS: Mapping[str, Any] = {
    # One insert is one block with its own name; the server must not merge several
    "async_insert": 0,
    "insert_deduplicate": 1,
    # The process may have died between the raw table and the roll-ups: a block that the raw table has is still
    # offered to the roll-ups
    "deduplicate_blocks_in_dependent_materialized_views": 1,
    "materialized_views_ignore_errors": 0,
    # A block may hold events of many days; a refusal would repeat for ever
    "max_partitions_per_insert_block": 0,
    "date_time_input_format": "best_effort",
}
_SERVER_SETTINGS: Mapping[str, Any] = {
    # Without it an error after the first byte of an HTTP answer looks like success
    "wait_end_of_query": 1,
}
READ_SETTINGS: Mapping[str, Any] = {
    "max_execution_time": QUERY_S_MAX,
    "max_memory_usage": _QUERY_MEMORY_BYTES_MAX,
    "max_result_rows": QUERY_ROWS_MAX + 1,
    "result_overflow_mode": "break",
    # Must be the last: after it no setting can be changed. It also forbids table functions such as file() and url()
    "readonly": 1,
}


@dataclass(frozen=True)
class Address:
    """A ClickHouse URL, checked. With https ``?ca=<path>`` trusts that CA in place of the system's, and
    ``?cert=<path>&key=<path>`` sends a client certificate.
    """

    url: str
    embedded: bool
    database: str
    tls: Mapping[str, Any] = field(default_factory=dict)
    """Arguments of the driver for the certificates that the URL names."""

    @classmethod
    def parse(cls, url: str) -> Address:
        """Parse a ClickHouse URL. Raises ValueError for any other URL."""
        parts = urlsplit(url)
        if parts.scheme not in ("http", "https", "chdb"):
            raise ValueError("a ClickHouse URL begins with http://, https:// or chdb:///")
        embedded = parts.scheme == "chdb"
        if embedded and (parts.netloc or not parts.path.strip("/")):
            # The engine would keep events in a temporary folder, or in one of the working directory
            raise ValueError("a ClickHouse URL of the embedded engine names an absolute folder, as chdb:///folder")
        named = dict(parse_qsl(parts.query)).get("database", "") if embedded else parts.path.strip("/")
        database = named or "default"
        if not re.fullmatch(r"[A-Za-z_]\w{0,63}", database):
            raise ValueError("the path of a ClickHouse URL is a database name: letters, digits and _")
        return cls(url, embedded, database, _tls_arguments(parts))

    @property
    def driver_url(self) -> str:
        """URL as the driver takes it: without the names of certificates."""
        parts = urlsplit(self.url)
        rest = [(name, value) for name, value in parse_qsl(parts.query) if name not in _TLS_FILES]
        return urlunsplit(parts._replace(query=urlencode(rest))) if self.tls else self.url

    @property
    def shown(self) -> str:
        """URL without user and password."""
        parts = urlsplit(self.url)
        host = parts.netloc.rpartition("@")[2]
        return urlunsplit((parts.scheme, host, parts.path, "", ""))

    def default_database(self) -> Address:
        """Return the address of the same server with its default database."""
        parts = urlsplit(self.url)
        path, query = (parts.path, "") if self.embedded else ("", parts.query)
        return Address.parse(urlunsplit((parts.scheme, parts.netloc, path, query, "")))


_TLS_FILES = {"ca": "ca_cert", "cert": "client_cert", "key": "client_cert_key"}
"""Argument of the driver by the URL's parameter."""


def _tls_arguments(parts: SplitResult) -> dict[str, str]:
    """Return the driver's arguments for the certificates that a URL names. Raises ValueError."""
    files = {name: path for name, path in parse_qsl(parts.query, keep_blank_values=True) if name in _TLS_FILES}
    if files and parts.scheme != "https":
        raise ValueError(f"{', '.join(files)} of a ClickHouse URL need https://")
    for name, path in files.items():
        if not os.path.isfile(path):
            raise ValueError(f"{name} of a ClickHouse URL must be the path of a PEM file; there is none at {path!r}")
    if ("cert" in files) != ("key" in files):
        raise ValueError("cert and key of a ClickHouse URL must be given together")
    arguments = {_TLS_FILES[name]: path for name, path in files.items()}
    if "cert" in files and parts.password:
        arguments["tls_mode"] = "strict"  # without it the driver logs in by the certificate and drops the password
    return arguments


def connect(address: Address, settings: Mapping[str, Any], answer_s: float | None = None) -> Client:
    """Open a client. Blocks. Raises StoreUnavailable, and the driver's own errors (see ``ClientThread``).

    ``answer_s``: time in which a server answers; None: ``ANSWER_S_MAX``.
    """
    try:
        import clickhouse_connect
    except ImportError:
        raise StoreUnavailable(
            "clickhouse-connect is not installed: pip install 'stream-gw[clickhouse]', "
            "or with the engine itself: pip install 'stream-gw[chdb]'"
        ) from None
    for noisy in ("clickhouse_connect", "urllib3"):
        # Their warnings repeat what they raise or retry
        logging.getLogger(noisy).setLevel(logging.ERROR)
    if not address.embedded:
        try:
            return clickhouse_connect.get_client(
                dsn=address.driver_url,
                **address.tls,
                # The driver reads TLS from the ports 443 and 8443, not from the scheme
                interface=urlsplit(address.url).scheme,
                # A session would allow one query at a time
                autogenerate_session_id=False,
                settings={**_SERVER_SETTINGS, **settings},
                tz_mode="aware",
                connect_timeout=5,
                send_receive_timeout=answer_s or ANSWER_S_MAX,
            )
        except clickhouse_connect.driver.exceptions.OperationalError as error:
            raise StoreUnavailable(
                f"ClickHouse at {address.shown} does not answer: {_connection_error(error, address) or _message(error)}"
            ) from error
        except clickhouse_connect.driver.exceptions.DatabaseError as error:
            if getattr(error, "code", None) is not None:
                raise
            raise StoreUnavailable(
                f"{address.shown} does not answer as ClickHouse does: {_message(error)}; check the host and port"
            ) from error
    try:
        return clickhouse_connect.get_client(dsn=address.url, settings=dict(settings), tz_mode="aware")
    except ImportError:
        raise StoreUnavailable(
            "the embedded ClickHouse is not installed: pip install 'stream-gw[chdb]', or set a server's URL"
        ) from None
    except clickhouse_connect.driver.exceptions.ProgrammingError as error:
        raise StoreUnavailable(
            f"the embedded ClickHouse cannot open {urlsplit(address.url).path}: another process has it open (ask that "
            f"process), this process has another folder open, or the folder is not writable ({_message(error)})"
        ) from error


def connect_writer(address: Address, answer_s: float | None = None) -> Client:
    """Open a client for inserts; the database is created if it is missing."""
    if address.database != "default":
        client = connect(address.default_database(), WRITE_SETTINGS)
        try:
            client.command(f"CREATE DATABASE IF NOT EXISTS {address.database}")
        finally:
            client.close()
    return connect(address, WRITE_SETTINGS, answer_s)


def connect_reader(address: Address) -> Client:
    """Open a client for queries, with read-only settings and limits."""
    return connect(address, READ_SETTINGS, QUERY_ANSWER_S_MAX)


class ClientThread:
    """A client with its own thread. It connects at the first call; a refused connection is tried again at the next."""

    def __init__(self, address: Address, connect: Callable[[], Client]) -> None:
        self._address = address
        self._connect = connect
        self._client: Client | None = None
        self._pool = ThreadPoolExecutor(1, thread_name_prefix="clickhouse")
        self._closed = threading.Event()

    async def run(self, work: Callable[[Client], T]) -> T:
        """Run blocking work with the client. Raises StoreUnavailable or StoreRefused for the driver's errors."""
        return await asyncio.get_running_loop().run_in_executor(self._pool, self._run, work)

    def _run(self, work: Callable[[Client], T]) -> T:
        if self._closed.is_set():
            raise StoreUnavailable("the store is closed")
        from clickhouse_connect.driver import exceptions

        try:
            if self._client is None:
                self._client = self._connect()
            return work(self._client)
        except (exceptions.OperationalError, exceptions.InterfaceError, OSError) as error:
            why = "" if self._address.embedded else _connection_error(error, self._address)
            told = f"ClickHouse at {self._address.shown} does not answer: {why}" if why else _message(error)
            raise StoreUnavailable(told) from error
        except exceptions.Error as error:
            if getattr(error, "code", None) in _TEMPORARY:
                raise StoreUnavailable(_message(error)) from error
            raise StoreRefused(_message(error)) from error

    async def close(self) -> None:
        def end() -> None:
            self._closed.set()
            if self._client is not None:
                self._client.close()
                self._client = None

        await asyncio.get_running_loop().run_in_executor(self._pool, end)
        self._pool.shutdown()


_TEMPORARY = frozenset({159, 202, 209, 210, 241, 242, 243, 252, 279, 319, 425, 999})
"""ClickHouse error codes that may pass: time and memory limits, too many queries or parts, network, disk."""


def _connection_error(error: BaseException, address: Address) -> str:
    """Return the system's reason for which a connection failed, in words; empty: the driver has another reason."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, OSError):
        wrapped = next((each for each in cause.args if isinstance(each, BaseException)), None)  # urllib3's SSLError
        cause = cause.__cause__ or cause.__context__ or wrapped
    if isinstance(cause, ssl.SSLError):
        return _tls_error(cause)
    if isinstance(cause, ConnectionResetError | BrokenPipeError) and urlsplit(address.url).scheme == "https":
        # TLS 1.3: a server rejects our certificate after the handshake, and its alert may be lost with the connection
        return f"{reason(cause)}; perhaps it requires another client certificate (?cert=<path>&key=<path> in the URL)"
    return "" if cause is None else reason(cause)


def _tls_error(error: ssl.SSLError) -> str:
    """Say why TLS failed, and what to do."""
    if isinstance(error, ssl.SSLCertVerificationError):
        found = error.verify_message.strip(". ")
        return f"its certificate is not trusted ({found}); ?ca=<path> in the URL names the PEM file of its authority"
    if "ALERT" in str(error.reason):
        return f"it rejects our certificate ({error.reason}); ?cert=<path>&key=<path> in the URL sends another"
    return (
        f"TLS failed ({error.reason or error.strerror}); perhaps this is not its port for https, or it requires "
        "a client certificate (?cert=<path>&key=<path> in the URL)"
    )


def _message(error: BaseException) -> str:
    # The driver appends the request's URL, which has the password
    text = " ".join(str(error).partition(" with url:")[0].split())
    return text if len(text) <= 500 else text[:500] + "…"
