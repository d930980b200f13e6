"""Official clients whose server answers with bytes that a test has made."""

from __future__ import annotations

from typing import Any

import anthropic
import httpx2
import openai
from anthropic.types import Message
from openai.lib.streaming.chat import ParsedChatCompletionSnapshot
from openai.types.responses import Response


class Canned:
    """A server that answers each request with ``body``."""

    def __init__(self) -> None:
        self.body = b""
        self.http = httpx2.Client(transport=httpx2.MockTransport(self._answer))

    def _answer(self, request: httpx2.Request) -> httpx2.Response:
        return httpx2.Response(200, headers={"content-type": "text/event-stream"}, content=self.body)

    def close(self) -> None:
        self.http.close()


class CannedOpenAI(Canned):
    def __init__(self) -> None:
        super().__init__()
        self.client = openai.OpenAI(api_key="sk-test", base_url="http://gateway/v1", http_client=self.http)

    def chat(self, body: bytes, n: int = 1) -> ParsedChatCompletionSnapshot:
        """The completion that the helper builds; ``get_final_completion()`` refuses one that was cut at its length."""
        self.body = body
        with self.client.chat.completions.stream(
            model="sim-small", messages=[{"role": "user", "content": "hi"}], n=n
        ) as stream:
            for _ in stream:
                pass
            return stream.current_completion_snapshot

    def response(self, body: bytes) -> Response:
        """The response that the helper builds; one that was cut is told by its last event alone."""
        self.body = body
        with self.client.responses.stream(model="sim-small", input="hi") as stream:
            last = list(stream)[-1]
            if last.type == "response.completed":
                return stream.get_final_response()
            assert last.type == "response.incomplete", last
            return last.response


class CannedAnthropic(Canned):
    def __init__(self) -> None:
        super().__init__()
        self.client = anthropic.Anthropic(api_key="sk-test", base_url="http://gateway", http_client=self.http)

    def message(self, body: bytes) -> Message:
        self.body = body
        with self.client.messages.stream(
            model="sim-small", max_tokens=9, messages=[{"role": "user", "content": "hi"}]
        ) as stream:
            return stream.get_final_message()


def completion_of(canned: CannedOpenAI, body: bytes, n: int = 1) -> dict[str, Any]:
    return said_alone(canned.chat(body, n).model_dump())


def said_alone(completion: dict[str, Any]) -> dict[str, Any]:
    """A completion without fields that are null, empty, absent or the helper's own."""
    completion.pop("inputs", None)  # a whole answer tells them; the helper leaves them out
    for choice in completion["choices"]:
        choice.pop("stop_reason", None)
        message = choice["message"]
        for name in ("parsed", "annotations", "audio", "function_call"):
            message.pop(name, None)
        for call in message.get("tool_calls") or ():
            call.pop("index", None)
            call["function"].pop("parsed_arguments", None)
        choice["message"] = {name: value for name, value in message.items() if value}
    return {name: value for name, value in _filled(completion).items() if name != "object"}


def _filled(value: Any) -> Any:
    if isinstance(value, dict):
        filled = {name: _filled(item) for name, item in value.items()}
        return {name: item for name, item in filled.items() if item not in (None, [], {})}
    return [_filled(item) for item in value] if isinstance(value, list) else value


def bare(value: Any) -> Any:
    """A message or response without null fields, and without those that a helper adds."""
    if isinstance(value, dict):
        added = ("parsed", "parsed_arguments", "parsed_output")
        return {name: bare(item) for name, item in value.items() if item is not None and name not in added}
    return [bare(item) for item in value] if isinstance(value, list) else value
