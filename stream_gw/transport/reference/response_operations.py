"""Table of the operations of the Responses API, in both profiles."""

from __future__ import annotations

from stream_fabric import errors as e
from stream_gw.dialects.responses import bodies
from stream_gw.transport.reference import answers as a
from stream_gw.transport.reference.operation import EVENTS, JSON, Answer, Errors, Operation, Parameter

_ID = Parameter("id", "Id of a response or of any other stream: `resp_` and 32 hex digits.")
_PROFILE = Parameter("OpenResponses-Version", "Any value: events and errors of Open Responses.", "header")
_KEY = Parameter(
    "Idempotency-Key",
    "A repeat with the same key and body attaches to the stream that the first request made.",
    "header",
    a.IdText,
)
_LAST_EVENT = Parameter("Last-Event-ID", "Cursor of the last frame that the client has.", "header", a.CursorText)
_TRACE = Parameter("traceparent", "W3C trace context; sets the trace id of the request.", "header")
_ABOUT = (
    "A response is a stream like any other: it can be followed, cancelled and listed by its id, in every dialect. With "
    '`"background": true` the answer comes at once and the stream runs without a reader.'
)
_OPEN = "In the profile of the Open Responses specification: 24 types of events, no `id:` lines, `[DONE]` at the end."


def response_operations(create: Errors, one_stream: Errors) -> tuple[Operation, ...]:
    """Return the operations. ``create``, ``one_stream``: errors of every create, and of every stream that exists."""
    return (
        *_of("/v1/responses", create, one_stream),
        Operation(
            "post", "/v1/responses/input_tokens", "Responses", "Count the tokens of an input",
            (Answer(200, "The number of tokens, from the model's own tokenizer.", {JSON: bodies.InputTokensAnswer},
                    ("X-Stream-Id", "x-ratelimit")),),
            "create", "A replica of the model counts. Nothing is generated, and no tokens are charged.", (_KEY, _TRACE),
            body=bodies.ResponsesBody, errors=create,
        ),
        *_of("/v1/open/responses", create, one_stream),
    )  # fmt: skip


def _of(base: str, create: Errors, one_stream: Errors) -> tuple[Operation, ...]:
    is_open = base.startswith("/v1/open/")
    event = bodies.OpenResponseEvent if is_open else bodies.ResponseEvent
    profile = () if is_open else (_PROFILE,)
    about = _OPEN if is_open else ""
    named = " as Open Responses" if is_open else ""
    headers = ("X-Stream-Id", "X-Stream-Epoch", "Link")
    return (
        Operation(
            "post", base, "Responses", f"Create a response{named}",
            (
                Answer(200, "The response or, with `\"stream\": true`, its events.",
                       {JSON: bodies.ResponseObject, EVENTS: event}, (*headers, "X-Served-Model", "x-ratelimit")),
                Answer(204, "The stream has ended, and the client has all of it."),
            ),
            "create", about or _ABOUT, (_KEY, _LAST_EVENT, _TRACE, *profile),
            body=bodies.ResponsesBody, errors=create, open=is_open,
        ),
        Operation(
            "get", base + "/{id}", "Responses", f"Read or replay a response{named}",
            (Answer(200, "The response as it is now or, with `stream`, its events.",
                    {JSON: bodies.ResponseObject, EVENTS: event}, headers),
             Answer(204, "With `Last-Event-ID`: the stream has ended, and the client has all of it.")),
            "read", about or "Any gateway answers. With `stream` from the beginning, or after `starting_after`.",
            (_ID, _LAST_EVENT, _TRACE, *profile), bodies.ReadResponseQuery, cookie=True, open=is_open,
            errors=(e.CursorInvalid, e.Unsupported, e.CursorGone, e.TooMany, e.RateLimited, *one_stream),
        ),
        Operation(
            "delete", base + "/{id}", "Responses", f"Delete a response{named}",
            (Answer(200, "The response and its log are deleted. One that ran was cancelled.",
                    {JSON: bodies.ResponseDeleted}),),
            "cancel", about, (_ID, *profile), errors=(e.Unsupported, *one_stream), open=is_open,
        ),
        Operation(
            "post", base + "/{id}/cancel", "Responses", f"Cancel a response{named}",
            (Answer(200, "The response as it ended.", {JSON: bodies.ResponseObject}),),
            "cancel", about, (_ID, *profile), errors=(e.Unsupported, *one_stream), open=is_open,
        ),
    )  # fmt: skip
