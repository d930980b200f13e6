"""The chart on a real API server, scheduler and controller manager, with KEDA: what is refused, what is let in, and how
many replicas of a pool run for what the controllers want. Nothing runs in the pods: a kubelet is not part of it."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from inference.control.pods import PodMarker
from stream_fabric.stream.ids import ReplicaId
from tests.infra import schemas
from tests.infra.chart import CASES, CHART, NAMESPACE, RELEASE, Object, objects, of_kind, values, workloads
from tests.support.kube import HOME, Kube, Refused, need_kube
from tests.support.server import wait_for

pytestmark = [pytest.mark.kube, pytest.mark.timeout(600)]

QWEN, LLAMA = "llm-stream-gw-pool-qwen3-8b", "llm-stream-gw-pool-llama-3-3-70b"
H100 = {"nvidia.com/gpu.product": "NVIDIA-H100-80GB-HBM3", "topology.kubernetes.io/zone": "a"}


@pytest.fixture(scope="module")
def kube() -> Iterator[Kube]:
    need_kube()
    with Kube(sync_s=2, downscale_s=1) as kube:
        for number in range(3):
            kube.node(f"gpu-{number}", H100, **{"nvidia.com/gpu": "8"})
        definitions = {"apiVersion": "v1", "kind": "List", "items": list(schemas.monitoring())}
        kube.kubectl("apply", "--server-side", "-f", "-", given=definitions)
        # A pod that is not as locked up as can be is not let in
        labels = {f"pod-security.kubernetes.io/{how}": "restricted" for how in ("enforce", "warn")}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
        kube.kubectl("create", "-f", "-", given=namespace)
        kube.kubectl("create", "-f", "-", given={"apiVersion": "v1", "kind": "List", "items": [*models(), *secrets()]})
        yield kube


def models() -> Iterator[Object]:
    """The claim that the chart's example has its models on, and what it claims."""
    size, modes = {"storage": "1Ti"}, ["ReadOnlyMany"]
    volume = {"capacity": size, "accessModes": modes, "storageClassName": "", "hostPath": {"path": "/models"}}
    claim = {"resources": {"requests": size}, "accessModes": modes, "storageClassName": "", "volumeName": "models"}
    for kind, spec, where in (
        ("PersistentVolume", volume, {}),
        ("PersistentVolumeClaim", claim, {"namespace": NAMESPACE}),
    ):
        yield {"apiVersion": "v1", "kind": kind, "metadata": {"name": "models", **where}, "spec": spec}


def secrets() -> Iterator[Object]:
    """KEDA looks up what the first container of a pool gets from Secrets, and scales nothing where one is missing."""
    keys: dict[str, dict[str, str]] = {}
    for _, pod in workloads(objects("production")):
        for container in pod["spec"]["containers"]:
            for variable in container.get("env", ()):
                if (source := variable.get("valueFrom", {}).get("secretKeyRef")) is not None:
                    keys.setdefault(source["name"], {})[source["key"]] = "secret"
    for name, data in keys.items():
        where = {"name": name, "namespace": NAMESPACE}
        yield {"apiVersion": "v1", "kind": "Secret", "metadata": where, "stringData": data}


class Controllers:
    """Metrics of the platform's controllers, one figure per pool. A pool without a figure is unknown."""

    def __init__(self) -> None:
        self.desired: dict[str, int] = {}
        told = self

        class Page(BaseHTTPRequestHandler):
            def do_GET(self) -> None:
                lines = [f'pool_desired_replicas{{pool="{pool}"}} {count}\n' for pool, count in told.desired.items()]
                body = "".join(lines).encode()
                self.send_response(200)
                self.send_header("content-type", "text/plain; version=0.0.4")
                self.send_header("content-length", str(len(body)))
                self.end_headers()
                self.wfile.write(body)

            def log_message(self, *args: object) -> None:
                pass

        self._server = ThreadingHTTPServer(("127.0.0.1", 0), Page)
        self.url = f"http://127.0.0.1:{self._server.server_address[1]}"
        self._thread = threading.Thread(target=self._server.serve_forever)
        self._thread.start()

    def close(self) -> None:
        self._server.shutdown()
        self._thread.join()
        self._server.server_close()


@pytest.fixture(scope="module")
def controllers(kube: Kube) -> Iterator[Controllers]:
    """Two, as the chart starts: they tell the same."""
    first, second = Controllers(), Controllers()
    second.desired = first.desired
    kube.scrape("controllers", [first.url, second.url])
    yield first
    first.close()
    second.close()


@pytest.mark.parametrize("case", CASES)
def test_the_server_takes_every_object(kube: Kube, case: str) -> None:
    found = objects(case)
    said = dry_run(kube, found)
    assert len(said.splitlines()) == len(found)
    assert said.count("(server dry run)") == len(found)


def test_the_server_drops_no_field_of_an_autoscaler(kube: Kube) -> None:
    """The API server silently drops a field that it does not know."""
    for one in of_kind(objects("production"), "ScaledObject"):
        said = kube.kubectl(
            "create", "--dry-run=server", "-n", NAMESPACE, "-o", "json", "--validate=strict", "-f", "-", given=one
        )
        assert within(one["spec"], json.loads(said)["spec"])


def within(part: Any, whole: Any) -> bool:
    if isinstance(part, dict):
        return isinstance(whole, dict) and all(name in whole and within(part[name], whole[name]) for name in part)
    if isinstance(part, list):
        return len(part) == len(whole) and all(map(within, part, whole))
    return bool(part == whole or str(part) == str(whole))


def sets(kube: Kube, *more: str) -> list[str]:
    """The chart's values for a quick autoscaler that asks the Prometheus of the test."""
    given = [
        f"autoscaling.prometheus={kube.prometheus_url}",
        "autoscaling.authenticationRef=",
        "autoscaling.matchers=",
        "autoscaling.pollingSeconds=2",
        "autoscaling.failures=2",
        "autoscaling.up.pods=50",
        "autoscaling.down.periodSeconds=4",
        "autoscaling.down.stabilizationSeconds=0",
        "pools[1].pauseScaleIn=false",
        *more,
    ]
    return ["-n", NAMESPACE, "-f", values("production"), *(word for one in given for word in ("--set", one))]


def dry_run(kube: Kube, found: list[Object]) -> str:
    """Output of the server for objects that it accepts. Raises Refused."""
    every = {"apiVersion": "v1", "kind": "List", "items": found}
    flags = ("--server-side", "--dry-run=server", "-n", NAMESPACE, "-f", "-")
    return kube.kubectl("apply", *flags, given=every)


def test_what_no_schema_sees_the_server_refuses(kube: Kube) -> None:
    with pytest.raises(Refused, match="maxUnavailable"):
        dry_run(kube, objects("production", "--set", "pools[0].rollout.maxSurge=0"))


@pytest.fixture(scope="module")
def installed(kube: Kube, controllers: Controllers) -> Kube:
    controllers.desired |= {"qwen3-8b": 3, "llama-3.3-70b": 0}
    wait_for(lambda: len(kube.query("pool_desired_replicas")) == 4, "Prometheus to know of the pools")
    kube.helm("install", RELEASE, str(CHART), *sets(kube))
    return kube


def replicas(kube: Kube, name: str) -> int:
    return int(kube.get("-n", NAMESPACE, "deployment", name)["spec"]["replicas"])


def until(kube: Kube, name: str, count: int, timeout_s: float = 60) -> None:
    wait_for(lambda: replicas(kube, name) == count, f"{count} replicas of {name}", timeout_s, every_s=0.3)


def test_a_release_makes_pods_that_are_let_in_and_find_their_nodes(installed: Kube) -> None:
    def bound() -> dict[str, list[Object]]:
        found: dict[str, list[Object]] = {}
        for pod in installed.get("-n", NAMESPACE, "pods")["items"]:
            if "nodeName" in pod["spec"]:
                found.setdefault(pod["metadata"]["labels"]["app.kubernetes.io/component"], []).append(pod)
        return found

    until(installed, QWEN, 3)
    roles = {"gateway", "agent", "controller", "telemetry", "placeholder"}
    pods = wait_for(lambda: (seen := bound()).keys() == roles and len(seen["agent"]) >= 3 and seen, "pods on nodes", 60)
    names = {name for name, _ in workloads(objects("production"))}
    assert {pod["metadata"]["labels"]["app.kubernetes.io/instance"] for every in pods.values() for pod in every} == {
        RELEASE
    }
    assert len(names) == 6
    for pod in pods["agent"]:
        assert len(pod["metadata"]["name"]) <= 64, "a replica's name takes no more"


def test_only_the_controllers_may_do_anything_and_that_to_pods(installed: Kube) -> None:
    def may(who: str, *what: str) -> bool:
        account = f"system:serviceaccount:{NAMESPACE}:{who}"
        try:
            return installed.kubectl("auth", "can-i", *what, f"--as={account}", "-n", NAMESPACE).strip() == "yes"
        except Refused:
            return False

    controller = "llm-stream-gw-controller"
    assert may(controller, "patch", "pods") and may(controller, "list", "pods")
    assert not may(controller, "delete", "pods") and not may(controller, "list", "secrets")
    assert not may("default", "list", "pods")


def test_no_second_autoscaler_takes_a_pool(installed: Kube) -> None:
    found = of_kind(objects("production"), "ScaledObject")
    (own,) = [one for one in found if one["metadata"]["name"] == QWEN]
    own["metadata"] = {"name": "another", "namespace": NAMESPACE}
    with pytest.raises(Refused, match="already managed"):
        installed.kubectl("create", "-f", "-", given=own)


def test_pools_follow_what_the_controllers_want(installed: Kube, controllers: Controllers) -> None:
    """Up and down at once, to none and back, nothing down while that is paused or while nobody knows."""
    until(installed, QWEN, 3)
    until(installed, LLAMA, 0)
    controllers.desired |= {"qwen3-8b": 10, "llama-3.3-70b": 1}
    until(installed, QWEN, 10)
    until(installed, LLAMA, 1)
    controllers.desired["qwen3-8b"] = 11
    until(installed, QWEN, 11)  # an autoscaler's usual tolerance would find ten near enough

    installed.helm("upgrade", RELEASE, str(CHART), *sets(installed, "autoscaling.pauseScaleIn=true"))
    wait_for(lambda: scale_down(installed)["selectPolicy"] == "Disabled", "the pause to reach the autoscaler", 30)
    assert replicas(installed, QWEN) == 11, "an upgrade leaves the number as it is"
    controllers.desired["qwen3-8b"] = 2
    wait_for(lambda: wanted(installed) == 2, "the autoscaler to see the new figure", 30)
    assert replicas(installed, QWEN) == 11

    # Nobody knows: as many as there are, not as few as the fallback
    controllers.desired.clear()
    wait_for(lambda: fallback(installed), "the fallback", 60)
    assert replicas(installed, QWEN) == 11

    controllers.desired |= {"qwen3-8b": 9, "llama-3.3-70b": 1}
    installed.helm("upgrade", RELEASE, str(CHART), *sets(installed))
    seen: list[int] = []

    def down() -> bool:
        seen.append(replicas(installed, QWEN))
        return seen[-1] == 9

    wait_for(down, "nine replicas", 90, every_s=0.2)
    assert {*seen} <= {11, 9}, "together"


def agents(kube: Kube) -> dict[str, Object]:
    """The pool's pods by name, also those that have been deleted and are not gone."""
    label = "stream-gw/pool=qwen3-8b,app.kubernetes.io/component=agent"
    return {pod["metadata"]["name"]: pod for pod in kube.get("-n", NAMESPACE, "pods", "-l", label)["items"]}


def mark(kube: Kube, pod: str) -> None:
    """As a controller does, under the account that the chart gives it."""
    token = kube.dir / "controller.token"
    token.write_text(kube.kubectl("-n", NAMESPACE, "create", "token", "llm-stream-gw-controller"))
    victims = {ReplicaId(f"{pod}-65a1b2c3d4e5f6")}
    assert asyncio.run(PodMarker(kube.server, NAMESPACE, token, kube.ca).mark_only(victims)) == victims


def test_the_pod_that_a_controller_marked_goes_and_has_its_drain_before_it_is_gone(
    installed: Kube, controllers: Controllers
) -> None:
    controllers.desired["qwen3-8b"] = 3
    until(installed, QWEN, 3, timeout_s=120)

    def stay() -> list[str]:
        return [name for name, pod in agents(installed).items() if "deletionTimestamp" not in pod["metadata"]]

    wait_for(lambda: len(stay()) == 3, "three pods that stay", 30)
    for name in (names := stay()):
        installed.ready(NAMESPACE, name)
    idle = sorted(names)[1]
    mark(installed, idle)
    controllers.desired["qwen3-8b"] = 2
    wait_for(lambda: len(stay()) == 2, "two pods that stay", 60)
    assert set(stay()) == set(names) - {idle}
    assert agents(installed)[idle]["metadata"]["deletionGracePeriodSeconds"] == 930
    installed.gone(NAMESPACE, idle)
    wait_for(lambda: idle not in agents(installed), "the pod to be gone")


def hpa(kube: Kube) -> Object:
    found: Object = kube.get("-n", NAMESPACE, "hpa", f"keda-hpa-{QWEN}")
    return found


def scale_down(kube: Kube) -> Object:
    rules: Object = hpa(kube)["spec"]["behavior"]["scaleDown"]
    return {"selectPolicy": "Max", **rules}


def wanted(kube: Kube) -> float:
    """The figure that the autoscaler has, whatever it makes of it: of all its replicas."""
    told = [one["external"]["current"]["averageValue"] for one in hpa(kube)["status"].get("currentMetrics") or ()]
    each = [float(one.removesuffix("m")) / (1000 if one.endswith("m") else 1) for one in told]
    return round(sum(each) * replicas(kube, QWEN))


def fallback(kube: Kube) -> bool:
    scaled = kube.get("-n", NAMESPACE, "scaledobject", QWEN)
    conditions = {one["type"]: one["status"] for one in scaled["status"]["conditions"]}
    return conditions.get("Fallback") == "True"


def test_the_modules_that_schemas_are_made_of_are_the_servers(kube: Kube) -> None:
    """kubeconform, where there is no server, checks against what this one says of itself."""
    served = json.loads(kube.kubectl("get", "--raw", "/openapi/v2"))["definitions"]
    file = json.loads((HOME / "share" / "kubernetes.json").read_text())["definitions"]
    for name in ("io.k8s.api.apps.v1.DeploymentSpec", "io.k8s.api.core.v1.PodSpec", "io.k8s.api.core.v1.Container"):
        assert served[name]["properties"].keys() == file[name]["properties"].keys()
