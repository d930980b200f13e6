"""ClickHouse by TLS, with an authority of its own: who comes in, and what is said when a door stays shut."""

from __future__ import annotations

import asyncio
import ssl
from pathlib import Path

import pytest

from telemetry.store.connection import Address
from telemetry.store.errors import StoreUnavailable
from tests.gateway.processes import run_cli
from tests.support.clickhouse import ClickHouseFront
from tests.support.proxy import Proxy
from tests.support.stores import make_store
from tests.support.tls import Authority

pytestmark = pytest.mark.platform


@pytest.fixture(scope="module")
def ours(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("clickhouse-tls"))


def server_context(ours: Authority, *, clients: bool) -> ssl.SSLContext:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    context.load_cert_chain(ours.server.cert, ours.server.key)
    context.load_verify_locations(ours.ca)
    context.verify_mode = ssl.CERT_REQUIRED if clients else ssl.CERT_NONE
    return context


async def version(url: str) -> str:
    store = make_store(url)
    try:
        return str((await store.query("SELECT version()")).rows[0][0])
    finally:
        await store.close()


@pytest.mark.parametrize("login", ["default", "default:"])
@pytest.mark.parametrize("clients", [False, True], ids=["server's certificate", "both certificates"])
async def test_a_private_authority_is_trusted(
    front: ClickHouseFront, ours: Authority, clients: bool, login: str
) -> None:
    shown = f"&cert={ours.client.cert}&key={ours.client.key}" if clients else ""
    async with Proxy.before(front.port, tls=server_context(ours, clients=clients)) as proxy:
        url = f"https://{login}@127.0.0.1:{proxy.port}/{front.database}?ca={ours.ca}{shown}"
        store = make_store(url)
        await store.open()  # makes the database on the same server
        await store.close()
        assert await version(url)


async def test_what_keeps_the_door_shut_is_said(front: ClickHouseFront, ours: Authority, tmp_path: Path) -> None:
    stranger = Authority(tmp_path, "stranger")
    async with Proxy.before(front.port, tls=server_context(ours, clients=True)) as proxy:
        place = f"https://default@127.0.0.1:{proxy.port}/default"
        for query, says in {
            "": "certificate is not trusted",
            f"?ca={stranger.ca}": "certificate is not trusted",
            f"?ca={ours.ca}": r"\?cert=<path>&key=<path>",
            f"?ca={ours.ca}&cert={stranger.client.cert}&key={stranger.client.key}": r"\?cert=<path>&key=<path>",
        }.items():
            with pytest.raises(StoreUnavailable, match=says):
                await version(place + query)
        told = (await asyncio.to_thread(run_cli, "doctor", STREAM_GW_CLICKHOUSE=place)).stdout
        assert "certificate is not trusted" in told and "?ca=<path>" in told
    with pytest.raises(StoreUnavailable, match="perhaps this is not its port for https"):
        await version(f"https://default@127.0.0.1:{front.port}/default")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("https://host/db?ca=/nowhere.pem", "there is none at '/nowhere.pem'"),
        ("https://host/db?ca=", "there is none at ''"),
        ("https://host/db?cert={ca}", "must be given together"),
        ("http://host/db?ca={ca}", "need https://"),
    ],
)
def test_certificates_that_cannot_be_used_are_refused_at_once(ours: Authority, url: str, says: str) -> None:
    with pytest.raises(ValueError, match=says):
        Address.parse(url.format(ca=ours.ca))
