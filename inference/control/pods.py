"""Tells Kubernetes which pods may go: a ReplicaSet that shrinks ends the pods with the lowest deletion cost first."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from stream_fabric.process.addresses import host_and_port
from stream_fabric.process.http_client import HTTP_ERRORS, open_session, read_body
from stream_fabric.stream.ids import ReplicaId

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
_COST = "-1000"
_TIMEOUT_S = 3.0
_PAGE = 500
_ANSWER_BYTES_MAX = 32 << 20
_ERROR_CHARS_MAX = 300


class Marker(Protocol):
    """Tells the platform, for example Kubernetes, which replicas it may end first."""

    async def mark_only(self, targets: Set[ReplicaId]) -> Set[ReplicaId]:
        """Mark these replicas and no others. Returns those of them that are marked; failures are logged, call again."""

    def forget(self) -> None:
        """Forget what is marked. The next call reads it again, because another controller may have changed it.

        Not called while ``mark_only`` runs.
        """


class NoMarker:
    """A ``Marker`` for platforms on which only people end replicas; reports every target as marked."""

    async def mark_only(self, targets: Set[ReplicaId]) -> Set[ReplicaId]:
        return targets

    def forget(self) -> None:
        pass


class _Owner(msgspec.Struct):
    uid: str


class _Metadata(msgspec.Struct, rename={"owners": "ownerReferences"}):
    name: str
    annotations: dict[str, str] = {}
    owners: list[_Owner] = []
    """The pod's ReplicaSet."""


class _Pod(msgspec.Struct):
    metadata: _Metadata


class _ListMetadata(msgspec.Struct, rename={"token": "continue"}):
    token: str = ""


class _Pods(msgspec.Struct):
    items: list[_Pod]
    metadata: _ListMetadata


class PodMarker:
    """A ``Marker`` through the Kubernetes API. Needs the rights to list and patch the namespace's pods.

    ``selector``: label selector of the pods whose marks are ours to remove; empty: those of the whole namespace.
    """

    def __init__(self, server: str, namespace: str, token: Path, ca: Path, selector: str = "") -> None:
        """``token`` is read for each call, because Kubernetes renews it. Raises OSError when ``ca`` is unreadable."""
        self._selector = selector
        self._url = f"{server}/api/v1/namespaces/{namespace}/pods"
        self._token = token
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._marked: set[str] | None = None
        """Names of the pods that the last call marked, if it marked them all; None: unknown."""

    @classmethod
    def in_cluster(cls, account: Path, selector: str) -> PodMarker:
        """Use the service account of this process's pod. Raises OSError or ValueError outside of a pod."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("STREAM_GW_POD_DELETION_COST works only in a pod: KUBERNETES_SERVICE_HOST is not set")
        namespace = (account / "namespace").read_text().strip()
        return cls(f"https://{host_and_port(host, port)}", namespace, account / "token", account / "ca.crt", selector)

    async def mark_only(self, targets: Set[ReplicaId]) -> Set[ReplicaId]:
        pods = {pod_of(target): target for target in targets}
        if self._marked == pods.keys():
            return targets
        marked: set[str] = set()
        try:
            headers = {"authorization": f"Bearer {self._token.read_text().strip()}"}
            async with open_session(total_s=_TIMEOUT_S, headers=headers, tls=self._tls) as session:
                # Read at each change: a controller whose term ended may have marked a pod after this term's first look
                found, owners = await self._list_marked(session)
                kept = [pod for pod in found - pods.keys() if not await self._set_cost(session, pod, None)]
                # Their ReplicaSets would end them in place of a target
                held = {owners.get(pod) for pod in kept}
                free = {pod for pod in pods if owners.get(pod) not in held}
                marked = found & free
                for pod in free - marked:
                    if await self._set_cost(session, pod, _COST):
                        marked.add(pod)
                self._marked = set(pods) if marked == pods.keys() and not kept else None
        except HTTP_ERRORS as error:
            self._marked = None
            log.warning("pod deletion cost not set, retrying: error=%s", error or type(error).__name__)
        return {target for pod, target in pods.items() if pod in marked}

    def forget(self) -> None:
        self._marked = None

    async def _list_marked(self, session: aiohttp.ClientSession) -> tuple[set[str], dict[str, str]]:
        """Return the names of marked pods, and the owner of each pod that has one."""
        marked: set[str] = set()
        owners: dict[str, str] = {}
        query: dict[str, str] = {"limit": str(_PAGE), "labelSelector": self._selector}
        while True:
            accept = {"accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
            async with session.get(self._url, params=query, headers=accept) as response:
                page = msgspec.json.decode(await _checked_body(response), type=_Pods)
            marked |= {pod.metadata.name for pod in page.items if pod.metadata.annotations.get(ANNOTATION) == _COST}
            owners |= {pod.metadata.name: pod.metadata.owners[0].uid for pod in page.items if pod.metadata.owners}
            if not page.metadata.token:
                return marked, owners
            query["continue"] = page.metadata.token

    async def _set_cost(self, session: aiohttp.ClientSession, pod: str, cost: str | None) -> bool:
        """Set a pod's cost; None removes it. False: the API refuses that, which must not hold up the other pods."""
        try:
            await self._patch_cost(session, pod, cost)
        except ValueError as error:
            log.warning("pod deletion cost refused, retrying: pod=%s error=%s", pod, error)
            return False
        return True

    async def _patch_cost(self, session: aiohttp.ClientSession, pod: str, cost: str | None) -> None:
        """Set the pod's deletion cost; None removes it. A pod that is gone is no error."""
        patch: dict[str, Any] = {"metadata": {"annotations": {ANNOTATION: cost}}}
        headers = {"content-type": "application/merge-patch+json"}
        url, body = f"{self._url}/{pod}", msgspec.json.encode(patch)
        async with session.patch(url, data=body, headers=headers) as response:
            if response.status != 404:  # the pod is gone, which is as good
                await _checked_body(response)


async def _checked_body(response: aiohttp.ClientResponse) -> bytes:
    """Return the body of a response. Raises ValueError for any status but 200."""
    body = await read_body(response, _ANSWER_BYTES_MAX)
    if response.status != 200:
        text = body[:_ERROR_CHARS_MAX].decode(errors="replace")
        raise ValueError(f"{response.method} {response.url.path} answered {response.status}: {text}")
    return body


def pod_of(replica: ReplicaId) -> str:
    """Return the name of a replica's pod: the replica id without its last part, which differs by process."""
    return replica.rpartition("-")[0]
