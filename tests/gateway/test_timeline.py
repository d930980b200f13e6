"""Phases of a reader's wall time: they add up, and each cause of delay has its own phase."""

from __future__ import annotations

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from stream_fabric.events import Phases, Timing
from stream_fabric.stream.frames import Note, encode
from stream_gw.observe.steered import Steered
from stream_gw.observe.timeline import Timestamps, phases

PLAIN = Timestamps(1000, placing=1200, placed=1700, started=2600, first=62_000, arrived=503_000, done=503_050)
TOLD = Timing(waited_us=0, handed_us=1600, taken_us=2400, queue_us=10_000, prefill_us=48_600, decode_us=441_000)


def test_an_ordinary_request_splits_into_its_phases() -> None:
    wall, parts = phases(PLAIN, TOLD, created=True, queued=False)
    assert wall == 502_050
    assert parts == Phases(
        gateway_us=200,
        admission_us=400,
        engine_queue_us=10_000,
        prefill_us=48_600,
        decode_us=441_000,
        fabric_us=800 + 1000,
        residual_us=50,
    )
    assert parts.total_us == wall


@pytest.mark.parametrize(("handed_s", "taken_s"), [(3600, 3600), (-3600, -3600), (3600, 0), (0, 3600), (0, -30)])
def test_a_clock_that_was_just_set_makes_no_phase(handed_s: int, taken_s: int) -> None:
    """Redis, the replica and the gateway differ about the time until they have read it again."""
    told = msgspec.structs.replace(
        TOLD, handed_us=TOLD.handed_us + handed_s * 1_000_000, taken_us=TOLD.taken_us + taken_s * 1_000_000
    )
    wall, parts = phases(PLAIN, told, created=True, queued=False)
    usual = phases(PLAIN, TOLD, created=True, queued=False)
    assert wall == usual[0] and parts.residual_us == usual[1].residual_us
    assert abs(parts.admission_us - usual[1].admission_us) < 1000 and abs(parts.fabric_us - usual[1].fabric_us) < 1000
    queued = msgspec.structs.replace(told, waited_us=90_000, handed_us=told.handed_us + 90_000)
    assert phases(PLAIN, queued, created=True, queued=True)[1].pool_queue_us == 90_000


def test_waiting_for_a_replica_counts_as_queue() -> None:
    told = Timing(90_000, 91_600, 92_400, 0, 1, 1)
    _, parts = phases(PLAIN._replace(arrived=92_500, done=92_500), told, created=True, queued=True)
    assert parts.pool_queue_us == 90_000
    assert parts.admission_us == 400


def test_the_check_of_a_structured_reply_and_its_repairs_are_a_phase_of_their_own() -> None:
    told = msgspec.structs.replace(TOLD, check_us=3_000_000)
    wall, parts = phases(PLAIN._replace(arrived=3_503_000, done=3_503_050), told, created=True, queued=False)
    assert (parts.decode_us, parts.check_us, parts.fabric_us) == (441_000, 3_000_000, 800 + 1000)
    assert parts.total_us == wall and parts.residual_us == 50


def test_an_agent_of_a_release_before_tells_no_check_and_no_steering() -> None:
    for left_out in (1, 2):
        before = msgspec.json.encode([getattr(TOLD, name) for name in TOLD.__struct_fields__][:-left_out])
        assert msgspec.json.decode(before, type=Timing) == TOLD
    newer = msgspec.json.encode([*msgspec.structs.astuple(TOLD), "of a release to come"])
    assert msgspec.json.decode(newer, type=Timing) == TOLD


def seen(*moments: tuple[int, int], broke: int = 0) -> Steered:
    """Inputs whose notes came at the first moment of each pair, and whose answers began at the second."""
    steered = Steered()
    for note, began in moments:
        steered.receive_note(APPLIED, note, early=note < 62_000)
        if broke and note < broke <= began:
            steered.receive_break(broke)
        steered.receive_output(began)
    return steered


APPLIED = encode(Note("input", body=msgspec.Raw(b'{"id":"k","result":"applied"}')))


def test_the_wait_for_the_answer_after_an_input_is_a_phase_of_its_own() -> None:
    told = msgspec.structs.replace(TOLD, decode_us=341_000, steer_us=100_000)
    wall, parts = phases(PLAIN._replace(steered=seen((200_000, 301_000))), told, created=True, queued=False)
    assert (parts.decode_us, parts.steer_us, parts.residual_us) == (341_000, 100_000, 50)
    assert parts.total_us == wall


def test_without_the_producers_timing_the_gateway_tells_the_wait() -> None:
    steered = seen((30_000, 62_000), (200_000, 300_000))
    wall, parts = phases(PLAIN._replace(steered=steered), None, created=True, queued=False)
    assert (parts.prefill_us, parts.steer_us, parts.decode_us) == (27_400, 32_000 + 100_000, 441_000 - 100_000)
    assert parts.total_us == wall
    late = PLAIN._replace(placed=1700, steered=seen((200_000, 300_000)))
    wall, parts = phases(late, None, created=False, queued=False)
    assert (parts.decode_us, parts.steer_us) == (501_300 - 100_000, 100_000) and parts.total_us == wall


def test_the_wait_for_an_answer_ends_where_its_replica_dies() -> None:
    steered = seen((100_000, 140_000), (292_000, 3_900_000), broke=302_000)
    at = PLAIN._replace(broke=302_000, arrived=4_003_000, done=4_003_000, steered=steered)
    told = Timing(0, 3_802_000, 3_803_000, 0, 50_000, 149_000)
    wall, parts = phases(at, told, created=True, queued=False)
    assert (parts.steer_us, parts.recovery_us) == (40_000 + 10_000, 3_500_000)
    assert parts.decode_us == 240_000 - 50_000 + 149_000
    assert parts.total_us == wall and abs(parts.residual_us) < 0.02 * wall


def test_a_slow_reader_counts_as_client_stall() -> None:
    at = PLAIN._replace(done=903_000, stalled_us=600_000, stalled_after_us=400_000)
    wall, parts = phases(at, TOLD, created=True, queued=False)
    assert parts.client_stall_us == 600_000
    assert parts.decode_us == 441_000 - 200_000, "what it slept through while tokens were made"
    assert abs(parts.residual_us) < 0.001 * wall


def test_a_slow_reader_waits_for_no_recovery() -> None:
    at = PLAIN._replace(broke=302_000, arrived=4_003_000, done=4_003_000, stalled_us=2_000_000)
    told = Timing(0, 3_802_000, 3_803_000, 0, 50_000, 149_000)
    wall, parts = phases(at, told, created=True, queued=False)
    assert parts.client_stall_us == 2_000_000
    assert parts.decode_us + parts.recovery_us == pytest.approx(240_000 + 149_000 + 3_500_000 - 2_000_000, rel=0.01)
    assert parts.total_us == wall and abs(parts.residual_us) < 0.02 * wall


def test_a_dead_replica_counts_as_recovery() -> None:
    at = PLAIN._replace(broke=302_000, arrived=4_003_000, done=4_003_000)
    told = Timing(0, 3_802_000, 3_803_000, 0, 50_000, 149_000)
    wall, parts = phases(at, told, created=True, queued=False)
    assert parts.recovery_us == 3_500_000
    assert parts.decode_us == 240_000 + 149_000
    assert abs(parts.residual_us) < 0.02 * wall


def test_each_pause_counts_as_recovery() -> None:
    at = PLAIN._replace(broke=602_000, paused_us=200_000, arrived=4_003_000, done=4_003_000)
    told = Timing(0, 3_802_000, 3_803_000, 0, 50_000, 149_000)
    wall, parts = phases(at, told, created=True, queued=False)
    assert parts.recovery_us == 200_000 + 3_200_000
    assert parts.decode_us == 340_000 + 149_000
    assert abs(parts.residual_us) < 0.02 * wall
    _, left = phases(at, None, created=True, queued=False)
    assert (left.recovery_us, left.decode_us) == (200_000 + 3_401_000, 340_000)


def test_a_replica_that_dies_before_the_first_token_has_its_time_once() -> None:
    at = PLAIN._replace(broke=302_000, first=3_853_000, arrived=4_003_000, done=4_003_000)
    told = Timing(0, 3_802_000, 3_803_000, 0, 50_000, 149_000)
    wall, parts = phases(at, told, created=True, queued=False)
    assert parts.recovery_us == 3_500_000
    assert (parts.prefill_us, parts.decode_us) == (302_000 - 2600 + 50_000, 149_000)
    assert parts.total_us == wall and abs(parts.residual_us) < 0.02 * wall
    _, waited = phases(at._replace(started=252_000), told, created=True, queued=True)
    assert (waited.pool_queue_us, waited.prefill_us) == (252_000 - 1700, 50_000 + 50_000)


def test_a_replica_that_dies_before_it_begins_counts_as_recovery() -> None:
    """Its gateway hears nothing of it: the first frame is the next replica's."""
    at = Timestamps(1000, 1200, 1700, 3_003_000, 3_062_000, 3_503_000, 3_503_050, continued=3_003_000)
    told = Timing(0, 3_001_700, 3_002_700, 10_000, 48_600, 441_000)
    wall, parts = phases(at, told, created=True, queued=False)
    assert (parts.admission_us, parts.recovery_us, parts.fabric_us) == (500, 3_000_000, 1000 + 700)
    assert parts.total_us == wall and parts.residual_us == 50
    wall, left = phases(at, None, created=True, queued=False)
    assert (left.recovery_us, left.fabric_us, left.prefill_us) == (3_001_300, 0, 59_000)
    assert left.total_us == wall
    _, waited = phases(at, told, created=True, queued=True)
    assert (waited.pool_queue_us, waited.recovery_us) == (3_000_000, 0), "most of it is the queue's"


def test_recovery_ends_where_the_next_replica_continues() -> None:
    """The reader leaves, or the stream is cancelled, so no producer tells its times."""
    at = PLAIN._replace(broke=302_000, continued=3_802_000, arrived=4_003_000, done=4_003_000)
    wall, parts = phases(at, None, created=True, queued=False)
    assert (parts.recovery_us, parts.decode_us) == (3_500_000, 240_000 + 201_000)
    assert parts.total_us == wall and parts.residual_us == 0
    wall, parts = phases(at._replace(first=3_853_000), None, created=True, queued=False)
    assert (parts.recovery_us, parts.decode_us) == (3_500_000, 150_000)
    assert parts.prefill_us == 302_000 - 2600 + 51_000
    assert parts.total_us == wall and parts.residual_us == 0
    steered = seen((100_000, 140_000), (3_900_000, 3_950_000), broke=302_000)
    wall, parts = phases(at._replace(steered=steered), None, created=True, queued=False)
    assert (parts.steer_us, parts.decode_us) == (90_000, 240_000 + 201_000 - 90_000)
    assert parts.total_us == wall and parts.residual_us == 0


def test_a_cancelled_stream_uses_the_gateways_timestamps() -> None:
    wall, parts = phases(PLAIN, None, created=True, queued=False)
    assert (parts.gateway_us, parts.admission_us, parts.fabric_us) == (200, 500, 900)
    assert (parts.prefill_us, parts.decode_us) == (59_400, 441_000)
    assert parts.total_us == wall
    _, waiting = phases(Timestamps(1000, 1200, 1700, done=50_000), None, created=True, queued=True)
    assert waiting.pool_queue_us == 48_300
    assert waiting.decode_us == 0


def test_a_refused_request_counts_as_admission() -> None:
    wall, parts = phases(Timestamps(1000, placing=1500, done=9500), None, created=True, queued=False)
    assert parts == Phases(gateway_us=500, admission_us=8000)
    assert wall == 8500


def test_a_resumed_reader_counts_its_gap() -> None:
    at = Timestamps(1000, placing=1100, placed=1500, first=0, arrived=101_500, done=101_500, gap_us=700_000)
    wall, parts = phases(at, TOLD, created=False, queued=False)
    assert wall == 800_500
    assert parts == Phases(gateway_us=500, decode_us=100_000, resume_gap_us=700_000)


_moment = st.integers(0, 10_000_000)


@given(
    st.lists(_moment, min_size=7, max_size=7), st.lists(_moment, min_size=6, max_size=6),
    st.integers(0, 1000), st.integers(0, 1000), _moment, st.booleans(), st.booleans(), st.booleans(),
)  # fmt: skip
def test_phases_always_add_up(
    moments: list[int], told: list[int], stalled: int, after: int, gap: int, tells: bool, created: bool, queued: bool
) -> None:
    """For any clocks: only the residual can be negative, and the sum is the wall time."""
    received, *rest = sorted(moments)
    after = min(after, stalled)
    at = Timestamps(received, *rest, stalled_us=stalled, stalled_after_us=after, gap_us=gap)
    wall, parts = phases(at, Timing(*told) if tells else None, created=created, queued=queued)
    assert parts.total_us == wall == at.done - at.received + gap
    for name in Phases.__struct_fields__[:-1]:
        assert getattr(parts, name) >= 0, name
