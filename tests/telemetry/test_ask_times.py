"""Points in time and cohorts, as operators write them."""

from __future__ import annotations

import pytest

from stream_fabric.errors import BadRequest
from telemetry.ask.times import cohort_of, moment_us, window

NOW_US = 1_795_168_800_000_000


@pytest.mark.parametrize(
    ("text", "before_us"),
    [("now", 0), ("90s", 90_000_000), (" 1.5h ", 5_400_000_000), ("3d", 259_200_000_000), ("999999999999d", NOW_US)],
)
def test_an_age_is_taken_from_now_and_ends_at_the_epoch(text: str, before_us: int) -> None:
    assert moment_us(text, NOW_US) == NOW_US - before_us


@pytest.mark.parametrize("text", ["", "soon", "-5m", "1e9s", "9" * 400 + "d", "1." + "9" * 400 + "s", "9" * 400])
def test_a_time_that_cannot_be_meant_is_refused_with_how_to_write_one(text: str) -> None:
    with pytest.raises(BadRequest, match="is no time; write 15m"):
        moment_us(text, NOW_US)
    with pytest.raises(BadRequest):
        cohort_of(f"until={text or 'never'}", NOW_US)


@pytest.mark.parametrize("text", ["1969-12-31T23:59:59Z", "9999-12-31T23:59:59Z", "0001-01-01T00:00:00+14:00"])
def test_a_year_that_no_event_has_is_refused(text: str) -> None:
    with pytest.raises(BadRequest, match="outside the supported years"):
        moment_us(text, NOW_US)


def test_a_window_must_not_end_before_it_begins() -> None:
    with pytest.raises(BadRequest, match="ends before it begins"):
        window({"since": "1h", "until": "2h"}, NOW_US, "1h")
