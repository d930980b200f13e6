"""Engines behind one port (``stream_fabric.ports.Engine``)."""

from __future__ import annotations

import shlex

from inference.agent.engines.openai import OpenAIEngine
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings
from inference.agent.engines.vllm import VllmEngine, VllmOptions
from inference.agent.settings import AgentSettings
from stream_fabric.ports import Engine


def make_engine(settings: AgentSettings) -> Engine:
    """Raises ValueError that names the wrong setting."""
    api_key = settings.upstream_api_key.get_secret_value()
    match settings.engine:
        case "sim":
            return SimEngine(SimSettings.parse(settings.sim))
        case "openai":
            url = settings.upstream
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"--upstream (STREAM_GW_UPSTREAM): the server's base URL, http:// or https://; got {url!r}"
                )
            return OpenAIEngine(url.rstrip("/").removesuffix("/v1"), api_key, settings.upstream_slots)
        case "vllm":
            if not settings.model:
                raise ValueError("--model (STREAM_GW_MODEL): engine vllm needs the model's name or folder")
            return VllmEngine(
                VllmOptions(
                    settings.model,
                    _words(settings.vllm_flags),
                    settings.vllm_python,
                    settings.upstream_slots,
                    api_key,
                    settings.kv_events,
                    settings.vllm_start_s,
                )
            )


def _words(flags: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise ValueError(f"--vllm-flags (STREAM_GW_VLLM_FLAGS): {error}; got {flags!r}") from None
