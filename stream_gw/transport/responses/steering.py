"""Steering of the responses on one socket: input for a response that runs, and the response that follows it.

An accepted input cuts the response's stream at an exact token. When the response has ended, a successor with the same
settings continues it with the input; ``response.created`` of the successor is the commit point. A response that ends
with calls of the client's tools has no successor: the client sends the results, and the input goes with them.
"""

from __future__ import annotations

import logging
from typing import Any, NamedTuple

import msgspec

from stream_fabric.errors import BadRequest, FabricError, InvalidInput, StreamGwError, TooDeep
from stream_fabric.json_bounds import check_depth
from stream_fabric.limits import INPUT_BYTES_MAX, INPUT_CONTAINERS_MAX, INPUTS_BYTES_MAX, INPUTS_PENDING_MAX
from stream_gw.auth import Principal
from stream_gw.dialects.responses.client_events import Steer
from stream_gw.streams.gateway import Gateway
from stream_gw.streams.steering.items import user_message
from stream_gw.transport.responses.socket import ResponsesSocket
from stream_gw.transport.responses.turn import Submission, Turn

log = logging.getLogger(__name__)

_encode = msgspec.json.Encoder().encode
_MESSAGE_KEYS = frozenset({"type", "role", "content", "id", "status"})
_OUTPUTS = {"function_call": "function_call_output", "custom_tool_call": "custom_tool_call_output"}
"""Items that a client has to answer, and the type of the answer."""
_ENDED = ("completed", "incomplete")
_PARENTS_MAX = 64
"""Responses whose inputs wait for results of tools; over: the oldest are given back."""


class _Output(msgspec.Struct):
    output: list[dict[str, Any]]


class SteerRefused(Exception):
    """An input is not taken. ``code``: one of the API's codes."""

    def __init__(self, code: str, message: str) -> None:
        super().__init__(message)
        self.code, self.message = code, message


class _Waiting(NamedTuple):
    """Inputs of a response that waits for results of the client's tools."""

    lane: str | None
    submissions: tuple[Submission, ...]


class SocketSteering:
    """Takes the inputs of one socket, and makes the successors of its responses."""

    __slots__ = ("_gateway", "_number", "_socket", "_waiting")

    def __init__(self, socket: ResponsesSocket, gateway: Gateway) -> None:
        self._socket = socket
        self._gateway = gateway
        self._number = 0
        """Sequence number of the next event about steering."""
        self._waiting: dict[str, _Waiting] = {}
        """By the id of the response."""

    # --- inputs --------------------------------------------------------------------------------------------

    def receive(self, who: Principal, event: Steer) -> Turn | None:
        """Take an input. Returns the turn whose stream is to be cut; None: the input was refused."""
        who.require("input")
        target = self._socket.running(event.previous_response_id)
        try:
            items = self._check(target, event)
        except SteerRefused as refused:
            self._fail(target, refused, Submission("", event.previous_response_id, event.input, []))
            return None
        assert target is not None
        name = f"steer_{self._gateway.parts.random.token_hex(16)}"
        target.steers.append(Submission(name, target.response, msgspec.Raw(bytes(event.input)), items))
        self._tell(target.lane, "accepted", {"steer": {"id": name, "previous_response_id": target.response}})
        return target

    def _check(self, target: Turn | None, event: Steer) -> list[dict[str, Any]]:
        """Return the input as items. Raises SteerRefused, BadRequest."""
        if self._socket.is_open_profile:
            raise SteerRefused("steering_not_supported", "the specification of Open Responses has no steering")
        if target is None:
            known = self._socket.recent.find(event.previous_response_id) is not None
            if known or event.previous_response_id in self._waiting:
                raise SteerRefused("response_already_completed", "the response has ended; continue it with a new one")
            raise SteerRefused("response_not_found", "no response with this id runs on this connection")
        if not target.is_open:
            raise SteerRefused("response_already_completed", "the response has ended; continue it with a new one")
        if target.settings is None:
            raise SteerRefused(
                "steering_not_supported", "a response of a conversation, or one with generate false, is not steered"
            )
        size = self._kept_bytes() + _size(event.input)
        if len(target.steers) >= INPUTS_PENDING_MAX or size > INPUTS_BYTES_MAX:
            raise SteerRefused(
                "too_many_pending_steers",
                f"at most {INPUTS_PENDING_MAX} inputs of a response, and {INPUTS_BYTES_MAX} bytes on a socket, wait",
            )
        return _items(event.input)

    def _kept_bytes(self) -> int:
        """Return the bytes of all inputs of the socket whose responses run, or wait for results of tools."""
        kept = [turn.steers for turn in self._socket.lanes.running.values()]
        kept += [list(each.submissions) for each in self._waiting.values()]
        return sum(_size(each.input) for submissions in kept for each in submissions)

    async def cut(self, who: Principal, turn: Turn) -> None:
        """Cut the stream of a turn. A call of a tool that has begun is finished first."""
        try:
            await self._gateway.commands.steer(who, turn.response)
        except FabricError as error:  # then the successor follows the response's own end
            log.warning("cut of a steered response failed: stream=%s error=%s", turn.response, error)

    # --- successors ----------------------------------------------------------------------------------------

    def required(self, turn: Turn) -> list[dict[str, Any]]:
        """Return what the client has to send before the response can be continued, as stubs of items."""
        if turn.encoder is None:
            return []
        output = msgspec.json.decode(turn.encoder.response(), type=_Output).output
        return [
            {"type": _OUTPUTS[item["type"]], "call_id": item["call_id"]} for item in output if item["type"] in _OUTPUTS
        ]

    def follow(self, turn: Turn) -> Turn | None:
        """Return the successor of a response that has ended; None: it has none. Tells what becomes of its inputs."""
        steers, turn.steers = tuple(turn.steers), []
        if not steers or not self._socket.is_live:
            return None
        if turn.failed or turn.status not in _ENDED:
            for each in steers:
                self._fail(turn, SteerRefused("response_not_active", "the response was cancelled or failed"), each)
            return None
        if turn.required:
            self._wait(turn, steers)
            return None
        return self._successor(turn, steers)

    def _successor(self, turn: Turn, steers: tuple[Submission, ...]) -> Turn | None:
        assert turn.settings is not None
        body = msgspec.json.decode(turn.settings, type=dict[str, msgspec.Raw])
        items = [item for each in steers for item in each.items]
        body |= {
            "type": msgspec.Raw(b'"response.create"'),
            "previous_response_id": msgspec.Raw(_encode(turn.response)),
            "input": msgspec.Raw(_encode(items)),
        }
        message = _encode(body)
        made = Turn(self._socket, turn.lane, message)
        made.carries, made.on_refused = steers, self._refuse_successor
        try:
            self._gateway.bodies.add(self._socket.principal.tenant, len(message))
        except StreamGwError as error:
            self._refuse_successor(made, error)
            return None
        return made

    def _refuse_successor(self, turn: Turn, error: StreamGwError) -> None:
        for each in turn.carries:
            self._fail(turn, SteerRefused("successor_creation_failed", error.message), each)

    def _wait(self, turn: Turn, steers: tuple[Submission, ...]) -> None:
        """Keep the inputs until the client sends the results of its tools."""
        self._waiting[turn.response] = _Waiting(turn.lane, steers)
        for each in steers:
            steer = {"id": each.id, "previous_response_id": each.parent}
            reason = "waiting_for_required_input"
            self._tell(turn.lane, "pending", {"reason": reason, "required_input": turn.required, "steer": steer})
        if len(self._waiting) > _PARENTS_MAX:
            lane, oldest = self._waiting.pop(next(iter(self._waiting)))
            for each in oldest:
                self._tell_failure(lane, SteerRefused("response_not_active", "too many responses wait"), each)

    def waiting(self, parent: str | None, lane: str | None) -> list[dict[str, Any]]:
        """Return the items that go with a request that continues ``parent``."""
        found = None if parent is None else self._waiting.get(parent)
        return [item for each in found.submissions for item in each.items] if found and found.lane == lane else []

    def commit(self, parent: str | None, lane: str | None) -> None:
        """Forget the inputs of ``parent``: the response that has them was created."""
        if parent is not None and self.waiting(parent, lane):
            del self._waiting[parent]

    # --- events --------------------------------------------------------------------------------------------

    def _fail(self, target: Turn | None, refused: SteerRefused, submission: Submission) -> None:
        self._tell_failure(None if target is None else target.lane, refused, submission)

    def _tell_failure(self, lane: str | None, refused: SteerRefused, submission: Submission) -> None:
        error = {"type": "invalid_request_error", "code": refused.code, "message": refused.message}
        steer: dict[str, Any] = {"previous_response_id": submission.parent, "input": submission.input}
        if submission.id:
            steer["id"] = submission.id
        self._tell(lane, "failed", {"error": error, "steer": steer})

    def _tell(self, lane: str | None, what: str, fields: dict[str, Any]) -> None:
        event = {"type": f"response.steer.{what}", "sequence_number": self._number, **fields}
        self._number += 1
        if lane is not None:
            event["stream_id"] = lane
        self._socket.reply_text(_encode(event))


def _size(raw: msgspec.Raw) -> int:
    return memoryview(raw).nbytes


def _items(raw: msgspec.Raw) -> list[dict[str, Any]]:
    """Return the input of a ``response.steer`` as items of a request. Raises SteerRefused, BadRequest."""
    if _size(raw) > INPUT_BYTES_MAX:
        raise SteerRefused("invalid_input", f"input has {_size(raw)} bytes, and the limit is {INPUT_BYTES_MAX}")
    try:
        check_depth(bytes(raw), INPUT_CONTAINERS_MAX)
        value = msgspec.json.decode(raw)
    except TooDeep as error:
        raise SteerRefused("invalid_input", error.message) from error
    except msgspec.MsgspecError as error:  # such as half of a surrogate pair; an event could not repeat it
        raise BadRequest(f"input is not JSON: {str(error)[:200]}", param="input") from error
    given = [value] if isinstance(value, str) else value
    if not isinstance(given, list) or not given:
        raise SteerRefused("invalid_input", "input is a string, or a list of messages with role user")
    if len(given) > INPUT_CONTAINERS_MAX:
        raise SteerRefused("invalid_input", f"input has {len(given)} messages, and the limit is {INPUT_CONTAINERS_MAX}")
    for item in given:
        if isinstance(item, dict) and not item.keys() <= _MESSAGE_KEYS:
            raise SteerRefused("invalid_input", "a message of a steering input has type, role and content alone")
        try:
            user_message(item)
        except InvalidInput as error:
            raise SteerRefused("invalid_input", error.message) from error
    return [item if isinstance(item, dict) else {"role": "user", "content": item} for item in given]


def with_waiting(waiting: list[dict[str, Any]], items: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Put waiting inputs into a request: behind the results of tools, which chat templates want right after the
    calls."""
    results = 0
    while results < len(items) and items[results].get("type") in _OUTPUTS.values():
        results += 1
    return [*items[:results], *waiting, *items[results:]]
