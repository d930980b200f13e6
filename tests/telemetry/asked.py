"""The made-up hour in the real engine, behind the HTTP door of the telemetry process. In a process of its own, because
a process can open one folder of the engine only: ``python -m tests.telemetry.asked FOLDER`` prints its URL."""

from __future__ import annotations

import asyncio
import json
import select
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path
from types import TracebackType

from stream_fabric.events import encode_event
from telemetry.ask.api import api
from telemetry.ask.named_queries import QUERIES
from telemetry.ask.queries import SAVED
from telemetry.consume.metrics import ConsumerMetrics
from telemetry.consume.rows import build_batch
from telemetry.emit.record import Part, PlainRecord
from tests.support.server import spawn
from tests.support.stores import make_store
from tests.telemetry.fleet import fleet

TOKEN = "a-token-of-tests"
START_S = 60.0


class Asked:
    """Blocking helper around the process."""

    def __init__(self) -> None:
        self._dir = Path(tempfile.mkdtemp(prefix="stream-gw-asked-"))
        self._process: subprocess.Popen[str] | None = None
        self.url = ""

    def __enter__(self) -> Asked:
        self._process = spawn(
            [sys.executable, "-m", "tests.telemetry.asked", str(self._dir / "data")], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        ready, _, _ = select.select([self._process.stdout], [], [], START_S)
        line = self._process.stdout.readline() if ready else ""
        if not line:
            self.close()
            raise RuntimeError("the engine with the made-up hour did not start")
        self.url = json.loads(line)["url"]
        return self

    def close(self) -> None:
        if self._process is not None:
            self._process.kill()
            self._process.wait()
            assert self._process.stdout is not None
            self._process.stdout.close()
        shutil.rmtree(self._dir, ignore_errors=True)

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


async def _serve(folder: str) -> None:
    store = make_store(f"chdb://{folder}")
    await store.open()
    # The hour is a fixed one, and must not grow too old
    await store.set_retention(3650, 36_500)
    records = [
        PlainRecord(offset, event.at_us // 1000, None, encode_event(event))
        for offset, event in enumerate(fleet().events)
    ]
    rows = build_batch(Part("made-up", 0), records)
    assert not rows.poison, rows.poison[:3]
    for table, block in rows.tables.items():
        await store.insert(table, block, "all")
    async with api(store, ConsumerMetrics(), {**QUERIES, **SAVED}, lambda: True, TOKEN, 0) as url:
        print(json.dumps({"url": url}), flush=True)
        await asyncio.Event().wait()


if __name__ == "__main__":
    asyncio.run(_serve(sys.argv[1]))
