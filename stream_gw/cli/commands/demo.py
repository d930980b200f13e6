"""``stream-gw demo``: streams, cancels and resumes on real processes; exit code 0 when all checks held."""

from __future__ import annotations

import argparse
import asyncio
import os
import signal
import sys
import time
from collections import deque
from typing import Any

from stream_gw.cli.flags import port
from stream_gw.cli.platform.platform import Platform, UpOptions, platform
from stream_gw.cli.variables import warn_of_unknown_variables
from stream_gw.client import Ack, Data, Position, StreamGateway
from stream_gw.client.items import text_of

_SIM = "itl_ms=15,ttft_ms=80,max_num_seqs=64"
_LOG_LINES_MAX = 200
"""Newest log lines of the processes, which are shown when a check fails and would interrupt the text before."""
_PROMPT = "Explain how a stream survives the death of its gateway."


class _CheckFailed(Exception):
    pass


def _check(holds: bool, what: str) -> None:
    """Raise _CheckFailed with the text ``what`` unless the check holds."""
    if not holds:
        raise _CheckFailed(what)


def _request_body(model: str, seed: int, tokens: int) -> dict[str, Any]:
    return {
        "model": model,
        "messages": [{"role": "user", "content": _PROMPT}],
        "max_tokens": tokens,
        "seed": seed,
        "stream": True,
        "stream_options": {"include_usage": True},
    }


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--port", type=port, default=0, help="port of the first gateway; 0: free ones (default 0)")


def run(args: argparse.Namespace) -> int:
    warn_of_unknown_variables()
    return asyncio.run(_demo(args.port))


async def _demo(first_port: int) -> int:
    """Start the platform, run the demo and return the exit code: 0 when every check held."""
    started = time.monotonic()
    print("Starting Redis, two simulated replicas, a controller and two gateways …", flush=True)
    options = UpOptions(gateways=2, replicas=2, sim=_SIM, port=first_port, telemetry=False, database=False)
    held: deque[str] = deque(maxlen=_LOG_LINES_MAX)
    async with platform(options, held.append) as running:
        urls = [gateway["url"] for gateway in running.gateways]
        print(f"Ready in {time.monotonic() - started:.1f} s: {urls[0]} and {urls[1]}\n")
        try:
            await _run_steps(running, urls)
        except _CheckFailed as failure:
            print(f"\nFAILED: {failure}\n\nThe processes logged:", *held, sep="\n", file=sys.stderr)
            return 1
    print(f"\nAll checks held. {time.monotonic() - started:.1f} s in total; every process has ended.")
    return 0


async def _run_steps(running: Platform, urls: list[str]) -> None:
    """Stream, cancel and resume an answer, and check each outcome. Raises _CheckFailed."""
    key = running.options.dev_key
    async with StreamGateway(urls[0], token=key) as one, StreamGateway(urls[1], token=key) as two:
        model = "sim-small"
        print("1. A streamed answer, from the simulator (no model, deterministic text):\n")
        undisturbed = await _print_stream(one, _request_body(model, seed=7, tokens=90))

        print("\n\n2. Stop: the stream is created on one gateway and cancelled through the other.")
        stream = one.create(_request_body(model, seed=8, tokens=400))
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
            disturbed = await _print_stream(
                both, _request_body(model, seed=7, tokens=90), kill=running.gateways[0]["pid"], after=25
            )
        _check(disturbed == undisturbed, "the answer differs from the undisturbed run with the same seed")
        print("\n\n   Identical, byte for byte, to the undisturbed answer with the same seed.")


async def _print_stream(gateway: StreamGateway, body: dict[str, Any], kill: int | None = None, after: int = 0) -> str:
    """Print the streamed text and return it. ``kill``: process id that is killed after ``after`` pieces of text."""
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
