"""Messages of a Responses socket, as types for the reference. ``transport.responses`` reads and builds them."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import UNSET, Meta, UnsetType

from stream_fabric.limits import IDEMPOTENCY_KEY_CHARS_MAX, LANE_NAME_CHARS_MAX
from stream_gw.dialects.responses.bodies import ResponsesBody

Lane = Annotated[
    str, Meta(extra_json_schema={"pattern": "^[A-Za-z0-9_.-]+$", "minLength": 1, "maxLength": LANE_NAME_CHARS_MAX})
]
NOT_SENT = ("stream", "background")
"""Fields of the HTTP body that a socket does not take."""


class ResponseCreate(ResponsesBody, tag_field="type", tag="response.create", kw_only=True):
    """Make a response. The fields are those of the HTTP body, and some of the socket's own."""

    stream_id: Lane | None = None
    """Lane of the response; absent: the default lane. A lane is first in, first out, and lanes run side by side."""
    generate: bool | None = None
    """False: check and keep the request, and make no output. Its response can be continued."""
    idempotency_key: Annotated[str, Meta(max_length=IDEMPOTENCY_KEY_CHARS_MAX)] | None = None
    """A repeat with the same key and fields attaches to the stream that the first one made."""
    traceparent: str | None = None
    """W3C trace context."""


class ResponseSteer(msgspec.Struct, tag_field="type", tag="response.steer"):
    """Add input to a response that runs."""

    previous_response_id: str
    """The response that runs."""
    input: Any
    """Text, or messages of the user."""


class ResponseSocketEvent(msgspec.Struct, kw_only=True):
    """One event of a response, as the `data:` of its server-sent events has it. Further fields depend on the type."""

    type: str
    """Such as `response.output_text.delta`. One of `response.completed`, `response.incomplete` and `response.failed` is
    the last one."""
    sequence_number: Annotated[int, Meta(ge=0)]
    stream_id: Lane | UnsetType = UNSET
    """Lane of the response; absent on the default lane."""


class ResponseSocketErrorObject(msgspec.Struct, kw_only=True):
    type: str
    code: str
    """Stable name of the error."""
    message: str
    """Cause, what it concerns, and what to do."""
    param: str | None
    """Field that is at fault."""
    retriable: bool | UnsetType = UNSET
    """Not in the profile of Open Responses, like the fields below."""
    request_id: str | UnsetType = UNSET
    """Name of the connection."""
    headers: dict[str, str] | UnsetType = UNSET
    """Headers that an HTTP answer would have, such as `retry-after`."""
    response_id: str | UnsetType = UNSET
    """Response whose delivery is cut off; it goes on."""
    starting_after: int | UnsetType = UNSET
    """Number of the last event that was sent: `GET /v1/responses/{response_id}?stream=true&starting_after=…`."""


class ResponseSocketError(msgspec.Struct, tag_field="type", tag="error", kw_only=True):
    """A request is refused, or the delivery of a response is cut off. It ends the turn."""

    status: Annotated[int, Meta(ge=400, lt=600)]
    """HTTP status that the request would have had."""
    stream_id: Lane | UnsetType = UNSET
    error: ResponseSocketErrorObject


class SteerError(msgspec.Struct, kw_only=True):
    type: Literal["invalid_request_error"]
    code: str
    message: str


class SteerFailed(msgspec.Struct, tag_field="type", tag="response.steer.failed", kw_only=True):
    """An input for a response that runs was not taken. It comes back."""

    sequence_number: Annotated[int, Meta(ge=0)]
    error: SteerError
    steer: dict[str, Any]
    """`input` and `previous_response_id`, as they were sent; `id`, if the input had been accepted."""
    stream_id: Lane | UnsetType = UNSET


class SteerId(msgspec.Struct, kw_only=True):
    id: str
    previous_response_id: str


class SteerAccepted(msgspec.Struct, tag_field="type", tag="response.steer.accepted", kw_only=True):
    """The gateway has the input. `response.created` of the successor is the moment from which it counts."""

    sequence_number: Annotated[int, Meta(ge=0)]
    steer: SteerId
    stream_id: Lane | UnsetType = UNSET


class SteerPending(msgspec.Struct, tag_field="type", tag="response.steer.pending", kw_only=True):
    """The response waits for results of the client's tools. The input goes with the request that brings them."""

    sequence_number: Annotated[int, Meta(ge=0)]
    reason: Literal["waiting_for_required_input"]
    required_input: list[dict[str, Any]]
    """Items to fill and to send with `previous_response_id`, on the same lane."""
    steer: SteerId
    stream_id: Lane | UnsetType = UNSET


CLIENT_MESSAGES: dict[str, type[msgspec.Struct]] = {
    "response.create": ResponseCreate,
    "response.steer": ResponseSteer,
}
SERVER_MESSAGES: dict[str, type[msgspec.Struct]] = {
    "response.event": ResponseSocketEvent,
    "response.error": ResponseSocketError,
    "response.steer.accepted": SteerAccepted,
    "response.steer.pending": SteerPending,
    "response.steer.failed": SteerFailed,
}
"""Messages by their name in the document."""
