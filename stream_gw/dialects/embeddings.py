"""The body of ``POST /v1/embeddings``, as OpenAI has it."""

from __future__ import annotations

from typing import Annotated, Any

from msgspec import Meta

from stream_fabric.errors import BadRequest
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.whole import whole

_DIMENSIONS_MAX = 65_536
_FORMATS = ("float", "base64")  # what else servers know is no JSON
_TokenId = Annotated[int, Meta(ge=0)]


def parse_embeddings(body: bytes) -> CreateRequest:
    """Raises BadRequest that names the field, what was given and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, "embeddings")
    _check_input(field(fields, "input", str | list[str | _TokenId | list[_TokenId]], required=True))
    format_ = field(fields, "encoding_format", str | None)
    if format_ is not None and format_ not in _FORMATS:
        raise BadRequest(
            f"encoding_format is one of {', '.join(_FORMATS)}; got {format_[:60]!r}", param="encoding_format"
        )
    bounded(fields, "dimensions", 1, _DIMENSIONS_MAX)
    return whole(request, len(bytes(fields["input"])))


def _check_input(given: str | list[Any]) -> None:
    if isinstance(given, str):
        return
    kinds = {type(part) for part in given}
    if len(kinds) != 1 or [] in given:
        found = f"a list of {', '.join(sorted(kind.__name__ for kind in kinds))}" if given else "an empty list"
        raise BadRequest(
            f"input must be a string, or a list of strings, of token ids or of lists of token ids; got {found}",
            param="input",
        )
    if kinds != {int} and len(given) > BATCH_MAX:
        raise BadRequest(f"input must hold at most {BATCH_MAX} inputs, got {len(given)}", param="input")
