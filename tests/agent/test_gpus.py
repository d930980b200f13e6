"""The host's GPUs: NVML where there is a device, and behaviour without one."""

from __future__ import annotations

import logging

import pytest

from inference.agent.observe import gpus
from inference.agent.observe.gpus import Gpu, GpuError, NvmlReader, watched_gpus
from tests.support.waiting import eventually


class Reader:
    """Gives the readings one after another; an empty one is a failure."""

    def __init__(self, *readings: list[Gpu]) -> None:
        self.readings = list(readings)
        self.closed = False

    def read(self) -> list[Gpu]:
        reading = self.readings.pop(0) if len(self.readings) > 1 else self.readings[0]
        if not reading:
            raise GpuError("the driver was unloaded")
        return reading

    def close(self) -> None:
        self.closed = True


def device() -> NvmlReader:
    try:
        return NvmlReader()
    except GpuError as error:
        pytest.skip(f"no GPU here: {error}")


def test_a_device_has_a_number_and_shares_of_time_and_memory() -> None:
    reader = device()
    found = reader.read()
    assert found and [gpu.number for gpu in found] == [str(index) for index in range(len(found))]
    assert all(0 <= gpu.utilization <= 1 and 0 < gpu.memory <= 1 for gpu in found)
    only = NvmlReader(visible="0")
    assert [gpu.number for gpu in only.read()] == ["0"]
    with pytest.raises(GpuError):
        NvmlReader(visible="GPU-00000000-0000-0000-0000-000000000000").read()
    only.close()
    reader.close()


async def test_without_a_driver_there_are_no_gpus_and_it_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    try:
        NvmlReader().close()
    except GpuError:
        with caplog.at_level(logging.INFO):
            async with watched_gpus() as seen:
                assert list(seen()) == []
        assert caplog.text.count("GPU metrics are off") == 1
    else:
        pytest.skip("a GPU is here")


async def test_a_reading_that_fails_shows_no_old_figures_and_is_retried(
    caplog: pytest.LogCaptureFixture, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(gpus, "_READ_EVERY_S", 0.001)
    one, two = [Gpu("0", 0.5, 0.25)], [Gpu("0", 0.75, 0.5)]
    reader = Reader(one, [], [], [], two)
    shown: list[list[Gpu]] = []
    async with watched_gpus(lambda: reader) as seen:

        def look() -> bool:
            if not shown or shown[-1] != list(seen()):
                shown.append(list(seen()))
            return shown[-1] == two

        await eventually(look)
    assert reader.closed
    assert caplog.text.count("the driver was unloaded") == 1
