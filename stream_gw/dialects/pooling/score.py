"""Parses ``POST /v1/score``, in vLLM's format: how well pairs of texts fit together."""

from __future__ import annotations

from typing import Annotated, Any

import msgspec
from msgspec import Meta

from stream_fabric.errors import BadRequest
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.pooling.inputs import input_bytes
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.whole import whole_request

PAIRS = (("queries", "documents"), ("queries", "items"), ("data_1", "data_2"), ("text_1", "text_2"))
"""Names of the two sides, in the order in which vLLM looks for them."""


class _Content(msgspec.Struct):
    content: Annotated[list[dict[str, Any]], Meta(min_length=1)]
    """Parts, for models that see images."""


_Text = str | _Content
_Side = _Text | list[_Text]


def parse_score(body: bytes) -> CreateRequest:
    """Parse and check the body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, "score")
    first, second = next((pair for pair in PAIRS if all(name in fields for name in pair)), PAIRS[0])
    sizes = {name: _size(name, field(fields, name, _Side)) for pair in PAIRS for name in pair if name in fields}
    for name in (first, second):
        if name not in sizes:
            raise BadRequest(f"{name} is missing", param=name)
    left, right = sizes[first], sizes[second]
    if left not in (1, right):
        raise BadRequest(f"{first} must have 1 item, or as many as {second}; got {left} and {right}", param=first)
    for name in ("max_tokens_per_query", "max_tokens_per_doc"):
        bounded(fields, name, 0, 1 << 31)
    # One text on the left is computed with each text on the right
    repeated = input_bytes(fields[first]) * (right if left == 1 else 1)
    return whole_request(request, repeated + input_bytes(fields[second]))


def _size(name: str, side: Any) -> int:
    """Return the number of texts of a side. Raises BadRequest."""
    if not isinstance(side, list):
        return 1
    if not 0 < len(side) <= BATCH_MAX:
        raise BadRequest(f"{name} must have 1 to {BATCH_MAX} items, got {len(side)}", param=name)
    return len(side)
