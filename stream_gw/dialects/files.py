"""Files that a request carries, as parts of a chat. Pure."""

from __future__ import annotations

import base64
import binascii
from typing import Any
from urllib.parse import unquote_to_bytes

from stream_fabric.errors import BadRequest, Unsupported

Json = dict[str, Any]
_AUDIO = {"audio/wav": "wav", "audio/mp3": "mp3", "audio/mpeg": "mp3"}
_BY_SUFFIX = {"pdf": "application/pdf", "txt": "text/plain", "md": "text/markdown", "csv": "text/csv"}
"""Media types of files that come without one."""
_TEXTS = ("application/json", "application/xml", "application/x-yaml", "application/javascript")


def file_part(url: str, name: str, place: str, *, param: str, media: str = "") -> Json:
    """Return a file as a part of a chat. Raises BadRequest and Unsupported, which name the place.

    ``url``: a data URL, or base64 alone. ``media``: the media type; empty: that of the URL, or of the file's suffix.
    """
    if not url.startswith("data:"):
        media = media or _BY_SUFFIX.get(name.rpartition(".")[2].lower(), "")
        url = f"data:{media};base64,{url}"
    media = media or url[5:].partition(",")[0].partition(";")[0]
    if media.startswith("image/"):
        return {"type": "image_url", "image_url": {"url": url}}
    if media in _AUDIO:
        return {"type": "input_audio", "input_audio": {"data": _base64(url, place, param), "format": _AUDIO[media]}}
    if media == "application/pdf":
        data = f"data:{media};base64,{_base64(url, place, param)}"
        return {"type": "file", "file": {"filename": name or "document.pdf", "file_data": data}}
    if media == "text" or media.startswith("text/") or media in _TEXTS:
        return {"type": "text", "text": _data(url, place, param).decode("utf-8", "replace")}
    raise Unsupported(
        f"{place} is a file of type {media[:60]!r}; images, audio (wav, mp3), PDF and text are supported", param=param
    )


def _data(url: str, place: str, param: str) -> bytes:
    """Return the bytes of a data URL. Raises BadRequest."""
    head, comma, data = url.partition(",")
    if not comma:
        raise BadRequest(f"{place} is not a valid data URL: it has no comma", param=param)
    try:
        return base64.b64decode(data, validate=True) if head.endswith(";base64") else unquote_to_bytes(data)
    except (binascii.Error, ValueError) as error:
        raise BadRequest(f"{place} is not a valid data URL: {error}", param=param) from error


def _base64(url: str, place: str, param: str) -> str:
    return base64.b64encode(_data(url, place, param)).decode()
