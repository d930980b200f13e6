"""Makes the AsyncAPI document of the WebSockets from the msgspec types of their messages."""

from __future__ import annotations

from typing import Any, NamedTuple, get_args

import msgspec

from stream_gw.dialects.parsers import PARSERS, PATHS
from stream_gw.transport.reference import response_messages
from stream_gw.transport.reference.document import VERSION
from stream_gw.transport.reference.operation import JSON, Operation
from stream_gw.transport.reference.schemas import schemas_of, type_key
from stream_gw.transport.reference.socket_messages import SERVER_MESSAGES
from stream_gw.transport.ui.messages import CLIENT_MESSAGES as CHAT_CLIENT_MESSAGES
from stream_gw.transport.ui.messages import SERVER_MESSAGES as CHAT_SERVER_MESSAGES
from stream_gw.transport.ws_messages import ClientMessage

_ABOUT = """\
Many streams on one WebSocket: subprotocol `tokenstream.v1` at `/v1/stream`. Each message is one JSON object in a text
frame, and `t` names its kind. A client chooses the number of a channel (`ch`) for each stream, and the `id` of a
request.

The credential is the header `Authorization`, or the offered subprotocol `bearer.<capability token>` beside
`tokenstream.v1`, or a first message `auth` within 10 s. A cursor `<epoch>-<seq>` names the last frame that a client
has.

Close codes: 1008 policy, 1009 too big, 1011 internal error, 1012 the gateway drains, 4401 the credential is missing or
has ended, 4403 the user is suspended, 4408 the reader is too slow, 4429 too many messages. `/openapi.json` describes
the HTTP API; `docs/protocol.md` tells the rules.

`/v1/responses` is the WebSocket mode of OpenAI's Responses API, and `/v1/open/responses` that of Open Responses: many
responses on one WebSocket, side by side on lanes. Each message is one JSON object in a text frame, and `type` names its
kind. The credential is the header `Authorization`. There 1001 is the end after 60 minutes.

`/v1/ui/chat` speaks the protocol of the AI SDK's `WebSocketChatTransport`, with the optional subprotocol
`ai-sdk.chat.v1`: several chats on one WebSocket, whose messages name their request (`docs/ai-sdk.md`). The credential
is the header `Authorization`, the offered subprotocol `bearer.<capability token>`, or a header in a message.
"""


class Exchange(NamedTuple):
    """One thing that a client or the gateway does on the socket."""

    name: str
    summary: str
    sends: str
    """Tag of the message."""
    replies: tuple[str, ...] = ()
    """Tags of the possible answers."""
    channel: str = "stream"


CLIENT_EXCHANGES = (
    Exchange("authenticate", "Send a credential, or a newer one of the same tenant", "auth", ("hi", "error")),
    Exchange("create", "Create a stream and read it on a channel", "create", ("ok", "error")),
    Exchange("subscribe", "Read a stream after a cursor", "sub", ("ok", "error")),
    Exchange("unsubscribe", "Close a channel; the stream goes on", "unsub"),
    Exchange("cancel", "Cancel a stream", "cancel", ("ack", "error")),
    Exchange("input", "Steer a running stream with a user's message", "input", ("ack", "error")),
)
SERVER_EXCHANGES = (
    Exchange("deliver", "Deliver frames", "d"),
    Exchange("end", "Tell the end of a stream", "end"),
    Exchange("tellGap", "Tell that frames are lost", "gap"),
    Exchange("tellReset", "Tell that frames are void", "reset"),
    Exchange("tellSteered", "Tell where an input was applied, or that it was refused", "steered"),
    Exchange("tellEpoch", "Tell that a channel is open or that its epoch rose", "ok"),
    Exchange("tellPosition", "Tell the position in the queue", "queued"),
    Exchange("tellError", "Tell an error of a channel or of the connection", "error"),
    Exchange("ping", "Check that the client lives", "ping", ("pong",)),
    Exchange("askToReconnect", "Ask the client to connect to another gateway", "reconnect"),
)


_RESPONSES = {"responses": "/v1/responses", "openResponses": "/v1/open/responses"}
"""Addresses of the channels of the Responses API."""


def _responses_exchanges(channel: str) -> dict[str, tuple[Exchange, ...]]:
    """Return what the client and what the gateway does on a channel of the Responses API."""
    named = "response" if channel == "responses" else "openResponse"
    answers = ("response.event", "response.error")
    return {
        "receive": (
            Exchange(f"{named}Create", "Make a response on a lane", "response.create", answers, channel),
            Exchange(
                f"{named}Steer", "Add input to a response that runs", "response.steer",
                (*(f"response.steer.{what}" for what in ("accepted", "pending", "failed")), "response.error"), channel,
            ),
        ),
        "send": (
            Exchange(f"{named}Deliver", "Deliver an event of a response", "response.event", channel=channel),
            Exchange(f"{named}TellError", "Tell the end of a turn or of the connection", "response.error",
                     channel=channel),
        ),
    }  # fmt: skip


_CHAT_ANSWERS = tuple(CHAT_SERVER_MESSAGES)
CHAT_EXCHANGES = {
    "receive": (
        Exchange("chatSend", "Send a turn and read its answer", "chat.send", _CHAT_ANSWERS, "chat"),
        Exchange("chatResume", "Read the running answer of a chat", "chat.resume", _CHAT_ANSWERS, "chat"),
        Exchange("chatAbort", "Stop the answer of a request", "chat.abort", channel="chat"),
    ),
    "send": (
        Exchange("chatBegin", "Tell that an answer begins", "chat.start", channel="chat"),
        Exchange("chatDeliver", "Deliver a chunk of an answer", "chat.chunk", channel="chat"),
        Exchange("chatTellEnd", "Tell the end of an answer", "chat.end", channel="chat"),
        Exchange("chatTellNothing", "Tell that no answer runs", "chat.no-active", channel="chat"),
        Exchange("chatTellError", "Tell that a request is refused or has failed", "chat.error", channel="chat"),
    ),
}


def make_asyncapi(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Return the AsyncAPI 3.0 document. ``operations``: the HTTP API, which has the bodies of creates."""
    structs: list[type[msgspec.Struct]] = [*get_args(ClientMessage), *SERVER_MESSAGES]
    bodies = _bodies(operations)
    responses = {**response_messages.CLIENT_MESSAGES, **response_messages.SERVER_MESSAGES}
    chats = {**CHAT_CLIENT_MESSAGES, **CHAT_SERVER_MESSAGES}
    by_type, schemas = schemas_of([*structs, *bodies.values(), *responses.values(), *chats.values()])
    for name in response_messages.NOT_SENT:
        del schemas["ResponseCreate"]["properties"][name]
    anyof = [by_type[type_key(body)] for body in bodies.values()]
    schemas["Create"]["properties"]["body"] = {"description": "Body of the dialect's API.", "anyOf": anyof}
    schemas["Input"]["properties"]["item"] |= {"anyOf": [{"type": "string"}, {"type": "object"}]}
    for name in ("Create", "Sub"):
        schemas[name]["properties"]["dialect"]["enum"] = list(bodies)
    messages = {_tag(struct): _message(_tag(struct), struct, by_type) for struct in structs}
    of_responses = {name: _message(name, struct, by_type) for name, struct in responses.items()}
    of_chats = {name: _message(name, struct, by_type) for name, struct in chats.items()}
    exchanges = [("receive", each) for each in CLIENT_EXCHANGES] + [("send", each) for each in SERVER_EXCHANGES]
    for channel in _RESPONSES:
        exchanges += [(action, each) for action, found in _responses_exchanges(channel).items() for each in found]
    exchanges += [(action, each) for action, found in CHAT_EXCHANGES.items() for each in found]
    return {
        "asyncapi": "3.0.0",
        "info": {"title": "stream-gw", "version": VERSION, "description": _ABOUT, "license": {"name": "Apache-2.0"}},
        "defaultContentType": JSON,
        "servers": {
            "fleet": _server("wss", "gateways.example", "Gateways behind a load balancer; any of them answers."),
            "local": _server("ws", "127.0.0.1:8080", "A gateway of `stream-gw up`."),
        },
        "channels": {
            "stream": {
                "address": "/v1/stream",
                "title": "tokenstream.v1",
                "messages": {tag: {"$ref": f"#/components/messages/{tag}"} for tag in messages},
                "bindings": {"ws": {"method": "GET", "headers": _HEADERS, "bindingVersion": "0.1.0"}},
            },
            **{name: _channel(address, "Responses", of_responses) for name, address in _RESPONSES.items()},
            "chat": _channel("/v1/ui/chat", "AI SDK chats", of_chats),
        },
        "operations": {each.name: _operation(action, each) for action, each in exchanges},
        "components": {
            "messages": messages | of_responses | of_chats,
            "schemas": _plain(schemas),
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer", "description": "An API key or a capability token."}
            },
        },
    }


def _channel(address: str, title: str, messages: dict[str, Any]) -> dict[str, Any]:
    headers = {"type": "object", "properties": {"Authorization": _AUTHORIZATION}}
    return {
        "address": address,
        "title": title,
        "messages": {name: {"$ref": f"#/components/messages/{name}"} for name in messages},
        "bindings": {"ws": {"method": "GET", "headers": headers, "bindingVersion": "0.1.0"}},
    }


_AUTHORIZATION = {"type": "string", "description": "`Bearer <API key or capability token>`."}
_HEADERS = {
    "type": "object",
    "properties": {
        "Sec-WebSocket-Protocol": {
            "type": "string",
            "description": "`tokenstream.v1`, and `bearer.<capability token>` where no header has the credential.",
        },
        "Authorization": _AUTHORIZATION,
    },
}


def _bodies(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Return the type of a create's body by dialect: the body of the path with the dialect's parser."""
    by_path = {operation.path: operation.body for operation in operations if operation.method == "post"}
    dialects = {parser: dialect for dialect, parser in PARSERS.items()}
    return {dialects[parser]: by_path[path] for path, parser in PATHS.items() if parser in dialects}


def _tag(struct: type[msgspec.Struct]) -> str:
    return str(struct.__struct_config__.tag)


def _message(name: str, struct: type[msgspec.Struct], by_type: dict[str, Any]) -> dict[str, Any]:
    """Make the message object of a struct; its docstring is the summary."""
    made = {"name": name, "title": struct.__name__, "payload": by_type[type_key(struct)]}
    about = (struct.__doc__ or "").strip()
    return made | ({"summary": " ".join(about.split()).replace("``", "`")} if about else {})


def _operation(action: str, exchange: Exchange) -> dict[str, Any]:
    channel = f"#/channels/{exchange.channel}"
    made: dict[str, Any] = {
        "action": action,
        "channel": {"$ref": channel},
        "summary": exchange.summary,
        "messages": [_channel_message(channel, exchange.sends)],
    }
    if exchange.replies:
        replies = [_channel_message(channel, tag) for tag in exchange.replies]
        made["reply"] = {"channel": {"$ref": channel}, "messages": replies}
    return made


def _channel_message(channel: str, tag: str) -> dict[str, str]:
    return {"$ref": f"{channel}/messages/{tag}"}


def _server(protocol: str, host: str, about: str) -> dict[str, Any]:
    security = [{"$ref": "#/components/securitySchemes/bearer"}]
    return {"host": host, "protocol": protocol, "description": about, "security": security}


def _plain(schema: Any) -> Any:
    """Remove ``discriminator``, which is a string in AsyncAPI and an object in OpenAPI."""
    if isinstance(schema, dict):
        return {
            name: _plain(value)
            for name, value in schema.items()
            if name != "discriminator" or not isinstance(value, dict) or "propertyName" not in value
        }
    return [_plain(each) for each in schema] if isinstance(schema, list) else schema
