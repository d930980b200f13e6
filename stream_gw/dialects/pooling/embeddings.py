"""Parses ``POST /v1/embeddings``, in OpenAI's format."""

from __future__ import annotations

from stream_fabric.errors import BadRequest
from stream_gw.dialects.pooling.inputs import Input, check_input
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.whole import whole_request

DIMENSIONS_MAX = 65_536
_FORMATS = ("float", "base64")  # other formats of servers are not JSON


def parse_embeddings(body: bytes) -> CreateRequest:
    """Parse and check the body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, "embeddings")
    check_input(field(fields, "input", Input, required=True))
    format_ = field(fields, "encoding_format", str | None)
    if format_ is not None and format_ not in _FORMATS:
        raise BadRequest(
            f"encoding_format must be one of {', '.join(_FORMATS)}; got {format_[:60]!r}", param="encoding_format"
        )
    bounded(fields, "dimensions", 1, DIMENSIONS_MAX)
    return whole_request(request, len(bytes(fields["input"])))
