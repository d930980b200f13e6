"""The simulator's settings, as they are written on a command line."""

from __future__ import annotations

import pytest

from inference.agent.engines import make_engine
from inference.agent.engines.openai import OpenAIEngine
from inference.agent.engines.sim.engine import SimEngine
from inference.agent.engines.sim.settings import SimSettings


def test_settings_are_read_and_the_rest_stays() -> None:
    settings = SimSettings.parse(" itl_ms=5, max_num_seqs=8,model=tiny ,")
    assert (settings.itl_ms, settings.max_num_seqs, settings.model) == (5.0, 8, "tiny")
    assert settings.block_size == SimSettings().block_size
    assert SimSettings.parse("") == SimSettings()


@pytest.mark.parametrize(
    ("text", "told"),
    [
        ("itl=20", "max_num_seqs"),
        ("itl_ms", "itl_ms"),
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


def test_make_engine_gives_the_kind_or_says_what_is_wrong() -> None:
    sim = make_engine("sim", sim="itl_ms=1", upstream="", api_key="", slots=256)
    assert isinstance(sim, SimEngine)
    assert isinstance(
        make_engine("openai", sim="", upstream="http://127.0.0.1:1/v1/", api_key="", slots=256), OpenAIEngine
    )
    with pytest.raises(ValueError, match="STREAM_GW_UPSTREAM"):
        make_engine("openai", sim="", upstream="localhost:8000", api_key="", slots=256)
    with pytest.raises(ValueError, match="itl_mss"):
        make_engine("sim", sim="itl_mss=1", upstream="", api_key="", slots=256)
