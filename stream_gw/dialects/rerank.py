"""The body of ``POST /v1/rerank``, as Cohere and Jina have it and vLLM serves it."""

from __future__ import annotations

import msgspec

from stream_fabric.errors import BadRequest
from stream_fabric.limits import BATCH_MAX
from stream_gw.dialects.requests import CreateRequest, bounded, field, read_common, read_fields
from stream_gw.dialects.whole import whole


class _Document(msgspec.Struct):
    text: str


def parse_rerank(body: bytes) -> CreateRequest:
    """Raises BadRequest that names the field, what was given and what is allowed."""
    fields = read_fields(body)
    request = read_common(fields, "rerank")
    query = field(fields, "query", str, required=True)
    documents = field(fields, "documents", list[str | _Document], required=True)
    if not 0 < len(documents) <= BATCH_MAX:
        raise BadRequest(f"documents must hold 1 to {BATCH_MAX} documents, got {len(documents)}", param="documents")
    bounded(fields, "top_n", 0, 1 << 31)
    # The query is computed with each document
    return whole(request, len(bytes(fields["documents"])) + len(documents) * len(query.encode()))
