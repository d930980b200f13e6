"""Parses ``POST /v1/rerank``, in the format of Cohere, Jina and vLLM."""

from __future__ import annotations

import msgspec

from stream_fabric.errors import BadRequest
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.whole import whole_request


class _Document(msgspec.Struct):
    text: str


def parse_rerank(body: bytes) -> CreateRequest:
    """Parse and check the body. Raises BadRequest that names the field, its value and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, "rerank")
    query = field(fields, "query", str, required=True)
    documents = field(fields, "documents", list[str | _Document], required=True)
    if not 0 < len(documents) <= BATCH_MAX:
        raise BadRequest(f"documents must have 1 to {BATCH_MAX} items, got {len(documents)}", param="documents")
    bounded(fields, "top_n", 0, 1 << 31)
    # The engine computes the query with each document
    return whole_request(request, len(bytes(fields["documents"])) + len(documents) * len(query.encode()))
