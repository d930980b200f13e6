"""Recorded traffic is read as it is published, and what is wrong with it is named with its line."""

from __future__ import annotations

from itertools import pairwise
from pathlib import Path

import pytest

from inference.simulate.traces import FILES, read, traces_folder

LINE = '{"timestamp": 1, "input_length": 2, "output_length": 3}\n'
HEAD = "TIMESTAMP,ContextTokens,GeneratedTokens\n"


def test_a_csv_is_read_by_time_whatever_its_moments_look_like(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_text(
        "\ufeff"
        + HEAD
        + "2023-11-16 18:00:01.5000000,20,0\n2023-11-16 18:00:00,10,5\n2023-11-16T20:00:03+02:00,30,7\n",
        "utf-8",
    )
    found = read(path)
    assert [(r.number, r.at_s, r.prompt_tokens, r.output_tokens) for r in found] == [
        (0, 0.0, 10, 5), (1, 1.5, 20, 1), (2, 3.0, 30, 7)
    ]  # fmt: skip
    assert len({r.session for r in found}) == 3


def test_json_lines_are_read_with_or_without_what_prompts_share(tmp_path: Path) -> None:
    path = tmp_path / "t.jsonl"
    path.write_text(
        '{"timestamp": 1700000003000, "input_length": 1100, "output_length": 3, "hash_ids": [1, 2, 9]}\n\n'
        '{"timestamp": 1700000000000.5, "input_length": 1024, "output_length": 4, "hash_ids": [1, 2], "type": "text"}\n'
        '{"timestamp": 1700000009000, "input_length": 5, "output_length": 4}\n'
    )
    found = read(path)
    path.write_bytes(b"\xef\xbb\xbf" + path.read_bytes().replace(b"\n", b"\r\n"))
    assert read(path) == found, "with a byte order mark and the line ends of Windows"
    assert [(r.at_s, r.prompt_tokens) for r in found] == [(0.0, 1024), (2.9995, 1100), (8.9995, 5)]
    assert found[0].session == found[1].session != found[2].session


@pytest.mark.parametrize(
    ("name", "text", "says"),
    [
        ("t.csv", HEAD + "2023-11-16 18:00:00,1,2\nnoon,1,2\n", ["line 3", "TIMESTAMP is 'noon'; write"]),
        ("t.csv", HEAD + "2023-11-16 18:00:00,many,2\n", ["line 2", "ContextTokens is 'many'; write a whole"]),
        ("t.csv", HEAD + "2023-11-16 18:00:00,5\n", ["line 2", "GeneratedTokens is ''"]),
        ("t.csv", HEAD + "2023-11-16 18:00:00,5,-3\n", ["line 2", "GeneratedTokens is -3 tokens"]),
        ("t.csv", "TIMESTAMP,tokens\n1,2\n", ["line 1", "no column ContextTokens, GeneratedTokens"]),
        ("t.csv", "", ["line 1", "no column TIMESTAMP"]),
        ("t.csv", HEAD, ["no request"]),
        ("t.jsonl", "\n", ["no request"]),
        ("t.jsonl", LINE + '{"timestamp": 1}\n', ["line 2", "missing"]),
        ("t.jsonl", LINE + LINE.replace("2", "-2"), ["line 2", "input_length"]),
        ("t.jsonl", "what\n", ["line 1", "malformed"]),
    ],
)
def test_what_is_wrong_is_named_with_its_line(tmp_path: Path, name: str, text: str, says: list[str]) -> None:
    path = tmp_path / name
    path.write_text(text)
    with pytest.raises(ValueError) as refused:
        read(path)
    assert all(part in str(refused.value) for part in [str(path), *says]), refused.value


def test_what_is_no_text_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "t.csv"
    path.write_bytes(b"\xff\xfe\x00")
    with pytest.raises(ValueError, match="no CSV"):
        read(path)


@pytest.mark.parametrize("name", FILES.values())
def test_the_published_traces_are_read(name: str) -> None:
    path = traces_folder(None) / name
    if not path.is_file():
        pytest.skip(f"no trace at {path}")
    found = read(path)
    assert len(found) > 3000
    assert found[0].at_s == 0.0 and found[-1].at_s > 1000
    assert all(a.at_s <= b.at_s for a, b in pairwise(found))
