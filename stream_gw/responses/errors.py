"""Errors of stored responses and conversations."""

from __future__ import annotations

from stream_fabric.errors import BadRequest, NotFound, TooMany
from stream_gw.tenancy.errors import DatabaseUnavailable


class ResponseNotFound(NotFound):
    """No such response is stored for the caller: it never was, was deleted, has expired, or is another tenant's."""

    def __init__(self, response: str) -> None:
        super().__init__(f"no response {response[:64]!r} is stored here; it may have expired", param="id")


class PreviousResponseNotFound(NotFound):
    """The response before the new one, or one before that, is not stored any more."""

    code = "previous_response_not_found"

    def __init__(self, response: str) -> None:
        super().__init__(
            f"previous response {response[:64]!r} is not stored here; send the whole input without it",
            param="previous_response_id",
        )


class ConversationNotFound(NotFound):
    """The caller has no such conversation: it never was, was deleted, has expired, or is another tenant's."""

    def __init__(self, conversation: str) -> None:
        super().__init__(f"no conversation {conversation[:64]!r} is stored here", param="conversation")


class ItemNotFound(NotFound):
    """The conversation or the response has no such item."""

    def __init__(self, item: str) -> None:
        super().__init__(f"no item {item[:64]!r} is there", param="item_id")


class ReferenceNotFound(NotFound):
    """A reference names no item of a stored response that the caller may see, or one of a response that runs."""

    code = "item_not_found"

    def __init__(self, item: str) -> None:
        super().__init__(f"no item {item[:64]!r} of a response is stored here; send the item itself", param="input")


class PreviousResponseRunning(BadRequest):
    """The response before the new one has not ended, so its output is not known."""

    code = "previous_response_running"

    def __init__(self, response: str) -> None:
        super().__init__(
            f"previous response {response!r} still runs; wait for its end or cancel it", param="previous_response_id"
        )


class ConversationLocked(BadRequest):
    """Another response of the conversation runs. OpenAI's API refuses the second one in the same way."""

    code = "conversation_locked"

    def __init__(self, conversation: str) -> None:
        super().__init__(
            f"conversation {conversation[:64]!r} has a response that runs; wait for its end", param="conversation"
        )


class HistoryTooLong(BadRequest):
    """The history of the new response exceeds a limit."""

    code = "history_too_long"


class ResponseTooLarge(BadRequest):
    """The input exceeds what may be stored of one response."""

    code = "response_too_large"


class ResponseStorageFull(TooMany):
    """The tenant's stored responses and conversations take as many bytes as they may."""

    code = "response_storage_full"


def storage_full(what_to_do: str) -> ResponseStorageFull:
    return ResponseStorageFull(
        f"the tenant's stored responses and conversations take as many bytes as they may; {what_to_do}",
        retry_after_s=60,
    )


class NoStore(NotFound):
    """This gateway stores no responses."""

    code = "no_response_store"


class ResponsesUnavailable(DatabaseUnavailable):
    """The database does not answer, and Redis does not hold what was asked for."""

    code = "responses_unavailable"
