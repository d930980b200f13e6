"""vLLM's KV-cache events over ZeroMQ, counted: what its prefix cache threw out. The one importer of ``zmq``.

vLLM publishes one batch a scheduler step that changed the cache, numbered from 0, and keeps the last 10,000 for replay.
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
"""Media whose removal takes a block out of the prefix cache; a copy in slower memory is another story."""


class _Stored(msgspec.Struct, tag="BlockStored", gc=False):
    block_size: int


class _Removed(msgspec.Struct, tag="BlockRemoved", gc=False):
    block_hashes: list[msgspec.Raw]
    medium: str | None = None
    group_idx: int | None = None
    """Of a model with layers of several kinds, each kind is a group and throws out its own share of a block."""


class _Cleared(msgspec.Struct, tag="AllBlocksCleared", gc=False):
    pass


class _Batch(msgspec.Struct, array_like=True, gc=False):
    ts: float
    events: list[_Stored | _Removed | _Cleared]


class KvLedger:
    """The sum of one vLLM life's batches. Sans I/O."""

    def __init__(self) -> None:
        self.evicted_tokens = 0
        self.clears = 0
        self.next = 0
        """The number of the batch that comes next."""
        self._block_size = 0
        self._decoder = msgspec.msgpack.Decoder(_Batch)

    def receive(self, seq: int, payload: bytes) -> bool:
        """One batch; whether it was its turn. Earlier ones are ignored, and a later one is to come again after what is
        missing."""
        if seq > self.next:
            return False
        if seq == self.next:
            self.next += 1
            self._count(payload)
        return True

    def give_up(self, seq: int) -> None:
        """What comes before ``seq`` cannot be had any more: nothing that was believed of the cache can be."""
        if seq > self.next:
            self.clears += 1
            self.next = seq

    def _count(self, payload: bytes) -> None:
        try:
            batch = self._decoder.decode(payload)
        except msgspec.MsgspecError as error:
            log.warning("KV events of vLLM cannot be read: %s", error)
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
    """The events of one vLLM after another. Its sockets are in a folder of ours alone: neither end has a port to find,
    and nobody else on the machine can read what is asked or make events up."""

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
        return self._evicted_before + self._ledger.evicted_tokens

    @property
    def clears(self) -> int:
        return self._clears_before + self._ledger.clears

    def listen(self) -> str:
        """Begin with the next vLLM; what it must be told as ``--kv-events-config``."""
        self.close()
        self._folder = tempfile.TemporaryDirectory(prefix="stream-gw-kv-")
        events, replay = f"ipc://{self._folder.name}/events", f"ipc://{self._folder.name}/replay"
        self.follow(events, replay)
        about = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": events, "replay_endpoint": replay}
        return msgspec.json.encode(about).decode()

    def follow(self, events: str, replay: str) -> None:
        """Count what is published at ``events``, from the first batch on. vLLM may bind the addresses later."""
        self._events = self._context.socket(zmq.SUB)
        self._events.rcvhwm = KV_BACKLOG_MAX
        self._events.subscribe(b"")
        self._events.connect(events)
        self._task = asyncio.create_task(self._listen(self._events, replay, self._ledger), name="kv-events")
        self._task.add_done_callback(_ended)

    def close(self) -> None:
        """The life that was listened to is over; the counts stay."""
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

    async def _listen(self, events: zmq.asyncio.Socket, replay: str, ledger: KvLedger) -> None:
        while True:
            _, number, payload = await events.recv_multipart()
            seq = int.from_bytes(number, "big")
            if not ledger.receive(seq, payload):
                await self._replay(replay, ledger)
                ledger.give_up(seq)
                ledger.receive(seq, payload)

    async def _replay(self, address: str, ledger: KvLedger) -> None:
        """Ask again for what was lost, and take what there is of it."""
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
                    ledger.give_up(seq)  # vLLM does not hold what came before it either
                    ledger.receive(seq, payload)
        except TimeoutError:
            log.warning("vLLM does not send its KV events from %d again within %g s", missing, KV_REPLAY_S_MAX)
        finally:
            socket.close(linger=0)


def _ended(task: asyncio.Task[None]) -> None:
    if not task.cancelled() and (error := task.exception()) is not None:
        log.error("vLLM's KV events are no longer counted", exc_info=error)
