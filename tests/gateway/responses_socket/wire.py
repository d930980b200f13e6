"""A client of the WebSocket mode of the Responses API that checks the order of every event."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

from openresponses_types import WebSocketErrorEvent
from websockets.asyncio.client import ClientConnection, connect

from tests.dialects.responses.fold import TERMINAL, fold
from tests.gateway.reference.socket_schema import assert_message
from tests.gateway.wire import ANSWER_S, MODEL, Gate

PATH, OPEN = "/v1/responses", "/v1/open/responses"


class ResponsesWire:
    """One socket. Events are kept by lane, in order."""

    def __init__(self, connection: ClientConnection) -> None:
        self.connection = connection
        self.lanes: dict[str | None, list[dict[str, Any]]] = {}
        self.steers: list[dict[str, Any]] = []
        self.order: list[str | None] = []
        """Lane of each event."""

    async def create(self, text: str = "Tell me of rivers.", tokens: int = 10, **more: Any) -> None:
        """Send a request whose text is that of ``asked`` in the tests over HTTP."""
        body = {"model": MODEL, "input": text, "max_output_tokens": tokens, "seed": 1, "ignore_eos": True, **more}
        event = {"type": "response.create", **body}
        assert_message("response.create", event)
        await self.send(event)

    async def send(self, event: dict[str, Any]) -> None:
        """Send any event; ``create`` sends those that the AsyncAPI document describes."""
        await self.connection.send(json.dumps(event))

    async def receive(self, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The next event of any lane."""
        async with asyncio.timeout(within_s):
            raw = await self.connection.recv()
        assert isinstance(raw, str), "events are text"
        event: dict[str, Any] = json.loads(raw)
        steers = event["type"].startswith("response.steer.")
        name = event["type"] if steers else {"error": "response.error"}.get(event["type"], "response.event")
        assert_message(name, event)
        if steers:  # of no turn
            self.steers.append(event)
            return event
        self.lanes.setdefault(event.get("stream_id"), []).append(event)
        self.order.append(event.get("stream_id"))
        return event

    async def until(self, type_: str, lane: str | None = None, within_s: float = ANSWER_S) -> dict[str, Any]:
        async with asyncio.timeout(within_s):
            while True:
                event = await self.receive(within_s)
                if event["type"] == type_ and event.get("stream_id") == lane:
                    return event

    async def until_created(self) -> str:
        """The id of the next response that begins, on whatever lane."""
        while (event := await self.receive())["type"] != "response.created":
            pass
        return str(event["response"]["id"])

    async def ended(self, lane: str | None = None, within_s: float = ANSWER_S) -> dict[str, Any]:
        """The last event of the next turn of a lane, whose events are checked and forgotten."""
        async with asyncio.timeout(within_s):
            while (count := self._whole(lane)) is None:
                await self.receive(within_s)
        turn, self.lanes[lane] = self.lanes[lane][:count], self.lanes[lane][count:]
        if turn[-1]["type"] == "error":
            return turn[-1]
        bare = [{name: value for name, value in event.items() if name != "stream_id"} for event in turn]
        fold([json.dumps(event).encode() for event in bare], has_gaps=True)
        return turn[-1]

    def _whole(self, lane: str | None) -> int | None:
        """Number of events of the next turn of a lane; None: it has not ended."""
        for number, event in enumerate(self.lanes.get(lane, ()), 1):
            if event["type"] in (*TERMINAL, "error"):
                return number
        return None

    async def turn(self, lane: str | None = None, **more: Any) -> dict[str, Any]:
        """One request and its response, or its ``error`` event."""
        await self.create(**more, **({} if lane is None else {"stream_id": lane}))
        event = await self.ended(lane)
        return event if event["type"] == "error" else event["response"]  # type: ignore[no-any-return]


@asynccontextmanager
async def opened(gate: Gate, path: str = PATH, **options: Any) -> AsyncIterator[ResponsesWire]:
    headers = {"Authorization": f"Bearer {gate.key}", **options.pop("headers", {})}
    async with connect(
        f"ws://{gate.host}:{gate.port}{path}",
        additional_headers=headers,
        proxy=None,
        max_size=None,
        **{"ping_interval": None, "close_timeout": 2, **options},
    ) as connection:
        yield ResponsesWire(connection)


def text_of(response: dict[str, Any]) -> str:
    parts = [part for item in response["output"] if item["type"] == "message" for part in item["content"]]
    return "".join(part["text"] for part in parts if part["type"] == "output_text")


def code_of(event: dict[str, Any]) -> tuple[int, str]:
    """Status and code of an ``error`` event, whose shape is checked."""
    WebSocketErrorEvent.model_validate(event)
    assert event["type"] == "error" and set(event) <= {"type", "status", "stream_id", "error"}, event
    assert {"type", "code", "message", "param"} <= set(event["error"]) and event["error"]["message"]
    return event["status"], event["error"]["code"]
