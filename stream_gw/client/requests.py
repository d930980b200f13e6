"""Requests on a socket that wait for their answer, found by id."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Final

from stream_gw.client.backoff import backoff_s, is_waited_out
from stream_gw.client.errors import GatewayError
from stream_gw.client.link import Link
from stream_gw.client.wire import Ack

REQUESTS_MAX: Final = 256  # unanswered cancels and inputs; over: the next raises too_many
REQUEST_TRIES_MAX: Final = 8


@dataclass(slots=True, eq=False)
class _Request:
    message: dict[str, Any]
    answer: asyncio.Future[Ack]
    tries: int = 0
    sent_on: Link | None = None
    timer: asyncio.TimerHandle | None = None


class PendingRequests:
    """Sends each request until it is answered: again on a new link, and again after a retriable error."""

    def __init__(self, link: Callable[[], Link | None], random: Callable[[], float]) -> None:
        """``link`` returns the present connection. ``random`` spreads the pauses between tries."""
        self._link = link
        self._random = random
        self._by_id: dict[str, _Request] = {}

    def cancel_of(self, stream_id: str) -> asyncio.Future[Ack] | None:
        """Return the future answer of a pending cancel of the stream; None: there is none."""
        for request in self._by_id.values():
            if request.message["t"] == "cancel" and request.message["stream"] == stream_id:
                return request.answer
        return None

    def of_another_stream(self, id: str, stream_id: str) -> asyncio.Future[Ack] | None:
        """Return the future answer of a pending request with this id that concerns another stream."""
        request = self._by_id.get(id)
        return request.answer if request is not None and request.message["stream"] != stream_id else None

    def send(self, message: dict[str, Any]) -> asyncio.Future[Ack]:
        """Send the request, unless one with its id is pending. Returns the answer, to be awaited shielded.

        Raises GatewayError when too many requests are pending.
        """
        pending = self._by_id.get(message["id"])
        if pending is not None:
            return pending.answer
        if len(self._by_id) >= REQUESTS_MAX:
            raise GatewayError("too_many", f"{REQUESTS_MAX} requests wait for an answer")
        request = _Request(message, asyncio.get_running_loop().create_future())
        request.answer.add_done_callback(_mark_retrieved)
        self._by_id[message["id"]] = request
        self._send(request)
        return request.answer

    def send_all(self) -> None:
        """Send every request on the present connection, except those that pause after an error."""
        for request in self._by_id.values():
            if request.timer is None:
                self._send(request)

    def receive_ack(self, ack: Ack) -> None:
        if answer := self._remove(ack.id):
            answer.set_result(ack)

    def receive_error(self, id: str | None, error: GatewayError) -> bool:
        """Send the request again later, or fail it. Returns False when no request has this id."""
        request = self._by_id.get(id) if id is not None else None
        if request is None:
            return False
        request.tries += 1
        if is_waited_out(error) and request.tries < REQUEST_TRIES_MAX:
            delay_s = max(error.retry_after_s or 0, backoff_s(request.tries, self._random))
            request.timer = asyncio.get_running_loop().call_later(delay_s, self._send, request)
        elif answer := self._remove(id):
            answer.set_exception(error)
        return True

    def fail(self, error: GatewayError, *, sent_on: Link | None = None) -> None:
        """Fail all requests, or those sent on one link."""
        for id, request in list(self._by_id.items()):
            if (sent_on is None or request.sent_on is sent_on) and (answer := self._remove(id)):
                answer.set_exception(error)

    def _send(self, request: _Request) -> None:
        request.timer = None
        link = self._link()
        if link is not None:
            request.sent_on = link
            link.post(request.message)

    def _remove(self, id: str | None) -> asyncio.Future[Ack] | None:
        """Remove a request and stop its timer; return its future answer. None: no request has this id."""
        request = self._by_id.pop(id, None) if id is not None else None
        if request is None:
            return None
        if request.timer is not None:
            request.timer.cancel()
        return request.answer


def _mark_retrieved(answer: asyncio.Future[Ack]) -> None:
    """Mark the answer's error as retrieved: its callers may be gone, and asyncio would log it."""
    if not answer.cancelled():
        answer.exception()
