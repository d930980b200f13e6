"""The list of models: what it tells of a model beside its name."""

from __future__ import annotations

from datetime import datetime

import pytest

from stream_fabric.process.host import HostClock, HostRandom
from stream_fabric.stream.ids import ReplicaId, new_replica_id, started_s
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


async def test_a_model_was_created_when_its_oldest_replica_started(one: Gate, two: Gate) -> None:
    listed = [(await gate.ask("GET", "/v1/models")).json["data"] for gate in (one, two)]
    told = {each["created"] for models in listed for each in models if each["id"] == MODEL}
    assert len(told) == 1, "all gateways tell the same"
    (created,) = told
    assert 0 < HostClock().now_us() / 1e6 - created < 24 * 3600
    anthropic = await one.ask("GET", f"/v1/models/{MODEL}", headers={"anthropic-version": "2023-06-01"})
    assert datetime.fromisoformat(anthropic.json["created_at"]).timestamp() == created


def test_a_replica_id_tells_the_start_of_its_process() -> None:
    assert started_s(new_replica_id("a-1", 1_796_035_672, HostRandom().token_hex(3))) == 1_796_035_672
    assert started_s(ReplicaId("a-replica")) == 0
