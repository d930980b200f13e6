"""The chat page's QR codes, read by a decoder of others."""

from __future__ import annotations

import json
import shutil
import subprocess

import pytest

from tests.house.tree import ROOT
from tests.support.missing import missing
from tests.support.venvs import venv_with

pytestmark = [pytest.mark.platform, pytest.mark.timeout(480)]  # a first install is slow

RUN_S = 60
MAKE = """
import { qrRows } from "%s";
const texts = JSON.parse(process.argv.at(-1));
console.log(JSON.stringify(texts.map(qrRows)));
"""
READ = """
import json, sys, zxingcpp
texts = []
for rows in json.load(sys.stdin):
    scale, quiet = 3, 4
    wide = [[0] * quiet + row + [0] * quiet for row in rows]
    blank = [[0] * len(wide[0])] * quiet
    lines = [bytes(255 * (1 - dark) for dark in row for _ in range(scale)) * scale for row in [*blank, *wide, *blank]]
    shape = [(len(wide) + 2 * quiet) * scale, len(wide[0]) * scale]
    found = zxingcpp.read_barcodes(memoryview(b"".join(lines)).cast("B", shape=shape))
    texts.append([(each.text, str(each.format)) for each in found])
print(json.dumps(texts))
"""
LENGTHS = (1, 17, 18, 53, 78, 106, 134, 154, 192, 230, 231, 271, 272, 367, 425, 458, 520, 718, 1003, 1465, 1990, 2953)


def read(codes: list[list[list[int]]]) -> list[list[str]]:
    """The texts that the decoder finds in each image of rows of 0 and 1."""
    python = str(venv_with("zxing-cpp==3.1.1"))
    given = json.dumps(codes)
    done = subprocess.run([python, "-c", READ], input=given, capture_output=True, text=True, timeout=RUN_S)
    assert done.returncode == 0, done.stderr
    return [[text for text, _ in found] for found in json.loads(done.stdout)]


def test_a_decoder_reads_every_size() -> None:
    node = shutil.which("node")
    if node is None:
        missing("needs node on PATH")
    texts = ["https://gw.example/watch#stream=resp_1&token=é"]
    texts += ["".join(chr(33 + (at * at + length) % 90) for at in range(length)) for length in LENGTHS]
    program = MAKE % (ROOT / "stream_gw/static/chat/qr.js")
    made = subprocess.run(
        [node, "--input-type=module", "-e", program, "--", json.dumps([*texts, "x" * 2954])],
        capture_output=True, text=True, timeout=RUN_S,
    )  # fmt: skip
    assert made.returncode == 0, made.stderr
    codes = json.loads(made.stdout)
    assert codes.pop() is None, "no code holds so much"
    sizes = [len(rows) for rows in codes[1:]]
    assert sizes[0] == 21 and sizes[-1] == 177 and sizes == sorted(sizes)
    assert read(codes) == [[text] for text in texts]
