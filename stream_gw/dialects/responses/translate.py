"""Translates input items of the Responses API into messages of a chat, which engines read. Pure."""

from __future__ import annotations

from typing import Any

from stream_fabric.errors import BadRequest, Unsupported
from stream_fabric.limits import MESSAGES_MAX
from stream_gw.dialects.files import file_part
from stream_gw.dialects.prompt import in_turns
from stream_gw.dialects.responses.thoughts import thoughts_of
from stream_gw.dialects.responses.tools import function_name, wrapped

Json = dict[str, Any]
_ROLES = {"user": "user", "assistant": "assistant", "system": "system", "developer": "system"}


def input_items(value: Any) -> list[Json]:
    """Return the input of a request as items. Raises BadRequest."""
    if isinstance(value, str):
        return [{"type": "message", "role": "user", "content": value}]
    if not isinstance(value, list):
        raise BadRequest("input must be a string or a list of items", param="input")
    for number, item in enumerate(value):
        if not isinstance(item, dict):
            raise BadRequest(f"input.{number} must be an object", param="input")
    return value


def chat_messages(instructions: str | None, items: list[Json]) -> list[Json]:
    """Return the messages of a chat. Raises BadRequest and Unsupported, which name the item."""
    made = _Messages()
    if instructions:
        made.messages.append({"role": "system", "content": instructions})
    for number, item in enumerate(items):
        made.add(item, f"input.{number}")
    messages = in_turns(made.finish())
    if not any(message["role"] != "system" for message in messages) and not items:
        raise BadRequest("input must have at least one item", param="input")
    if len(messages) > MESSAGES_MAX:
        raise BadRequest(f"input becomes {len(messages)} messages; the limit is {MESSAGES_MAX}", param="input")
    return messages


def check_items(items: list[Json]) -> None:
    """Check items that are added to a conversation: one that no request can use would fail every later response.

    The call of an output may be there already. Raises BadRequest and Unsupported, which name the item.
    """
    made = _Messages(has_all_calls=False)
    for number, item in enumerate(items):
        made.add(item, f"items.{number}")


class _Messages:
    """Collects messages. Thoughts, text and calls of an answer are items here, and one message in a chat."""

    def __init__(self, *, has_all_calls: bool = True) -> None:
        """``has_all_calls`` False: outputs may belong to calls that are not added."""
        self._has_all_calls = has_all_calls
        self.messages: list[Json] = []
        self._answer: Json | None = None
        """The assistant's message that the next item may belong to."""
        self._images: list[Json] = []
        """Images and files of the tools' results, which chat templates allow only in a user's message."""
        self._calls: set[str] = set()

    def add(self, item: Json, place: str) -> None:
        type_ = item.get("type") or ("message" if "role" in item else None)
        match type_:
            case "message":
                self._add_message(item, place)
            case "function_call":
                self._add_call(item, place, _string(item, "arguments", place))
            case "custom_tool_call":
                self._add_call(item, place, wrapped(_string(item, "input", place)))
            case "function_call_output" | "custom_tool_call_output":
                self._add_result(item, place)
            case "reasoning":
                self._add_thoughts(item, place)
            case "item_reference":
                raise Unsupported(
                    f"{place} is a reference to an item, and nothing is stored here; send the item", param="input"
                )
            case str():
                raise Unsupported(
                    f"{place} is an item of type {type_[:60]!r}, which is not supported; leave it out, or send what it "
                    "says as a message",
                    param="input",
                )
            case _:
                raise BadRequest(f"{place} must have a type", param="input")

    def finish(self) -> list[Json]:
        self._end_results()
        return self.messages

    def _add_message(self, item: Json, place: str) -> None:
        role = _ROLES.get(str(item.get("role")))
        if role is None:
            raise BadRequest(f"{place}.role must be user, assistant, system or developer", param="input")
        content = _content(item.get("content"), f"{place}.content")
        if role == "assistant":
            answer = self._open_answer()
            if answer["content"] is not None or "tool_calls" in answer:
                answer = self._new_answer()
            answer["content"] = content
            return
        self._end_results()
        self.messages.append({"role": role, "content": content})

    def _add_call(self, item: Json, place: str, arguments: str) -> None:
        call = _string(item, "call_id", place)
        name = function_name(_string(item, "name", place), item.get("namespace"))
        function = {"name": name, "arguments": arguments}
        self._calls.add(call)
        answer = self._open_answer()
        answer.setdefault("tool_calls", []).append({"id": call, "type": "function", "function": function})

    def _add_result(self, item: Json, place: str) -> None:
        call, output = _string(item, "call_id", place), item.get("output")
        if self._has_all_calls and call not in self._calls:
            raise BadRequest(f"{place} is the output of a call that is not in the input: {call[:60]!r}", param="input")
        self._answer = None
        content = _content(output, f"{place}.output")
        if isinstance(content, list):
            self._images += [part for part in content if part["type"] != "text"]
            content = _joined([part for part in content if part["type"] == "text"])
        self.messages.append({"role": "tool", "tool_call_id": call, "content": content})

    def _add_thoughts(self, item: Json, place: str) -> None:
        """Add thoughts in plain text, or in our ``encrypted_content``. Only their own service can read others."""
        texts = [
            _string(part, "text", place)
            for name in ("content", "summary")
            for part in _list(item, name, place)
            if isinstance(part, dict)
        ]
        if not texts and (carried := thoughts_of(item.get("encrypted_content"))):
            texts = [carried]
        if not texts:
            return
        answer = self._open_answer()
        if answer["content"] is not None or "tool_calls" in answer:
            answer = self._new_answer()
        thoughts = "\n".join(filter(None, [answer.get("reasoning"), *texts]))
        answer["reasoning"] = answer["reasoning_content"] = thoughts  # servers differ in the field's name

    def _open_answer(self) -> Json:
        return self._new_answer() if self._answer is None else self._answer

    def _new_answer(self) -> Json:
        self._end_results()
        self._answer = {"role": "assistant", "content": None}
        self.messages.append(self._answer)
        return self._answer

    def _end_results(self) -> None:
        self._answer = None
        if self._images:
            self.messages.append({"role": "user", "content": self._images})
            self._images = []


# --- content -----------------------------------------------------------------------------------------------------


def _content(content: Any, place: str) -> Any:
    """Return content as a string or as parts of a chat."""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise BadRequest(f"{place} must be a string or a list of parts", param="input")
    return _joined([_part(part, f"{place}.{number}") for number, part in enumerate(content)])


def _joined(parts: list[Json]) -> Any:
    """Return one text as a string, as clients of a chat write it; else the parts."""
    if not parts:
        return ""
    return parts[0]["text"] if len(parts) == 1 and parts[0]["type"] == "text" else parts


def _part(part: Any, place: str) -> Json:
    type_ = part.get("type") if isinstance(part, dict) else None
    match type_:
        case "input_text" | "output_text" | "text" | "summary_text" | "reasoning_text":
            return {"type": "text", "text": _string(part, "text", place)}
        case "refusal":
            return {"type": "text", "text": _string(part, "refusal", place)}
        case "input_image":
            return {"type": "image_url", "image_url": _image(part, place)}
        case "input_file":
            return _file(part, place)
        case "input_audio" if isinstance(part.get("input_audio"), dict):
            return {"type": "input_audio", "input_audio": part["input_audio"]}
        case str():
            raise Unsupported(f"{place} is a part of type {type_[:60]!r}, which is not supported", param="input")
    raise BadRequest(f"{place} must be an object with a type", param="input")


def _file(part: Json, place: str) -> Json:
    data, name = part.get("file_data"), part.get("filename")
    if not isinstance(data, str):
        raise Unsupported(
            f"{place} must have file_data: files are not stored here, and not fetched from a URL", param="input"
        )
    return file_part(data, name if isinstance(name, str) else "", place, param="input")


def _image(part: Json, place: str) -> Json:
    url = part.get("image_url")
    if not isinstance(url, str):
        raise Unsupported(
            f"{place} must have an image_url, which may be a data URL: files are not stored here", param="input"
        )
    detail = part.get("detail")
    return {"url": url} if detail is None else {"url": url, "detail": detail}


def _list(item: Json, name: str, place: str) -> list[Any]:
    value = item.get(name) or []
    if not isinstance(value, list):
        raise BadRequest(f"{place}.{name} must be a list", param="input")
    return value


def _string(item: Json, name: str, place: str) -> str:
    value = item.get(name)
    if not isinstance(value, str):
        raise BadRequest(f"{place}.{name} must be a string", param="input")
    return value
