"""A process dies between the end of a stream and its bill."""

from __future__ import annotations

from typing import Any

import pytest

from stream_fabric.events import AttemptTrace
from stream_fabric.limits import BILL_LATE_S
from stream_fabric.recovery.late_bills import LateBills
from tests.sim.hosts import AgentHost
from tests.sim.loop import Process
from tests.sim.test_planted_bugs import nothing
from tests.sim.test_takeovers import Stage
from tests.sim.witness import Violation


def staged(seed: int, planted: Any = ()) -> Stage:
    """The only replica stands still; who ends its stream is killed, and the replica takes the stream off its list."""
    stage = Stage(1, seed=seed, planted=planted)
    stage.ask(0.3, max_tokens=200)
    w, frozen = stage.w, list[AgentHost]()

    def freeze() -> None:
        frozen.append(stage.producer())
        w.chaos.hang(frozen[0], 30.0)

    def ran(script: str, process: Process) -> None:
        if script == "fence" and not any(host.process is process for host in w.agents):
            w.chaos.kill(next(host for host in w.hosts if host.process is process))
            w.loop.thaw(frozen[0].process)

    w.ran = ran  # type: ignore[method-assign]
    stage.at(1.0, freeze)
    return stage


@pytest.mark.parametrize("seed", range(4))
def test_another_process_writes_the_bill(seed: int) -> None:
    stage = staged(seed)
    state, end = stage.run()
    assert (end.status, state.epoch.n) == ("failed", 2)
    attempts = [event for event in stage.w.events.events if isinstance(event, AttemptTrace)]
    (bill,) = [event for event in attempts if event.billed]
    assert (bill.output_tokens, bill.replica) == (state.usage.output, "") and bill.output_tokens > 0
    told = stage.w.loop.now - stage.w.witness.ended_at[bill.stream]
    assert told > BILL_LATE_S


def test_without_it_the_stream_has_no_bill() -> None:
    with pytest.raises(Violation, match=r"5: .* its bills are"):
        staged(0, [(LateBills, "run", nothing)]).run()
