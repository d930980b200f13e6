"""Checks of the engine that an agent with this environment would use."""

from __future__ import annotations

import asyncio
import re

import aiohttp

from inference.agent.make_engine import make_engine
from inference.agent.settings import AgentSettings
from inference.engines.sim.settings import SimSettings
from inference.engines.vllm_flags import command_of
from stream_fabric.errors import StreamGwError
from stream_gw.cli.checks.report import Report

_VERSION_S = 120.0
"""vLLM imports its libraries before it prints its version."""
_VERSION_TESTED = (0, 32)


async def check_engine(report: Report, settings: AgentSettings) -> None:
    match settings.engine:
        case "sim":
            try:
                SimSettings.parse(settings.sim)
            except ValueError as error:
                report.missing("usable settings of the simulator", f"correct STREAM_GW_SIM: {error}")
                return
            report.skipped("engine", "set STREAM_GW_ENGINE to openai or vllm; the simulator needs nothing")
        case "openai":
            await _check_upstream(report, settings)
        case "vllm":
            await _check_vllm(report, settings)


async def _check_upstream(report: Report, settings: AgentSettings) -> None:
    try:
        engine = make_engine(settings)
    except ValueError as error:
        report.missing("usable settings of the engine", str(error))
        return
    try:
        models = await engine.start()
    except (StreamGwError, aiohttp.ClientError, OSError) as error:
        remedy = f"{error}; check STREAM_GW_UPSTREAM and STREAM_GW_UPSTREAM_API_KEY"
        report.missing(f"an OpenAI-compatible server at {settings.upstream}", remedy)
    else:
        report.ok(f"OpenAI-compatible server at {settings.upstream} answers", f"serves {', '.join(models)}")
    finally:
        await engine.close()


async def _check_vllm(report: Report, settings: AgentSettings) -> None:
    try:
        command = command_of(settings.vllm_python)
    except ValueError as error:
        report.missing("vLLM", str(error))
        return
    try:
        make_engine(settings)
    except ValueError as error:
        report.missing("usable settings of vLLM", str(error))
    code, out = await _run_version_command(command)
    found = re.search(r"(\d+)\.(\d+)\.\S+", out)
    if code != 0 or found is None:
        last = out.strip().splitlines()[-1:] or ["no output"]
        remedy = "reinstall vLLM, or name another Python with STREAM_GW_VLLM_PYTHON"
        report.missing("a vLLM that starts", remedy, found=f"{' '.join(command)} --version: {last[0][:200]}")
    elif (int(found[1]), int(found[2])) < _VERSION_TESTED:
        remedy = "upgrade vLLM to 0.32 or later: before it, traces hold estimates of queue and prefill times"
        report.missing("a tested version of vLLM", remedy, found=found[0], needed=False)
    else:
        report.ok("vLLM", f"version {found[0]}, {command[0]}")


async def _run_version_command(command: list[str]) -> tuple[int, str]:
    """Run vLLM with ``--version``; return (exit code, output)."""
    process = await asyncio.create_subprocess_exec(
        *command, "--version", stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.STDOUT
    )
    try:
        async with asyncio.timeout(_VERSION_S):
            out, _ = await process.communicate()
    except TimeoutError:
        process.kill()
        await process.wait()
        return 1, f"no answer in {_VERSION_S:g} s"
    assert process.returncode is not None
    return process.returncode, out.decode(errors="replace")
