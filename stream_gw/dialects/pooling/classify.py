"""Parses ``POST /v1/classify``, in vLLM's format."""

from __future__ import annotations

from typing import Any

from stream_fabric.errors import BadRequest
from stream_gw.dialects.pooling.inputs import Input, check_input, input_bytes
from stream_gw.dialects.requests import CreateRequest, field, read_common, read_fields
from stream_gw.dialects.whole import whole_request


def parse_classify(body: bytes) -> CreateRequest:
    """Parse and check the body. Raises BadRequest that names the field, its value and what is allowed.

    The input is ``input``, as for embeddings, or ``messages``: one chat, which the model's template joins.
    """
    fields = read_fields(body)
    request = read_common(fields, "classify")
    messages = field(fields, "messages", list[dict[str, Any]] | None)
    if messages is None:
        check_input(field(fields, "input", Input, required=True))
        return whole_request(request, len(bytes(fields["input"])))
    if field(fields, "input", Any) is not None:
        raise BadRequest("input and messages exclude each other; send one of them", param="messages")
    if not messages:
        raise BadRequest("messages must have at least one message", param="messages")
    return whole_request(request, input_bytes(fields["messages"]))
