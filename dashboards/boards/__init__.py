"""Grafana boards, one module each. A test runs every query."""

from __future__ import annotations

from pathlib import Path

from dashboards.boards.autoscaling import AUTOSCALING
from dashboards.boards.fleet import FLEET
from dashboards.boards.objectives import SLO
from dashboards.boards.pool import POOL
from dashboards.boards.streams import STREAMS
from dashboards.boards.telemetry import TELEMETRY
from dashboards.boards.tenants import TENANTS
from dashboards.build import render

FOLDER = Path(__file__).parents[1] / "grafana"
BOARDS = (FLEET, POOL, TENANTS, STREAMS, AUTOSCALING, TELEMETRY, SLO)


def files() -> dict[str, str]:
    """Contents by file name."""
    return {f"{board.uid}.json": render(board) for board in BOARDS}
