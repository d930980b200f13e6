"""Which replica Kubernetes may take: a ReplicaSet that shrinks ends the pods with the least deletion cost first."""

from __future__ import annotations

import logging
import os
import ssl
from collections.abc import Set
from pathlib import Path
from typing import Any, Protocol

import aiohttp
import msgspec

from stream_fabric.ids import ReplicaId

log = logging.getLogger(__name__)

ANNOTATION = "controller.kubernetes.io/pod-deletion-cost"
_COST = "-1000"
_TIMEOUT_S = 3.0
_PAGE = 500


class Marker(Protocol):
    """Tells whoever ends replicas which ones may go."""

    async def settle(self, victims: Set[ReplicaId]) -> Set[ReplicaId]:
        """These and no others; those of them that it is known of. Never raises: what failed is tried again."""

    def forget(self) -> None:
        """Another may have told of some meanwhile."""


class NoMarker:
    """Nobody ends replicas but people."""

    async def settle(self, victims: Set[ReplicaId]) -> Set[ReplicaId]:
        return victims

    def forget(self) -> None:
        pass


class _Metadata(msgspec.Struct):
    name: str
    annotations: dict[str, str] = {}


class _Pod(msgspec.Struct):
    metadata: _Metadata


class _Next(msgspec.Struct, rename={"token": "continue"}):
    token: str = ""


class _Pods(msgspec.Struct):
    items: list[_Pod]
    metadata: _Next


class PodMarker:
    """Marks pods through the API server. Needs the rights to list and patch the namespace's pods."""

    def __init__(self, server: str, namespace: str, token: Path, ca: Path) -> None:
        """``token`` is read again for each call, for it is renewed. Raises OSError when ``ca`` cannot be read."""
        self._pods = f"{server}/api/v1/namespaces/{namespace}/pods"
        self._token = token
        self._tls = ssl.create_default_context(cafile=str(ca))
        self._marked: set[str] | None = None
        """Pods; None: not known, another may have marked some."""

    @classmethod
    def in_cluster(cls, account: Path) -> PodMarker:
        """As the pod that this runs in. Raises OSError or ValueError outside of one."""
        host, port = os.environ.get("KUBERNETES_SERVICE_HOST", ""), os.environ.get("KUBERNETES_SERVICE_PORT", "443")
        if not host:
            raise ValueError("STREAM_GW_POD_DELETION_COST works in a pod: there is no KUBERNETES_SERVICE_HOST here")
        host = f"[{host}]" if ":" in host else host
        namespace = (account / "namespace").read_text().strip()
        return cls(f"https://{host}:{port}", namespace, account / "token", account / "ca.crt")

    async def settle(self, victims: Set[ReplicaId]) -> Set[ReplicaId]:
        pods = {pod_of(victim): victim for victim in victims}
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
        try:
            if self._marked == pods.keys():
                return victims
            headers = {"authorization": f"Bearer {self._token.read_text().strip()}"}
            async with aiohttp.ClientSession(headers=headers, timeout=timeout) as session:
                if self._marked is None:
                    self._marked = await self._list(session)
                for pod in self._marked - pods.keys():
                    await self._patch(session, pod, None)
                    self._marked.discard(pod)
                for pod in pods.keys() - self._marked:
                    await self._patch(session, pod, _COST)
                    self._marked.add(pod)
        except (aiohttp.ClientError, OSError, ValueError) as error:  # a TimeoutError is an OSError
            log.warning("which pods may go cannot be told to Kubernetes: %s", error or type(error).__name__)
        return {victim for pod, victim in pods.items() if pod in (self._marked or ())}

    def forget(self) -> None:
        self._marked = None

    async def _list(self, session: aiohttp.ClientSession) -> set[str]:
        """Pods that are marked."""
        marked: set[str] = set()
        query: dict[str, str] = {"limit": str(_PAGE)}
        while True:
            accept = {"accept": "application/json;as=PartialObjectMetadataList;g=meta.k8s.io;v=v1"}
            async with session.get(self._pods, params=query, headers=accept, ssl=self._tls) as answer:
                page = msgspec.json.decode(await _body(answer), type=_Pods)
            marked |= {pod.metadata.name for pod in page.items if pod.metadata.annotations.get(ANNOTATION) == _COST}
            if not page.metadata.token:
                return marked
            query["continue"] = page.metadata.token

    async def _patch(self, session: aiohttp.ClientSession, pod: str, cost: str | None) -> None:
        patch: dict[str, Any] = {"metadata": {"annotations": {ANNOTATION: cost}}}
        headers = {"content-type": "application/merge-patch+json"}
        url, body = f"{self._pods}/{pod}", msgspec.json.encode(patch)
        async with session.patch(url, data=body, headers=headers, ssl=self._tls) as answer:
            if answer.status != 404:  # it is gone, which is as good
                await _body(answer)


async def _body(answer: aiohttp.ClientResponse) -> bytes:
    body = await answer.read()
    if answer.status != 200:
        raise ValueError(
            f"{answer.method} {answer.url.path} answers {answer.status}: {body[:300].decode(errors='replace')}"
        )
    return body


def pod_of(replica: ReplicaId) -> str:
    """An agent's replica is named after its pod (STREAM_GW_REPLICA), with a part that no earlier process had."""
    return replica.rpartition("-")[0]
