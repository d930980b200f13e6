"""``stream-gw traces`` while nobody answers it."""

from __future__ import annotations

import argparse
import asyncio

import pytest

from telemetry.ask import command
from telemetry.ask.settings import AskSettings
from telemetry.store.errors import StoreUnavailable
from tests.support.server import free_port


async def test_a_slow_answer_is_announced_with_the_address(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(command, "_SLOW_S", 0.05)

    async def hold(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        await asyncio.sleep(0.5)
        writer.close()

    port = free_port()
    url = f"http://127.0.0.1:{port}"
    async with await asyncio.start_server(hold, "127.0.0.1", port):
        args = argparse.Namespace(command="traces", verb="why", id="resp_" + "0" * 32, json=False)
        with pytest.raises(StoreUnavailable):
            await command.run(AskSettings(telemetry_url=url), args, lambda text: None)
    assert capsys.readouterr().err.startswith(f"still waiting for stream-gw telemetry at {url};")
