"""A kubelet whose containers are plain processes: it runs what the control plane bound to nodes, and says of a pod only
what is so of its process.

What a pod declares is done: variables from Secrets and from the pod itself, volumes, probes with their periods,
preStop, SIGTERM and the grace, restarts. One machine stands for all nodes, so that three things are other than in a
cluster, and nothing else:

- the image is this checkout: ``stream-gw`` is run from it;
- a pod has its own address (``10.x.a.b`` in its status), which is ``127.x.a.b`` here (``here``), and what it is told to
  listen on at 0.0.0.0 it listens on there;
- there are no mounts: a variable that names a path below one names the volume's folder.
"""

from __future__ import annotations

import asyncio
import base64
import contextlib
import itertools
import json
import os
import random
import signal
import ssl
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import aiohttp

from stream_fabric.process.death_signal import die_with_parent
from tests.support.server import wait_for

_ROOT = Path(__file__).parents[2]
_LOOK_S = 0.2
_CALL_S = 10.0
_BACK_OFF_S, _BACK_OFF_MAX_S = 10.0, 60.0
_STOP_S = 15.0
_ACCOUNT = "/var/run/secrets/kubernetes.io/serviceaccount"

Object = dict[str, Any]


class Pod:
    """One pod on this machine, for as long as its object is there."""

    def __init__(self, declared: Object, address: str, folder: Path) -> None:
        self.declared = declared
        self.name: str = declared["metadata"]["name"]
        self.uid: str = declared["metadata"]["uid"]
        self.labels: dict[str, str] = declared["metadata"].get("labels", {})
        self.address = address
        self.folder = folder
        self.process: asyncio.subprocess.Process | None = None
        self.restarts = 0
        self.started = False
        """The startup probe has been answered since the process began."""
        self.ready = False
        self.since = _now()
        """When ``ready`` last changed."""
        self.code: int | None = None
        """Exit code of the last process."""
        self.leaving = asyncio.Event()
        self.leaves_at = 0.0
        """By when it is to be gone, by the loop's clock."""
        self.gone = False
        self.told: list[tuple[float, str]] = []
        """Events of the pod, with the time of the monotonic clock."""

    @property
    def container(self) -> Object:
        (container,) = self.declared["spec"]["containers"]
        return dict(container)

    @property
    def component(self) -> str:
        return self.labels.get("app.kubernetes.io/component", "")

    @property
    def pid(self) -> int:
        """Process id; 0: no process runs."""
        return self.process.pid if self.process is not None and self.process.returncode is None else 0

    @property
    def log(self) -> str:
        """Output of all its processes."""
        path = self.folder / "log"
        return path.read_text(errors="replace") if path.exists() else ""

    def port(self, name: str | int) -> int:
        if isinstance(name, int):
            return name
        return next(int(port["containerPort"]) for port in self.container["ports"] if port["name"] == name)

    def url(self, port: str | int) -> str:
        return f"http://{self.address}:{self.port(port)}"

    def tell(self, what: str) -> None:
        self.told.append((time.monotonic(), what))


class Kubelet:
    """Runs the pods of one namespace, in a thread of its own. ``tls``: as the administrator at ``server``, whose CA
    ``ca`` holds. ``on_pods`` is called with the pods that run whenever they are others. ``pull_s`` returns for a pod
    how many seconds its image takes: it is pending for so long before its process begins."""

    def __init__(
        self,
        server: str,
        tls: ssl.SSLContext,
        ca: Path,
        namespace: str,
        on_pods: Callable[[list[Pod]], None],
        pull_s: Callable[[Pod], float] = lambda _pod: 0.0,
    ) -> None:
        self._server, self._tls, self._ca, self._namespace = server, tls, ca, namespace
        self._on_pods, self._pull_s = on_pods, pull_s
        self._folder = tempfile.TemporaryDirectory(prefix="stream-gw-kubelet-")
        self._network = random.randrange(100, 250)
        self._numbers = itertools.count(1)
        self._pods: dict[str, Pod] = {}
        self.past: list[Pod] = []
        """Those that are gone, in the order in which they went."""
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="kubelet")
        self._loop: asyncio.AbstractEventLoop | None = None
        self._stop: asyncio.Event | None = None

    # --- for tests -----------------------------------------------------------------------------------------

    def pods(self, component: str = "") -> list[Pod]:
        """Those that are not gone, the oldest first."""
        self.check()
        return [pod for pod in list(self._pods.values()) if component in ("", pod.component)]

    def here(self, address: str) -> str:
        """Where an address of a pod leads on this machine."""
        return address.replace("10.", "127.", 1)

    def kill(self, pod: Pod) -> None:
        """SIGKILL to its process; what then becomes of the pod is the kubelet's work."""
        assert pod.pid
        pod.tell("killed by the test")
        os.kill(pod.pid, signal.SIGKILL)

    def check(self) -> None:
        """Raises what the kubelet failed by."""
        if self._served.done():
            self._served.result()

    def __enter__(self) -> Kubelet:
        self._served = self._thread.submit(lambda: asyncio.run(self._serve()))
        wait_for(lambda: self._stop is not None or self._served.done(), "the kubelet's loop")
        self.check()
        return self

    def __exit__(self, *exc: object) -> None:
        """Ends every process. Fails where one had an error that nothing expected."""
        assert self._loop is not None and self._stop is not None
        if not self._served.done():
            self._loop.call_soon_threadsafe(self._stop.set)
        self._thread.shutdown()
        faults = [f"{pod.name}:\n{pod.log}" for pod in [*self.past, *self._pods.values()] if "Traceback" in pod.log]
        self._folder.cleanup()
        self.check()
        assert not faults, "\n".join(faults)

    # --- its loop ------------------------------------------------------------------------------------------

    async def _serve(self) -> None:
        self._loop = asyncio.get_running_loop()
        async with self._session(), asyncio.TaskGroup() as tasks:
            self._stop = asyncio.Event()
            looking = tasks.create_task(self._look(tasks))
            await self._stop.wait()
            looking.cancel()
            for pod in self._pods.values():
                pod.leaving.set()
                pod.gone = True  # there is nobody to tell any more
                pod.leaves_at = self._loop.time() + _STOP_S

    @contextlib.asynccontextmanager
    async def _session(self) -> AsyncIterator[None]:
        timeout = aiohttp.ClientTimeout(total=_CALL_S)
        async with (
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(ssl=self._tls), timeout=timeout) as self._api,
            aiohttp.ClientSession(connector=aiohttp.TCPConnector(force_close=True)) as self._prober,
        ):
            yield

    async def _look(self, tasks: asyncio.TaskGroup) -> None:
        while True:
            found = await self._call("GET", f"{self._path('pods')}?resourceVersion=0")
            there = {one["metadata"]["uid"]: one for one in found["items"] if one["spec"].get("nodeName")}
            for uid, declared in there.items():
                if uid not in self._pods and declared["status"].get("phase") == "Pending":
                    self._pods[uid] = pod = self._new(declared)
                    tasks.create_task(self._live(pod), name=pod.name)
            for uid, pod in list(self._pods.items()):
                deleted = there.get(uid, {"metadata": {"deletionTimestamp": "", "deletionGracePeriodSeconds": 0}})
                if "deletionTimestamp" in deleted["metadata"] and not pod.leaving.is_set():
                    grace_s = deleted["metadata"]["deletionGracePeriodSeconds"]
                    pod.leaves_at = asyncio.get_running_loop().time() + grace_s
                    pod.tell(f"has {grace_s} s to leave")
                    pod.leaving.set()
            await asyncio.sleep(_LOOK_S)

    def _new(self, declared: Object) -> Pod:
        number = next(self._numbers)
        address = f"127.{self._network}.{number // 250}.{number % 250 + 1}"
        folder = Path(self._folder.name) / f"{number}-{declared['metadata']['name']}"
        folder.mkdir()
        return Pod(declared, address, folder)

    # --- one pod -------------------------------------------------------------------------------------------

    async def _live(self, pod: Pod) -> None:
        pod.tell("bound")
        variables = await self._variables(pod, await self._volumes(pod))
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(pod.leaving.wait(), self._pull_s(pod))
        back_off_s = 0.0
        while not pod.leaving.is_set():
            await self._begin(pod, variables)
            await self._say(pod)
            self._on_pods(self.pods())
            ended = asyncio.create_task(self._process(pod).wait())
            probing = asyncio.create_task(self._probe(pod))
            leaving = asyncio.create_task(pod.leaving.wait())
            await asyncio.wait([ended, probing, leaving], return_when=asyncio.FIRST_COMPLETED)
            if not ended.done():
                if not leaving.done():
                    probing.result()  # it ended because the process answers no more, or failed itself
                    pod.tell("answers no more")
                    pod.leaves_at = asyncio.get_running_loop().time() + pod.declared["spec"].get(
                        "terminationGracePeriodSeconds", 30
                    )
                await self._end(pod)
            for task in (ended, probing, leaving):
                task.cancel()
            await asyncio.gather(ended, probing, leaving, return_exceptions=True)
            pod.code = await self._process(pod).wait()
            pod.tell(f"ended with {pod.code}")
            pod.started = False
            self._be(pod, False)
            if not pod.leaving.is_set():
                pod.restarts += 1
                await self._say(pod)
                with contextlib.suppress(TimeoutError):
                    await asyncio.wait_for(pod.leaving.wait(), back_off_s)
                back_off_s = min(max(2 * back_off_s, _BACK_OFF_S), _BACK_OFF_MAX_S)
        if not pod.gone:
            await self._say(pod)
            uid = {"preconditions": {"uid": pod.uid}, "gracePeriodSeconds": 0}
            await self._call("DELETE", f"{self._path('pods')}/{pod.name}", uid, missing=True)
            pod.tell("gone")
            pod.gone = True
            del self._pods[pod.uid]
            self.past.append(pod)
            self._on_pods(self.pods())

    def _process(self, pod: Pod) -> asyncio.subprocess.Process:
        assert pod.process is not None
        return pod.process

    async def _begin(self, pod: Pod, variables: dict[str, str]) -> None:
        command = [*pod.container["command"], *pod.container.get("args", ())]
        assert command[0] == "stream-gw", command
        with (pod.folder / "log").open("ab") as log:
            pod.process = await asyncio.create_subprocess_exec(
                sys.executable, "-m", "stream_gw.cli", *command[1:],
                cwd=_ROOT, env=variables, stdin=asyncio.subprocess.DEVNULL, stdout=log, stderr=log,
                start_new_session=True, preexec_fn=die_with_parent(),
            )  # fmt: skip
        pod.tell("begins")

    async def _end(self, pod: Pod) -> None:
        """End the pod: preStop, SIGTERM, and SIGKILL after the grace period."""
        process, loop = self._process(pod), asyncio.get_running_loop()
        hook: Object = pod.container.get("lifecycle", {}).get("preStop", {})
        assert hook.keys() <= {"sleep"}, f"this kubelet knows no such hook: {hook}"
        with contextlib.suppress(TimeoutError):
            sleep_s = 0 if pod.gone else min(hook.get("sleep", {}).get("seconds", 0), pod.leaves_at - loop.time())
            await asyncio.wait_for(process.wait(), sleep_s)
            return
        for number, word, until in (
            (signal.SIGTERM, "SIGTERM", pod.leaves_at),
            (signal.SIGKILL, "SIGKILL: its grace is over", loop.time() + _STOP_S),
        ):
            pod.tell(word)
            with contextlib.suppress(ProcessLookupError):
                process.send_signal(number)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(process.wait(), max(until - loop.time(), 0.1))
                return

    # --- what is so ----------------------------------------------------------------------------------------

    async def _probe(self, pod: Pod) -> None:
        """Keeps ``ready`` true to the process, until the process is to be started again for what it does not answer."""
        container = pod.container
        if "startupProbe" in container and not await self._until(pod, container["startupProbe"], True, gives_up=True):
            return
        pod.started = True
        watching = [
            asyncio.create_task(self._watch_ready(pod)),
            asyncio.create_task(self._until(pod, container["livenessProbe"], False)),
        ]
        try:
            done, _ = await asyncio.wait(watching, return_when=asyncio.FIRST_COMPLETED)
            for task in done:
                task.result()
        finally:
            for task in watching:
                task.cancel()

    async def _watch_ready(self, pod: Pod) -> None:
        while True:
            await self._until(pod, pod.container["readinessProbe"], not pod.ready)
            self._be(pod, not pod.ready)
            await self._say(pod)

    async def _until(self, pod: Pod, probe: Object, wanted: bool, *, gives_up: bool = False) -> bool:
        """Ask until the probe says what is wanted, so many times in a row as it takes. False: it has said the contrary
        as often, and the asker ``gives_up``."""
        limits = {True: probe.get("successThreshold", 1), False: probe.get("failureThreshold", 3)}
        last, row = wanted, 0
        if not pod.ready:
            await asyncio.sleep(probe.get("initialDelaySeconds", 0))
        while True:
            said = await self._answers(pod, probe)
            row = row + 1 if said == last else 1
            last = said
            if row >= limits[said] and (said == wanted or gives_up):
                return said == wanted
            await asyncio.sleep(probe.get("periodSeconds", 10))

    async def _answers(self, pod: Pod, probe: Object) -> bool:
        asked = probe["httpGet"]
        timeout = aiohttp.ClientTimeout(total=probe.get("timeoutSeconds", 1))
        try:
            async with self._prober.get(f"{pod.url(asked['port'])}{asked['path']}", timeout=timeout) as answer:
                return 200 <= answer.status < 400
        except (aiohttp.ClientError, OSError):  # a TimeoutError is an OSError
            return False

    def _be(self, pod: Pod, ready: bool) -> None:
        if pod.ready != ready:
            pod.ready, pod.since = ready, _now()
            pod.tell("ready" if ready else "not ready")

    async def _say(self, pod: Pod) -> None:
        if pod.gone:
            return
        runs = bool(pod.pid)
        ended: Object = {"terminated": {"exitCode": pod.code or 0, "finishedAt": _now()}}
        container = pod.container
        status = {
            "name": container["name"],
            "image": container["image"],
            "imageID": "",
            "ready": pod.ready,
            "started": pod.started,
            "restartCount": pod.restarts,
            "state": {"running": {}} if runs else ended if pod.code is not None else {"waiting": {}},
            "lastState": ended if runs and pod.code is not None else {},
        }
        over = pod.leaving.is_set() and not runs
        phase = ("Failed" if pod.code else "Succeeded") if over else "Running"
        true = {True: "True", False: "False"}
        conditions = [{"type": "Initialized", "status": "True"}] + [
            {"type": kind, "status": true[pod.ready], "lastTransitionTime": pod.since}
            for kind in ("ContainersReady", "Ready")
        ]
        address = pod.address.replace("127.", "10.", 1)
        told = {
            "phase": phase,
            "podIP": address,
            "podIPs": [{"ip": address}],
            "conditions": conditions,
            "containerStatuses": [status],
        }
        body = {"metadata": {"uid": pod.uid}, "status": told}
        await self._call("PATCH", f"{self._path('pods')}/{pod.name}/status", body, missing=True)

    # --- what it is given ----------------------------------------------------------------------------------

    async def _volumes(self, pod: Pod) -> dict[str, Path]:
        """The folder of each volume."""
        found = {}
        for volume in pod.declared["spec"].get("volumes", ()):
            folder = pod.folder / "volumes" / volume["name"]
            folder.mkdir(parents=True)
            for name, data in (await self._files(pod, volume)).items():
                (folder / name).write_bytes(data)
            found[volume["name"]] = folder
        return found

    async def _files(self, pod: Pod, volume: Object) -> dict[str, bytes]:
        if "emptyDir" in volume:
            return {}
        if "secret" in volume:
            return await self._secret(volume["secret"]["secretName"])
        if "configMap" in volume:
            data = (await self._call("GET", f"{self._path('configmaps')}/{volume['configMap']['name']}"))["data"]
            return {name: text.encode() for name, text in data.items()}
        # The API server gives each account a token that ends with the pod, the CA and the namespace
        assert "projected" in volume, f"this kubelet knows no such volume: {volume}"
        pod_of = {"apiVersion": "v1", "kind": "Pod", "name": pod.name, "uid": pod.uid}
        account = f"{self._path('serviceaccounts')}/{pod.declared['spec']['serviceAccountName']}/token"
        given = await self._call("POST", account, {"spec": {"boundObjectRef": pod_of, "expirationSeconds": 3600}})
        token = given["status"]["token"].encode()
        return {"token": token, "ca.crt": self._ca.read_bytes(), "namespace": self._namespace.encode()}

    async def _secret(self, name: str) -> dict[str, bytes]:
        data = (await self._call("GET", f"{self._path('secrets')}/{name}"))["data"]
        return {key: base64.b64decode(value) for key, value in data.items()}

    async def _variables(self, pod: Pod, folders: dict[str, Path]) -> dict[str, str]:
        mounts = {one["mountPath"]: folders[one["name"]] for one in pod.container.get("volumeMounts", ())}
        host, _, port = self._server.removeprefix("https://").rpartition(":")
        found = {name: value for name, value in os.environ.items() if not name.startswith("STREAM_GW_")}
        found |= {"KUBERNETES_SERVICE_HOST": host, "KUBERNETES_SERVICE_PORT": port}
        if _ACCOUNT in mounts:
            found["STREAM_GW_POD_ACCOUNT"] = _ACCOUNT
        for one in pod.container.get("env", ()):
            found[one["name"]] = await self._variable(pod, one)
        for name, value in found.items():
            if name.endswith("_HOST") and value == "0.0.0.0":
                found[name] = pod.address
            for path, folder in mounts.items():
                if name.startswith("STREAM_GW_") and f"{value}/".startswith(f"{path}/"):
                    found[name] = f"{folder}{value.removeprefix(path)}"
        return found

    async def _variable(self, pod: Pod, one: Object) -> str:
        source = one.get("valueFrom")
        if source is None:
            return str(one.get("value", ""))
        if "secretKeyRef" in source:
            wanted = source["secretKeyRef"]
            return (await self._secret(wanted["name"]))[wanted["key"]].decode()
        path: str = source["fieldRef"]["fieldPath"]
        if path == "metadata.name":
            return pod.name
        assert path.startswith("metadata.labels['"), f"this kubelet knows no such field: {path}"
        return pod.labels[path.removeprefix("metadata.labels['").removesuffix("']")]

    # --- the API server ------------------------------------------------------------------------------------

    def _path(self, kind: str) -> str:
        return f"/api/v1/namespaces/{self._namespace}/{kind}"

    async def _call(self, method: str, path: str, body: object = None, missing: bool = False) -> Any:
        """Raises RuntimeError, but for what is ``missing`` where that may be."""
        patch = "application/strategic-merge-patch+json"
        headers = {"content-type": patch if method == "PATCH" else "application/json"}
        data = None if body is None else json.dumps(body)
        async with self._api.request(method, f"{self._server}{path}", data=data, headers=headers) as answer:
            text = await answer.text()
            # 409: another object of that name is there meanwhile
            if answer.status >= 400 and not (missing and answer.status in (404, 409)):
                raise RuntimeError(f"{method} {path} answers {answer.status}: {text[:500]}")
            return json.loads(text)


def _now() -> str:
    return datetime.now(UTC).isoformat(timespec="seconds").replace("+00:00", "Z")
