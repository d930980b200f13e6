"""A real Kubernetes control plane with KEDA and Prometheus for tests: plain processes on free loopback ports, with
their state in a temporary folder. Blocking helpers. What they are made of, and how: ``infra/local-kube``.

There is no network of Services, and no kubelet but that of ``tests/support/kubelet.py``: without it a pod is bound to a
node and then waits for whoever plays its kubelet. A node that a test adds stays ready without one.

``python -m tests.support.kube`` keeps one up until Ctrl-C, for a look at it with kubectl.
"""

from __future__ import annotations

import base64
import importlib.util
import json
import os
import shutil
import ssl
import subprocess
import sys
import tempfile
import time
import urllib.parse
import urllib.request
from collections.abc import Callable, Iterable
from pathlib import Path
from types import ModuleType
from typing import Any, Self

import pytest
import yaml

from stream_fabric.process.death_signal import die_with_parent
from tests.support.missing import missing
from tests.support.server import Started, free_port, wait_for
from tests.support.tls import Authority

_RECIPE = Path(__file__).parents[2] / "infra" / "local-kube" / "build.py"
_START_S = 90.0
_STOP_S = 5.0
_LOOPBACK = "IP:127.0.0.1,DNS:localhost"
_METRICS_NAME = "keda-metrics-apiserver.keda.svc"
"""The API server asks for this name, whatever address an APIService leads to."""


def _recipe() -> ModuleType:
    spec = importlib.util.spec_from_file_location("local_kube_build", _RECIPE)
    assert spec is not None and spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


HOME: Path = _recipe().folder()
"""Where ``make helm`` and ``make kube`` put what they build."""


def tool(name: str) -> str:
    """Path of a program that ``make helm`` builds. Without it the test is skipped, or fails where ``CI`` is set."""
    found = HOME / "bin" / name
    if not found.exists():
        missing(f"needs {found}; run: make helm")
    return str(found)


def need_kube() -> None:
    """Skip where ``make kube`` has not built the control plane, also under ``CI``: it takes half an hour."""
    if missing := missing_programs():
        pytest.skip(f"needs {', '.join(missing)} in {HOME / 'bin'}; run: make kube")


def missing_programs() -> list[str]:
    """Names of the programs that ``make kube`` has not built."""
    return [name for name in _PROGRAMS if not (HOME / "bin" / name).exists()]


_PROGRAMS = (
    "etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl",
    "keda-operator", "keda-adapter", "keda-webhooks", "prometheus", "helm",
)  # fmt: skip


class Refused(Exception):
    """Output of a command that ended with a code other than 0."""


class Kube(Started):
    """A control plane of the test's own. ``node`` adds a node, ``kubectl`` and ``helm`` are the commands, ``ready`` and
    ``gone`` are what a kubelet would say of a pod (``tests/support/kubelet.py`` is one), ``scrape`` tells Prometheus of
    targets, ``kill`` and ``again`` are for its own processes. Autoscalers look every ``sync_s``."""

    def __init__(self, *, sync_s: float = 5, downscale_s: float = 15) -> None:
        self._sync_s, self._downscale_s = sync_s, downscale_s
        self.dir = Path(tempfile.mkdtemp(prefix="stream-gw-kube-"))
        self._processes: list[tuple[str, subprocess.Popen[bytes]]] = []
        self._begun: dict[str, tuple[tuple[str, ...], dict[str, str]]] = {}
        self._health: dict[str, str] = {}
        self._ports: dict[str, int] = {}
        self.config = self.dir / "admin.kubeconfig"

    # --- for tests -----------------------------------------------------------------------------------------

    @property
    def server(self) -> str:
        return f"https://127.0.0.1:{self.port('api')}"

    @property
    def ca(self) -> Path:
        """Whom to trust for ``server``."""
        return self._ca.ca

    @property
    def prometheus_url(self) -> str:
        return f"http://127.0.0.1:{self.port('prometheus')}"

    def kubectl(self, *args: str, given: object = None, timeout_s: float = 60) -> str:
        """``given``: objects on stdin. Raises Refused."""
        return self._run("kubectl", args, given, timeout_s)

    def get(self, *args: str) -> Any:
        return json.loads(self.kubectl("get", *args, "-o", "json"))

    def helm(self, *args: str, timeout_s: float = 120) -> str:
        return self._run("helm", args, None, timeout_s)

    def node(self, name: str, labels: dict[str, str] | None = None, **room: str) -> None:
        """A ready node; ``room`` beside processors, memory and pods as ``{"nvidia.com/gpu": "8"}``."""
        capacity = {"cpu": "64", "memory": "512Gi", "pods": "110", **room}
        ready = {"type": "Ready", "status": "True", "reason": "Test", "message": ""}
        status = {"capacity": capacity, "allocatable": capacity, "conditions": [ready]}
        labels = {"kubernetes.io/hostname": name, "kubernetes.io/os": "linux", **(labels or {})}
        node = {"apiVersion": "v1", "kind": "Node", "metadata": {"name": name, "labels": labels}, "status": status}
        self.kubectl("create", "-f", "-", given=node)
        # Every new node is tainted as not ready, and who would take that off is not running
        self.kubectl("patch", "node", name, "--type=merge", "-p", json.dumps({"spec": {"taints": None}}))

    def ready(self, namespace: str, pod: str) -> None:
        """As its kubelet says that the pod's containers run and are ready."""
        conditions = [{"type": kind, "status": "True"} for kind in ("Initialized", "ContainersReady", "Ready")]
        status = json.dumps({"status": {"phase": "Running", "conditions": conditions}})
        self.kubectl("-n", namespace, "patch", "pod", pod, "--subresource=status", "-p", status)

    def gone(self, namespace: str, pod: str) -> None:
        """As its kubelet says that the pod has ended; until then one that was deleted stays."""
        self.kubectl("-n", namespace, "delete", "pod", pod, "--grace-period=0", "--force", "--wait=false")

    def scrape(self, job: str, urls: Iterable[str]) -> None:
        """Prometheus asks these each second, beginning within two."""
        targets = [{"targets": [url.removeprefix("http://") for url in urls]}]
        self._file(f"targets/{job}.json", json.dumps(targets))

    def as_admin(self) -> ssl.SSLContext:
        """For ``server``, with every right."""
        context = ssl.create_default_context(cafile=str(self.ca))
        context.load_cert_chain(self._users["admin"].cert, self._users["admin"].key)
        return context

    def kill(self, name: str) -> None:
        """SIGKILL to one of its processes."""
        (found,) = [one for one in self._processes if one[0] == name]
        found[1].kill()
        found[1].wait()
        self._processes.remove(found)

    def again(self, name: str) -> None:
        """Start one that was killed as it was started first, and wait until it is ready."""
        flags, env = self._begun[name]
        self._begin(name, *flags, **env)
        self._await(name, self._health[name])

    def query(self, expr: str) -> list[Any]:
        address = f"{self.prometheus_url}/api/v1/query?{urllib.parse.urlencode({'query': expr})}"
        with urllib.request.urlopen(address, timeout=10) as answer:
            return list(json.load(answer)["data"]["result"])

    def port(self, name: str) -> int:
        return self._ports.setdefault(name, free_port())

    # --- its life ------------------------------------------------------------------------------------------

    def start(self) -> Self:
        self._certificates()
        self._control_plane()
        self._keda()
        self._prometheus()
        return self

    def close(self) -> None:
        """The last begun ends first."""
        for _, process in reversed(self._processes):
            process.terminate()
            try:
                process.wait(_STOP_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._processes.clear()
        shutil.rmtree(self.dir, ignore_errors=True)

    # --- its parts -----------------------------------------------------------------------------------------

    def _certificates(self) -> None:
        folder = self.dir / "pki"
        folder.mkdir()
        self._ca = Authority(folder, "kubernetes")
        self._front = Authority(folder, "front-proxy")
        keda_ca = Authority(folder, "keda")
        self._server = self._ca.issue(
            "apiserver", f"subjectAltName={_LOOPBACK},DNS:kubernetes.default.svc,DNS:kubernetes.default"
        )
        self._accounts = self._ca.issue("service-accounts")
        self._users = {
            "admin": self._ca.issue("admin", subject="/O=system:masters/CN=admin"),
            "controllers": self._ca.issue("controllers", subject="/CN=system:kube-controller-manager"),
            "scheduler": self._ca.issue("scheduler", subject="/CN=system:kube-scheduler"),
        }
        for name, user in self._users.items():
            self._kubeconfig(name, {"client-certificate": str(user.cert), "client-key": str(user.key)})
        # KEDA's three processes find one certificate, of servers and clients, under these names in one folder
        one = keda_ca.issue("keda-one", f"subjectAltName={_LOOPBACK},DNS:keda-operator.keda.svc,DNS:{_METRICS_NAME}")
        self._keda_pki = self.dir / "keda-pki"
        self._keda_pki.mkdir()
        for source, name in ((one.cert, "tls.crt"), (one.key, "tls.key"), (keda_ca.ca, "ca.crt")):
            shutil.copyfile(source, self._keda_pki / name)
        self._keda_bundle = base64.b64encode(keda_ca.ca.read_bytes()).decode()

    def _control_plane(self) -> None:
        etcd, peers, api = (self.port(name) for name in ("etcd", "peers", "api"))
        self._begin(
            "etcd", "--name=test", f"--data-dir={self.dir}/etcd", "--unsafe-no-fsync",
            f"--listen-client-urls=http://127.0.0.1:{etcd}", f"--advertise-client-urls=http://127.0.0.1:{etcd}",
            f"--listen-peer-urls=http://127.0.0.1:{peers}", f"--initial-advertise-peer-urls=http://127.0.0.1:{peers}",
            f"--initial-cluster=test=http://127.0.0.1:{peers}",
        )  # fmt: skip
        self._await("etcd", f"http://127.0.0.1:{etcd}/health")
        self._begin(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd}", "--bind-address=127.0.0.1", f"--secure-port={api}",
            # Nothing answers at the Services' addresses; the reconciler would refuse loopback as the server's own
            "--advertise-address=127.0.0.1", "--endpoint-reconciler-type=none",
            "--service-cluster-ip-range=10.96.0.0/24",
            # With it the API server finds no way to an APIService whose Service is a name
            "--enable-aggregator-routing=false",
            f"--tls-cert-file={self._server.cert}", f"--tls-private-key-file={self._server.key}",
            f"--client-ca-file={self._ca.ca}", "--authorization-mode=RBAC",
            "--service-account-issuer=https://kubernetes.default.svc",
            f"--service-account-key-file={self._accounts.cert}",
            f"--service-account-signing-key-file={self._accounts.key}",
            f"--requestheader-client-ca-file={self._front.ca}", "--requestheader-allowed-names=front-proxy-client",
            "--requestheader-username-headers=X-Remote-User", "--requestheader-group-headers=X-Remote-Group",
            "--requestheader-extra-headers-prefix=X-Remote-Extra-",
            f"--proxy-client-cert-file={self._front.client.cert}",
            f"--proxy-client-key-file={self._front.client.key}",
        )  # fmt: skip
        self._await("kube-apiserver", f"https://127.0.0.1:{api}/readyz")
        self._begin(
            "kube-controller-manager", *self._as("controllers"), "--bind-address=127.0.0.1",
            f"--secure-port={self.port('controllers')}", "--leader-elect=false", "--use-service-account-credentials",
            f"--service-account-private-key-file={self._accounts.key}", f"--root-ca-file={self._ca.ca}",
            "--controllers=*,-node-lifecycle-controller",  # nodes stay ready though no kubelet says so
            f"--horizontal-pod-autoscaler-sync-period={self._sync_s:g}s",
            f"--horizontal-pod-autoscaler-downscale-stabilization={self._downscale_s:g}s",
        )  # fmt: skip
        self._begin(
            "kube-scheduler", *self._as("scheduler"), "--bind-address=127.0.0.1",
            f"--secure-port={self.port('scheduler')}", "--leader-elect=false",
        )  # fmt: skip
        self._await("kube-controller-manager", f"https://127.0.0.1:{self.port('controllers')}/healthz")
        self._await("kube-scheduler", f"https://127.0.0.1:{self.port('scheduler')}/healthz")

    def _keda(self) -> None:
        self._keda_objects()
        # Under its own account, so that what it may do is what it may do in a cluster
        token = self.kubectl("-n", "keda", "create", "token", "keda-operator", "--duration=24h").strip()
        self._kubeconfig("keda", {"token": token})
        metrics, adapter, hooks = (self.port(name) for name in ("keda-grpc", "adapter", "webhooks"))
        here = {
            "KUBECONFIG": f"{self.dir}/keda.kubeconfig", "POD_NAMESPACE": "keda", "WATCH_NAMESPACE": "",
            "KEDA_CLUSTER_OBJECT_NAMESPACE": "keda",
        }  # fmt: skip
        pki = f"--cert-dir={self._keda_pki}"
        self._begin(
            "keda-operator", pki, "--enable-cert-rotation=false",
            f"--metrics-service-bind-address=127.0.0.1:{metrics}", *self._doors("operator"), **here,
        )  # fmt: skip
        self._await("keda-operator", f"http://127.0.0.1:{self.port('operator-health')}/readyz")
        account = f"{self.dir}/keda.kubeconfig"
        self._begin(
            "keda-adapter", f"--lister-kubeconfig={account}", f"--authentication-kubeconfig={account}",
            f"--authorization-kubeconfig={account}", "--bind-address=127.0.0.1", f"--secure-port={adapter}",
            f"--port={self.port('adapter-metrics')}", pki, f"--tls-cert-file={self._keda_pki}/tls.crt",
            f"--tls-private-key-file={self._keda_pki}/tls.key", f"--client-ca-file={self._keda_pki}/ca.crt",
            f"--metrics-service-address=localhost:{metrics}", **here,
        )  # fmt: skip
        self._begin("keda-webhooks", pki, f"--port={hooks}", *self._doors("hooks"), **here)
        self._await("keda-webhooks", f"http://127.0.0.1:{self.port('hooks-health')}/readyz")
        self.kubectl("apply", "-f", "-", given=self._webhooks())
        name = "apiservice/v1beta1.external.metrics.k8s.io"
        self.kubectl("wait", "--for=condition=Available", name, f"--timeout={_START_S:g}s", timeout_s=_START_S + 10)

    def _doors(self, of: str) -> tuple[str, str]:
        metrics, health = self.port(f"{of}-metrics"), self.port(f"{of}-health")
        return f"--metrics-bind-address=127.0.0.1:{metrics}", f"--health-probe-bind-address=127.0.0.1:{health}"

    def _keda_objects(self) -> None:
        """KEDA's own definitions and roles, but no Deployments; and its metrics API at a loopback port."""
        shutil.copytree(HOME / "share" / "keda", self.dir / "keda")
        port = self.port("adapter")
        service = {
            "apiVersion": "v1",
            "kind": "Service",
            "metadata": {"name": "keda-metrics-apiserver", "namespace": "keda"},
            # Endpoints may not be loopback addresses, but a name may lead there
            "spec": {"type": "ExternalName", "externalName": "localhost", "ports": [{"port": port}]},
        }
        api = {
            "apiVersion": "apiregistration.k8s.io/v1",
            "kind": "APIService",
            "metadata": {"name": "v1beta1.external.metrics.k8s.io"},
            "spec": {
                "service": {"name": "keda-metrics-apiserver", "namespace": "keda", "port": port},
                "group": "external.metrics.k8s.io",
                "version": "v1beta1",
                "caBundle": self._keda_bundle,
                "groupPriorityMinimum": 100,
                "versionPriority": 100,
            },
        }
        self._file("keda/loopback/api.json", json.dumps({"apiVersion": "v1", "kind": "List", "items": [service, api]}))
        for name in ("role.yaml", "role_binding.yaml"):
            shutil.copyfile(self.dir / "keda" / "metrics-server" / name, self.dir / "keda" / "loopback" / name)
        whole = {
            "apiVersion": "kustomize.config.k8s.io/v1beta1",
            "kind": "Kustomization",
            "resources": [
                *(f"../{name}" for name in ("crd", "general", "rbac", "service_account")),
                *("role.yaml", "role_binding.yaml", "api.json"),
            ],
        }
        self._file("keda/loopback/kustomization.yaml", json.dumps(whole))
        # Server-side: the definitions are larger than the annotation that kubectl would keep of them
        self.kubectl("apply", "--server-side", "-k", f"{self.dir}/keda/loopback")
        self.kubectl("wait", "--for=condition=Established", "crd", "--all", "--timeout=30s")

    def _webhooks(self) -> Any:
        hooks = yaml.safe_load((self.dir / "keda/webhooks/validation_webhooks.yaml").read_text())
        for hook in hooks["webhooks"]:
            path = hook["clientConfig"]["service"]["path"]
            url = f"https://localhost:{self.port('webhooks')}{path}"
            hook["clientConfig"] = {"url": url, "caBundle": self._keda_bundle}
            hook["failurePolicy"] = "Fail"  # or a mistake of ours would pass unseen
        return hooks

    def _prometheus(self) -> None:
        jobs = [
            {
                "job_name": "test",
                "file_sd_configs": [{"files": [f"{self.dir}/targets/*.json"], "refresh_interval": "2s"}],
            }
        ]
        config = {"global": {"scrape_interval": "1s", "scrape_timeout": "1s"}, "scrape_configs": jobs}
        self._file("targets/none.json", "[]")
        self._file("prometheus.yml", json.dumps(config))
        self._begin(
            "prometheus", f"--config.file={self.dir}/prometheus.yml", f"--storage.tsdb.path={self.dir}/prometheus",
            f"--web.listen-address=127.0.0.1:{self.port('prometheus')}", "--log.level=warn",
        )  # fmt: skip
        self._await("prometheus", f"{self.prometheus_url}/-/ready")

    # --- processes -----------------------------------------------------------------------------------------

    def _as(self, user: str) -> tuple[str, ...]:
        path = self.dir / f"{user}.kubeconfig"
        return tuple(f"--{flag}kubeconfig={path}" for flag in ("", "authentication-", "authorization-"))

    def _kubeconfig(self, name: str, user: dict[str, str]) -> None:
        server = {"server": self.server, "certificate-authority": str(self.ca)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": server}],
            "users": [{"name": name, "user": user}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": name}}],
            "current-context": "test",
        }
        self._file(f"{name}.kubeconfig", json.dumps(config))

    def _file(self, name: str, text: str) -> None:
        path = self.dir / name
        path.parent.mkdir(exist_ok=True)
        partial = path.with_name(f".{path.name}")  # whoever watches the folder sees it whole
        partial.write_text(text)
        partial.rename(path)

    def _begin(self, name: str, *flags: str, **env: str) -> None:
        self._begun[name] = flags, env
        with (self.dir / f"{name}.log").open("ab") as log:
            process = subprocess.Popen(
                [HOME / "bin" / name, *flags],
                env={**os.environ, **env},
                stdout=log,
                stderr=log,
                start_new_session=True,
                preexec_fn=die_with_parent(),
            )
        self._processes.append((name, process))

    def _await(self, name: str, url: str) -> None:
        self._health[name] = url
        process = next(process for known, process in self._processes if known == name)
        anybody = ssl._create_unverified_context()

        def answers() -> bool:
            if process.poll() is not None:
                raise RuntimeError(f"{name} ended with {process.returncode}:\n{self.log(name)}")
            with urllib.request.urlopen(url, timeout=5, context=anybody) as answer:
                return bool(answer.status == 200)

        try:
            wait_for(answers, f"{name} to be ready", timeout_s=_START_S, every_s=0.1)
        except TimeoutError as error:
            raise TimeoutError(f"{error}\n{self.log(name)}") from None

    def log(self, name: str) -> str:
        return (self.dir / f"{name}.log").read_text(errors="replace")[-3000:]

    def _run(self, name: str, args: Iterable[str], given: object, timeout_s: float) -> str:
        done = subprocess.run(
            [HOME / "bin" / name, *args],
            env={
                **os.environ,
                "KUBECONFIG": str(self.config),
                "HELM_CACHE_HOME": f"{self.dir}/helm/cache",
                "HELM_CONFIG_HOME": f"{self.dir}/helm/config",
                "HELM_DATA_HOME": f"{self.dir}/helm/data",
            },
            input=None if given is None else json.dumps(given),
            capture_output=True,
            text=True,
            timeout=timeout_s,
        )
        if done.returncode:
            raise Refused(f"{name} {' '.join(args)}: {done.stderr}{done.stdout}")
        return done.stdout


def main(say: Callable[[str], None] = print) -> None:
    began = time.monotonic()
    with Kube() as kube:
        kube.node("node-0", {}, **{"nvidia.com/gpu": "8"})
        say(f"up after {time.monotonic() - began:.0f} s; Ctrl-C ends it")
        say(f"export KUBECONFIG={kube.config} PATH={HOME / 'bin'}:$PATH PROMETHEUS={kube.prometheus_url}")
        try:
            while True:
                time.sleep(3600)
        except KeyboardInterrupt:
            pass


if __name__ == "__main__":
    main()
