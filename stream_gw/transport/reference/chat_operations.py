"""Table of the operations of chats in the AI SDK's format."""

from __future__ import annotations

from stream_fabric import errors as e
from stream_gw.dialects.ui import bodies as ui
from stream_gw.transport.reference.operation import EVENTS, JSON, Answer, Errors, Operation, Parameter

_CHAT = Parameter("id", "Id of the chat.", type=ui.ChatName)
_HEADER = "x-vercel-ai-ui-message-stream"
_ABOUT = (
    "An event is one `data:` line with a chunk of the UI message stream v1, and an `id:` line with its cursor. "
    "`[DONE]` follows the last one. The first chunk's `messageMetadata.streamId` is the stream's id."
)


def chat_operations(
    errors: Errors, found: Errors, headers: tuple[str, ...], parameters: tuple[Parameter, ...]
) -> tuple[Operation, ...]:
    """Return the operations. ``errors``: of a create; ``found``: of a stream that exists."""
    return (
        Operation(
            "post", "/v1/ui/chat", "Create", "Ask in a chat of the AI SDK's useChat",
            (
                Answer(200, "The answer's events.", {EVENTS: ui.UiEvent}, (_HEADER, *headers)),
                Answer(204, "The stream has ended, and the client has all of it."),
            ),
            "create", _ABOUT, parameters, body=ui.UiChatBody, errors=errors,
        ),
        Operation(
            "get", "/v1/ui/chat/{id}/stream", "Streams", "Resume the newest answer of a chat",
            (
                Answer(200, "The answer from its beginning, then as it goes on.", {EVENTS: ui.UiEvent},
                       (_HEADER, *headers[:3])),
                Answer(204, "Nothing runs, and a reader has got the last answer whole; or it was stopped."),
            ),
            "read", f"As `useChat` asks with `resume`. Any gateway answers. {_ABOUT}",
            (_CHAT,), ui.ChatQuery, errors=(e.Unsupported, e.TooMany, *found), route="/v1/ui/chat/{id:path}/stream",
        ),
        Operation(
            "delete", "/v1/ui/chat/{id}", "Streams", "Stop the answer of a chat",
            (Answer(200, "The stop, and the last frame that any reader gets.", {JSON: ui.StopAnswer}),),
            "cancel", "`stop()` of `useChat` ends only the page's own request.",
            (_CHAT,), ui.StopQuery, errors=found, route="/v1/ui/chat/{id:path}",
        ),
    )  # fmt: skip
