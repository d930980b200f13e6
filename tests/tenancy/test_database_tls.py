"""PostgreSQL with TLS: an authority of one's own, those of the system, and what is said of a wrong file."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from stream_gw.tenancy.errors import DatabaseUnavailable
from stream_gw.tenancy.sql.database import Database
from tests.support.postgres import PostgresServer
from tests.support.tls import Authority

pytestmark = pytest.mark.platform


@pytest.fixture(scope="module")
def authority(tmp_path_factory: pytest.TempPathFactory) -> Authority:
    return Authority(tmp_path_factory.mktemp("tls"))


@pytest.fixture(scope="module")
def server(authority: Authority) -> Iterator[PostgresServer]:
    with PostgresServer(authority) as server:
        yield server


async def connects(url: str) -> None:
    """Raises DatabaseUnavailable."""
    database = Database(url)
    try:
        await database.schema()
    finally:
        await database.close()


async def test_the_authority_of_the_url_is_trusted_and_the_name_verified(
    server: PostgresServer, authority: Authority
) -> None:
    query = f"?sslmode=verify-full&sslrootcert={authority.ca}"
    await connects(server.url + query)
    with pytest.raises(DatabaseUnavailable, match="not valid for 'localhost'"):
        await connects(server.url.replace("127.0.0.1", "localhost") + query)


async def test_the_systems_authorities_are_trusted_by_name(
    server: PostgresServer, authority: Authority, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As in libpq. asyncpg took ``system`` for the name of a file."""
    url = server.url + "?sslmode=verify-full&sslrootcert=system"
    with pytest.raises(DatabaseUnavailable, match="certificate verify failed"):
        await connects(url)
    monkeypatch.setenv("SSL_CERT_FILE", str(authority.ca))
    await connects(url)


async def test_a_certificate_file_that_is_missing_is_named(server: PostgresServer, tmp_path: Path) -> None:
    """The driver says ``[Errno 2] No such file or directory`` of any of them."""
    nowhere = tmp_path / "nowhere.pem"
    with pytest.raises(DatabaseUnavailable, match=f"sslrootcert of its URL: {nowhere}: no such file or directory"):
        await connects(f"{server.url}?sslmode=verify-full&sslrootcert={nowhere}")


async def test_a_server_that_is_away_is_told_in_words() -> None:
    with pytest.raises(DatabaseUnavailable, match="refuses: connection refused"):
        await connects("postgresql://a:b@127.0.0.1:1/c")
