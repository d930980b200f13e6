"""The OpenAPI document: every route of the app is in it, every operation of it is routed, and it is served."""

from __future__ import annotations

import re
from collections.abc import AsyncIterator
from typing import Any

import msgspec
import pytest

from stream_fabric.process.host import HostClock
from stream_fabric.redis.client import RedisClient
from stream_gw.observe.access import AccessLog
from stream_gw.observe.local_stats import LocalStatsWindow
from stream_gw.observe.metrics import Metrics
from stream_gw.transport.app import Edge
from stream_gw.transport.reference.asyncapi import make_asyncapi
from stream_gw.transport.reference.document import make_document
from stream_gw.transport.reference.operations import OPERATIONS
from stream_gw.transport.reference.served import ASYNCAPI as ASYNCAPI_FILE
from stream_gw.transport.reference.served import DOCUMENT as DOCUMENT_FILE
from stream_gw.transport.reference.served import body_of, text_of
from tests.gateway.in_process import in_process
from tests.gateway.wire import Gate

DOCUMENT = msgspec.json.decode(msgspec.json.encode(make_document(OPERATIONS)))
UNDOCUMENTED = {"/{rest:path}"}
"""Paths of the app that answer 404."""


@pytest.fixture
async def edge(redis_client: RedisClient) -> AsyncIterator[Edge]:
    async with in_process(redis_client) as started:
        yield Edge(started.gateway, Metrics(), AccessLog(0, HostClock()), LocalStatsWindow(HostClock()))


def test_what_is_committed_is_what_the_operations_make() -> None:
    made = {DOCUMENT_FILE: make_document(OPERATIONS), ASYNCAPI_FILE: make_asyncapi(OPERATIONS)}
    for path, document in made.items():
        assert path.read_text() == text_of(document), "run: python -m stream_gw.transport.reference"
        assert body_of(path) == msgspec.json.encode(document)


async def test_every_route_is_documented_and_every_operation_is_routed(edge: Edge) -> None:
    routed = {(method, path) for path, methods in edge.paths.items() for method in methods if path not in UNDOCUMENTED}
    assert routed == {(operation.method, operation.route or operation.path) for operation in OPERATIONS}


async def test_the_document_is_served_without_a_key_and_with_a_tag(one: Gate) -> None:
    no_key = {"authorization": ""}
    reply = await one.ask("GET", "/openapi.json", headers=no_key)
    assert reply.status == 200 and reply.headers["content-type"] == "application/json"
    assert reply.json == DOCUMENT
    tag = reply.headers["etag"]
    assert reply.headers["cache-control"] == "no-cache"
    for tags in (tag, f"W/{tag}", f'"other", {tag}', "*"):
        again = await one.ask("GET", "/openapi.json", headers=no_key | {"if-none-match": tags})
        assert (again.status, again.body, again.headers["etag"]) == (304, b"", tag)
        assert "content-length" not in again.headers and "transfer-encoding" not in again.headers
    assert (await one.ask("GET", "/openapi.json", headers=no_key | {"if-none-match": '"other"'})).status == 200
    assert (await one.ask("HEAD", "/openapi.json", headers=no_key)).headers["etag"] == tag


async def test_the_page_is_served_with_the_headers_of_all_pages(one: Gate) -> None:
    page, other = [await one.ask("GET", path, headers={"authorization": ""}) for path in ("/docs", "/ops")]
    assert page.status == 200 and re.search(rb'src="/static/v-[0-9a-f]{16}/docs.js"', page.body)
    names = ("content-security-policy", "x-content-type-options", "referrer-policy", "cache-control")
    assert [page.headers[name] for name in names] == [other.headers[name] for name in names]


def test_every_reference_is_there_and_every_schema_is_used() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert set(references(DOCUMENT)) == {f"#/components/schemas/{name}" for name in schemas}


def test_every_operation_has_its_own_name_and_tells_its_answers() -> None:
    operations = [each for item in DOCUMENT["paths"].values() for each in item.values()]
    names = [each["operationId"] for each in operations]
    assert len(set(names)) == len(names)
    assert all(any(int(status) < 400 for status in each["responses"]) for each in operations)
    tags = {tag["name"] for tag in DOCUMENT["tags"]}
    assert {tag for each in operations for tag in each["tags"]} == tags


def test_parameters_of_a_path_are_described() -> None:
    for path, item in DOCUMENT["paths"].items():
        for operation in item.values():
            described = {each["name"] for each in operation.get("parameters", ()) if each["in"] == "path"}
            assert described == {part[1:-1] for part in path.split("/") if part.startswith("{")}, path


def test_docstrings_of_fields_are_descriptions() -> None:
    schemas = DOCUMENT["components"]["schemas"]
    assert schemas["KeyCreate"]["properties"]["expires_in_s"]["description"] == "null: the key does not expire."
    assert schemas["ChatBody"]["properties"]["n"]["description"] == "Number of choices."
    parameters = {each["name"]: each for each in DOCUMENT["paths"]["/v1/admin/keys"]["get"]["parameters"]}
    assert parameters["revoked"]["description"] == "Also list revoked keys."


def references(part: Any) -> list[str]:
    if isinstance(part, dict):
        found = [part["$ref"]] if "$ref" in part else list(part.get("mapping", {}).values())
        return found + [each for value in part.values() for each in references(value)]
    return [each for value in part for each in references(value)] if isinstance(part, list) else []
