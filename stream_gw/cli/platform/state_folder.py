"""The folder where ``stream-gw up`` keeps traces, undelivered events and its database from one run to the next.

ClickHouse's engine lets one process open its folder, so a lock file gives the folder to one run at a time.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import secrets
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

FRESH = "fresh"
"""The value of ``--state-folder`` for an empty folder that is removed at the end."""


@dataclass(frozen=True)
class StateFolder:
    """Folder of one run."""

    path: Path
    note: str
    """Says whether the folder is kept, for the user."""

    def secret(self, name: str) -> str:
        """Return the secret of this name, which is made once and lies in the folder as a file of its owner's alone."""
        path = self.path / name
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with open(descriptor, "w") as file:
                file.write(secrets.token_hex(32))
        return path.read_text()


def default_folder() -> Path:
    return Path(os.environ.get("XDG_STATE_HOME") or Path.home() / ".local" / "state") / "stream-gw"


@contextlib.contextmanager
def open_state_folder(named: str) -> Iterator[StateFolder]:
    """Hold a folder for this run. ``named`` empty: the default folder, or a temporary one while another run has it.

    Raises ValueError when another run holds the folder that the user named.
    """
    if named == FRESH:
        with _temporary_folder("empty, and deleted when this run ends") as folder:
            yield folder
        return
    path = Path(named).expanduser().absolute() if named else default_folder()
    path.mkdir(parents=True, exist_ok=True, mode=0o700)
    with (path / "run.lock").open("a") as lock, contextlib.ExitStack() as stack:
        try:
            fcntl.flock(lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            if named:
                raise ValueError(
                    f"another stream-gw up uses the folder {path}: stop it, or name another --state-folder"
                ) from None
            note = f"deleted when this run ends, because another stream-gw up uses {path}"
            yield stack.enter_context(_temporary_folder(note))
        else:
            yield StateFolder(path, "shared with earlier and later runs; --state-folder names another")


@contextlib.contextmanager
def _temporary_folder(note: str) -> Iterator[StateFolder]:
    with tempfile.TemporaryDirectory(prefix="stream-gw-state-") as folder:
        yield StateFolder(Path(folder), note)
