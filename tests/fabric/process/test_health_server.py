"""The small HTTP surface listens where it is told, and nowhere else."""

from __future__ import annotations

import aiohttp
import pytest

from stream_fabric.process.addresses import url_of
from stream_fabric.process.health_server import serve_health


async def _page() -> tuple[str, bytes]:
    return "text/plain", b"streams 1\n"


async def test_it_listens_on_the_address_that_it_is_told_alone() -> None:
    ready = False
    async with serve_health("127.0.0.2", 0, lambda: ready, _page) as url, aiohttp.ClientSession() as session:
        assert url.startswith("http://127.0.0.2:")
        async with session.get(f"{url}/metrics") as answer:
            assert (answer.status, await answer.text()) == (200, "streams 1\n")
        for now, status in ((False, 503), (True, 200)):
            ready = now
            async with session.get(f"{url}/healthz") as answer:
                assert answer.status == status
        with pytest.raises(aiohttp.ClientConnectorError):
            await session.get(url.replace("127.0.0.2", "127.0.0.1"))


async def test_a_port_that_is_taken_is_named_with_its_flags() -> None:
    async with serve_health("127.0.0.1", 0, lambda: True, _page) as url:
        port = int(url.rpartition(":")[2])
        with pytest.raises(OSError, match="address already in use") as failed:
            await serve_health("127.0.0.1", port, lambda: True, _page).__aenter__()
    assert str(failed.value) == (
        f"cannot listen on 127.0.0.1 port {port}: address already in use; choose another --metrics-port or "
        "--metrics-host"
    )


def test_an_ipv6_address_makes_a_url() -> None:
    assert url_of(("::1", 9465, 0, 0)) == "http://[::1]:9465"
