"""Tells KEDA of the pools by gRPC, as its external scaler (trigger ``external-push``). The one module that knows gRPC.

It answers from this controller's last look, so nothing in it waits for anybody. What is not known is an error and never
0: KEDA then leaves the number as it is, and falls back. A pool that is to have its first replica is told at once.

How KEDA asks: a stream that ends well is opened again two seconds later, one that fails after twice as long as the last
time, up to a minute, until one ends well. So each ends well and before long, and what is not known is not said on it.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import random
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from inference.control import externalscaler_pb2 as wire
from inference.control.desired import Desired
from inference.control.metrics import ControllerMetrics

log = logging.getLogger(__name__)

METRIC = "pool_desired_replicas"
SERVICE = "externalscaler.ExternalScaler"
STREAM_S = 600.0
"""A stream ends after so long at most: whoever opens the next may find another controller."""
STREAMS_MAX = 1000
CALLS_MAX = 2000
MESSAGE_BYTES_MAX = 64 << 10
_STOP_S = 2.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two processes on one port would each get half of the questions
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", MESSAGE_BYTES_MAX),
    # A peer that is gone without a word is found out, and its streams end
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_POOL_CHARS_MAX = 128


class Tls(NamedTuple):
    """PEM files. Replaced ones are taken for the connections that come then."""

    cert: Path
    key: Path
    client_ca: Path
    """Only who has a certificate of it is answered."""


class KedaScaler:
    def __init__(self, desired: Desired, metrics: ControllerMetrics) -> None:
        self._desired = desired
        self._metrics = metrics
        self._streams = 0
        self._ends = False

    def handlers(self) -> grpc.GenericRpcHandler:
        def one(call: Callable[..., Any], question: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(call, question.FromString, _spelled)

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetMetricSpec": one(self._spec, wire.ScaledObjectRef),
                "GetMetrics": one(self._figures, wire.GetMetricsRequest),
                "IsActive": one(self._is_active, wire.ScaledObjectRef),
                "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                    self._activity, wire.ScaledObjectRef.FromString, _spelled
                ),
            },
        )

    async def _spec(self, ref: Any, context: grpc.aio.ServicerContext) -> Any:
        """The same whatever is known: without it KEDA would have no autoscaler."""
        await self._pool(ref, context, "GetMetricSpec")
        # The controllers have weighed it: as many as they want, each for a target of one
        return wire.GetMetricSpecResponse(metricSpecs=[wire.MetricSpec(metricName=METRIC, targetSizeFloat=1.0)])

    async def _figures(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        count = await self._count(request.scaledObjectRef, context, "GetMetrics")
        return wire.GetMetricsResponse(
            metricValues=[wire.MetricValue(metricName=METRIC, metricValue=count, metricValueFloat=count)]
        )

    async def _is_active(self, ref: Any, context: grpc.aio.ServicerContext) -> Any:
        return wire.IsActiveResponse(result=await self._count(ref, context, "IsActive") > 0)

    async def _activity(self, ref: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        pool = await self._pool(ref, context, "StreamIsActive")
        if self._streams >= STREAMS_MAX:
            await self._refuse(context, "StreamIsActive", grpc.StatusCode.RESOURCE_EXHAUSTED, "too many streams")
        self._count_streams(+1)
        try:
            async for active in self._changes(pool):
                yield wire.IsActiveResponse(result=active)
        finally:
            self._count_streams(-1)

    async def _changes(self, pool: str) -> AsyncIterator[bool]:
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STREAM_S * random.uniform(0.8, 1.0)
        told: bool | None = None
        while not self._ends and (left_s := ends_at - loop.time()) > 0:
            change = self._desired.change()
            count = self._desired.of(pool, loop.time())
            if count is not None and (count > 0) != told:
                told = count > 0
                yield told
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await change.wait()

    async def _count(self, ref: Any, context: grpc.aio.ServicerContext, call: str) -> int:
        pool = await self._pool(ref, context, call)
        count = self._desired.of(pool, asyncio.get_running_loop().time())
        if count is None:
            await self._refuse(
                context, call, grpc.StatusCode.UNAVAILABLE, f"no plan of pool {pool!r} is known to this controller"
            )
        assert count is not None
        return count

    async def _pool(self, ref: Any, context: grpc.aio.ServicerContext, call: str) -> str:
        """What the trigger's metadata name."""
        self._metrics.receive_call(call)
        pool: str = ref.scalerMetadata.get("pool", "")
        if not 0 < len(pool) <= _POOL_CHARS_MAX:
            text = f"the trigger of {ref.namespace}/{ref.name} needs a pool in its metadata"
            await self._refuse(context, call, grpc.StatusCode.INVALID_ARGUMENT, text)
        return pool

    async def _refuse(self, context: grpc.aio.ServicerContext, call: str, code: grpc.StatusCode, text: str) -> None:
        self._metrics.receive_refusal(call, code.name.lower())
        await context.abort(code, text)

    def _count_streams(self, more: int) -> None:
        self._streams += more
        self._metrics.receive_streams(self._streams)

    @contextlib.asynccontextmanager
    async def served(self, host: str, port: int, tls: Tls | None) -> AsyncIterator[int]:
        """Gives the port; 0: any free one. Raises OSError when it is taken, and ValueError for files that are not what
        they should be."""
        credentials = None if tls is None else _credentials(tls)
        server = grpc.aio.server(handlers=(self.handlers(),), options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
        where = f"[{host}]:{port}" if ":" in host else f"{host}:{port}"
        try:
            if credentials is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise OSError(f"STREAM_GW_SCALER_PORT: {where} cannot be listened on ({error})") from None
        await server.start()
        try:
            yield bound
        finally:
            self._ends = True
            self._desired.wake()
            await server.stop(_STOP_S)


def _spelled(answer: Any) -> bytes:
    spelled: bytes = answer.SerializeToString()
    return spelled


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Raises ValueError for files that are not what they should be; later ones that are not are not taken."""
    known = _read(tls)

    def newer() -> Any:
        """Asked at each handshake, by another thread; None: as before."""
        nonlocal known
        try:
            found = _read(tls)
        except ValueError as error:
            log.warning("the scaler's certificate stays as it was: %s", error)
            return None
        if found == known:
            return None
        known = found
        log.info("the scaler's certificate is a new one")
        return _configuration(found)

    return grpc.dynamic_ssl_server_credentials(_configuration(known), newer, require_client_authentication=True)


def _read(tls: Tls) -> tuple[bytes, bytes, bytes]:
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # With a password given OpenSSL does not ask the terminal for one
        context.load_cert_chain(tls.cert, tls.key, password="")
    except OSError as error:
        raise ValueError(
            f"STREAM_GW_SCALER_CERT and STREAM_GW_SCALER_KEY: {tls.cert} and {tls.key} are not a certificate and its "
            "key in PEM form, without a passphrase"
        ) from error
    try:
        context.load_verify_locations(tls.client_ca)
        return tls.cert.read_bytes(), tls.key.read_bytes(), tls.client_ca.read_bytes()
    except OSError as error:
        raise ValueError(
            f"STREAM_GW_SCALER_CLIENT_CA: {tls.client_ca} cannot be read as certificates in PEM form"
        ) from error


def _configuration(files: tuple[bytes, bytes, bytes]) -> Any:
    cert, key, client_ca = files
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)
