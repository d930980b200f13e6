"""Engines behind one port (``stream_fabric.ports.Engine``)."""

from __future__ import annotations

from typing import Literal

from inference.agent.engines.openai import OpenAIEngine
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from stream_fabric.ports import Engine


def make_engine(kind: Literal["sim", "openai"], *, sim: str, upstream: str, api_key: str, slots: int) -> Engine:
    """Raises ValueError that names the wrong setting."""
    if kind == "sim":
        return SimEngine(SimSettings.parse(sim))
    if not upstream.startswith(("http://", "https://")):
        raise ValueError(
            f"--upstream (STREAM_GW_UPSTREAM): the server's base URL, http:// or https://; got {upstream!r}"
        )
    return OpenAIEngine(upstream.rstrip("/").removesuffix("/v1"), api_key, slots)
