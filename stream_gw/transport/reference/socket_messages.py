"""Messages that a gateway sends over a WebSocket, as types for the reference. ``ws_socket`` builds them as bytes."""

from __future__ import annotations

from typing import Annotated, Any, Literal

import msgspec
from msgspec import Meta

from stream_fabric.stream.frames import ErrorInfo, Usage
from stream_gw.transport.reference.answers import CursorText, Status, StructuredOutput

Channel = Annotated[int, Meta(ge=0, lt=1 << 31)]
Seq = Annotated[int, Meta(ge=0)]


class Hi(msgspec.Struct, tag_field="t", tag="hi"):
    """The credential was accepted."""

    conn: str
    """Name of the connection, also the `request_id` of its errors."""
    gateway: str
    """Id of the gateway, the same on each of its sockets."""
    ping_ms: int
    """Milliseconds between two pings."""


class Ok(msgspec.Struct, tag_field="t", tag="ok"):
    """The channel is open. A second one on a channel means that the epoch rose."""

    ch: Channel
    stream: str
    epoch: str
    """Number of the epoch and its nonce, joined by a dot."""
    head: Seq
    """Seq of the last frame that the gateway has received."""
    status: Status
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Headers that an HTTP answer to the create would have: what is left of limits, budget warnings, the model that
    answered."""


class Data(msgspec.Struct, tag_field="t", tag="d"):
    """Frames up to `s`. A client applies it only when its cursor's seq is `a`."""

    ch: Channel
    s: Seq
    f: list[dict[str, Any]]
    """Chunks of the dialect, as the `data:` of its server-sent events holds them."""
    a: Seq | msgspec.UnsetType = msgspec.UNSET
    """Seq after which the frames continue; absent: `s - 1`."""


class ChoiceCheck(StructuredOutput, kw_only=True):
    """Check of one choice against the JSON schema of the request."""

    choice: Annotated[int, Meta(ge=0)]


class End(msgspec.Struct, tag_field="t", tag="end"):
    """The stream has ended, and the channel is closed."""

    ch: Channel
    s: Seq
    status: Literal["completed", "cancelled", "failed", "incomplete"]
    usage: Usage | msgspec.UnsetType | None = msgspec.UNSET
    error: ErrorInfo | msgspec.UnsetType = msgspec.UNSET
    """Present where the stream failed."""
    structured_output: list[ChoiceCheck] | msgspec.UnsetType = msgspec.UNSET
    """Checks of the choices against the JSON schema of the request."""


class Gap(msgspec.Struct, tag_field="t", tag="gap", rename={"first": "from", "last": "to"}):
    """The frames `from` to `to` are lost for good."""

    ch: Channel
    first: Seq
    last: Seq


class Reset(msgspec.Struct, tag_field="t", tag="reset"):
    """Frames above `to` that were seen are void."""

    ch: Channel
    epoch: str
    to: Seq


class Steered(msgspec.Struct, tag_field="t", tag="steered"):
    """An input was applied: frames after `s` are another answer, which takes it into account. Or it was refused."""

    ch: Channel
    s: Seq
    id: str
    """The input's id."""
    result: Literal["applied", "refused"]
    reason: str | msgspec.UnsetType = msgspec.UNSET
    """Reason of a refusal: `waits_for_tools`, `no_text`, `no_chat` or `several_choices`."""


class Queued(msgspec.Struct, tag_field="t", tag="queued"):
    """The stream waits for a replica. Sent to a create with `queued`."""

    ch: Channel
    position: int
    of: int
    warming_s: int | msgspec.UnsetType = msgspec.UNSET
    """Seconds until a replica that starts is expected to be ready; absent: none starts, or it is unknown."""


class Ack(msgspec.Struct, tag_field="t", tag="ack"):
    """Answer to a `cancel` or an `input`."""

    id: str
    """The request's id."""
    result: Literal["accepted", "already", "pending", "terminal", "duplicate"]
    at: CursorText | msgspec.UnsetType | None = msgspec.UNSET
    """Cursor of the last frame that any reader gets; in the answer to a cancel."""
    status: Status | msgspec.UnsetType | None = msgspec.UNSET


class Ping(msgspec.Struct, tag_field="t", tag="ping"):
    """The gateway lives. A client answers with `pong`."""

    head: dict[str, Seq]
    """Seq of the last frame that the gateway has received, by channel."""


class Reconnect(msgspec.Struct, tag_field="t", tag="reconnect"):
    """This gateway drains: connect to another one."""

    after_ms: Annotated[int, Meta(ge=0)]
    """Milliseconds to wait before, so that clients spread."""


class SocketError(msgspec.Struct, tag_field="t", tag="error", kw_only=True):
    """Error of a channel (`ch`, which it closes), of a request (`id`), or of the connection."""

    code: str
    """Stable name of the error."""
    message: str
    """Cause, what it concerns, and what to do."""
    retriable: bool
    """True: the same request may succeed later."""
    request_id: str
    """Name of the connection."""
    ch: int | msgspec.UnsetType = msgspec.UNSET
    """Channel as the client named it, also where the number is not allowed."""
    id: str | msgspec.UnsetType = msgspec.UNSET
    retry_after_s: float | msgspec.UnsetType = msgspec.UNSET
    headers: dict[str, str] | msgspec.UnsetType = msgspec.UNSET
    """Headers that an HTTP answer would have: what is left of limits."""
    stream: str | msgspec.UnsetType = msgspec.UNSET
    """Stream that can be resumed at `cursor`."""
    cursor: CursorText | msgspec.UnsetType = msgspec.UNSET


SERVER_MESSAGES = (Hi, Ok, Data, End, Gap, Reset, Steered, Queued, Ack, Ping, Reconnect, SocketError)
