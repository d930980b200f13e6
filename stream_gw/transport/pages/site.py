"""The files of the pages as this release has them, under addresses that browsers may keep for good.

A page names its files below ``/static/v-<version>/``. The version is a digest of all files: another release has other
addresses, so a browser asks for nothing but the page when it comes again. A page also names every module that its
script imports, so that a browser asks for all of them at once.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

from stream_gw.transport.pages.served import REVALIDATED, ServedBody

KEPT = b"public, max-age=31536000, immutable"
"""Cache-Control of a file below its version."""
_VERSION = re.compile(r"v-([0-9a-f]{16})/")
_IMPORT = re.compile(rb"""^(?:import|export)\b[^;'"]*?["'](\.[^"']+)["']""", re.MULTILINE)
"""Static imports. Modules that a page imports later, such as the highlighter, are not loaded ahead."""
_SCRIPT = re.compile(rb'<script type="module" src="/static/([^"]+)">')
_TEXT = "text/plain; charset=utf-8"
_TYPES = {
    ".css": "text/css; charset=utf-8",
    ".html": "text/html; charset=utf-8",
    ".js": "text/javascript; charset=utf-8",
    ".json": "application/json",
    ".mjs": "text/javascript; charset=utf-8",
    ".svg": "image/svg+xml",
}


class Site:
    """The folder's files and pages. They are read once: another release is another process."""

    def __init__(self, folder: Path) -> None:
        self._files = {path.relative_to(folder).as_posix(): _served(path) for path in _files_below(folder)}
        digest = hashlib.sha256()
        for name in sorted(self._files):
            digest.update(b"%d %s %d " % (len(name), name.encode(), len(self._files[name].body)))
            digest.update(self._files[name].body)
        self.version = digest.hexdigest()[:16]

    def file(self, path: str) -> tuple[ServedBody, bytes] | None:
        """Return the file of a path below ``/static`` and its Cache-Control. None: there is none.

        The version of another release has this release's file: in a rolling upgrade any gateway may be asked. Nobody
        keeps that answer.
        """
        found = _VERSION.match(path)
        file = self._files.get(path[found.end() :] if found else path)
        if file is None:
            return None
        return file, KEPT if found and found[1] == self.version else REVALIDATED

    def page(self, name: str, head: str | None = None) -> ServedBody:
        """Return a page. ``head``: file of a head that pages share; its ``$name`` is the page's name without suffix."""
        html = self._files[name].body
        if head is not None:
            html = self._files[head].body.replace(b"$name", Path(name).stem.encode()) + html
        html = _SCRIPT.sub(lambda script: self._preloads(script[1].decode()) + script[0], html)
        html = html.replace(b'"/static/', b'"/static/v-%s/' % self.version.encode())
        return ServedBody(html, _TYPES[".html"].encode())

    def modules(self, entry: str) -> list[str]:
        """Return the modules that a script imports, and those that they import; the largest first."""
        found: set[str] = {entry}
        left = [entry]
        while left:
            name = left.pop()
            new = set(self._imports(name)) - found
            found |= new
            left.extend(new)
        return sorted(found - {entry}, key=lambda name: (-len(self._files[name].body), name))

    def _imports(self, name: str) -> Iterator[str]:
        for found in _IMPORT.finditer(self._files[name].body):
            imported = os.path.normpath(os.path.join(os.path.dirname(name), found[1].decode()))
            if imported in self._files:
                yield imported

    def _preloads(self, entry: str) -> bytes:
        lines = (f'<link rel="modulepreload" href="/static/{name}">\n' for name in self.modules(entry))
        return "".join(lines).encode()


def _files_below(folder: Path) -> Iterator[Path]:
    # ``static/client`` is a link to clients/js/src in the source tree, and a folder in a wheel
    for parent, _, names in os.walk(folder, followlinks=True):
        for name in names:
            yield Path(parent, name)


def _served(path: Path) -> ServedBody:
    return ServedBody(path.read_bytes(), _TYPES.get(path.suffix, _TEXT).encode())
