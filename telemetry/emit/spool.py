"""Events on disk, for the time that they cannot be delivered.

A process has a folder of its own under the host's spool folder, and a lock on it that dies with the process. Segments
lie in it: files that are only appended to, each record framed by its length and a checksum. Records are in lanes: those
that must not be dropped, and the rest, which makes room for them. A segment is removed once a transport has
acknowledged all of it, never before; it is never changed, so a process killed between the two sends it again, to be
known by its events' ids. What a killed process leaves, another of the same host takes over. A killed process tears at
most the record that it was writing, which nobody was told is safe: it is cut off.

The lane that must not be dropped also survives the loss of power. Blocking calls; one thread at a time.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import re
import secrets
import shutil
import struct
import tempfile
import time
from collections import Counter, deque
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from zlib import crc32

import msgspec

from stream_fabric.limits import EVENTS_BATCH_BYTES_MAX, EVENTS_BATCH_MAX
from telemetry.transport import Record

log = logging.getLogger(__name__)

_MAGIC = b"sgspool1"
_FRAME = struct.Struct("<II")
_KEPT, _REST = "kept", "rest"
_LOCK = "lock"
_UNBORN_S = 60.0
"""A folder that for so long has not become a process's own was left by one killed meanwhile."""
_NAME = re.compile(rf"(\d{{15}})-\d{{8}}\.({_KEPT}|{_REST})")
_FULL = (errno.ENOSPC, errno.EDQUOT)

_encoder = msgspec.msgpack.Encoder()
_decoder = msgspec.msgpack.Decoder(Record)


def frame(record: Record) -> bytes:
    payload = _encoder.encode(record)
    return _FRAME.pack(len(payload), crc32(payload)) + payload


class Damaged(Exception):
    """A segment holds what nobody has written. ``records``: those before the damage."""

    def __init__(self, message: str, records: list[Record]) -> None:
        super().__init__(message)
        self.records = records


def unframe(data: bytes) -> list[Record]:
    """A segment's records, without a torn last one. Raises Damaged."""
    records: list[Record] = []
    if not data.startswith(_MAGIC):
        if _MAGIC.startswith(data):
            return records
        raise Damaged("it does not begin as a segment does", records)
    at, end = len(_MAGIC), len(data)
    while at + _FRAME.size <= end:
        length, checksum = _FRAME.unpack_from(data, at)
        stop = at + _FRAME.size + length
        if stop > end:
            break
        payload = data[at + _FRAME.size : stop]
        try:
            if crc32(payload) != checksum:
                raise Damaged(f"the checksum is wrong at byte {at}", records)
            records.append(_decoder.decode(payload))
        except msgspec.MsgspecError as error:
            raise Damaged(f"no record at byte {at}: {error}", records) from error
        at = stop
    return records


@dataclass(eq=False)
class Segment:
    path: Path
    lane: str
    bytes: int
    born: float
    """Unix time."""
    count: int = 0


@dataclass
class Spooled:
    """What has become of records given to the spool."""

    spooled: Counter[str] = field(default_factory=Counter)
    """By kind."""
    evicted: Counter[str] = field(default_factory=Counter)
    """By kind: older ones, dropped to make room for those that must not be."""
    refused: list[Record] = field(default_factory=list)
    """There is no room."""
    failed: list[Record] = field(default_factory=list)
    """The disk does not take them now."""
    error: str = ""


@dataclass
class _Adopted:
    lock: int
    left: int
    """Segments."""


class _Lane:
    """The segments of one lane, and the one that is being written."""

    def __init__(self) -> None:
        self.sealed: deque[Segment] = deque()
        self.open: Segment | None = None
        self.fd = -1

    def seal(self) -> None:
        if self.open is not None:
            os.close(self.fd)
            self.sealed.append(self.open)
            self.open = None


class Spool:
    """Raises ValueError where ``root`` cannot be written."""

    def __init__(self, root: Path, bytes_max: int, *, now: Callable[[], float] = time.time) -> None:
        self._root = root
        self.bytes_max = bytes_max
        self._now = now
        self._lanes = {_KEPT: _Lane(), _REST: _Lane()}
        self._held: set[Segment] = set()
        self._adopted: dict[Path, _Adopted] = {}
        self._number = 0
        self.bytes = 0
        try:
            root.mkdir(0o700, parents=True, exist_ok=True)
            self._folder, self._lock = self._make()
        except OSError as error:
            raise ValueError(
                f"the spool folder {root} cannot be written: {error.strerror}; see STREAM_GW_EVENTS_SPOOL"
            ) from error

    def _make(self) -> tuple[Path, int]:
        # Locked before it has its name, so that nobody takes it for a dead process's
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
        lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = self._root / f"{os.getpid()}-{secrets.token_hex(4)}"
        os.rename(new, folder)
        return folder, lock

    # --- in ------------------------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> Spooled:
        """Keep records; those of ``spooled`` survive this process."""
        told = Spooled()
        for lane, kept in ((_KEPT, True), (_REST, False)):
            batch: list[Record] = []
            framed = bytearray()
            for record in records:
                if record.kept is not kept:
                    continue
                data = frame(record)
                if batch and (len(framed) + len(data) > EVENTS_BATCH_BYTES_MAX or len(batch) == EVENTS_BATCH_MAX):
                    self._put(lane, batch, framed, told)
                    batch, framed = [], bytearray()
                batch.append(record)
                framed += data
            if batch:
                self._put(lane, batch, framed, told)
        return told

    def _put(self, lane: str, batch: list[Record], framed: bytearray, told: Spooled) -> None:
        kept = lane == _KEPT
        if not self._room(len(framed), kept, told):
            told.refused += batch
            return
        try:
            try:
                self._append(self._lanes[lane], lane, framed, len(batch))
            except OSError as error:
                if not kept or error.errno not in _FULL or not self._evict(told):
                    raise
                self._append(self._lanes[lane], lane, framed, len(batch))
        except OSError as error:
            told.failed += batch
            told.error = f"{error.strerror}: {self._folder}"
        else:
            told.spooled.update(record.kind for record in batch)

    def hold(self, records: Sequence[Record]) -> tuple[list[Segment], Spooled]:
        """Keep a copy of records that are on their way, in segments that ``next`` does not give until ``release``."""
        for lane in self._lanes.values():
            lane.seal()
        before = {segment for lane in self._lanes.values() for segment in lane.sealed}
        told = self.put(records)
        held: list[Segment] = []
        for lane in self._lanes.values():
            lane.seal()
            while lane.sealed and lane.sealed[-1] not in before:
                held.append(lane.sealed.pop())
        self._held.update(held)
        return held, told

    def release(self, segments: Sequence[Segment]) -> None:
        """They were not delivered: let ``next`` give them again, first."""
        for segment in reversed(segments):
            self._held.discard(segment)
            self._lanes[segment.lane].sealed.appendleft(segment)

    def _room(self, size: int, kept: bool, told: Spooled) -> bool:
        while self.bytes + size > self.bytes_max:
            if not kept or not self._evict(told):
                return False
        return True

    def _evict(self, told: Spooled) -> bool:
        """Drop the oldest segment that may be dropped."""
        rest = self._lanes[_REST]
        if not rest.sealed:
            rest.seal()
        if not rest.sealed:
            return False
        segment = rest.sealed.popleft()
        told.evicted.update(record.kind for record in self._read(segment))
        self._remove(segment)
        return True

    def _append(self, lane: _Lane, name: str, framed: bytearray, count: int) -> None:
        if lane.open is not None and (
            lane.open.bytes + len(framed) > EVENTS_BATCH_BYTES_MAX or lane.open.count + count > EVENTS_BATCH_MAX
        ):
            lane.seal()
        if lane.open is None:
            self._number += 1
            born = self._now()
            path = self._folder / f"{int(born * 1000):015d}-{self._number:08d}.{name}"
            lane.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            lane.open = Segment(path, name, 0, born)
            framed = bytearray(_MAGIC) + framed
            if name == _KEPT:
                self._sync_folder()
        segment = lane.open
        try:
            _write(lane.fd, framed)
            if name == _KEPT:
                os.fdatasync(lane.fd)
        except OSError:
            # Nothing comes after half a record: the segment ends here
            with contextlib.suppress(OSError):
                os.ftruncate(lane.fd, segment.bytes)
            lane.seal()
            if not segment.bytes:
                lane.sealed.remove(segment)
                segment.path.unlink(missing_ok=True)
            raise
        segment.bytes += len(framed)
        segment.count += count
        self.bytes += len(framed)

    def _sync_folder(self) -> None:
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # --- out -----------------------------------------------------------------------------------------------

    def next(self) -> tuple[Segment, list[Record]] | None:
        """The oldest segment and its records; it stays until ``done``, and out of the way until ``release``."""
        while True:
            lanes = [lane for lane in self._lanes.values() if lane.sealed]
            if not lanes:
                for lane in self._lanes.values():
                    lane.seal()
                lanes = [lane for lane in self._lanes.values() if lane.sealed]
                if not lanes:
                    return None
            segment = min(lanes, key=lambda lane: lane.sealed[0].born).sealed.popleft()
            records = self._read(segment)
            if records:
                self._held.add(segment)
                return segment, records
            self._remove(segment)

    def done(self, segments: Sequence[Segment]) -> None:
        """They have been delivered."""
        for segment in segments:
            self._held.discard(segment)
            self._remove(segment)

    @property
    def empty(self) -> bool:
        """Nothing is left for ``next``."""
        return not any(lane.sealed or lane.open for lane in self._lanes.values())

    def oldest(self) -> float | None:
        """Unix time at which the oldest segment was begun."""
        born = [segment.born for segment in self._held]
        for lane in self._lanes.values():
            born += [lane.sealed[0].born] if lane.sealed else [lane.open.born] if lane.open else []
        return min(born, default=None)

    def _read(self, segment: Segment) -> list[Record]:
        try:
            return unframe(segment.path.read_bytes())
        except Damaged as damage:
            # What is sound goes its way; the file is put aside for somebody to look at
            aside = self._root / f"damaged-{segment.path.parent.name}-{segment.path.name}"
            log.error("a spool segment is damaged: %s; its first %d events are sent, the file is now %s",
                      damage, len(damage.records), aside)  # fmt: skip
            shutil.copyfile(segment.path, aside)
            return damage.records

    def _remove(self, segment: Segment) -> None:
        self.bytes -= segment.bytes
        segment.path.unlink(missing_ok=True)
        adopted = self._adopted.get(segment.path.parent)
        if adopted is not None:
            adopted.left -= 1
            if not adopted.left:
                del self._adopted[segment.path.parent]
                _leave(segment.path.parent, adopted.lock)

    # --- others' -------------------------------------------------------------------------------------------

    def adopt(self) -> int:
        """Take over the folders of this host's processes that are dead; return how many segments they left."""
        found = 0
        for folder in sorted(self._root.iterdir()):
            if folder == self._folder or folder in self._adopted or not folder.is_dir():
                continue
            lock = self._take(folder)
            if lock is None:
                continue
            segments = [segment for path in folder.iterdir() if (segment := _segment(path)) is not None]
            if not segments:
                _leave(folder, lock)
                continue
            self._adopted[folder] = _Adopted(lock, len(segments))
            for segment in segments:
                self.bytes += segment.bytes
                self._lanes[segment.lane].sealed.append(segment)
            found += len(segments)
        if found:
            for lane in self._lanes.values():
                lane.sealed = deque(sorted(lane.sealed, key=lambda segment: segment.born))
        return found

    def _take(self, folder: Path) -> int | None:
        """The lock on a folder, unless its process lives."""
        try:
            if folder.name.startswith(".new-") and time.time() - folder.stat().st_mtime < _UNBORN_S:
                return None
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another may have taken, emptied and removed it between the two calls
            if os.fstat(lock).st_ino == os.stat(folder / _LOCK).st_ino:
                return lock
        except OSError:
            pass
        os.close(lock)
        return None

    def close(self) -> None:
        """What is not delivered stays for whoever comes next on this host."""
        for lane in self._lanes.values():
            lane.seal()
        for adopted in self._adopted.values():
            os.close(adopted.lock)
        _leave(self._folder, self._lock)


def _segment(path: Path) -> Segment | None:
    named = _NAME.fullmatch(path.name)
    if named is None:
        return None
    return Segment(path, named[2], path.stat().st_size, int(named[1]) / 1000)


def _leave(folder: Path, lock: int) -> None:
    """Remove a folder if nothing is in it, and let go of it."""
    if len(os.listdir(folder)) <= 1:
        with contextlib.suppress(OSError):
            (folder / _LOCK).unlink()
            folder.rmdir()
    os.close(lock)


def _write(fd: int, data: bytearray) -> None:
    view = memoryview(data)
    while view:
        view = view[os.write(fd, view) :]
