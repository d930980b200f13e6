"""Recorded traces as requests, with another start or scaled arrivals."""

from __future__ import annotations

import codecs
import csv
import os
from collections.abc import Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from functools import cached_property
from pathlib import Path
from typing import Annotated

import msgspec

TRACE_BLOCK_TOKENS = 512
"""Prompt tokens that one id of a trace stands for."""
ENGINE_BLOCK_TOKENS = 64
"""Tokens of an engine's KV block."""
HINT_BLOCK_TOKENS = 128
"""Tokens of a hint's block: 512 bytes of prompt at 4 bytes per token."""
_COLUMNS = ("TIMESTAMP", "ContextTokens", "GeneratedTokens")
_TOKENS_MAX = 1 << 24
FILES = {"azure": "azure_conv_2023.csv", "mooncake": "mooncake_synthetic.jsonl"}
RULES = {
    "azure": "the trace names no prefixes and no sessions: every prompt is distinct, every request its own session",
    "mooncake": "a block id is 512 tokens; a request that holds all whole blocks of the last request with which it "
    "shares a beginning belongs to that one's session",
}


@dataclass(frozen=True)
class Request:
    number: int
    at_s: float
    prompt_tokens: int
    output_tokens: int
    ids: tuple[int, ...]
    """One id per 512 tokens of the prompt; the last block may be shorter. Equal ids mean equal prompts up to there."""
    session: str
    tenant: str = "all"
    tier: int = 1
    """Index into ``TIERS`` of placement."""
    said: int = 0
    """Output tokens of earlier producers, for a stream that is continued. ``prompt_tokens`` includes them."""

    @cached_property
    def engine_hashes(self) -> list[int]:
        """Ids of the prompt's complete engine blocks."""
        return _split_ids(self.ids, self.prompt_tokens, ENGINE_BLOCK_TOKENS)

    @cached_property
    def hint_hashes(self) -> list[int]:
        """Ids of the prompt's complete blocks of the gateways' prefix hints."""
        return _split_ids(self.ids, self.prompt_tokens, HINT_BLOCK_TOKENS)


@dataclass(frozen=True)
class Trace:
    name: str
    rule: str
    requests: tuple[Request, ...]


class TraceAbsent(Exception):
    """A trace file is missing. The message says where to get it."""


def _split_ids(ids: Sequence[int], tokens: int, block_tokens: int) -> list[int]:
    """Ids of the prompt's complete blocks of ``block_tokens`` tokens, from its ids of 512-token blocks."""
    parts = TRACE_BLOCK_TOKENS // block_tokens
    return [value * parts + part for value in ids for part in range(parts)][: tokens // block_tokens]


def traces_folder(given: Path | None) -> Path:
    """Return the folder of recorded traces: as given, from ``STREAM_GW_TRACES``, or the default."""
    named = os.environ.get("STREAM_GW_TRACES")
    return given or (Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "traces")


def read(path: Path) -> tuple[Request, ...]:
    """Read a recorded trace, sorted by arrival, from its first request on: Azure's CSV, or Mooncake's JSON lines.

    Raises OSError, and ValueError that names the line.
    """
    found = _mooncake(path) if path.suffix in (".jsonl", ".json") else _azure(path)
    if not found:
        raise ValueError(f"{path}: it has no request")
    return found


def load(name: str, folder: Path) -> Trace:
    """Load a named trace. Raises TraceAbsent when its file is missing."""
    path = folder / FILES[name]
    if not path.is_file():
        raise TraceAbsent(
            f"no trace at {path}; name a folder that holds {' and '.join(FILES.values())} with --folder or "
            "STREAM_GW_TRACES (Azure/AzurePublicDataset publishes one as AzureLLMInferenceTrace_conv, "
            "kvcache-ai/Mooncake the other as synthetic_trace)"
        )
    return Trace(name, RULES[name], _azure(path) if name == "azure" else _mooncake(path))


def _azure(path: Path) -> tuple[Request, ...]:
    """Read a trace in Azure's CSV format."""
    rows: list[tuple[datetime, int, int]] = []
    number = 1
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            absent = [name for name in _COLUMNS if name not in (reader.fieldnames or ())]
            if absent:
                raise ValueError(f"no column {', '.join(absent)}; there are to be {', '.join(_COLUMNS)}")
            for row in reader:
                number = reader.line_num
                rows.append(
                    (
                        _parse_time(row["TIMESTAMP"]),
                        _parse_tokens("ContextTokens", row["ContextTokens"]),
                        _parse_tokens("GeneratedTokens", row["GeneratedTokens"]),
                    )
                )
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: line {number}: {error}") from error
    rows.sort(key=lambda row: row[0])
    return tuple(
        Request(number, (at - rows[0][0]).total_seconds(), tokens, max(made, 1), (), str(number))
        for number, (at, tokens, made) in enumerate(rows)
    )


def _parse_time(text: str | None) -> datetime:
    """Parse a timestamp; without an offset it is UTC."""
    try:
        at = datetime.fromisoformat(text or "")
    except ValueError:
        raise ValueError(f"TIMESTAMP is {text or ''!r}; write 2023-11-16 18:15:46.68") from None
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _parse_tokens(column: str, text: str | None) -> int:
    """Parse a token count. Raises ValueError for impossible ones."""
    try:
        tokens = int(text or "")
    except ValueError:
        raise ValueError(f"{column} is {text or ''!r}; write a whole number of tokens") from None
    if not 0 <= tokens <= _TOKENS_MAX:
        raise ValueError(f"{column} is {tokens} tokens; a request has from 0 to {_TOKENS_MAX:,}")
    return tokens


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
    hash_ids: tuple[int, ...] = ()


def _mooncake(path: Path) -> tuple[Request, ...]:
    """Read a trace in Mooncake's format of JSON lines."""
    lines = []
    for number, text in enumerate(path.read_bytes().removeprefix(codecs.BOM_UTF8).splitlines(), 1):
        if text.strip():
            try:
                lines.append(msgspec.json.decode(text, type=_Line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: line {number}: {error}") from error
    lines.sort(key=lambda line: line.timestamp)
    begin = lines[0].timestamp if lines else 0.0
    sessions = sessions_of([(line.hash_ids, line.input_length) for line in lines])
    return tuple(
        Request(
            number, (line.timestamp - begin) / 1000, line.input_length, max(line.output_length, 1), line.hash_ids, own
        )
        for number, (line, own) in enumerate(zip(lines, sessions, strict=True))
    )


def sessions_of(prompts: Sequence[tuple[Sequence[int], int]]) -> list[str]:
    """Return the session of each prompt, given as (ids, tokens) in order of arrival.

    A prompt continues the session of the last prompt with the same beginning if it contains all its complete blocks.
    """
    last_with: dict[int, int] = {}
    sessions: list[str] = []
    for number, (ids, _) in enumerate(prompts):
        shared = next((k for k in range(len(ids), 0, -1) if ids[k - 1] in last_with), 0)
        session = str(number)
        if shared:
            before = last_with[ids[shared - 1]]
            if shared >= prompts[before][1] // TRACE_BLOCK_TOKENS:
                session = sessions[before]
        sessions.append(session)
        last_with.update(dict.fromkeys(ids, number))
    return sessions


def cut(trace: Trace, count: int, seed: int) -> Trace:
    """Return ``count`` consecutive requests of a trace that repeats. The seed chooses the start."""
    whole = trace.requests
    start = seed * len(whole) // 3 % len(whole)
    round_s = whole[-1].at_s * (1 + 1 / len(whole))
    turned = [*whole[start:], *(replace(r, at_s=r.at_s + round_s) for r in whole[:start])][:count]
    begin_s = turned[0].at_s
    requests = tuple(replace(r, number=n, at_s=r.at_s - begin_s) for n, r in enumerate(turned))
    return replace(trace, requests=requests)


def scaled(trace: Trace, duration_s: float) -> Trace:
    """Return the same arrivals, made faster or slower so that they last ``duration_s``."""
    factor = duration_s / trace.requests[-1].at_s
    return replace(trace, requests=tuple(replace(r, at_s=r.at_s * factor) for r in trace.requests))
