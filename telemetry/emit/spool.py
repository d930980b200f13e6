"""The disk spool: events that cannot be delivered now. Blocking calls; one thread at a time.

A process has a folder of its own under the host's spool folder, with a file lock that ends with the process. The folder
holds segments: append-only files of records, each framed by its length and a checksum. Records are in two lanes:
billing events, and other events, which make room for them. A segment is removed when the transport has acknowledged all
of it. A process killed between the two sends it again; readers know the copies by their events' ids. Another process of
the same host takes over the segments of a dead one. A killed process tears at most the record that it was writing. That
record was not reported as safe, and it is cut off.

The lane of billing events also survives a power failure. A SQLite file would replace framing and locks, but eviction
would then cost deletes and a vacuum under a full disk, where removing a segment is one unlink.
"""

from __future__ import annotations

import contextlib
import errno
import fcntl
import logging
import os
import shutil
import tempfile
from collections import Counter, deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path

from stream_fabric.limits import EVENTS_BATCH_BYTES_MAX, EVENTS_BATCH_MAX
from stream_fabric.ports import Clock, Random
from telemetry.emit.segments import (
    KEPT,
    MAGIC,
    OTHER,
    Damaged,
    Lane,
    Segment,
    decode_segment,
    encode_record,
    segment_at,
    write_all,
)
from telemetry.emit.transport import Record

log = logging.getLogger(__name__)

_LOCK = "lock"
_STARTING_S = 60.0
"""Age after which a folder that was not named yet belongs to a dead process, in seconds."""
_FULL = (errno.ENOSPC, errno.EDQUOT)


@dataclass
class Spooled:
    """Outcome of records given to the spool."""

    spooled: Counter[str] = field(default_factory=Counter)
    """By kind."""
    evicted: Counter[str] = field(default_factory=Counter)
    """Older events by kind, dropped to make room for billing events."""
    refused: list[Record] = field(default_factory=list)
    """Records for which there is no room."""
    failed: list[Record] = field(default_factory=list)
    """Records that the disk does not take now."""
    error: str = ""


@dataclass
class _Adopted:
    """A dead process's folder that this process took over."""

    lock: int
    left: int
    """Remaining segments."""


class Spool:
    """The spool of this process, and those adopted from dead processes. ``clock`` is the host's: file times use it.

    Raises ValueError when ``root`` cannot be written.
    """

    def __init__(self, root: Path, bytes_max: int, clock: Clock, random: Random) -> None:
        self._root = root
        self.bytes_max = bytes_max
        self._clock = clock
        self._random = random
        self._lanes = {KEPT: Lane(), OTHER: Lane()}
        self._held: set[Segment] = set()
        self._adopted: dict[Path, _Adopted] = {}
        self._number = 0
        self.bytes = 0
        try:
            root.mkdir(0o700, parents=True, exist_ok=True)
            self._folder, self._lock = self._make_folder()
        except OSError as error:
            raise ValueError(
                f"the spool folder {root} cannot be written: {error.strerror}; see STREAM_GW_EVENTS_SPOOL"
            ) from error

    def _make_folder(self) -> tuple[Path, int]:
        """Make a locked folder for this process, and return it with the lock's file descriptor."""
        # Locked before it gets its name, so that no process takes it for a dead one's
        new = Path(tempfile.mkdtemp(prefix=".new-", dir=self._root))
        lock = os.open(new / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        folder = self._root / f"{os.getpid()}-{self._random.token_hex(4)}"
        os.rename(new, folder)
        return folder, lock

    def _now_s(self) -> float:
        return self._clock.now_us() / 1e6

    @property
    def bill_bytes(self) -> int:
        """Bytes of billing events, which nothing evicts."""
        lane = self._lanes[KEPT]
        held = (segment for segment in self._held if segment.lane == KEPT)
        opened = (lane.open,) if lane.open is not None else ()
        return sum(segment.bytes for segment in (*lane.sealed, *opened, *held))

    # --- in ------------------------------------------------------------------------------------------------

    def put(self, records: Sequence[Record]) -> Spooled:
        """Write records. Those counted in ``spooled`` survive this process."""
        outcome = Spooled()
        for lane, kept in ((KEPT, True), (OTHER, False)):
            batch: list[Record] = []
            framed = bytearray()
            for record in records:
                if record.kept is not kept:
                    continue
                data = encode_record(record)
                if batch and (len(framed) + len(data) > EVENTS_BATCH_BYTES_MAX or len(batch) == EVENTS_BATCH_MAX):
                    self._put_batch(lane, batch, framed, outcome)
                    batch, framed = [], bytearray()
                batch.append(record)
                framed += data
            if batch:
                self._put_batch(lane, batch, framed, outcome)
        return outcome

    def _put_batch(self, lane: str, batch: list[Record], framed: bytearray, outcome: Spooled) -> None:
        """Write one batch to its lane, and add the result to ``outcome``."""
        kept = lane == KEPT
        try:
            if not self._make_room(len(framed), kept, outcome):
                outcome.refused += batch
                return
            try:
                self._append(self._lanes[lane], lane, framed, len(batch))
            except OSError as error:
                if not kept or error.errno not in _FULL or not self._evict(outcome):
                    raise
                self._append(self._lanes[lane], lane, framed, len(batch))
        except OSError as error:
            outcome.failed += batch
            outcome.error = f"{error.strerror}: {self._folder}"
        else:
            outcome.spooled.update(record.kind for record in batch)

    def hold(self, records: Sequence[Record]) -> tuple[list[Segment], Spooled]:
        """Write a copy of unacknowledged records, in segments that ``next`` skips until ``release``."""
        for lane in self._lanes.values():
            lane.seal()
        before = {segment for lane in self._lanes.values() for segment in lane.sealed}
        outcome = self.put(records)
        held: list[Segment] = []
        for lane in self._lanes.values():
            lane.seal()
            while lane.sealed and lane.sealed[-1] not in before:
                held.append(lane.sealed.pop())
        self._held.update(held)
        return held, outcome

    def release(self, segments: Sequence[Segment]) -> None:
        """Put back segments that were not delivered: ``next`` returns them again, first."""
        for segment in reversed(segments):
            self._held.discard(segment)
            self._lanes[segment.lane].sealed.appendleft(segment)

    def _make_room(self, size: int, kept: bool, outcome: Spooled) -> bool:
        """Return True if ``size`` bytes fit. Other events are evicted for billing events."""
        while self.bytes + size > self.bytes_max:
            if not kept or not self._evict(outcome):
                return False
        return True

    def _evict(self, outcome: Spooled) -> bool:
        """Drop the oldest segment of events other than billing. False: there is none. Raises OSError."""
        rest = self._lanes[OTHER]
        if not rest.sealed:
            rest.seal()
        if not rest.sealed:
            return False
        segment = rest.sealed.popleft()
        try:
            records = decode_segment(segment.path.read_bytes())
        except Damaged as damage:
            records = damage.records
        except OSError:
            rest.sealed.append(segment)
            raise
        outcome.evicted.update(record.kind for record in records)
        self._remove(segment)
        return True

    def _append(self, lane: Lane, name: str, framed: bytearray, count: int) -> None:
        """Append a batch to the lane's open segment, or to a new one. Raises OSError and leaves no half record."""
        if lane.open is not None and (
            lane.open.bytes + len(framed) > EVENTS_BATCH_BYTES_MAX or lane.open.count + count > EVENTS_BATCH_MAX
        ):
            lane.seal()
        if lane.open is None:
            self._number += 1
            born = self._now_s()
            path = self._folder / f"{int(born * 1000):015d}-{self._number:08d}.{name}"
            lane.fd = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_APPEND, 0o600)
            lane.open = Segment(path, name, 0, born)
            framed = bytearray(MAGIC) + framed
            if name == KEPT:
                self._sync_folder()
        segment = lane.open
        try:
            write_all(lane.fd, framed)
            if name == KEPT:
                os.fdatasync(lane.fd)
        except OSError:
            # Nothing may follow half a record: the segment ends here
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
        """Flush the folder's entries to disk, so that a new file survives a power failure."""
        fd = os.open(self._folder, os.O_RDONLY)
        try:
            os.fsync(fd)
        finally:
            os.close(fd)

    # --- out -----------------------------------------------------------------------------------------------

    def next(self) -> tuple[Segment, list[Record]] | None:
        """Return the oldest segment and its records.

        The segment stays on disk until ``done``; ``next`` skips it until ``release``. Raises OSError when the segment
        cannot be read; it is then the last one.
        """
        while True:
            lanes = [lane for lane in self._lanes.values() if lane.sealed]
            if not lanes:
                for lane in self._lanes.values():
                    lane.seal()
                lanes = [lane for lane in self._lanes.values() if lane.sealed]
                if not lanes:
                    return None
            lane = min(lanes, key=lambda lane: lane.sealed[0].born)
            segment = lane.sealed.popleft()
            try:
                records = self._read_records(segment)
            except OSError:
                for other in self._lanes.values():  # all others go before it
                    other.seal()
                segment.born = self._now_s()
                lane.sealed.append(segment)
                raise
            if records:
                self._held.add(segment)
                return segment, records
            self._remove(segment)

    def done(self, segments: Sequence[Segment]) -> None:
        """Remove delivered segments."""
        for segment in segments:
            self._held.discard(segment)
            self._remove(segment)

    @property
    def empty(self) -> bool:
        """True when ``next`` has nothing to return."""
        return not any(lane.sealed or lane.open for lane in self._lanes.values())

    def oldest(self) -> float | None:
        """Return the Unix time in seconds at which the oldest segment was begun. None: the spool is empty."""
        born = [segment.born for segment in self._held]
        for lane in self._lanes.values():
            born += [lane.sealed[0].born] if lane.sealed else [lane.open.born] if lane.open else []
        return min(born, default=None)

    def _read_records(self, segment: Segment) -> list[Record]:
        """Read a segment; a damaged one is copied aside, and its readable records are returned."""
        try:
            return decode_segment(segment.path.read_bytes())
        except Damaged as damage:
            # The readable records are sent; the file is kept for inspection
            aside = self._root / f"damaged-{segment.path.parent.name}-{segment.path.name}"
            log.error("spool segment damaged: error=%s events_saved=%d moved_to=%s",
                      damage, len(damage.records), aside)  # fmt: skip
            shutil.copyfile(segment.path, aside)
            return damage.records

    def _remove(self, segment: Segment) -> None:
        """Delete a segment, and a dead process's folder with its last segment."""
        self.bytes -= segment.bytes
        segment.path.unlink(missing_ok=True)
        adopted = self._adopted.get(segment.path.parent)
        if adopted is not None:
            adopted.left -= 1
            if not adopted.left:
                del self._adopted[segment.path.parent]
                _release_folder(segment.path.parent, adopted.lock)

    # --- dead processes -------------------------------------------------------------------------------------------

    def adopt(self) -> int:
        """Take over the folders of this host's dead processes, and return the number of their segments."""
        found = 0
        for folder in sorted(self._root.iterdir()):
            if folder == self._folder or folder in self._adopted or not folder.is_dir():
                continue
            lock = self._lock_folder(folder)
            if lock is None:
                continue
            segments = [segment for path in folder.iterdir() if (segment := segment_at(path)) is not None]
            if not segments:
                _release_folder(folder, lock)
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

    def _lock_folder(self, folder: Path) -> int | None:
        """Lock a folder and return the lock's file descriptor. None: the folder's process lives."""
        try:
            if folder.name.startswith(".new-") and self._now_s() - folder.stat().st_mtime < _STARTING_S:
                return None
            lock = os.open(folder / _LOCK, os.O_RDWR | os.O_CREAT, 0o600)
        except OSError:
            return None
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
            # Another process may have taken, emptied and removed it between the two calls
            if os.fstat(lock).st_ino == os.stat(folder / _LOCK).st_ino:
                return lock
        except OSError:
            pass
        os.close(lock)
        return None

    def close(self) -> None:
        """Release the folder. Undelivered segments stay for the next process of this host."""
        for lane in self._lanes.values():
            lane.seal()
        for adopted in self._adopted.values():
            os.close(adopted.lock)
        _release_folder(self._folder, self._lock)


def _release_folder(folder: Path, lock: int) -> None:
    """Remove a folder if it is empty, and unlock it."""
    if len(os.listdir(folder)) <= 1:
        with contextlib.suppress(OSError):
            (folder / _LOCK).unlink()
            folder.rmdir()
    os.close(lock)
