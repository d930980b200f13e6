"""Makes the engine that an agent's settings ask for."""

from __future__ import annotations

import shlex

import msgspec

from inference.agent.settings import AgentSettings
from inference.engines.openai import OpenAIEngine
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from inference.engines.vllm import VllmEngine
from inference.engines.vllm_flags import VllmOptions
from stream_fabric.ports import Engine


def make_engine(settings: AgentSettings) -> Engine:
    """Make the engine that the settings ask for. Raises ValueError that names the wrong setting."""
    api_key = settings.upstream_api_key.get_secret_value()
    match settings.engine:
        case "sim":
            sim = SimSettings.parse(settings.sim)
            if settings.itl_objective_ms:
                sim = msgspec.structs.replace(sim, itl_objective_ms=settings.itl_objective_ms)
            return SimEngine(sim)
        case "openai":
            url = settings.upstream
            if not url.startswith(("http://", "https://")):
                raise ValueError(
                    f"--upstream (STREAM_GW_UPSTREAM) must be the server's base URL, http:// or https://; got {url!r}"
                )
            steps = settings.upstream_steps if settings.upstream_steps not in ("auto", "off") else ""
            return OpenAIEngine(url.rstrip("/").removesuffix("/v1"), api_key, settings.upstream_slots, steps=steps)
        case "vllm":
            if not settings.model:
                raise ValueError("--model (STREAM_GW_MODEL) is missing: engine vllm needs the model's name or folder")
            return VllmEngine(
                VllmOptions(
                    settings.model,
                    _split_flags(settings.vllm_flags),
                    settings.vllm_python,
                    settings.upstream_slots,
                    api_key,
                    settings.kv_events,
                    settings.vllm_start_s,
                    steps=settings.upstream_steps,
                    itl_objective_s=settings.itl_objective_ms / 1000,
                )
            )


def _split_flags(flags: str) -> tuple[str, ...]:
    try:
        return tuple(shlex.split(flags))
    except ValueError as error:
        raise ValueError(f"--vllm-flags (STREAM_GW_VLLM_FLAGS): {error}; got {flags!r}") from None
