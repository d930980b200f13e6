"""Parser of server-sent events, for bytes in pieces of any size. Sans I/O."""

from __future__ import annotations

_BYTE_ORDER_MARK = b"\xef\xbb\xbf"


class EventTooLarge(Exception):
    pass


class EventParser:
    """Returns the data of each event. Lines end with LF, CRLF or CR; other fields are ignored."""

    def __init__(self, event_bytes_max: int) -> None:
        self._max = event_bytes_max
        self._rest = b""
        self._more: list[bytes] = []
        """Pieces that continue the line of ``_rest``: joined once, at its end, and not with each piece."""
        self._more_size = 0
        self._data: list[bytes] = []
        self._size = 0
        self._may_be_mark = True
        """The bytes so far are none, or begin a byte order mark."""

    def receive(self, chunk: bytes) -> list[bytes]:
        """Return the data of the events that this piece completes. Raises EventTooLarge."""
        if (
            not (self._rest or self._more or self._data or b"\r" in chunk)
            and chunk.startswith(b"data: ")
            and chunk.find(b"\n") == len(chunk) - 2
            and 2 < len(chunk) <= self._max
            and chunk.endswith(b"\n")
        ):
            self._may_be_mark = False
            return [chunk[6:-2]]  # one whole event, as servers write them
        if not (self._may_be_mark or b"\n" in chunk or b"\r" in chunk or self._rest.endswith(b"\r")):
            self._more.append(chunk)
            self._more_size += len(chunk)
            if len(self._rest) + self._more_size > self._max:
                raise EventTooLarge
            return []
        buffer = self._take_rest() + chunk
        if self._may_be_mark:
            self._may_be_mark = len(buffer) < len(_BYTE_ORDER_MARK) and _BYTE_ORDER_MARK.startswith(buffer)
            buffer = buffer.removeprefix(_BYTE_ORDER_MARK)
        if b"\r" in buffer:
            # A CR at the very end may be half of a CRLF: it waits for the next bytes
            held = buffer.endswith(b"\r")
            buffer = (buffer[:-1] if held else buffer).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *lines, self._rest = buffer.split(b"\n")
        if len(self._rest) > self._max:
            raise EventTooLarge
        events: list[bytes] = []
        for line in lines:
            self._receive_line(line, events)
        return events

    def end(self) -> list[bytes]:
        """Return the data of a last event without its blank line, after the end of the bytes."""
        events: list[bytes] = []
        for line in (self._take_rest().rstrip(b"\r"), b""):
            self._receive_line(line, events)
        return events

    def _take_rest(self) -> bytes:
        """Return the bytes of the line that has not ended, and forget them."""
        rest = b"".join([self._rest, *self._more]) if self._more else self._rest
        self._rest = b""
        self._more.clear()
        self._more_size = 0
        return rest

    def _receive_line(self, line: bytes, events: list[bytes]) -> None:
        if not line:
            if self._data:
                events.append(b"\n".join(self._data))
                self._data.clear()
                self._size = 0
        elif line.startswith(b"data:"):
            value = line[6:] if line[5:6] == b" " else line[5:]
            self._size += len(value)
            if self._size > self._max:
                raise EventTooLarge
            self._data.append(value)
