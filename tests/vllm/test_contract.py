"""The engines' contract suite on the real vLLM, by its plug-in and by HTTP: tests that do not need the simulator."""

from __future__ import annotations

from collections.abc import AsyncIterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import pytest_asyncio

from inference.engines.openai import OpenAIEngine
from inference.engines.sim.engine import SimEngine
from inference.engines.vllm import VllmEngine
from tests.agent.engines import test_contract as contract

pytestmark = [pytest.mark.vllm, pytest.mark.timeout(600), pytest.mark.asyncio(loop_scope="session")]

test_one_block_one_end = contract.test_an_answer_has_one_text_block_one_choice_end_and_one_terminal
test_completions = contract.test_completions_stream_text_too
test_the_same_request = contract.test_the_same_request_gets_the_same_text_and_another_seed_another
test_choices = contract.test_choices_open_in_order_and_end_each
test_a_stop_string = contract.test_a_stop_string_ends_the_answer_before_it_and_is_told
test_a_tool_call = contract.test_a_tool_call_streams_its_arguments
test_logprobs = contract.test_logprobs_are_aligned_to_the_tokens
test_a_schema = contract.test_a_schema_gets_an_object_that_fits
test_side_by_side = contract.test_streams_side_by_side_do_not_mix
test_after_abort = contract.test_after_abort_the_sink_hears_nothing_and_the_blocks_are_free
test_abort_of_the_unknown = contract.test_abort_of_the_unknown_and_the_ended_is_ignored
test_abort_from_within_the_sink = contract.test_abort_from_within_the_sink_leaves_the_engine_serving
test_load = contract.test_load_tells_what_runs
test_a_prompt_note = contract.test_a_prompt_note_comes_before_the_output
# Not here: reasoning (a template's switch turns it on, test_engine.py), an end by itself (this model knows none), and
# close (the session's engine is closed once, by its fixture, which looks at the same)


class Replica:
    """The figures that the suite reads from the simulator, read from vLLM."""

    def __init__(self, engine: VllmEngine) -> None:
        self._engine = engine

    @property
    def idle(self) -> bool:
        load = self._engine.load()
        return load.running == load.waiting == 0

    @property
    def blocks(self) -> Any:
        return SimpleNamespace(used=self._engine.load().kv_used_ratio)


@pytest_asyncio.fixture(loop_scope="session", params=["by the plug-in", "by HTTP"])
async def setup(engine: VllmEngine, request: pytest.FixtureRequest) -> AsyncIterator[contract.Setup]:
    sim = cast(SimEngine, SimpleNamespace(replica=Replica(engine)))
    if request.param == "by the plug-in":
        yield contract.Setup(engine, sim)
    else:
        assert engine.url is not None
        by_http = OpenAIEngine(engine.url)
        await by_http.start()
        yield contract.Setup(by_http, sim)
        await by_http.close()
