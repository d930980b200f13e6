"""Checks of the inputs that pooling requests share."""

from __future__ import annotations

import re
from typing import Annotated, Any

from msgspec import Meta, Raw

from stream_fabric.errors import BadRequest
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.prompt import IMAGE_TOKENS

_TokenId = Annotated[int, Meta(ge=0)]
Input = str | list[str | _TokenId | list[_TokenId]]
"""A text, or a list of texts, of token ids, or of lists of token ids."""


_IMAGES = re.compile(rb'"url"\s*:\s*"data:image/[^"]*"')
_IMAGE_BYTES = IMAGE_TOKENS * 4
"""Bytes that an image counts for at most: models resize images, and a token of text takes about 4."""


def input_bytes(value: Raw) -> int:
    """Return the bytes of an input, from which its tokens are estimated."""
    raw = bytes(value)
    return len(raw) - sum(max(0, len(image) - _IMAGE_BYTES) for image in _IMAGES.findall(raw))


def check_input(value: str | list[Any]) -> None:
    """Check that a list has items of one kind, and not too many inputs. Raises BadRequest."""
    if isinstance(value, str):
        return
    kinds = {type(part) for part in value}
    if len(kinds) != 1 or [] in value:
        kinds_found = f"a list of {', '.join(sorted(kind.__name__ for kind in kinds))}" if value else "an empty list"
        raise BadRequest(
            f"input must be a string, or a list of strings, of token ids or of lists of token ids; got {kinds_found}",
            param="input",
        )
    if kinds != {int} and len(value) > BATCH_MAX:
        raise BadRequest(f"input must have at most {BATCH_MAX} items, got {len(value)}", param="input")
