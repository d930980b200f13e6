"""The chart installed on a real control plane, and every pod of it a process: what the tests of a whole fleet stand
on."""

from __future__ import annotations

import contextlib
import json
import urllib.request
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key
from tests.gateway.wire import Gate
from tests.infra.chart import CHART, NAMESPACE, RELEASE, Object
from tests.support.kube import Kube
from tests.support.kubelet import Kubelet, Pod
from tests.support.redis import RedisServer
from tests.support.server import wait_for

PARTITIONS = 4
GATEWAYS = CONTROLLERS = 2
_START_S = 120.0
_SMALL: Object = {"requests": {"cpu": "100m", "memory": "128Mi"}}


def pool(name: str, sim: str, **more: Any) -> Object:
    """One of simulated replicas, whose model has its name."""
    engine = {"engine": "sim", "sim": f"model={name},{sim}", "models": [name]}
    return {"name": name, **engine, "resources": _SMALL, "longestStreamSeconds": 60, **more}


def values(pools: list[Object], prometheus: str) -> Object:
    """For an autoscaler that is as quick as the controllers' plans are short."""
    return {
        "partitions": PARTITIONS,
        "redis": {"secret": {"name": "redis"}},
        "telemetry": {"enabled": False},
        "gateway": {
            "replicas": GATEWAYS,
            "autoscaling": {"by": "none"},
            "secrets": {"keys": {"name": "keys"}},
            "resources": _SMALL,
            "drainSeconds": 10,
            "preStopSeconds": 1,
        },
        "controller": {"replicas": CONTROLLERS, "resources": _SMALL},
        "pools": pools,
        "autoscaling": {
            "prometheus": prometheus,
            "pollingSeconds": 2,
            "cooldownSeconds": 2,
            "failures": 5,
            "up": {"pods": 50, "percent": 100, "periodSeconds": 15},
            "down": {"pods": 1, "periodSeconds": 2, "stabilizationSeconds": 0},
        },
    }


@dataclass(frozen=True)
class Cluster:
    """A release, with whatever runs for it."""

    kube: Kube
    kubelet: Kubelet
    redis_url: str
    key: str

    def ask(self, path: str) -> Any:
        """GET a path of the API server below the namespace."""
        api, _, what = path.partition(" ")
        url = f"{self.kube.server}/{api}/namespaces/{NAMESPACE}/{what}"
        with urllib.request.urlopen(url, timeout=10, context=self.kube.as_admin()) as answer:
            return json.load(answer)

    def gates(self) -> list[Gate]:
        """The gateways that the Service leads to."""
        name = f"{RELEASE}-stream-gw-gateway"
        slices = self.ask(f"apis/discovery.k8s.io/v1 endpointslices?labelSelector=kubernetes.io/service-name={name}")
        pids = {pod.name: pod.pid for pod in self.kubelet.pods("gateway")}
        return [
            Gate(
                f"http://{self.kubelet.here(end['addresses'][0])}:{port['port']}",
                pids[end["targetRef"]["name"]],
                self.key,
            )
            for one in slices["items"]
            for port in one["ports"] or ()
            for end in one["endpoints"] or ()
            if end["conditions"]["ready"]
        ]

    def agents(self, pool: str) -> list[Pod]:
        return [pod for pod in self.kubelet.pods("agent") if pod.labels["stream-gw/pool"] == pool]

    def replicas(self) -> dict[str, int]:
        """Desired replicas of each pool's Deployment."""
        label = "stream-gw/pool,app.kubernetes.io/component=agent"
        found = self.ask(f"apis/apps/v1 deployments?labelSelector={label}")["items"]
        return {one["metadata"]["labels"]["stream-gw/pool"]: one["spec"]["replicas"] for one in found}


def deployment(pool: str) -> str:
    return f"{RELEASE}-stream-gw-pool-{pool}"


@contextlib.contextmanager
def cluster(folder: Path, pools: list[Object], pull_s: Callable[[Pod], float] = lambda _pod: 0.0) -> Iterator[Cluster]:
    """``pull_s``: seconds that a pod's image takes, before its process begins."""
    key = new_key(HostRandom())
    with RedisServer() as redis, Kube(sync_s=2, downscale_s=1) as kube:
        for number in range(2):
            kube.node(f"node-{number}")
        labels = {"pod-security.kubernetes.io/enforce": "restricted"}
        namespace = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": NAMESPACE, "labels": labels}}
        kube.kubectl("create", "-f", "-", given=namespace)
        keys = f'[[tenant]]\nid = "dev"\n[[tenant.key]]\nsha256 = "{key_digest(key)}"\n'
        for name, data in (("redis", {"url": redis.url}), ("keys", {"tenants.toml": keys})):
            secret = {"apiVersion": "v1", "kind": "Secret", "metadata": {"name": name}, "stringData": data}
            kube.kubectl("-n", NAMESPACE, "create", "-f", "-", given=secret)

        def scraped(pods: list[Pod]) -> None:
            kube.scrape("controllers", [pod.url("metrics") for pod in pods if pod.component == "controller"])

        with Kubelet(kube.server, kube.as_admin(), kube.ca, NAMESPACE, scraped, pull_s) as kubelet:
            running = Cluster(kube, kubelet, redis.url, key)
            given = folder / "values.json"
            given.write_text(json.dumps(values(pools, kube.prometheus_url)))
            kube.helm("install", RELEASE, str(CHART), "-n", NAMESPACE, "-f", str(given))
            wait_for(lambda: len(running.gates()) == GATEWAYS, "the gateways to be ready", _START_S, every_s=0.3)
            yield running
