"""Types of the table of operations."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, Literal, NamedTuple

from stream_fabric.accounts.records import Scope
from stream_fabric.errors import StreamGwError

Method = Literal["get", "post", "put", "patch", "delete"]
Group = Literal["Create", "Responses", "Streams", "Account", "Fleet", "Tenants", "Service", "Pages"]
Errors = tuple[type[StreamGwError], ...]

JSON = "application/json"
EVENTS = "text/event-stream"
TEXT = "text/plain"


class Parameter(NamedTuple):
    """One parameter in the path or in a header. Parameters of the query are the fields of ``Operation.query``."""

    name: str
    about: str
    place: Literal["path", "header"] = "path"
    type: Any = str


class Answer(NamedTuple):
    """A response that is no error. ``media``: type of the body by its media type, or a tuple of the
    types that it may have; empty: there is no body."""

    status: int
    about: str
    media: Mapping[str, Any] = MappingProxyType({})
    headers: tuple[str, ...] = ()
    """Names of headers, which ``document.HEADERS`` describes."""


class Operation(NamedTuple):
    """One method of one path."""

    method: Method
    path: str
    group: Group
    summary: str
    answers: tuple[Answer, ...]
    scope: Scope | Literal["any"] | None = "any"
    """Scope that the credential must have; ``any``: any credential; None: no credential is needed."""
    about: str = ""
    parameters: tuple[Parameter, ...] = ()
    query: Any = None
    """Struct whose fields are the parameters of the query string."""
    body: Any = None
    body_required: bool = True
    errors: Errors = ()
    """Errors beside those that follow from ``scope`` and ``body``."""
    cookie: bool = False
    """Whether the cookie of ``POST /v1/cookie`` is also accepted."""
    anthropic: bool = False
    """Whether errors have Anthropic's shape and statuses whatever headers the request has."""
    open: bool = False
    """Whether errors have the shape of Open Responses."""
    route: str = ""
    """Path in the router where it differs."""
