"""Makes the OpenAPI document from the table of operations and the msgspec types that it names."""

from __future__ import annotations

import ast
import inspect
import sys
from functools import cache
from typing import Any, get_origin

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
)
from stream_gw.transport.reference.answers import Error
from stream_gw.transport.reference.operation import JSON, Answer, Operation, Parameter
from stream_gw.transport.ws_messages import ClientMessage

VERSION = "1"
_REF = "#/components/schemas/{name}"
_RATE = "What is left of the limit of the plan that has the least left, as OpenAI's clients read it."
HEADERS: dict[str, tuple[tuple[str, str], ...]] = {
    "X-Stream-Id": (("X-Stream-Id", "Id of the stream."),),
    "X-Stream-Epoch": (("X-Stream-Epoch", "Epoch of the stream."),),
    "Link": (("Link", "Path at which the stream can be resumed."),),
    "Set-Cookie": (("Set-Cookie", "The cookie `stream_gw`."),),
    "ETag": (("ETag", "Tag of the document."),),
    "x-ratelimit": tuple(
        (f"x-ratelimit-{figure}-{kind}", _RATE)
        for kind in ("requests", "tokens")
        for figure in ("limit", "remaining", "reset")
    ),
}
"""Response headers by the name that ``Answer.headers`` gives them."""
_ABOUT = """\
stream-gw streams tokens of language models. Any gateway delivers, resumes or cancels any stream.

Send `Authorization: Bearer <API key or capability token>`. A cursor `<epoch>-<seq>` names the last frame that a client
has. Each `GET` also takes `HEAD`. A body has 8 MiB at most. Errors have one shape; `code` names the error, and
`retriable` tells whether the same request may succeed later. 429 and 503 have `Retry-After`.

Streams are also read over the WebSocket `GET /v1/stream`, subprotocol `tokenstream.v1`; `x-websocket` has its messages.
"""
_GROUPS = {
    "Create": "Requests that start a stream.",
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
    schemas, components = msgspec.json.schema_components(types, ref_template=_REF)
    by_type = {_key(type_): _portable(schema) for type_, schema in zip(types, schemas, strict=True)}
    named = {name: _portable(schema) for name, schema in components.items()}
    for struct in _structs(types):
        _describe_fields(named, struct)
    paths: dict[str, Any] = {}
    for operation in operations:
        paths.setdefault(operation.path, {})[operation.method] = _operation(operation, by_type)
    return {
        "openapi": "3.1.0",
        "info": {"title": "stream-gw", "version": VERSION, "description": _ABOUT},
        "tags": [{"name": name, "description": about} for name, about in _GROUPS.items()],
        "paths": paths,
        "components": {"schemas": dict(sorted(named.items())), "securitySchemes": _SECURITY},
        "x-websocket": {"path": "/v1/stream", "subprotocol": "tokenstream.v1", "client": by_type[_key(ClientMessage)]},
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
        schema = by_type[_key(operation.body)]
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
        "schema": by_type[_key(parameter.type)],
    }


def _query_parameters(struct: Any) -> list[dict[str, Any]]:
    """Make a parameter of each field. A field that may be None is a parameter that may be left out."""
    [_], components = msgspec.json.schema_components([struct], ref_template=_REF)
    schema = _portable(components[struct.__name__])
    made = []
    for name, about in _field_docs(struct).items():
        field = schema["properties"][name]
        field = next((each for each in field.get("anyOf", ()) if each != {"type": "null"}), field)
        made.append({"name": name, "in": "query", "description": about, "required": False, "schema": field})
    return made


# --- responses -----------------------------------------------------------------------------------------------------


def errors_of(operation: Operation) -> dict[int, list[str]]:
    """Return the codes of the errors that an operation answers with, by status."""
    kinds: list[type[StreamGwError]] = [BadRequest, HeadersTooLarge, *operation.errors]
    if operation.scope is not None:
        kinds += [Unauthenticated, KeyRevoked, Forbidden]
    if operation.body is not None:
        kinds += [RequestTimeout, BodyTooLarge]
    codes: dict[int, list[str]] = {}
    for kind in kinds:
        codes.setdefault(kind.http_status, []).append(kind.code)
    return {status: sorted(names) for status, names in sorted(codes.items())}


def _responses(operation: Operation, by_type: dict[str, Any]) -> dict[str, Any]:
    made = {str(answer.status): _answer(answer, by_type) for answer in operation.answers}
    for status, codes in errors_of(operation).items():
        told = ", ".join(f"`{code}`" for code in codes)
        if str(status) in made:  # one status has two shapes
            both = made[str(status)]
            both["description"] += f" Or an error: {told}."
            schema = both["content"].setdefault(JSON, {"schema": by_type[_key(Error)]})["schema"]
            if schema != by_type[_key(Error)]:
                both["content"][JSON]["schema"] = {"anyOf": [schema, by_type[_key(Error)]]}
        else:
            made[str(status)] = {"description": told, "content": {JSON: {"schema": by_type[_key(Error)]}}}
        if status in (429, 503):
            header = {"description": "Seconds after which to ask again.", "schema": {"type": "integer"}}
            made[str(status)]["headers"] = {"Retry-After": header}
    return dict(sorted(made.items()))


def _answer(answer: Answer, by_type: dict[str, Any]) -> dict[str, Any]:
    made: dict[str, Any] = {"description": answer.about}
    headers = [each for name in answer.headers for each in HEADERS[name]]
    if headers:
        made["headers"] = {name: {"description": about, "schema": {"type": "string"}} for name, about in headers}
    if answer.media:
        made["content"] = {media: {"schema": by_type[_key(type_)]} for media, type_ in answer.media.items()}
    return made


# --- schemas -------------------------------------------------------------------------------------------------------


def _key(type_: Any) -> str:
    return repr(type_)


def _types_of(operations: tuple[Operation, ...]) -> list[Any]:
    """Return every type that the document names, each once."""
    found: list[Any] = [Error, ClientMessage]
    for operation in operations:
        found += [each.type for each in operation.parameters]
        found += [type_ for answer in operation.answers for type_ in answer.media.values()]
        if operation.body is not None:
            found.append(operation.body)
    return list({_key(type_): type_ for type_ in found}.values())


def _portable(schema: Any) -> Any:
    r"""Rewrite what JSON Schema writes differently: ``\Z`` of Python's patterns is ``$``."""
    if isinstance(schema, dict):
        made = {name: _portable(value) for name, value in schema.items()}
        if isinstance(pattern := made.get("pattern"), str):
            made["pattern"] = pattern.removesuffix(r"\Z") + ("$" if pattern.endswith(r"\Z") else "")
        if isinstance(about := made.get("description"), str):
            made["description"] = _prose(about)
        return made
    return [_portable(each) for each in schema] if isinstance(schema, list) else schema


def _structs(types: list[Any]) -> list[type[msgspec.Struct]]:
    """Return every struct within the types."""
    found: dict[type[msgspec.Struct], None] = {}

    def add(info: msgspec.inspect.Type) -> None:
        if isinstance(info, msgspec.inspect.StructType):
            if info.cls not in found:
                found[info.cls] = None
                for field in info.fields:
                    add(field.type)
        elif isinstance(info, msgspec.inspect.UnionType):
            for each in info.types:
                add(each)
        elif isinstance(info, msgspec.inspect.Metadata):
            add(info.type)
        elif isinstance(info, msgspec.inspect.DictType):
            add(info.value_type)
        elif isinstance(info, msgspec.inspect.ListType | msgspec.inspect.VarTupleType):
            add(info.item_type)

    for info in msgspec.inspect.multi_type_info(types):
        add(info)
    return list(found)


def _describe_fields(components: dict[str, Any], struct: type[msgspec.Struct]) -> None:
    """Add the docstrings below a struct's fields to its schema."""
    properties = components.get(struct.__name__, {}).get("properties", {})
    docs = _field_docs(struct)
    for field in msgspec.structs.fields(struct):
        if docs.get(field.name) and field.encode_name in properties:
            properties[field.encode_name] = {"description": docs[field.name], **properties[field.encode_name]}


def _field_docs(struct: Any) -> dict[str, str]:
    """Return the docstring below each field, by the field's name; empty where a field has none."""
    struct = get_origin(struct) or struct
    docs: dict[str, str] = {field.name: "" for field in msgspec.structs.fields(struct)}
    for base in reversed(struct.__mro__):
        if base.__module__.partition(".")[0].startswith("stream_"):
            docs.update(_docs_of_module(base.__module__).get(base.__name__, {}))
    return docs


@cache
def _docs_of_module(module: str) -> dict[str, dict[str, str]]:
    """Return the docstrings below the fields of a module's classes, by class and field."""
    found: dict[str, dict[str, str]] = {}
    try:
        source = inspect.getsource(sys.modules[module])
    except (OSError, TypeError):  # installed without its source
        return found
    for node in ast.parse(source).body:
        if not isinstance(node, ast.ClassDef):
            continue
        docs = found.setdefault(node.name, {})
        for field, below in zip(node.body, node.body[1:], strict=False):
            match field, below:
                case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                    docs[name] = _prose(inspect.cleandoc(text))
    return found


def _prose(docstring: str) -> str:
    """Turn a docstring into Markdown that speaks of JSON."""
    text = " ".join(docstring.split()).replace("``", "`")
    return text.replace("None:", "null:").replace("True:", "true:").replace("False:", "false:")
