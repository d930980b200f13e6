"""``stream-gw demo``: the main job in front of your eyes, on real processes, and an exit code that tells."""

from __future__ import annotations

import asyncio
import os
import signal
import sys
import time
from typing import Any

from stream_gw.client import Ack, Data, Position, StreamGateway
from stream_gw.client.stream import text_of
from stream_gw.up import Platform, UpOptions, platform

_SIM = "itl_ms=15,ttft_ms=80,max_num_seqs=64"
_PROMPT = "Explain how a stream survives the death of its gateway."


class _Failed(Exception):
    pass


def _check(holds: bool, what: str) -> None:
    if not holds:
        raise _Failed(what)


def _body(model: str, seed: int, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": tokens,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


async def run(port: int) -> int:
    """0 when everything that was shown held."""
    started = time.monotonic()
    print("Starting Redis, two simulated replicas, a controller and two gateways …", flush=True)
    options = UpOptions(gateways=2, replicas=2, sim=_SIM, port=port, telemetry=False)
    async with platform(options) as running:
        urls = [gateway["url"] for gateway in running.gateways]
        print(f"Ready in {time.monotonic() - started:.1f} s: {urls[0]} and {urls[1]}\n")
        try:
            await _show(running, urls)
        except _Failed as failure:
            print(f"\nFAILED: {failure}", file=sys.stderr)
            return 1
    print(f"\nAll held. {time.monotonic() - started:.1f} s in all; every process has ended.")
    return 0


async def _show(running: Platform, urls: list[str]) -> None:
    key = running.options.dev_key
    async with StreamGateway(urls[0], token=key) as one, StreamGateway(urls[1], token=key) as two:
        model = "sim-small"
        print("1. A streamed answer, from the simulator (no model, deterministic text):\n")
        undisturbed = await _print(one, _body(model, seed=7, tokens=90))

        print("\n\n2. Stop: the stream is created on one gateway and cancelled through the other.")
        stream = one.create(_body(model, seed=8, tokens=400))
        ack: Ack | None = None
        last_text = 0
        async for item in stream:
            if isinstance(item, Data):
                last_text = item.seq if text_of(item.chunks) else last_text
            if last_text >= 12 and ack is None:
                ack = await two.cancel(await stream.ready())
        _check(ack is not None and ack.result == "accepted", f"the cancel was answered {ack}")
        assert ack is not None and ack.at is not None and stream.usage is not None
        _check(stream.status == "cancelled", f"the stream ended {stream.status}, not cancelled")
        _check(
            last_text == Position.parse(ack.at).seq, f"the last text was frame {last_text}, the cancel said {ack.at}"
        )
        print(
            f"   Acknowledged at {ack.at}; the reader's last text was frame {last_text}, "
            f"and {stream.usage['output']} tokens are billed."
        )

        print("\n3. A gateway dies (kill -9) in the middle of an answer; the reader goes on through the other:\n")
        both = StreamGateway(urls, token=key)
        async with both:
            disturbed = await _print(both, _body(model, seed=7, tokens=90), kill=running.gateways[0]["pid"], after=25)
        _check(disturbed == undisturbed, "the answer differs from the undisturbed run with the same seed")
        print("\n\n   Identical, byte for byte, to the undisturbed answer with the same seed.")


async def _print(gateway: StreamGateway, body: dict[str, Any], kill: int | None = None, after: int = 0) -> str:
    parts: list[str] = []
    stream = gateway.create(body)
    print("   ", end="")
    async for text in stream.text():
        parts.append(text)
        print(text.replace("\n", "\n   "), end="", flush=True)
        if kill is not None and len(parts) == after:
            os.kill(kill, signal.SIGKILL)
            print("\n   ── gateway killed ──\n   ", end="", flush=True)
            kill = None
    _check(stream.status == "completed", f"the stream ended {stream.status}")
    _check(bool(parts), "no text came")
    await asyncio.sleep(0)
    return "".join(parts)
