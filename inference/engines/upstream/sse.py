"""Server-sent events out of bytes, however they were cut. Sans I/O."""

from __future__ import annotations


class EventTooLarge(Exception):
    pass


class EventParser:
    """Takes bytes, gives each event's data. Lines end with LF, CRLF or CR; other fields are passed over."""

    def __init__(self, event_bytes_max: int) -> None:
        self._max = event_bytes_max
        self._rest = b""
        self._data: list[bytes] = []
        self._size = 0

    def receive(self, chunk: bytes) -> list[bytes]:
        """Raises EventTooLarge."""
        buffer = self._rest + chunk
        if b"\r" in buffer:
            # A CR at the very end may be half of a CRLF: it waits for the next bytes
            held = buffer.endswith(b"\r")
            buffer = (buffer[:-1] if held else buffer).replace(b"\r\n", b"\n").replace(b"\r", b"\n") + b"\r" * held
        *lines, self._rest = buffer.split(b"\n")
        if len(self._rest) > self._max:
            raise EventTooLarge
        events: list[bytes] = []
        for line in lines:
            self._line(line, events)
        return events

    def end(self) -> list[bytes]:
        """The bytes have ended: an event without its blank line is complete enough when a line of it is."""
        events: list[bytes] = []
        for line in (self._rest.rstrip(b"\r"), b""):
            self._line(line, events)
        self._rest = b""
        return events

    def _line(self, line: bytes, events: list[bytes]) -> None:
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
