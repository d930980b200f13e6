"""The traces as requests, and what is done to them: another start, scaled arrivals."""

from __future__ import annotations

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
"""What one id of a trace stands for."""
ENGINE_BLOCK_TOKENS = 64
"""The replicas' KV block."""
HINT_BLOCK_TOKENS = 128
"""A block of hints is 512 bytes of prompt; a token is taken for 4."""
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
    """Of each 512 tokens of the prompt, the last maybe fewer; equal ids are equal prompts up to there."""
    session: str
    tenant: str = "all"

    @cached_property
    def engine_hashes(self) -> list[int]:
        return _spread(self.ids, self.prompt_tokens, ENGINE_BLOCK_TOKENS)

    @cached_property
    def hint_hashes(self) -> list[int]:
        return _spread(self.ids, self.prompt_tokens, HINT_BLOCK_TOKENS)


@dataclass(frozen=True)
class Trace:
    name: str
    rule: str
    requests: tuple[Request, ...]


class TraceAbsent(Exception):
    """Carries what to do about it."""


def _spread(ids: Sequence[int], tokens: int, block_tokens: int) -> list[int]:
    """The ids of whole smaller blocks."""
    parts = TRACE_BLOCK_TOKENS // block_tokens
    return [value * parts + part for value in ids for part in range(parts)][: tokens // block_tokens]


def traces_folder(given: Path | None) -> Path:
    named = os.environ.get("STREAM_GW_TRACES")
    return given or (Path(named) if named else Path(__file__).resolve().parents[3] / "shared" / "traces")


def read(path: Path) -> tuple[Request, ...]:
    """A recorded trace, by time of arrival: CSV as Azure publishes it, or JSON lines as Mooncake does. Raises OSError,
    and ValueError that names the line."""
    found = _mooncake(path) if path.suffix in (".jsonl", ".json") else _azure(path)
    if not found:
        raise ValueError(f"{path}: it has no request")
    return found


def load(name: str, folder: Path) -> Trace:
    path = folder / FILES[name]
    if not path.is_file():
        raise TraceAbsent(
            f"no trace at {path}; name a folder that holds {' and '.join(FILES.values())} with --folder or "
            "STREAM_GW_TRACES (Azure/AzurePublicDataset publishes one as AzureLLMInferenceTrace_conv, "
            "kvcache-ai/Mooncake the other as synthetic_trace)"
        )
    return Trace(name, RULES[name], _azure(path) if name == "azure" else _mooncake(path))


def _azure(path: Path) -> tuple[Request, ...]:
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
                rows.append((_moment(row["TIMESTAMP"]), _tokens(row["ContextTokens"]), _tokens(row["GeneratedTokens"])))
    except (UnicodeDecodeError, csv.Error) as error:
        raise ValueError(f"{path} is no CSV: {error}") from error
    except ValueError as error:
        raise ValueError(f"{path}: line {number}: {error}") from error
    rows.sort(key=lambda row: row[0])
    return tuple(
        Request(number, (at - rows[0][0]).total_seconds(), tokens, max(made, 1), (), str(number))
        for number, (at, tokens, made) in enumerate(rows)
    )


def _moment(text: str | None) -> datetime:
    """One without an offset is taken for UTC."""
    at = datetime.fromisoformat(text or "")
    return at if at.tzinfo else at.replace(tzinfo=UTC)


def _tokens(text: str | None) -> int:
    """Refuses what no request has."""
    tokens = int(text or "")
    if not 0 <= tokens <= _TOKENS_MAX:
        raise ValueError(f"{tokens} tokens; a request has from 0 to {_TOKENS_MAX:,}")
    return tokens


class _Line(msgspec.Struct):
    timestamp: Annotated[float, msgspec.Meta(ge=0)]
    """Milliseconds."""
    input_length: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
    output_length: Annotated[int, msgspec.Meta(ge=0, le=_TOKENS_MAX)]
    hash_ids: tuple[int, ...] = ()


def _mooncake(path: Path) -> tuple[Request, ...]:
    lines = []
    for number, text in enumerate(path.read_bytes().splitlines(), 1):
        if text.strip():
            try:
                lines.append(msgspec.json.decode(text, type=_Line))
            except (msgspec.MsgspecError, UnicodeDecodeError) as error:
                raise ValueError(f"{path}: line {number}: {error}") from error
    lines.sort(key=lambda line: line.timestamp)
    sessions = sessions_of([(line.hash_ids, line.input_length) for line in lines])
    return tuple(
        Request(number, line.timestamp / 1000, line.input_length, max(line.output_length, 1), line.hash_ids, session)
        for number, (line, session) in enumerate(zip(lines, sessions, strict=True))
    )


def sessions_of(prompts: Sequence[tuple[Sequence[int], int]]) -> list[str]:
    """Of (ids, tokens) in order of arrival: a prompt that holds all whole blocks of the last one with which it shares a
    beginning belongs to that one's session."""
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
    """``count`` requests in a row; each seed has another start, and the trace goes round."""
    whole = trace.requests
    start = seed * len(whole) // 3 % len(whole)
    round_s = whole[-1].at_s * (1 + 1 / len(whole))
    turned = [*whole[start:], *(replace(r, at_s=r.at_s + round_s) for r in whole[:start])][:count]
    begin_s = turned[0].at_s
    requests = tuple(replace(r, number=n, at_s=r.at_s - begin_s) for n, r in enumerate(turned))
    return replace(trace, requests=requests)


def scaled(trace: Trace, duration_s: float) -> Trace:
    """The same arrivals, so much faster or slower that they take so long."""
    factor = duration_s / trace.requests[-1].at_s
    return replace(trace, requests=tuple(replace(r, at_s=r.at_s * factor) for r in trace.requests))
