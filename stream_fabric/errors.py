"""Errors that reach a client, an operator or another process. Their policy is in class attributes.

    StreamGwError
    ├── BadRequest 400 / 1008
    │   ├── ContentFiltered          moderation flags the prompt
    │   ├── ContextLengthExceeded    the request exceeds the model's maximum context
    │   ├── CursorInvalid            not a cursor, or a position ahead of the stream
    │   ├── InvalidInput             the item of an input is not a user's message
    │   ├── TooDeep                  JSON nested beyond the limit
    │   └── Unsupported              the request asks for something this platform cannot do
    │       └── SteeringUnsupported  the stream takes no input
    ├── Unauthenticated 401 / 4401
    │   ├── KeyRevoked               the API key was revoked while it was in use
    │   └── LinkEnded                the owner of the stream has ended the links to it
    ├── Forbidden 403 / 4403
    │   └── UserSuspended            the request's user is suspended
    ├── NotFound 404 / 1008          no such stream, or another tenant's
    │   ├── ModelNotFound            no pool serves the model
    │   └── NotServed                an endpoint of another service that this platform does not have
    ├── MethodNotAllowed 405
    ├── RequestTimeout 408           the body did not arrive in time; retriable
    ├── CursorGone 410               the log no longer has the frames after the cursor
    ├── BodyTooLarge 413 / 1009
    ├── WrongRegion 421 / 4403      this gateway is outside the regions that may serve the caller
    ├── StreamCancelled 499          the stream was cancelled; OpenAI's clients retry no 499
    ├── IdempotencyMismatch 422      same Idempotency-Key, different body
    ├── TooMany 429 / 4429           a limit is reached; retriable
    │   ├── RateLimited              a limit of the tenant's plan
    │   │   └── BudgetExceeded       a budget of the tenant's plan
    │   └── TooManyPendingInputs     inputs of the stream wait to be applied
    ├── HeadersTooLarge 431
    ├── Draining 503 / 1012          this process is shutting down; retriable
    ├── GatewayFull 503 / 1013       this gateway holds as many bytes of bodies or of answers as it may; retriable
    ├── NoReplica 503 / 1013         no replica can serve the model now; retriable
    │   ├── PoolFull                 the pool's queue is full
    │   ├── PoolBusy                 the backlog ahead of the request's tier is too long
    │   └── RegionUnavailable        no replica in the regions that may serve the request
    ├── ModerationUnavailable 503 / 1013   content cannot be checked now; retriable
    ├── FabricError 503 / 1013       base of all errors of the fabric's adapter; retriable
    │   ├── FabricUnavailable        Redis cannot be reached in time
    │   │   └── FabricRefused        the server refuses the login or is no Redis; its detail tells what to correct
    │   ├── FabricFull               Redis is at its memory limit
    │   ├── FabricLost               Redis has lost what the call builds on
    │   └── FabricFault              Redis refused a command
    ├── ReplicaLost 502 / 1011       the producer died before the stream ended; retriable
    ├── EngineFailed 502 / 1011      the engine ended the stream with an error
    │   ├── StreamTooLarge           the output exceeds the limit of one stream
    │   └── EngineLost               the engine died before the stream ended; retriable
    ├── StreamLost 502 / 1011        the log and its producer are both lost; retriable
    │   └── StreamReset              frames that the reader has seen are void; a read from the beginning has the others
    ├── DeadlineExceeded 504 / 1011  the request's deadline has passed, or, retriable, its time in the queue
    └── StreamFailed                 a stream's recorded failure, with the recorded policy

The numbers are HTTP status and WebSocket close code. Transports catch StreamGwError and encode it in the request's
dialect; they use its attributes and never look at its class.
"""

from __future__ import annotations

from typing import ClassVar, Protocol


class StreamGwError(Exception):
    """Base of all errors. ``message`` says what happened, to what, and what to do; it is safe to show to a client.

    ``detail``: the cause, which may name hosts. Logs and operators see it with ``str``; clients never do.
    """

    code: ClassVar[str] = "internal_error"
    http_status: ClassVar[int] = 500
    close_code: ClassVar[int] = 1011
    retriable: ClassVar[bool] = False
    type: ClassVar[str] = "server_error"

    headers: tuple[tuple[bytes, bytes], ...] = ()
    """Further headers of the HTTP response."""

    def __init__(
        self, message: str, *, param: str | None = None, retry_after_s: int | None = None, detail: object = None
    ) -> None:
        super().__init__(message if detail is None else f"{message}: {detail}")
        self.message = message
        self.param = param
        self.retry_after_s = 1 if retry_after_s is None and self.http_status in (429, 503) else retry_after_s


class BadRequest(StreamGwError):
    code = "invalid_request"
    http_status = 400
    close_code = 1008
    type = "invalid_request_error"


class ContentFiltered(BadRequest):
    code = "content_filter"


class ContextLengthExceeded(BadRequest):
    code = "context_length_exceeded"


class CursorInvalid(BadRequest):
    code = "cursor_invalid"


class InvalidInput(BadRequest):
    code = "invalid_input"


class TooDeep(BadRequest):
    code = "json_too_deep"


class Unsupported(BadRequest):
    code = "unsupported"


class SteeringUnsupported(Unsupported):
    code = "steering_not_supported"


class Unauthenticated(StreamGwError):
    code = "invalid_api_key"
    http_status = 401
    close_code = 4401
    type = "authentication_error"


class KeyRevoked(Unauthenticated):
    code = "api_key_revoked"


class LinkEnded(Unauthenticated):
    code = "link_ended"


class Forbidden(StreamGwError):
    code = "forbidden"
    http_status = 403
    close_code = 4403
    type = "permission_error"


class UserSuspended(Forbidden):
    code = "user_suspended"


class NotFound(StreamGwError):
    code = "not_found"
    http_status = 404
    close_code = 1008
    type = "invalid_request_error"


class ModelNotFound(NotFound):
    code = "model_not_found"


class NotServed(NotFound):
    code = "not_served"


class MethodNotAllowed(StreamGwError):
    code = "method_not_allowed"
    http_status = 405
    type = "invalid_request_error"


class RequestTimeout(StreamGwError):
    code = "request_timeout"
    http_status = 408
    close_code = 1008
    retriable = True
    type = "invalid_request_error"


class CursorGone(StreamGwError):
    code = "cursor_gone"
    http_status = 410
    close_code = 1008
    type = "invalid_request_error"


class BodyTooLarge(StreamGwError):
    code = "body_too_large"
    http_status = 413
    close_code = 1009
    type = "invalid_request_error"


class StreamCancelled(StreamGwError):
    """Somebody cancelled the stream, so its caller must not retry. gRPC maps CANCELLED to the same status."""

    code = "cancelled"
    http_status = 499
    close_code = 1008
    type = "invalid_request_error"


class HeadersTooLarge(StreamGwError):
    code = "headers_too_large"
    http_status = 431
    type = "invalid_request_error"


class WrongRegion(StreamGwError):
    code = "wrong_region"
    http_status = 421
    close_code = 4403
    type = "invalid_request_error"


class IdempotencyMismatch(StreamGwError):
    code = "idempotency_mismatch"
    http_status = 422
    close_code = 1008
    type = "invalid_request_error"


class TooMany(StreamGwError):
    code = "too_many"
    http_status = 429
    close_code = 4429
    retriable = True
    type = "rate_limit_error"


class RateLimited(TooMany):
    """A limit of the tenant's plan is reached. ``headers`` of the response tell what is left of the limits.

    ``may_retry`` False: the limit never allows this request, so it is not retriable and has no ``Retry-After``.
    """

    code = "rate_limit_exceeded"

    def __init__(
        self,
        message: str,
        *,
        retry_after_s: int | None = None,
        headers: tuple[tuple[bytes, bytes], ...] = (),
        may_retry: bool = True,
    ) -> None:
        super().__init__(message, retry_after_s=retry_after_s)
        self.headers = headers
        if not may_retry:
            self.retriable, self.retry_after_s = False, None  # type: ignore[misc]
            self.headers = (*headers, (b"x-should-retry", b"false"))  # OpenAI's clients follow it


class BudgetExceeded(RateLimited):
    """A budget of the tenant's plan is used up. ``may_retry`` False: it never has room for this request again."""

    code = "budget_exceeded"


class TooManyPendingInputs(TooMany):
    code = "too_many_pending_steers"


class Draining(StreamGwError):
    code = "draining"
    http_status = 503
    close_code = 1012
    retriable = True


class GatewayFull(StreamGwError):
    code = "gateway_full"
    http_status = 503
    close_code = 1013
    retriable = True


class NoReplica(StreamGwError):
    code = "no_replica"
    http_status = 503
    close_code = 1013
    retriable = True


class PoolFull(NoReplica):
    code = "pool_full"


class PoolBusy(NoReplica):
    code = "pool_busy"


class RegionUnavailable(NoReplica):
    code = "region_unavailable"


class ModerationUnavailable(StreamGwError):
    code = "moderation_unavailable"
    http_status = 503
    close_code = 1013
    retriable = True


class FabricError(StreamGwError):
    """Base of all errors that leave the fabric's adapter."""

    code = "fabric_error"
    http_status = 503
    close_code = 1013
    retriable = True


class FabricUnavailable(FabricError):
    code = "fabric_unavailable"


class FabricRefused(FabricUnavailable):
    """The server refuses the login, its certificate does not verify, or it is no Redis; its detail has the remedy."""


class FabricFull(FabricError):
    """Redis is at its memory limit and takes no new data."""

    code = "fabric_full"


class FabricLost(FabricError):
    """Redis has lost what the call builds on; the caller begins again."""

    code = "fabric_lost"


class FabricFault(FabricError):
    """Redis answered a command with an error that a retry does not solve."""

    code = "fabric_fault"


class ReplicaLost(StreamGwError):
    code = "replica_lost"
    http_status = 502
    retriable = True


class EngineFailed(StreamGwError):
    code = "engine_error"
    http_status = 502


class StreamTooLarge(EngineFailed):
    code = "stream_too_large"


class EngineLost(EngineFailed):
    code = "engine_lost"
    retriable = True


class StreamLost(StreamGwError):
    code = "stream_lost"
    http_status = 502
    retriable = True


class StreamReset(StreamLost):
    pass


class DeadlineExceeded(StreamGwError):
    code = "deadline_exceeded"
    http_status = 504


class _Failure(Protocol):
    """Attributes of ``stream.frames.ErrorInfo``, which this module cannot import."""

    @property
    def code(self) -> str: ...
    @property
    def message(self) -> str: ...
    @property
    def type(self) -> str: ...
    @property
    def http_status(self) -> int: ...
    @property
    def retriable(self) -> bool: ...
    @property
    def param(self) -> str | None: ...


class StreamFailed(StreamGwError):
    """A stream's recorded failure, raised again for a caller that does not stream."""


def from_info(info: _Failure) -> StreamFailed:
    """Make the error that a stream's terminal records; its policy is the recorded one, not the class's."""
    retry_after_s = 1 if info.retriable or info.http_status in (429, 503) else None
    error = StreamFailed(info.message, param=info.param, retry_after_s=retry_after_s)
    error.code, error.type = info.code, info.type  # type: ignore[misc]
    error.http_status, error.retriable = info.http_status, info.retriable  # type: ignore[misc]
    return error
