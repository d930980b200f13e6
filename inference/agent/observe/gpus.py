"""Utilization and memory of the host's GPUs, from NVIDIA's management library (NVML)."""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any, NamedTuple, Protocol

log = logging.getLogger(__name__)

_READ_EVERY_S = 5.0


class Gpu(NamedTuple):
    number: str
    utilization: float
    """Share of time in which a kernel ran, 0 to 1."""
    memory: float
    """Share of the memory in use, 0 to 1."""


class GpuReader(Protocol):
    """Reads the GPUs that this process may use. Calls block for milliseconds."""

    def read(self) -> list[Gpu]:
        """Read utilization and memory of each GPU; leave out GPUs without these figures. Raises GpuError."""

    def close(self) -> None: ...


class GpuError(Exception):
    """The GPUs cannot be read; the message says why."""


class NvmlReader:
    """The ``GpuReader`` of NVIDIA's driver. Raises GpuError when the driver is not installed."""

    def __init__(self, visible: str = "") -> None:
        """``visible``: indexes or UUIDs as in CUDA_VISIBLE_DEVICES; empty: all GPUs."""
        import pynvml  # 5,000 lines that only an agent with a metrics port needs

        self._nvml: Any = pynvml
        self._visible = [name.strip() for name in visible.split(",") if name.strip()]
        try:
            pynvml.nvmlInit()
        except pynvml.NVMLError as error:
            raise GpuError(str(error)) from error

    def read(self) -> list[Gpu]:
        nvml = self._nvml
        try:
            names = self._visible or [str(index) for index in range(nvml.nvmlDeviceGetCount())]
            return [gpu for name in names if (gpu := self._read_one(name)) is not None]
        except nvml.NVMLError as error:
            raise GpuError(str(error)) from error

    def _read_one(self, name: str) -> Gpu | None:
        nvml = self._nvml
        by_index = name.isdecimal()
        handle = nvml.nvmlDeviceGetHandleByIndex(int(name)) if by_index else nvml.nvmlDeviceGetHandleByUUID(name)
        try:
            utilization = nvml.nvmlDeviceGetUtilizationRates(handle).gpu
            memory = nvml.nvmlDeviceGetMemoryInfo(handle)
        except nvml.NVMLError_NotSupported:  # a slice of a GPU (MIG) has no utilization
            return None
        return Gpu(
            name if by_index else str(nvml.nvmlDeviceGetIndex(handle)), utilization / 100, memory.used / memory.total
        )

    def close(self) -> None:
        with contextlib.suppress(self._nvml.NVMLError):
            self._nvml.nvmlShutdown()


def open_nvml() -> GpuReader | None:
    """Return the reader of this host, or None when it has no NVIDIA driver, which is logged."""
    try:
        return NvmlReader(os.environ.get("CUDA_VISIBLE_DEVICES", ""))
    except GpuError as error:
        log.info("GPU metrics are off: reason=%s", error)
        return None


@contextlib.asynccontextmanager
async def watched_gpus(
    open_reader: Callable[[], GpuReader | None] = open_nvml,
) -> AsyncIterator[Callable[[], Sequence[Gpu]]]:
    """Read the GPUs every few seconds; yields a function that returns the last reading."""
    reader = await asyncio.to_thread(open_reader)
    if reader is None:
        yield lambda: ()
        return
    task = (readings := _Readings(reader)).start()
    try:
        yield lambda: readings.last
    finally:
        task.cancel()
        await asyncio.wait([task])
        reader.close()


class _Readings:
    """Reads the GPUs every few seconds and keeps the last reading."""

    def __init__(self, reader: GpuReader) -> None:
        self._reader = reader
        self._failed = ""
        self.last: Sequence[Gpu] = ()

    def start(self) -> asyncio.Task[None]:
        return asyncio.create_task(self._run(), name="gpus")

    async def _run(self) -> None:
        while True:
            try:
                self.last, self._failed = await asyncio.to_thread(self._reader.read), ""
            except GpuError as error:
                self.last = ()
                if str(error) != self._failed:  # logged once for each reason
                    self._failed = str(error)
                    log.warning("read of the GPUs failed, retrying: error=%s", error)
            await asyncio.sleep(_READ_EVERY_S)
