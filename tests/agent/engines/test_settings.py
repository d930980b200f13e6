"""Settings of engines, as they are written on a command line."""

from __future__ import annotations

import sys
from typing import Any

import pytest

from inference.agent.make_engine import make_engine
from inference.agent.settings import AgentSettings
from inference.engines.openai import OpenAIEngine
from inference.engines.sim.engine import SimEngine
from inference.engines.sim.settings import SimSettings
from inference.engines.vllm import VllmEngine
from stream_fabric.ports import Engine


def test_settings_are_read_and_the_rest_stays() -> None:
    settings = SimSettings.parse(" itl_ms=5, max_num_seqs=8,model=tiny ,")
    assert (settings.itl_ms, settings.max_num_seqs, settings.model) == (5.0, 8, "tiny")
    assert settings.block_size == SimSettings().block_size
    assert SimSettings.parse("") == SimSettings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("itl=20", "max_num_seqs"),
        ("itl_ms", "itl_ms has no value; write itl_ms="),
        ("itl_ms=-1", "itl_ms must be 0 to 60000"),
        ("itl_ms=fast", "itl_ms"),
        ("max_num_seqs=1.5", "max_num_seqs"),
        ("fail_rate=2", "fail_rate must be 0 to 1"),
        ("length_min=9,length_max=8", "length_min"),
        ("itl_ms=nan", "itl_ms"),
    ],
)
def test_a_wrong_setting_is_named_with_what_is_allowed(text: str, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        SimSettings.parse(text)


def made(**given: Any) -> Engine:
    return make_engine(AgentSettings(**given))


def test_make_engine_gives_the_kind_or_says_what_is_wrong() -> None:
    assert isinstance(made(engine="sim", sim="itl_ms=1"), SimEngine)
    assert isinstance(made(engine="openai", upstream="http://127.0.0.1:1/v1/"), OpenAIEngine)
    flags = "--max-num-seqs 3 --override-generation-config '{\"top_k\": 1}'"
    vllm = made(engine="vllm", model="m", vllm_python=sys.executable, vllm_flags=flags)
    assert isinstance(vllm, VllmEngine)
    assert vllm.load().slots == 3
    for wrong, told in (
        ({"engine": "openai", "upstream": "localhost:8000"}, "STREAM_GW_UPSTREAM"),
        ({"engine": "sim", "sim": "itl_mss=1"}, "itl_mss"),
        ({"engine": "vllm"}, "STREAM_GW_MODEL"),
        ({"engine": "vllm", "model": "m", "vllm_flags": "--x 'y"}, "STREAM_GW_VLLM_FLAGS"),
        ({"engine": "vllm", "model": "m", "vllm_python": sys.executable, "vllm_flags": "--port 1"}, "--port"),
    ):
        with pytest.raises(ValueError, match=told):
            made(**wrong)
