"""The list of models: what it tells of a model beside its name."""

from __future__ import annotations

import pytest

from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate


@pytest.mark.parametrize(
    ("named", "modalities"),
    [
        ("", None),
        ("another", None),
        (f"another, {MODEL}", ["text", "image"]),
        ("*", ["text", "image"]),
    ],
)
async def test_models_that_take_images_say_so(platform: Running, named: str, modalities: list[str] | None) -> None:
    with platform.gateway(STREAM_GW_IMAGE_MODELS=named) as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        (listed,) = [each for each in (await gate.ask("GET", "/v1/models")).json["data"] if each["id"] == MODEL]
        one = (await gate.ask("GET", f"/v1/models/{MODEL}")).json
    assert listed.get("input_modalities") == one.get("input_modalities") == modalities
