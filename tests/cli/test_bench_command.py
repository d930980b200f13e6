"""``stream-gw bench`` against servers with known times and known faults, on real sockets."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest
from aiohttp import web

from stream_gw.cli.main import main
from tests.agent.engines.upstream import play, server
from tests.cli.bench_target import CHAT, DONE, USAGE, after_probe, measured, piece, third, timed
from tests.gateway.processes import run_cli


async def test_the_figures_are_those_of_the_server(tmp_path: Path) -> None:
    async with server({CHAT: timed(0.2, 0.05, 9)}) as url:
        load = ("--concurrency", "3", "--duration", "2", "--profile", "batch", "--usd-output", "1000000")
        code, found = await measured(tmp_path, url, *load)
    (stage,) = found["stages"]
    assert code == 0 and stage["failed"] == 0 and stage["requests"] == stage["completed"] >= 9
    assert (stage["prompt_tokens"], stage["output_tokens"]) == (7 * stage["requests"], 18 * stage["requests"])
    assert 0.2 <= stage["ttft"]["p50_s"] < 0.35
    assert 0.045 < stage["gap"]["p50_s"] < 0.075 and stage["gap"]["count"] == 8 * stage["requests"]
    assert stage["itl"]["p50_s"] == pytest.approx(0.4 / 17, rel=0.3), "two tokens a piece"
    assert 0.6 <= stage["e2e"]["p50_s"] < 1.0
    at_once = stage["requests_per_s"] * stage["e2e"]["mean_s"]
    assert at_once == pytest.approx(3, rel=0.35), "Little's law"
    assert stage["usd_per_session"] == pytest.approx(18)
    assert sum(one["began"] for one in found["bins"]) == stage["requests"] == len(found["requests"])
    assert sum(one["pieces"] for one in found["bins"]) == 9 * stage["requests"]
    assert not found["target"]["is_gateway"]


async def test_an_open_load_does_not_wait_for_a_slow_server(tmp_path: Path) -> None:
    async with server({CHAT: timed(1.5, 0.0, 1)}) as url:
        _, found = await measured(tmp_path, url, "--rate", "20", "--duration", "1")
    assert found["stages"][0]["requests"] > 8
    began = [one["began_s"] for one in found["requests"]]
    assert max(began) < 1.2, "all began before the first answer"


async def test_failures_are_told_by_their_kind_and_fail_the_run(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    asked = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        if asked > 2:  # the first two are the probe
            match asked % 3:
                case 0:
                    body = {"error": {"code": "pool_full", "message": "<b>come again</b>"}}
                    return web.json_response(body, status=503)
                case 1:
                    return await play(piece("a"), cut=True)(request)
        return await play(piece("a"), USAGE % 1, DONE)(request)

    async with server({CHAT: serve}) as url:
        code, found = await measured(tmp_path, url, "--concurrency", "1", "--requests", "9", "--duration", "20")
    (stage,) = found["stages"]
    assert code == 1 and (stage["requests"], stage["failed"]) == (9, 6)
    assert stage["errors"] == {"503 pool_full": 3, "connection lost": 3}
    assert "3 x 503 pool_full: 503: <b>come again</b>" in capsys.readouterr().out
    page = (tmp_path / "out.html").read_text()
    assert "<b>come" not in page and "&lt;b&gt;come again" in page


async def test_a_server_cannot_write_to_the_terminal(tmp_path: Path) -> None:
    hostile = "\x1b]0;owned\x07\x1b[2J\x9b31m\r\u202e"

    async def refuse(request: web.Request) -> web.Response:
        return web.json_response({"error": {"code": "c", "message": f"no {hostile}"}}, status=500)

    async with server({CHAT: refuse}) as url:
        done = await asyncio.to_thread(run_cli, "bench", url, "--model", f"m{hostile}", "--duration", "1")
    assert done.returncode == 1
    assert "no \\u001b]0;owned\\u0007\\u001b[2J\\u009b31m\\u000d\\u202e" in done.stderr
    assert all(sign.isprintable() or sign == "\n" for sign in done.stdout + done.stderr)


@pytest.mark.parametrize(
    "body", [b'{"detail":"Not Found"}', b'["no"]', b'"no"', b'{"error":"no"}', b'{"error":{"message":"\xff"}}', b""]
)
async def test_a_refusal_of_any_form_is_one_failed_request(tmp_path: Path, body: bytes) -> None:
    code, found = await third(tmp_path, play(body, status=404))
    assert (code, found["stages"][0]["errors"]) == (1, {"404": 1})
    assert found["requests"][0]["message"] == f"404: {body.decode('utf-8', 'replace')}"


async def test_a_closed_load_does_not_flood_a_server_that_fails(tmp_path: Path) -> None:
    async with server({CHAT: after_probe(play(status=429))}) as url:
        code, found = await measured(tmp_path, url, "--concurrency", "4", "--duration", "1")
    assert code == 1 and 4 < found["stages"][0]["errors"]["429"] <= 16, "a reader waits after a failure"


FINISH = b'data: {"choices":[{"index":0,"delta":{},"finish_reason":"stop"}]}\r\n\r\n'


@pytest.mark.parametrize(
    ("body", "errors"),
    [
        ([piece("a"), FINISH], {}),
        ([piece("a"), DONE], {}),
        ([DONE], {}),
        ([piece("a"), piece("b")], {"connection lost": 1}),
        ([b"<html>log in</html>"], {"bad answer": 1}),
        ([], {"bad answer": 1}),
    ],
)
async def test_an_answer_is_whole_with_its_end_alone(tmp_path: Path, body: list[bytes], errors: dict[str, int]) -> None:
    code, found = await third(tmp_path, play(*body))
    assert (code, found["stages"][0]["errors"]) == (bool(errors), errors)


async def test_a_failure_in_the_ramp_fails_the_run(tmp_path: Path) -> None:
    asked = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await timed(0.0, 0.0, 2)(request) if asked != 3 else web.Response(status=500)

    async with server({CHAT: serve}) as url:
        code, found = await measured(tmp_path, url, "--concurrency", "1", "--ramp", "0.3", "--duration", "0.3")
    assert (code, found["stages"][0]["failed"]) == (1, 0)


async def test_a_report_keeps_no_key(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    flags = ("--key=sk-secret-1", "--concurrency", "1", "--requests", "1")
    async with server({CHAT: timed(0.0, 0.0, 2)}) as url:
        monkeypatch.setattr("sys.argv", ["stream-gw", "bench", url, *flags])
        _, found = await measured(tmp_path, url, *flags)
    assert "--key=KEY" in found["command"]
    assert not any("sk-secret" in out.read_text() for out in tmp_path.iterdir())


async def test_an_answer_that_does_not_come_is_a_timeout(tmp_path: Path) -> None:
    asked = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal asked
        asked += 1
        return await timed(0.0 if asked <= 2 else 60.0, 0.0, 1)(request)

    async with server({CHAT: serve}) as url:
        flags = ("--concurrency", "2", "--requests", "2", "--duration", "10", "--timeout", "0.3")
        code, found = await measured(tmp_path, url, *flags)
    assert (code, found["stages"][0]["errors"]) == (1, {"timeout": 2})


async def test_the_pauses_of_a_slow_reader_are_not_the_server_s_time(tmp_path: Path) -> None:
    async with server({CHAT: timed(0.0, 0.0, 6)}) as url:
        flags = ("--concurrency", "1", "--requests", "1", "--slow", "1", "--timeout", "1")
        code, found = await measured(tmp_path, url, *flags)
    assert (code, found["disturbances"]["slow_completed"]) == (0, 1)
    assert found["requests"][0]["duration_s"] > 1.5, "seven events with their pauses"


async def test_the_connection_of_a_slow_reader_serves_no_other_request(tmp_path: Path) -> None:
    """Its server takes it for idle, and may close it, while the reader is still reading."""
    used: list[object] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        used.append(request.transport)
        return await timed(0.0, 0.0, 2)(request)

    async with server({CHAT: serve}) as url:
        flags = ("--concurrency", "1", "--requests", "2", "--slow", "1")
        assert (await measured(tmp_path, url, *flags))[0] == 0
    first, second = used[-2:]
    assert first is not second


async def test_a_cancel_closes_the_connection_to_a_server_without_cancels(tmp_path: Path) -> None:
    left = 0

    async def serve(request: web.Request) -> web.StreamResponse:
        nonlocal left
        try:
            return await timed(0.0, 0.02, 200)(request)
        except (asyncio.CancelledError, ConnectionError):
            left += 1
            raise

    async with server({CHAT: serve}) as url:
        flags = ("--concurrency", "2", "--requests", "4", "--cancel", "1", "--cancel-at", "3", "--duration", "20")
        code, found = await measured(tmp_path, url, "--profile", "batch", *flags)
        async with asyncio.timeout(10):
            while left < 4:
                await asyncio.sleep(0.01)
    seen = found["disturbances"]
    assert (code, seen["cancelled"], seen["named_cancels"]) == (0, 4, 0)
    assert all(one["pieces"] == 3 for one in found["requests"])


async def test_a_system_without_linux_calls_is_measured_from_too(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*limits: Any) -> None:
        raise ValueError("current limit exceeds maximum limit")

    monkeypatch.delattr("os.sched_getaffinity")
    monkeypatch.setattr("resource.setrlimit", refuse)
    assert (await third(tmp_path, play(piece("a"), DONE)))[0] == 0


async def test_a_run_without_a_counted_request_fails(tmp_path: Path) -> None:
    async with server({CHAT: timed(0.0, 0.0, 2)}) as url:
        code, found = await measured(tmp_path, url, "--rate", "0.001", "--duration", "0.1")
    assert (code, found["requests"]) == (1, [])


async def test_the_same_seed_sends_the_same_prompts(tmp_path: Path) -> None:
    digests = []
    for seed in ("5", "5", "6"):
        async with server({CHAT: timed(0.0, 0.0, 3)}) as url:
            flags = ("--concurrency", "1", "--requests", "9", "--duration", "20", "--seed", seed)
            digests.append((await measured(tmp_path, url, *flags))[1]["prompts_sha256"])
    assert digests[0] == digests[1] != digests[2]


async def test_a_chat_repeats_the_answers_without_their_reasoning(tmp_path: Path) -> None:
    asked: list[Any] = []

    async def serve(request: web.Request) -> web.StreamResponse:
        asked.append((await request.json())["messages"])
        thought = b'data: {"choices":[{"index":0,"delta":{"reasoning_content":"hm "}}]}\n\n'
        return await play(thought, piece("yes"), USAGE % 2, DONE)(request)

    async with server({CHAT: serve}) as url:
        code, found = await measured(tmp_path, url, "--concurrency", "1", "--requests", "2", "--duration", "20")
    assert (code, [one["pieces"] for one in found["requests"]]) == (0, [2, 2])
    assert [message["content"] for message in asked[-1] if message["role"] == "assistant"] == ["yes"]


async def test_a_trace_is_replayed_with_its_lengths(tmp_path: Path) -> None:
    trace = tmp_path / "t.jsonl"
    begin_ms = 1_700_000_000_000
    lines = [
        {"timestamp": begin_ms + 1000 * n, "input_length": 600, "output_length": 4 + n, "hash_ids": [1]}
        for n in range(4)
    ]
    trace.write_text("\n".join(map(json.dumps, lines)))
    async with server({CHAT: timed(0.0, 0.0, 1000)}) as url:
        code, found = await measured(tmp_path, url, "--trace", str(trace), "--speed", "10")
    assert code == 0 and [one["pieces"] for one in found["requests"]] == [4, 5, 6, 7]
    assert [round(one["began_s"], 1) for one in found["requests"]] == pytest.approx([0, 0.1, 0.2, 0.3], abs=0.11)


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--rate", "1", "--concurrency", "2"], "the load is open or closed"),
        (["--cut", "0.7", "--slow", "0.4"], "their sum is above 1"),
        (["--rate", "0"], "must be a number above 0"),
        (["--duration", "soon"], "must be a time such as 30s"),
        (["--duration", "0"], "must be a time above 0"),
        (["--timeout", "0s"], "must be a time above 0"),
        (["--requests", "-1"], "must be a whole number"),
        (["--trace", "t.csv", "--duration", "1m"], "--requests ends it early"),
        (["--trace", "t.csv", "--ramp", "0"], "--requests ends it early"),
        (["--trace", "t.csv", "--profile", "chat"], "the trace has its own lengths"),
        (["--prompts", "p.jsonl", "--profile", "rag"], "the file has its own lengths"),
        (["--concurrency", "0"], "whole numbers from 1"),
        (["--cut", "2"], "a share from 0 to 1"),
    ],
)
def test_wrong_flags_say_what_is_allowed(flags: list[str], told: str, capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit) as ended:
        main(["bench", "http://127.0.0.1:1", *flags])
    assert ended.value.code == 2
    assert told in capsys.readouterr().err


@pytest.mark.parametrize("flag", ["--json", "--html"])
@pytest.mark.parametrize("out", [".", "absent/out"])
async def test_a_report_that_cannot_be_written_is_told_before_the_run(tmp_path: Path, flag: str, out: str) -> None:
    asked: list[Any] = []
    async with server({CHAT: play(DONE, seen=asked)}) as url:
        with pytest.raises((ValueError, OSError)):
            await measured(tmp_path, url, "--requests", "1", flag, str(tmp_path / out))
    assert not asked


async def test_a_named_model_needs_no_list_of_models(tmp_path: Path) -> None:
    async def absent(request: web.Request) -> web.StreamResponse:
        return web.Response(status=404)

    async with server({CHAT: timed(0.0, 0.0, 2)}, {"/v1/models": absent}) as url:
        flags = ("--concurrency", "1", "--requests", "1")
        code, found = await measured(tmp_path, url, "--model", "mine", *flags)
        assert (code, found["target"]["model"]) == (0, "mine")
        with pytest.raises(ValueError, match="404; give the server's base URL, or --model if it lists no models"):
            await measured(tmp_path, url, *flags)


def test_a_server_that_is_not_there_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["bench", "http://127.0.0.1:1", "--duration", "1"]) == 1
    assert "is the server running" in capsys.readouterr().err


async def test_an_error_in_the_first_answer_is_told_before_the_run(tmp_path: Path) -> None:
    error = b'data: {"error":{"code":"no_replica","message":"no replica is up"}}\n\n'
    async with server({CHAT: play(error)}) as url:
        with pytest.raises(ValueError, match="does not answer: no replica is up"):
            await measured(tmp_path, url)


async def test_a_server_that_cannot_resume_is_not_cut(tmp_path: Path) -> None:
    async with server({CHAT: timed(0.0, 0.0, 3)}) as url:
        for flags in (["--cut", "0.5"], ["--transport", "ws"]):
            with pytest.raises(ValueError, match="no stream-gw gateway"):
                await measured(tmp_path, url, *flags)
