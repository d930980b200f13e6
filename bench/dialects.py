"""CPU of encoding one token for one SSE reader, by dialect, as ratios to ``openai.chat`` in the same run.

    python -m bench.dialects [--bound 1.3]

Rounds of the dialects alternate, and the least of each counts. Exit code 1: a dialect costs more than the bound.
"""

from __future__ import annotations

import argparse
import sys
import time

from bench.harness import table
from stream_fabric.stream.frames import Open, encode, encode_text
from stream_fabric.stream.ids import StreamId
from stream_gw.dialects import DIALECTS, encoder_for
from stream_gw.dialects.facts import StreamFacts
from stream_gw.dialects.requests import Kind

_STREAM = StreamId("resp_" + "0" * 32)
_TOKENS = 2000
_ROUNDS = 60


def round_ns(dialect: str) -> float:
    """Encode each token as the hub hands it over, alone; return nanoseconds of CPU a token."""
    kind: Kind = "completions" if dialect == "openai.completions" else "chat"
    encoder = encoder_for(dialect, StreamFacts(_STREAM, 1_763_712_000, "sim-small", kind))
    encoder.sse([encode(Open(0, 0, "text"))], 1, 1)
    lines = [[encode_text(0, f" token{number}")] for number in range(_TOKENS)]
    began = time.thread_time_ns()
    for seq, line in enumerate(lines, 2):
        encoder.sse(line, 1, seq)
    return (time.thread_time_ns() - began) / _TOKENS


def main(argv: list[str] | None = None) -> int:
    parser = argparse.ArgumentParser(prog="python -m bench.dialects", description=__doc__)
    parser.add_argument("--bound", type=float, default=1.3, help="largest ratio to openai.chat (default 1.3)")
    bound: float = parser.parse_args(argv).bound
    least = dict.fromkeys(DIALECTS, float("inf"))
    for _ in range(_ROUNDS):
        for dialect in DIALECTS:
            least[dialect] = min(least[dialect], round_ns(dialect))
    ratios = {dialect: taken / least["openai.chat"] for dialect, taken in least.items()}
    rows = [[dialect, f"{taken:.0f} ns", f"{ratios[dialect]:.2f}"] for dialect, taken in least.items()]
    print(table(["dialect", "CPU a token", "of openai.chat"], rows))
    return int(max(ratios.values()) > bound)


if __name__ == "__main__":
    sys.exit(main())
