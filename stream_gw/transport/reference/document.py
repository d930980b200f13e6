"""Makes the OpenAPI document from the table of operations and the msgspec types that it names."""

from __future__ import annotations

from typing import Any

import msgspec

from stream_fabric.errors import (
    BadRequest,
    BodyTooLarge,
    Forbidden,
    HeadersTooLarge,
    KeyRevoked,
    RequestTimeout,
    StreamGwError,
    Unauthenticated,
    WrongRegion,
)
from stream_gw.dialects.anthropic.bodies import AnthropicError
from stream_gw.dialects.anthropic.errors import OVERLOADED_STATUS, http_status
from stream_gw.dialects.responses.bodies import OpenError
from stream_gw.transport.reference.answers import Error
from stream_gw.transport.reference.operation import JSON, Answer, Operation, Parameter
from stream_gw.transport.reference.schemas import REF, field_docs, portable, schemas_of, type_key
from stream_gw.transport.ws_messages import ClientMessage

VERSION = "1"
_RATE = "What is left of the limit of the plan that has the least left, as OpenAI's clients read it."
HEADERS: dict[str, tuple[tuple[str, str], ...]] = {
    "X-Stream-Id": (("X-Stream-Id", "Id of the stream."),),
    "X-Stream-Epoch": (("X-Stream-Epoch", "Epoch of the stream."),),
    "X-Structured-Output": (
        ("X-Structured-Output", "Whether the answer, not streamed, fits its JSON schema: valid, invalid, unchecked."),
    ),
    "X-Served-Model": (("X-Served-Model", "The smaller model that answered; absent: the one that was asked."),),
    "Link": (("Link", "Path at which the stream can be resumed."),),
    "x-vercel-ai-ui-message-stream": (("x-vercel-ai-ui-message-stream", "Version of the UI message stream: `v1`."),),
    "request-id": (("request-id", "Id of the request, under the name that Anthropic's clients read."),),
    "Set-Cookie": (("Set-Cookie", "The cookie `stream_gw`."),),
    "ETag": (("ETag", "Tag of the body."),),
    "x-budget-warning": (
        ("x-budget-warning", "Budgets of which 80 % are used, with their use: `tenant_month 83%, user_day 91%`."),
    ),
    "x-ratelimit": tuple(
        (f"x-ratelimit-{figure}-{kind}", _RATE)
        for kind in ("requests", "tokens")
        for figure in ("limit", "remaining", "reset")
    ),
    "anthropic-ratelimit": tuple(
        (f"anthropic-ratelimit-{kind}-{figure}", "The same, as Anthropic's clients read it: a reset is a time of day.")
        for kind in ("requests", "tokens")
        for figure in ("limit", "remaining", "reset")
    ),
}
"""Response headers by the name that ``Answer.headers`` gives them."""
_ABOUT = """\
stream-gw streams tokens of language models. Any gateway delivers, resumes or cancels any stream.

Send `Authorization: Bearer <API key or capability token>`. A cursor `<epoch>-<seq>` names the last frame that a client
has. Each `GET` also takes `HEAD`. A body has 8 MiB at most. `code` names an error, and `retriable` tells whether the
same request may succeed later. 429 and 503 have `Retry-After`. Errors have OpenAI's shape; those of `/v1/messages`, and
all for a request with the header `anthropic-version`, have Anthropic's; those of `/v1/open/responses` have the shape of
Open Responses.

Streams are also read over the WebSocket `GET /v1/stream`, subprotocol `tokenstream.v1`, and responses are made over
`GET /v1/responses`; `/asyncapi.json` describes both, and `x-websocket` has the client's messages.
"""
_GROUPS = {
    "Create": "Requests that start a stream.",
    "Responses": "Stored responses and conversations of the Responses API.",
    "Streams": "Streams that exist: follow, describe, cancel, send input.",
    "Account": "Models, limits and credentials of the caller.",
    "Fleet": "Live figures and traces of the whole fleet, for operators.",
    "Tenants": "Tenants, users, keys, plans and prices in the database, for operators.",
    "Service": "Health, metrics and this document.",
    "Pages": "Pages for browsers.",
}


def make_document(operations: tuple[Operation, ...]) -> dict[str, Any]:
    """Return the OpenAPI 3.1 document of the operations."""
    types = _types_of(operations)
    by_type, named = schemas_of(types)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "stream-gw", "version": VERSION, "description": _ABOUT},
        "tags": [{"name": name, "description": about} for name, about in _GROUPS.items()],
        "paths": paths,
        "components": {"schemas": named, "securitySchemes": _SECURITY},
        "x-websocket": {
            "path": "/v1/stream",
            "subprotocol": "tokenstream.v1",
            "document": "/asyncapi.json",
            "client": by_type[type_key(ClientMessage)],
        },
    }


_SECURITY: dict[str, Any] = {
    "bearer": {"type": "http", "scheme": "bearer", "description": "An API key or a capability token."},
    "apiKey": {"type": "apiKey", "in": "header", "name": "x-api-key", "description": "The same, in another header."},
    "cookie": {"type": "apiKey", "in": "cookie", "name": "stream_gw", "description": "Set by `POST /v1/cookie`."},
}


# --- operations --------------------------------------------------------------------------------------------------


def _operation(operation: Operation, by_type: dict[str, Any]) -> dict[str, Any]:
    words = "".join(c if c.isalnum() else " " for c in operation.path).split()
    made: dict[str, Any] = {
        "operationId": "_".join([operation.method, *words]),
        "tags": [operation.group],
        "summary": operation.summary,
    }
    if operation.about:
        made["description"] = operation.about
    parameters = [_parameter(each, by_type) for each in operation.parameters]
    if operation.query is not None:
        parameters += _query_parameters(operation.query)
    if parameters:
        made["parameters"] = parameters
    if operation.body is not None:
        schema = by_type[type_key(operation.body)]
        made["requestBody"] = {"required": operation.body_required, "content": {JSON: {"schema": schema}}}
    made["responses"] = _responses(operation, by_type)
    made["security"] = _security(operation)
    return made


def _security(operation: Operation) -> list[dict[str, list[str]]]:
    if operation.scope is None:
        return []
    scopes: list[str] = [] if operation.scope == "any" else [operation.scope]
    names = ("bearer", "apiKey", "cookie") if operation.cookie else ("bearer", "apiKey")
    return [{name: scopes} for name in names]


def _parameter(parameter: Parameter, by_type: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": parameter.name,
        "in": parameter.place,
        "description": parameter.about,
        "required": parameter.place == "path",
        "schema": by_type[type_key(parameter.type)],
    }


def _query_parameters(struct: Any) -> list[dict[str, Any]]:
    """Make a parameter of each field. A field that may be None is a parameter that may be left out."""
    [_], components = msgspec.json.schema_components([struct], ref_template=REF)
    schema = portable(components[struct.__name__])
    made = []
    names = dict(zip(struct.__struct_fields__, struct.__struct_encode_fields__, strict=True))
    for field_name, about in field_docs(struct).items():
        name = names[field_name]
        field = schema["properties"][name]
        field = next((each for each in field.get("anyOf", ()) if each != {"type": "null"}), field)
        made.append({"name": name, "in": "query", "description": about, "required": False, "schema": field})
    return made


# --- responses -----------------------------------------------------------------------------------------------------


def errors_of(operation: Operation) -> dict[int, list[str]]:
    """Return the codes of the errors that an operation answers with, by status."""
    kinds: list[type[StreamGwError]] = [BadRequest, HeadersTooLarge, *operation.errors]
    if operation.scope is not None:
        kinds += [Unauthenticated, KeyRevoked, Forbidden, WrongRegion]
    if operation.body is not None:
        kinds += [RequestTimeout, BodyTooLarge]
    codes: dict[int, list[str]] = {}
    for kind in kinds:
        status = http_status(kind) if operation.anthropic else kind.http_status
        codes.setdefault(status, []).append(kind.code)
    return {status: sorted(names) for status, names in sorted(codes.items())}


def _responses(operation: Operation, by_type: dict[str, Any]) -> dict[str, Any]:
    made = {str(answer.status): _answer(answer, by_type) for answer in operation.answers}
    error = by_type[type_key(AnthropicError if operation.anthropic else OpenError if operation.open else Error)]
    if not operation.anthropic and any(each.name == "anthropic-version" for each in operation.parameters):
        error = {"anyOf": [error, by_type[type_key(AnthropicError)]]}
    if any(each.name == "OpenResponses-Version" for each in operation.parameters):
        error = {"anyOf": [error, by_type[type_key(OpenError)]]}
    for status, codes in errors_of(operation).items():
        told = ", ".join(f"`{code}`" for code in codes)
        if str(status) in made:  # one status has two shapes
            both = made[str(status)]
            both["description"] += f" Or an error: {told}."
            schema = both["content"].setdefault(JSON, {"schema": error})["schema"]
            if schema != error:
                both["content"][JSON]["schema"] = {"anyOf": [schema, error]}
        else:
            made[str(status)] = {"description": told, "content": {JSON: {"schema": error}}}
        if status in (429, 503, OVERLOADED_STATUS):
            header = {"description": "Seconds after which to ask again.", "schema": {"type": "integer"}}
            made[str(status)]["headers"] = {"Retry-After": header}
    return dict(sorted(made.items()))


def _answer(answer: Answer, by_type: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"description": answer.about}
    headers = [each for name in answer.headers for each in HEADERS[name]]
    if headers:
        made["headers"] = {name: {"description": about, "schema": {"type": "string"}} for name, about in headers}
    if answer.media:
        shapes = {media: [by_type[type_key(type_)] for type_ in _each(types)] for media, types in answer.media.items()}
        made["content"] = {
            media: {"schema": schemas[0] if len(schemas) == 1 else {"anyOf": schemas}}
            for media, schemas in shapes.items()
        }
    return made


def _each(types: Any) -> tuple[Any, ...]:
    """Return the types that a body may have."""
    return types if isinstance(types, tuple) else (types,)


def _types_of(operations: tuple[Operation, ...]) -> list[Any]:
    """Return every type that the document names, each once."""
    found: list[Any] = [Error, AnthropicError, OpenError, ClientMessage]
    for operation in operations:
        found += [each.type for each in operation.parameters]
        found += [type_ for answer in operation.answers for types in answer.media.values() for type_ in _each(types)]
        if operation.body is not None:
            found.append(operation.body)
    return list({type_key(type_): type_ for type_ in found}.values())
