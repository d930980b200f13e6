"""Deletion costs of pods, through a Kubernetes API of the test's own."""

from __future__ import annotations

import contextlib
import json
from collections.abc import AsyncIterator
from pathlib import Path

import pytest
from aiohttp import web

from inference.control.pods import ANNOTATION, PodMarker
from stream_fabric.stream.ids import ReplicaId
from tests.support.tls import Authority
from tests.support.web import served


class Api:
    """Lists and patches the pods of a namespace."""

    def __init__(self, *pods: str) -> None:
        self.costs: dict[str, str | None] = dict.fromkeys(pods)
        self.labels: dict[str, str] = {}
        self.owners: dict[str, str] = {}
        """ReplicaSet of each pod that has one."""
        self.refused: set[str] = set()
        """Pods whose patch is refused."""
        self.url = ""

    @property
    def marked(self) -> set[str]:
        return {pod for pod, cost in self.costs.items() if cost is not None}

    async def list(self, request: web.Request) -> web.Response:
        selector = request.query["labelSelector"]
        items = [
            {
                "metadata": {
                    "name": pod,
                    "annotations": {} if cost is None else {ANNOTATION: cost},
                    "ownerReferences": [{"uid": self.owners[pod]}] if pod in self.owners else [],
                }
            }
            for pod, cost in self.costs.items()
            if selector in ("", self.labels.get(pod))
        ]
        return web.json_response({"items": items, "metadata": {}})

    async def patch(self, request: web.Request) -> web.Response:
        pod = request.match_info["pod"]
        if pod in self.refused:
            return web.Response(status=429, text="too many requests")
        self.costs[pod] = json.loads(await request.read())["metadata"]["annotations"][ANNOTATION]
        return web.json_response({})

    @contextlib.asynccontextmanager
    async def open(self) -> AsyncIterator[Api]:
        pods = "/api/v1/namespaces/llm/pods"
        async with served([web.get(pods, self.list), web.patch(pods + "/{pod}", self.patch)]) as self.url:
            yield self


@pytest.fixture
async def api() -> AsyncIterator[Api]:
    async with Api("a", "b", "c").open() as opened:
        opened.labels = dict.fromkeys("abc", "app.kubernetes.io/instance=llm")
        yield opened


@pytest.fixture
def marker(api: Api, tmp_path: Path) -> PodMarker:
    token = tmp_path / "token"
    token.write_text("t")
    return PodMarker(api.url, "llm", token, Authority(tmp_path).ca, "app.kubernetes.io/instance=llm")


def replicas(*pods: str) -> set[ReplicaId]:
    return {ReplicaId(f"{pod}-65a1b2c3d4e5f6") for pod in pods}


async def test_a_pod_that_a_former_leader_marked_late_is_unmarked_before_the_next_ones_leave(
    api: Api, marker: PodMarker
) -> None:
    assert await marker.mark_only(replicas()) == set()
    api.costs["b"] = "-1000"  # the patch of a controller whose term was over
    assert await marker.mark_only(replicas("a")) == replicas("a")
    assert api.marked == {"a"}


async def test_no_pod_counts_as_marked_while_another_one_keeps_its_mark(api: Api, marker: PodMarker) -> None:
    assert await marker.mark_only(replicas("a", "b")) == replicas("a", "b")
    api.refused.add("b")
    assert await marker.mark_only(replicas("a")) == set()
    api.refused.clear()
    assert await marker.mark_only(replicas("a")) == replicas("a")
    assert api.marked == {"a"}


async def test_a_mark_that_cannot_be_removed_holds_its_own_replica_set_alone(api: Api, marker: PodMarker) -> None:
    api.owners = {"a": "one", "b": "two", "c": "two"}
    assert await marker.mark_only(replicas("b")) == replicas("b")
    api.refused.add("b")
    for _ in range(2):
        assert await marker.mark_only(replicas("a", "c")) == replicas("a")
    api.refused.clear()
    assert await marker.mark_only(replicas("a", "c")) == replicas("a", "c")
    assert api.marked == {"a", "c"}


@pytest.mark.parametrize("refused", ("a", "b", "c"))
async def test_a_pod_that_is_never_marked_keeps_no_other_from_leaving(
    api: Api, marker: PodMarker, refused: str
) -> None:
    api.refused.add(refused)
    others = {"a", "b", "c"} - {refused}
    for _ in range(2):
        assert await marker.mark_only(replicas("a", "b", "c")) == replicas(*others)
    assert api.marked == others
    api.refused.clear()
    assert await marker.mark_only(replicas("a", "b", "c")) == replicas("a", "b", "c")


async def test_pods_of_another_install_keep_their_marks(api: Api, marker: PodMarker) -> None:
    api.costs["other"] = "-1000"
    api.labels["other"] = "app.kubernetes.io/instance=staging"
    assert await marker.mark_only(replicas("a")) == replicas("a")
    assert api.marked == {"a", "other"}
