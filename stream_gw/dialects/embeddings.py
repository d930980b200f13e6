"""Parses ``POST /v1/embeddings``, in OpenAI's format."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from stream_fabric.errors import BadRequest
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.whole import whole_request

DIMENSIONS_MAX = 65_536
_FORMATS = ("float", "base64")  # other formats of servers are not JSON
_TokenId = Annotated[int, Meta(ge=0)]


def parse_embeddings(body: bytes) -> CreateRequest:
    """Parse and check the body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, "embeddings")
    _check_input(field(fields, "input", str | list[str | _TokenId | list[_TokenId]], required=True))
    format_ = field(fields, "encoding_format", str | None)
    if format_ is not None and format_ not in _FORMATS:
        raise BadRequest(
            f"encoding_format must be one of {', '.join(_FORMATS)}; got {format_[:60]!r}", param="encoding_format"
        )
    bounded(fields, "dimensions", 1, DIMENSIONS_MAX)
    return whole_request(request, len(bytes(fields["input"])))


def _check_input(value: str | list[Any]) -> None:
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
