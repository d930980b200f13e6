"""ClickHouse for tests: the engine (chDB) in a process of its own, behind as much of ClickHouse's HTTP as its client
speaks. A server named by ``STREAM_GW_TEST_CLICKHOUSE`` runs the same suite.

``python -m tests.support.clickhouse FOLDER PORT`` is the process.
"""

from __future__ import annotations

import asyncio
import gzip
import json
import os
import sys
import tempfile
import threading
import urllib.error
import urllib.request
from typing import Any

from aiohttp import web

from tests.support.server import ServerProcess, free_port, wait_for


class ClickHouseFront(ServerProcess):
    """An engine whose data outlive its process, until ``close``. Blocking helpers."""

    def __init__(self) -> None:
        super().__init__("clickhouse")
        self.port = free_port()
        self.database = "default"

    @property
    def url(self) -> str:
        return f"http://default@127.0.0.1:{self.port}/{self.database}"

    @property
    def data(self) -> str:
        return str(self.folder / "data")

    def start(self) -> ClickHouseFront:
        command = [sys.executable, "-m", "tests.support.clickhouse", self.data, str(self.port)]
        self.launch(command, start_new_session=True)
        wait_for(self._answers, "the ClickHouse front to answer", timeout_s=60)
        return self

    def _answers(self) -> bool:
        assert self.process is not None
        assert self.process.poll() is None, f"it ended with {self.process.returncode}:\n{self.log[-2000:]}"
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}/ping", timeout=5) as answer:
            return bool(answer.status == 200)

    def fault(self, mode: str) -> None:
        """``ok``; ``refuse``: inserts of blocks are refused; ``lose``: they are done, and their answers are lost. With
        a table's name, as in ``lose fleet``: only those into that table."""
        request = urllib.request.Request(f"http://127.0.0.1:{self.port}/fault", mode.encode(), method="POST")
        with urllib.request.urlopen(request, timeout=60) as answer:
            assert answer.status == 200


# --- the process ---------------------------------------------------------------------------------------------

_OF_HTTP = {
    "query", "database", "session_id", "session_timeout", "query_id", "compress", "decompress", "buffer_size",
    "wait_end_of_query", "send_progress_in_http_headers", "http_headers_progress_interval_ms", "user", "password",
    "enable_http_compression", "default_format", "quota_key", "role", "session_check", "client_protocol_version",
}  # fmt: skip


class _Refused(Exception):
    def __init__(self, message: str, code: int) -> None:
        super().__init__(message)
        self.code = code


class _Engine:
    """A handle for writing, and one for each set of settings of readers: read-only cannot be taken back."""

    def __init__(self, folder: str) -> None:
        import chdb

        self._connect = lambda: chdb.connect(folder)
        self._write = self._connect()
        self._readers: dict[str, Any] = {}
        self._lock = threading.Lock()

    def run(
        self, database: str, sql: str, settings: dict[str, str], parameters: dict[str, str], data: bytes | None
    ) -> tuple[bytes, str]:
        with self._lock:
            try:
                if settings.get("readonly", "0") != "0":
                    return self._answer(self._reader(database, settings), sql, parameters)
                self._write.query(f"USE {database}", "TabSeparated")
                if data is not None:
                    return self._insert(sql, settings, data)
                for name, value in settings.items():
                    self._write.query(f"SET {name} = '{_quoted(value)}'", "TabSeparated")
                try:
                    return self._answer(self._write, sql, parameters)
                finally:
                    for name in settings:
                        self._write.query(f"SET {name} = DEFAULT", "TabSeparated")
            except RuntimeError as error:
                text = str(error)
                code = text.partition("Code: ")[2].partition(".")[0]
                raise _Refused(text, int(code) if code.isdecimal() else 1000) from error

    def _reader(self, database: str, settings: dict[str, str]) -> Any:
        key = json.dumps([database, settings], sort_keys=True)
        if key not in self._readers:
            reader = self._readers[key] = self._connect()
            reader.query(f"USE {database}", "TabSeparated")
            for name, value in sorted(settings.items(), key=lambda item: item[0] == "readonly"):
                reader.query(f"SET {name} = '{_quoted(value)}'", "TabSeparated")
        return self._readers[key]

    def _answer(self, handle: Any, sql: str, parameters: dict[str, str]) -> tuple[bytes, str]:
        words = sql.rstrip().rstrip(";").split()
        named = words[-1] if len(words) > 1 and words[-2].upper() == "FORMAT" else ""
        body = handle.query(sql, named or "TabSeparated", params=parameters).bytes() or b""
        return body, named or ("TabSeparated" if body else "")

    def _insert(self, sql: str, settings: dict[str, str], data: bytes) -> tuple[bytes, str]:
        head, _, format = sql.strip().rpartition("FORMAT ")
        clause = ", ".join(f"{name} = '{_quoted(value)}'" for name, value in settings.items())
        with tempfile.NamedTemporaryFile() as file:
            file.write(data)
            file.flush()
            setting = f"SETTINGS {clause}" if clause else ""
            self._write.query(f"{head} FROM INFILE '{file.name}' {setting} FORMAT {format}", "TabSeparated")
        return b"", ""


def _quoted(text: str) -> str:
    return text.replace("\\", "\\\\").replace("'", "\\'")


def _plain(body: bytes, encoding: str) -> bytes:
    match encoding:
        case "":
            return body
        case "gzip":
            return gzip.decompress(body)
        case "lz4":
            import lz4.frame

            return bytes(lz4.frame.decompress(body))
        case "zstd":
            import cramjam

            return bytes(cramjam.zstd.decompress(body))
    raise _Refused(f"unknown content encoding {encoding}", 36)


def _serve(folder: str, port: int) -> None:
    engine = _Engine(folder)
    mode = "ok"

    async def query(request: web.Request) -> web.StreamResponse:
        body = _plain(await request.read(), request.headers.get("content-encoding", ""))
        given = dict(request.query)
        parameters = {name.removeprefix("param_"): given.pop(name) for name in list(given) if name.startswith("param_")}
        settings = {name: value for name, value in given.items() if name not in _OF_HTTP}
        sql, data = given.get("query", ""), None
        if sql:
            data = body
        else:
            # An insert's first line is the statement, its data follow
            if body[:6].upper() == b"INSERT":
                first, _, rest = body.partition(b"\n")
                sql, data = first.decode(), rest
            else:
                sql = body.decode()
        if data is not None and (sql.lstrip()[:6].upper() != "INSERT" or "FORMAT " not in sql):
            sql, data = (sql + "\n" + data.decode()) if data else sql, None
        # The fault is in the data's way only; a block is told by its name
        named = data is not None and "insert_deduplication_token" in settings
        what, _, table = mode.partition(" ")
        named = named and (not table or f"INTO {table}" in sql.replace("`", ""))
        if named and what == "refuse":
            return _refusal(_Refused("Code: 202. DB::Exception: Too many simultaneous queries", 202))
        try:
            database = given.get("database", "default")
            answer, format = await asyncio.to_thread(engine.run, database, sql, settings, parameters, data)
        except _Refused as refused:
            return _refusal(refused)
        if named and what == "lose":
            assert request.transport is not None
            request.transport.abort()
        headers = {"X-ClickHouse-Summary": "{}", "X-ClickHouse-Timezone": "UTC"}
        if format:
            headers["X-ClickHouse-Format"] = format
        return web.Response(body=answer, headers=headers)

    def _refusal(refused: _Refused) -> web.Response:
        return web.Response(text=str(refused), status=500, headers={"X-ClickHouse-Exception-Code": str(refused.code)})

    async def ping(request: web.Request) -> web.Response:
        return web.Response(text="Ok.\n")

    async def fault(request: web.Request) -> web.Response:
        nonlocal mode
        mode = (await request.read()).decode()
        return web.Response(text="ok")

    app = web.Application(client_max_size=1 << 30)
    app.add_routes([web.get("/ping", ping), web.post("/fault", fault), web.post("/", query), web.get("/", query)])
    web.run_app(app, host="127.0.0.1", port=port, print=None, access_log=None)


if __name__ == "__main__":
    os.environ.setdefault("TZ", "UTC")
    _serve(sys.argv[1], int(sys.argv[2]))
