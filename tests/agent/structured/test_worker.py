"""Checks of replies: what fits, what does not, and what a hostile schema can do."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import signal
import sys
import time
from typing import Any

import pytest

from inference.agent.structured.checker import ReplyChecker, open_checker
from inference.agent.structured.worker import Replies
from stream_fabric.limits import CHECK_REASON_CHARS, CHECK_S_MAX, SCHEMA_BYTES_MAX, SCHEMAS_KEPT
from stream_fabric.stream.frames import Check
from tests.gateway.processes import alive
from tests.support.waiting import eventually

PERSON = {
    "type": "object",
    "properties": {
        "name": {"type": "string"},
        "age": {"type": "integer", "minimum": 0},
        "a/b": {"type": "array", "items": {"$ref": "#/$defs/city"}},
    },
    "required": ["name"],
    "additionalProperties": False,
    "$defs": {"city": {"type": "string", "pattern": "^[A-Z]"}},
}


def check(schema: Any, reply: str) -> Check:
    return Replies().check(json.dumps(schema).encode(), reply.encode())


@pytest.mark.parametrize(
    ("reply", "result", "path", "words"),
    [
        ('{"name":"x","age":3,"a/b":["Rome"]}', "valid", "", ""),
        ('  {"name":"x"}\n', "valid", "", ""),
        ('{"name":"x","age":-1}', "invalid", "/age", "less than the minimum"),
        ('{"name":"x","a/b":["Rome","rome"]}', "invalid", "/a~1b/1", "does not match"),
        ("{}", "invalid", "", "required property"),
        ('{"name":"x","y":1}', "invalid", "", "Additional properties"),
        ("", "invalid", "", "not JSON"),
        ('{"name":"x"', "invalid", "", "not JSON"),
        ('{"name":"x"} thanks', "invalid", "", "not JSON"),
        ('```json\n{"name":"x"}\n```', "invalid", "", "not JSON"),
        ('{"name":NaN}', "invalid", "", "not JSON"),
        ("[" * 100_000 + "]" * 100_000, "unchecked", "", "too deep"),
    ],
)
def test_a_reply(reply: str, result: str, path: str, words: str) -> None:
    found = check(PERSON, reply)
    assert (found.result, found.path) == (result, path), found
    assert words in found.reason
    assert len(found.reason) <= CHECK_REASON_CHARS + 1


@pytest.mark.parametrize(
    ("schema", "words"),
    [
        ({"$ref": "http://127.0.0.1:9/schema.json"}, "cannot be checked"),
        ({"$ref": "file:///etc/passwd"}, "cannot be checked"),
        ({"$schema": "https://example.org/own"}, "cannot be checked"),
        ({"type": "nonsense"}, "cannot be checked"),
        ({"pattern": "^(?!x)y"}, "cannot be checked"),
        ({"pattern": "("}, "cannot be checked"),
        ([1], "cannot be checked"),
        ({"enum": ["x" * SCHEMA_BYTES_MAX]}, "the limit is"),
    ],
    ids=lambda value: str(value)[:30],
)
def test_a_schema_that_cannot_be_checked_is_no_mismatch(schema: Any, words: str) -> None:
    found = check(schema, '"yes"')
    assert found.result == "unchecked" and words in found.reason
    assert "passwd" not in found.reason or "root" not in found.reason


def test_patterns_take_linear_time() -> None:
    began = time.perf_counter()
    assert check({"pattern": "^(a+)+$"}, json.dumps("a" * 50_000 + "!")).result == "invalid"
    assert time.perf_counter() - began < 1


def test_compiled_schemas_are_bounded() -> None:
    replies = Replies()
    for number in range(SCHEMAS_KEPT * 2):
        assert replies.check(json.dumps({"const": number}).encode(), str(number).encode()).result == "valid"
    assert len(replies._compiled) == SCHEMAS_KEPT


def doubling(depth: int) -> bytes:
    """A small schema whose check takes 2 ** depth steps."""
    defs: dict[str, Any] = {f"d{depth}": {"type": "string"}}
    for number in range(depth):
        defs[f"d{number}"] = {"anyOf": [{"$ref": f"#/$defs/d{number + 1}"}] * 2}
    return json.dumps({"$ref": "#/$defs/d0", "$defs": defs}).encode()


async def test_the_child_checks_and_its_failure_costs_no_other_reply() -> None:
    results: list[str] = []
    schema = json.dumps(PERSON).encode()
    async with open_checker(results.append) as checker:
        assert (await checker.check(schema, '{"name":"é"}', "t")).result == "valid"
        big = json.dumps({"name": "x" * (4 << 20)})
        assert (await checker.check(schema, big, "t")).result == "valid", "larger than a pipe holds"
        child = checker._child
        assert child is not None
        child.kill()
        await child.wait()
        found = await checker.check(schema, "{}", "t")
        assert found.result == "invalid", "it is started again"
        assert checker._child is not None and checker._child.pid != child.pid
        pid = checker._child.pid
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


@pytest.mark.timeout(60)
async def test_a_schema_that_takes_too_long_is_cut_and_not_tried_again() -> None:
    loop = asyncio.get_running_loop()
    slow = doubling(60)
    async with open_checker(lambda result: None) as checker:
        assert (await checker.check(b"true", "1", "t")).result == "valid"
        began = loop.time()
        first, other = await asyncio.gather(
            checker.check(slow, "5", "t"), checker.check(b'{"type":"integer"}', "5", "t")
        )
        assert first.result == "unchecked" and f"longer than {CHECK_S_MAX:g} s" in first.reason
        assert other.result == "valid", "the next reply gets a new process"
        assert loop.time() - began < CHECK_S_MAX + 10
        began = loop.time()
        assert (await checker.check(slow, "6", "t")).result == "unchecked"
        assert loop.time() - began < 0.1


@pytest.mark.timeout(60)
async def test_slow_schemas_of_a_tenant_cost_no_other_its_check() -> None:
    """Three at once were enough: each reply of another tenant waited 5 s, and was not checked then."""
    async with open_checker(lambda result: None) as checker:
        assert (await checker.check(b"true", "1", "t")).result == "valid"
        async with asyncio.TaskGroup() as tasks:
            slow = [tasks.create_task(checker.check(doubling(60 + number), "5", "t")) for number in range(4)]
            await asyncio.sleep(0)
            assert (await checker.check(b"true", "1", "other")).result == "valid"
            assert sum(task.done() for task in slow) <= 1
            for task in slow:
                task.cancel()
    assert not checker._askers


async def test_a_caller_that_leaves_spoils_no_other_answer() -> None:
    async with open_checker(lambda result: None) as checker:
        assert (await checker.check(b"true", "1", "t")).result == "valid"
        left = asyncio.create_task(checker.check(doubling(60), "5", "t"))
        await asyncio.sleep(0.05)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
        assert (await checker.check(b'{"type":"string"}', "5", "t")).result == "invalid"


async def test_a_child_that_was_killed_last_has_ended_too() -> None:
    async with open_checker(lambda result: None) as checker:
        assert (await checker.check(b"true", "1", "t")).result == "valid"
        assert checker._child is not None
        pid = checker._child.pid
        left = asyncio.create_task(checker.check(doubling(60), "5", "t"))
        await asyncio.sleep(0.05)
        left.cancel()
        with pytest.raises(asyncio.CancelledError):
            await left
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)


async def test_a_child_ends_with_an_agent_that_is_killed_while_it_checks() -> None:
    code = f"""
import asyncio
from inference.agent.structured.checker import ReplyChecker
from stream_fabric.stream.frames import Check

async def main():
    checker = ReplyChecker(lambda result: None)
    await checker.check(b"true", "5", "t")
    print(checker._child.pid, flush=True)
    await checker.check({doubling(60)!r}, "5", "t")

asyncio.run(main())
"""
    agent = await asyncio.create_subprocess_exec(sys.executable, "-c", code, stdout=asyncio.subprocess.PIPE)
    assert agent.stdout is not None
    child = int(await agent.stdout.readline())

    def cpu_ticks() -> int:
        with open(f"/proc/{child}/stat") as file:
            return int(file.read().rpartition(")")[2].split()[11])

    await eventually(lambda: cpu_ticks() > 5, what="the check to begin")
    agent.kill()
    await agent.wait()
    try:
        await eventually(lambda: not alive(child), what="the checking process to end with its agent")
    finally:
        with contextlib.suppress(ProcessLookupError):
            os.kill(child, signal.SIGKILL)


async def test_without_replies_there_is_no_process() -> None:
    checker = ReplyChecker(lambda result: None)
    assert checker._child is None
    await checker.close()
