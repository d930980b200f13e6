"""Counts evictions from vLLM's prefix cache by its KV-cache events over ZeroMQ. The only importer of ``zmq``.

vLLM publishes one batch for each scheduler step that changed the cache, numbered from 0, and keeps the last 10,000 for
replay.
"""

from __future__ import annotations

import asyncio
import logging
import tempfile

import msgspec
import zmq
import zmq.asyncio

from stream_fabric.limits import KV_BACKLOG_MAX, KV_REPLAY_S_MAX

log = logging.getLogger(__name__)

_END = (-1).to_bytes(8, "big", signed=True)
_DEVICE = (None, "GPU")
"""Media whose removal evicts a block from the prefix cache; copies in slower memory do not count."""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_size: int


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[msgspec.Raw]
    medium: str | None = None
    group_idx: int | None = None
    """Group of layers. In a model with several kinds of layers each group evicts its own share of a block."""


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


class KvLedger:
    """Counts evicted tokens and cache clears in the event batches of one vLLM process. Sans I/O."""

    def __init__(self) -> None:
        self.evicted_tokens = 0
        self.clears = 0
        self.next = 0
        """Number of the next batch."""
        self._block_size = 0
        self._decoder = msgspec.msgpack.Decoder(_Batch)

    def receive(self, seq: int, payload: bytes) -> bool:
        """Take one batch; ignore earlier ones. False: the batches before it are missing, and it was not taken."""
        if seq > self.next:
            return False
        if seq == self.next:
            self.next += 1
            self._count_evictions(payload)
        return True

    def skip_to(self, seq: int) -> None:
        """Continue at batch ``seq``. The skipped batches are lost, so the cache counts as cleared."""
        if seq > self.next:
            self.clears += 1
            self.next = seq

    def _count_evictions(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("vLLM's KV events cannot be decoded, the cache counts as cleared: error=%s", error)
            self.clears += 1
            return
        for event in batch.events:
            match event:
                case _Stored(block_size=size):
                    self._block_size = size
                case _Removed(block_hashes=hashes, medium=medium, group_idx=group):
                    if medium in _DEVICE and not group:
                        self.evicted_tokens += len(hashes) * self._block_size
                case _Cleared():
                    self.clears += 1


class KvEvents:
    """Counts evictions over all vLLM processes of this agent.

    The sockets are in a private folder: no port is needed, and no other user can read or forge events.
    """

    def __init__(self) -> None:
        self._context = zmq.asyncio.Context.instance()
        self._folder: tempfile.TemporaryDirectory[str] | None = None
        self._events: zmq.asyncio.Socket | None = None
        self._task: asyncio.Task[None] | None = None
        self._ledger = KvLedger()
        self._evicted_before = 0
        self._clears_before = 0

    @property
    def evicted_tokens(self) -> int:
        """Number of tokens that vLLM has evicted from its prefix cache."""
        return self._evicted_before + self._ledger.evicted_tokens

    @property
    def clears(self) -> int:
        """Number of times the whole prefix cache was cleared or events were lost."""
        return self._clears_before + self._ledger.clears

    def listen(self) -> str:
        """Prepare for the next vLLM process. Returns its ``--kv-events-config``."""
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="stream-gw-kv-")
        events, replay = f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay"
        self.follow(events, replay)
        about = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
        return msgspec.json.encode(about).decode()

    def follow(self, events: str, replay: str) -> None:
        """Count the events published at ``events``, from the first batch on. vLLM may bind the addresses later."""
        self._events = self._context.socket(zmq.SUB)
        self._events.rcvhwm = KV_BACKLOG_MAX
        self._events.subscribe(b"")
        self._events.connect(events)
        self._task = asyncio.create_task(self._receive_batches(self._events, replay, self._ledger), name="kv-events")
        self._task.add_done_callback(_log_failure)

    def close(self) -> None:
        """Stop listening; the counts stay."""
        if self._task is not None:
            self._task.cancel()
            self._task = None
        if self._events is not None:
            self._events.close(linger=0)
            self._events = None
        if self._folder is not None:
            self._folder.cleanup()
            self._folder = None
        self._evicted_before, self._clears_before = self.evicted_tokens, self.clears
        self._ledger = KvLedger()

    async def _receive_batches(self, events: zmq.asyncio.Socket, replay: str, ledger: KvLedger) -> None:
        """Receive batches of events until cancelled; a gap is filled by a replay."""
        while True:
            _, number, payload = await events.recv_multipart()
            seq = int.from_bytes(number, "big")
            if not ledger.receive(seq, payload):
                await self._replay(replay, ledger)
                ledger.skip_to(seq)
                ledger.receive(seq, payload)

    async def _replay(self, address: str, ledger: KvLedger) -> None:
        """Request the missing batches from vLLM again, and take those that it still has."""
        missing = ledger.next
        socket = self._context.socket(zmq.DEALER)
        try:
            socket.rcvhwm = KV_BACKLOG_MAX
            socket.connect(address)
            async with asyncio.timeout(KV_REPLAY_S_MAX):
                await socket.send_multipart([b"", missing.to_bytes(8, "big")])
                while True:
                    *_, number, payload = await socket.recv_multipart()
                    if number == _END:
                        return
                    seq = int.from_bytes(number, "big")
                    ledger.skip_to(seq)  # vLLM no longer has the batches before it
                    ledger.receive(seq, payload)
        except TimeoutError:
            log.warning("replay of vLLM's KV events timed out: from=%d timeout_s=%g", missing, KV_REPLAY_S_MAX)
        finally:
            socket.close(linger=0)


def _log_failure(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("vLLM's KV events are no longer counted: error=%s", error, exc_info=error)
