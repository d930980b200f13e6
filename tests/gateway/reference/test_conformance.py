"""Generated requests against a running platform: every answer is one that the document tells of, within a bound."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator
from datetime import timedelta
from typing import Any

import pytest
import requests
import schemathesis
from hypothesis import HealthCheck, given, settings
from hypothesis.errors import Unsatisfiable
from schemathesis import GenerationMode
from schemathesis.specs.openapi import checks

from tests.gateway.processes import on_cluster
from tests.gateway.reference.fleet import DOCUMENT, Fleet, api_fleet, make_known, narrowed

pytestmark = [pytest.mark.platform, pytest.mark.timeout(300)]
ANSWER_S = 10.0
EXAMPLES, REFUSALS = 12, 3
OPERATIONS = [(method, path) for path, item in DOCUMENT["paths"].items() for method in item if path != "/v1/admin/ops"]
REFUSED = (
    "/v1/conversations/", "/v1/responses/{id}/input_items", "/v1/open/responses/{id}/input_items", "/v1/cookie",
    "/v1/admin/traces", "/v1/admin/keys", "/v1/usage", "/v1/admin/usage", "/static",
)  # fmt: skip
"""No valid request is served here: it needs a token, telemetry, or an id that exists."""
CHECKS = (
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_headers_conformance,
    checks.response_schema_conformance,
)


@pytest.fixture(scope="module")
def fleet(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Fleet]:
    with api_fleet(tmp_path_factory.mktemp("api")) as started:
        yield started


@pytest.fixture(scope="module")
def schema(fleet: Fleet) -> Any:
    stream, *doomed = [asyncio.run(fleet.acme.background(20)) for _ in range(3)]
    loaded = schemathesis.openapi.from_dict(narrowed(stream, (doomed[0], doomed[1])))
    loaded.config.update(base_url=fleet.acme.url)
    loaded.config.generation.update(with_security_parameters=False)
    return loaded


@pytest.mark.parametrize("mode", [GenerationMode.POSITIVE, GenerationMode.NEGATIVE], ids=["valid", "invalid"])
@pytest.mark.parametrize("who", ["acme", "operator"])
@pytest.mark.parametrize(("method", "path"), OPERATIONS)
def test_every_answer_is_documented(
    fleet: Fleet, schema: Any, who: str, method: str, path: str, mode: GenerationMode
) -> None:
    is_whose = (who == "operator") == ("/admin/" in path)
    if on_cluster() and (mode is GenerationMode.NEGATIVE or not is_whose):
        pytest.skip("refused before it reaches the fabric: runs on one Redis")
    if "/admin/" in path:  # another test may have deleted them
        asyncio.run(make_known(fleet.operator))
    operation = schema[path][method.upper()]
    key: str = getattr(fleet, who).key
    session, statuses = requests.Session(), set[int]()

    @settings(
        max_examples=EXAMPLES if is_whose else REFUSALS,
        deadline=timedelta(seconds=ANSWER_S),
        derandomize=True,
        database=None,
        suppress_health_check=list(HealthCheck),
    )
    @given(case=operation.as_strategy(generation_mode=mode))
    def ask(case: Any) -> None:
        response = case.call_and_validate(
            headers={"Authorization": f"Bearer {key}"}, session=session, timeout=ANSWER_S, checks=list(CHECKS)
        )
        statuses.add(response.status_code)

    try:
        ask()
    except Unsatisfiable:
        assert mode is GenerationMode.NEGATIVE, "an operation without parameters and body has no invalid request"
    if mode is GenerationMode.POSITIVE and is_whose and not path.startswith(REFUSED):
        assert min(statuses) < 400 or 409 in statuses, "no generated request got to its end"
