"""``stream-gw up`` keeps conversations and stored responses by itself, from one run to the next."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.request import Request, urlopen

import pytest
from openai import AuthenticationError, NotFoundError, OpenAI

from stream_gw.cli.commands import up
from stream_gw.cli.platform.platform import Platform, UpOptions
from stream_gw.cli.platform.state_folder import StateFolder
from tests.gateway.processes import Process, need_redis, run_cli
from tests.support.waiting import eventually

pytestmark = pytest.mark.platform

_FLAGS = ["up", "--port", "0", "--replicas", "1", "--no-telemetry", "--sim", "itl_ms=1,ttft_ms=1"]


@contextmanager
def _up(*flags: str, **env: str) -> Iterator[tuple[Process, list[OpenAI]]]:
    """A platform, and the official client of each of its gateways."""
    need_redis()
    with Process(*_FLAGS, *flags, **env) as process:
        key = process.facts["key"]
        urls = [f"{gateway['url']}/v1" for gateway in process.facts["gateways"]]
        clients = [OpenAI(base_url=url, api_key=key, max_retries=0, timeout=30) for url in urls]
        try:
            yield process, clients
        finally:
            for client in clients:
                client.close()


def _texts(client: OpenAI, conversation: str) -> list[str]:
    items: list[Any] = client.conversations.items.list(conversation, order="asc").data
    return [item.content[0].text for item in items]


async def test_conversations_work_in_a_plain_up_and_outlive_it(tmp_path: Path) -> None:
    env = {"XDG_STATE_HOME": str(tmp_path)}
    database = tmp_path / "stream-gw" / "database.sqlite"
    with _up(**env) as (process, (one, two)):
        assert process.facts["database"] == str(database)
        assert f"stream-gw up: the database is in {database.parent} (shared with earlier and later runs" in process.log
        conversation = one.conversations.create(metadata={"topic": "sockets"})
        first = one.responses.create(model="sim-small", input="Name one protocol.", conversation=conversation.id)
        second = two.responses.create(model="sim-small", input="And another one?", conversation=conversation.id)
        kept = ["Name one protocol.", first.output_text, "And another one?", second.output_text]
        await eventually(lambda: _texts(one, conversation.id) == kept, "both turns to be written", 20)
        compacted = one.responses.compact(model="sim-small", previous_response_id=second.id)
    assert stat.S_IMODE(database.stat().st_mode) == 0o600
    with _up("--gateways", "1", **env) as (_, (only,)):
        assert only.conversations.retrieve(conversation.id).metadata == {"topic": "sockets"}
        assert _texts(only, conversation.id) == kept
        assert only.responses.retrieve(second.id).output_text == second.output_text
        output: Any = [item.model_dump(exclude_none=True, warnings=False) for item in compacted.output]
        after = only.responses.create(model="sim-small", input=[*output, {"role": "user", "content": "Go on."}])
        assert after.status == "completed", "the secret that opens compactions outlives the run"


def _made(url: str, path: str, body: dict[str, str]) -> dict[str, Any]:
    headers = {"authorization": "Bearer sk-dev", "content-type": "application/json"}
    request = Request(f"{url}/v1/admin/{path}", json.dumps(body).encode(), headers)
    with urlopen(request, timeout=20) as answer:
        made: dict[str, Any] = json.load(answer)
    return made


def test_keys_are_made_in_a_plain_up_and_outlive_it(tmp_path: Path) -> None:
    """A tenant dev of the database has the development key too."""
    env, keys = {"XDG_STATE_HOME": str(tmp_path)}, []
    pepper = tmp_path / "stream-gw" / "key-pepper"
    with _up(**env) as (process, clients):
        url = process.facts["gateways"][0]["url"]
        for tenant in ("acme", "dev"):
            _made(url, "tenants", {"id": tenant})
            keys.append(_made(url, "keys", {"tenant": tenant})["key"])
        for client in clients:
            for key in ("sk-dev", *keys):
                assert client.with_options(api_key=key).models.list().data
    assert stat.S_IMODE(pepper.stat().st_mode) == 0o600
    with _up("--gateways", "1", **env) as (_, (only,)):
        for key in ("sk-dev", *keys):
            assert only.with_options(api_key=key).models.list().data
    with (
        _up("--gateways", "1", **env, STREAM_GW_KEY_PEPPER="another of 16 bytes") as (_, (only,)),
        pytest.raises(AuthenticationError),
    ):
        only.with_options(api_key=keys[0]).models.list()


def test_up_without_a_database_says_which_setting_gives_one() -> None:
    with _up("--gateways", "1", "--no-database", STREAM_GW_DATABASE_URL="sqlite:////nonexistent/x") as (
        process,
        (only,),
    ):
        assert process.facts["database"] is None and process.facts["state_folder"] is None
        with pytest.raises(NotFoundError, match="STREAM_GW_DATABASE_URL"):
            only.conversations.create()


def test_up_warns_once_of_a_variable_that_nothing_reads() -> None:
    with _up("--gateways", "1", "--no-database", "--no-telemetry", STREAM_GW_DRAINS_S="1") as (process, _):
        assert process.log.count("STREAM_GW_DRAINS_S") == 1
        assert "STREAM_GW_DRAIN_S" in process.log


@pytest.mark.parametrize(
    ("options", "database", "says"),
    [
        (UpOptions(), True, "(stored responses, conversations, keys)"),
        (UpOptions(), False, "none, so no conversations: pip install 'stream-gw[tenants]'"),
        (
            UpOptions(redis_url="redis://r"),
            False,
            "none, so no conversations: set STREAM_GW_DATABASE_URL or --database",
        ),
    ],
)
def test_the_addresses_name_the_database(
    options: UpOptions, database: bool, says: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    path = tmp_path / "database.sqlite"
    here = Platform(options, "redis://r", None, gateways=[{"url": "http://g"}], database=path if database else None)
    up.print_addresses(here)
    (line,) = [line for line in capsys.readouterr().out.splitlines() if line.startswith("  database")]
    assert says in line and (str(path) in line) == database


def test_a_secret_is_made_once_and_is_its_owners_alone(tmp_path: Path) -> None:
    folder = StateFolder(tmp_path, "")
    secret = folder.secret("token-secret")
    assert len(secret) == 64 and folder.secret("token-secret") == secret
    assert stat.S_IMODE((tmp_path / "token-secret").stat().st_mode) == 0o600


def test_a_users_redis_gets_no_database_of_its_own() -> None:
    """Its fleet may have one, and gateways with another would write that fleet's responses there."""
    done = run_cli(*_FLAGS, "--redis-url", "redis://127.0.0.1:1/0")
    assert done.returncode == 1
    assert "database" not in done.stderr
