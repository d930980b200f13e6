"""Samples of replicas that a gateway keeps for viewers to come."""

from __future__ import annotations

from stream_fabric.limits import OPS_LOAD_EVERY_S, OPS_LOADS_MAX
from stream_fabric.pool.records import EngineLoad, ReplicaInfo
from stream_fabric.stream.ids import ReplicaId
from stream_gw.admin.load_history import SAMPLES_MAX, LoadHistory
from stream_gw.admin.records import LoadSample


def info(name: str, running: int, waiting: int = 0, slots: int = 8) -> ReplicaInfo:
    return ReplicaInfo(ReplicaId(name), "p", "vllm", ("m",), "ready", EngineLoad(running, waiting, slots))


def loads(samples: tuple[LoadSample, ...]) -> list[int]:
    return [sample.load_percent for sample in samples]


def test_a_load_is_kept_every_interval_and_the_oldest_leaves() -> None:
    history = LoadHistory()
    for number in range(3 * SAMPLES_MAX):
        history.sample({"p": [info("a", number % 9)]}, number * OPS_LOAD_EVERY_S)
        history.sample({"p": [info("a", 100)]}, (number + 0.5) * OPS_LOAD_EVERY_S)
    kept = history.of(ReplicaId("a"))
    assert len(kept) == SAMPLES_MAX
    assert loads(kept[-3:]) == [round(100 * (number % 9) / 8) for number in range(3 * SAMPLES_MAX - 3, 3 * SAMPLES_MAX)]


def test_a_replica_that_left_is_forgotten_and_one_that_came_begins_anew() -> None:
    history = LoadHistory()
    history.sample({"p": [info("a", 4)], "q": [info("b", 8)]}, 0.0)
    history.sample({"p": [info("a", 4)]}, 10.0)
    assert (loads(history.of(ReplicaId("a"))), history.of(ReplicaId("b"))) == ([50, 50], ())
    history.sample({"p": [info("b", 0)]}, 20.0)
    assert (history.of(ReplicaId("a")), loads(history.of(ReplicaId("b")))) == ((), [0])


def test_waiting_counts_and_a_replica_without_slots_has_a_load() -> None:
    history = LoadHistory()
    history.sample({"p": [info("a", 8, 8), info("b", 0, 5, slots=0), info("c", 9000, 0, slots=1)]}, 0.0)
    assert [loads(history.of(ReplicaId(name))) for name in "abc"] == [[200], [500], [999]]
    assert [history.of(ReplicaId(name))[0].waiting for name in "abc"] == [8, 5, 0]


def test_the_kv_cache_is_kept_where_the_engine_reports_it() -> None:
    history = LoadHistory()
    for number, load in enumerate(
        (EngineLoad(1, 0, 8), EngineLoad(1, 0, 8, kv_used_ratio=0.256, kv_capacity_tokens=100))
    ):
        history.sample({"p": [ReplicaInfo(ReplicaId("a"), "p", "vllm", ("m",), "ready", load)]}, 10.0 * number)
    assert [sample.kv_used_percent for sample in history.of(ReplicaId("a"))] == [None, 26]


def test_the_number_of_replicas_is_bounded() -> None:
    history = LoadHistory()
    history.sample({"p": [info(str(number), 1) for number in range(OPS_LOADS_MAX + 10)]}, 0.0)
    assert loads(history.of(ReplicaId(str(OPS_LOADS_MAX - 1)))) == [12]
    assert history.of(ReplicaId(str(OPS_LOADS_MAX))) == ()
