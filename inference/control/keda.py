"""External scaler for KEDA by gRPC (trigger ``external-push``). The only module that knows gRPC.

Calls are answered from this controller's last look, so none waits. An unknown count is an error and never 0: KEDA then
keeps the number of replicas, or falls back. A pool that gets its first desired replica is pushed at once.

KEDA opens a stream again two seconds after it ended well. After a failure it waits twice as long as the last time, up
to a minute. So streams here end well after a limited time, and send nothing while the count is unknown.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import ssl
from collections.abc import AsyncIterator, Callable
from pathlib import Path
from typing import Any, NamedTuple

import grpc

from inference.control import externalscaler_pb2 as wire
from inference.control.desired import DesiredReplicas
from inference.control.metrics import ControllerMetrics
from stream_fabric.ports import Random
from stream_fabric.process.addresses import host_and_port

log = logging.getLogger(__name__)

METRIC = "pool_desired_replicas"
SERVICE = "externalscaler.ExternalScaler"
STREAM_S = 600.0
"""Longest duration of a stream. The next one may reach another controller."""
STREAMS_MAX = 1000
CALLS_MAX = 2000
MESSAGE_BYTES_MAX = 64 << 10
_STOP_S = 2.0
_OPTIONS = (
    ("grpc.so_reuseport", 0),  # two processes on one port would each get half of the calls
    ("grpc.max_receive_message_length", MESSAGE_BYTES_MAX),
    ("grpc.max_metadata_size", MESSAGE_BYTES_MAX),
    # Pings find a peer that vanished, so that its streams end
    ("grpc.keepalive_time_ms", 30_000),
    ("grpc.keepalive_timeout_ms", 10_000),
    ("grpc.keepalive_permit_without_calls", 1),
)
_POOL_CHARS_MAX = 128


class Tls(NamedTuple):
    """PEM files. New connections use replaced files."""

    cert: Path
    key: Path
    client_ca: Path
    """Clients need a certificate of one of these CAs."""


class KedaScaler:
    """Serves the desired replicas of this controller's last look."""

    def __init__(self, desired: DesiredReplicas, metrics: ControllerMetrics, random: Random) -> None:
        self._desired = desired
        self._metrics = metrics
        self._random = random
        self._streams = 0
        self._is_closing = False

    def handlers(self) -> grpc.GenericRpcHandler:
        def unary(call: Callable[..., Any], request: Any) -> grpc.RpcMethodHandler:
            return grpc.unary_unary_rpc_method_handler(call, request.FromString, _serialize)

        return grpc.method_handlers_generic_handler(
            SERVICE,
            {
                "GetMetricSpec": unary(self._get_metric_spec, wire.ScaledObjectRef),
                "GetMetrics": unary(self._get_metrics, wire.GetMetricsRequest),
                "IsActive": unary(self._is_active, wire.ScaledObjectRef),
                "StreamIsActive": grpc.unary_stream_rpc_method_handler(
                    self._stream_is_active, wire.ScaledObjectRef.FromString, _serialize
                ),
            },
        )

    async def _get_metric_spec(self, ref: Any, context: grpc.aio.ServicerContext) -> Any:
        """Return the metric's specification, which is the same for all pools. KEDA needs it to create an autoscaler."""
        await self._pool_of_trigger(ref, context, "GetMetricSpec")
        # The metric is the desired count itself, so each replica has a target of 1
        return wire.GetMetricSpecResponse(metricSpecs=[wire.MetricSpec(metricName=METRIC, targetSizeFloat=1.0)])

    async def _get_metrics(self, request: Any, context: grpc.aio.ServicerContext) -> Any:
        count = await self._desired_count(request.scaledObjectRef, context, "GetMetrics")
        return wire.GetMetricsResponse(
            metricValues=[wire.MetricValue(metricName=METRIC, metricValue=count, metricValueFloat=count)]
        )

    async def _is_active(self, ref: Any, context: grpc.aio.ServicerContext) -> Any:
        return wire.IsActiveResponse(result=await self._desired_count(ref, context, "IsActive") > 0)

    async def _stream_is_active(self, ref: Any, context: grpc.aio.ServicerContext) -> AsyncIterator[Any]:
        """Stream to KEDA whether the pool should have replicas."""
        pool = await self._pool_of_trigger(ref, context, "StreamIsActive")
        if self._streams >= STREAMS_MAX:
            text = f"this controller is at its limit of {STREAMS_MAX} streams; retry"
            await self._refuse(context, "StreamIsActive", grpc.StatusCode.RESOURCE_EXHAUSTED, text)
        self._add_streams(+1)
        try:
            async for active in self._active_changes(pool):
                yield wire.IsActiveResponse(result=active)
        finally:
            self._add_streams(-1)

    async def _active_changes(self, pool: str) -> AsyncIterator[bool]:
        """Yield whether the pool should have replicas: once now and then at each change."""
        loop = asyncio.get_running_loop()
        ends_at = loop.time() + STREAM_S * self._random.uniform(0.8, 1.0)
        sent: bool | None = None
        while not self._is_closing and (left_s := ends_at - loop.time()) > 0:
            change = self._desired.next_change()
            count = self._desired.count(pool, loop.time())
            if count is not None and (count > 0) != sent:
                sent = count > 0
                yield sent
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(left_s):
                    await change.wait()

    async def _desired_count(self, ref: Any, context: grpc.aio.ServicerContext, call: str) -> int:
        """Return the desired replicas of the trigger's pool; abort the call when the count is unknown."""
        pool = await self._pool_of_trigger(ref, context, call)
        count = self._desired.count(pool, asyncio.get_running_loop().time())
        if count is None:
            text = f"this controller knows no plan of pool {pool!r}; declare it in STREAM_GW_POOLS_FILE, or retry"
            await self._refuse(context, call, grpc.StatusCode.UNAVAILABLE, text)
        assert count is not None
        return count

    async def _pool_of_trigger(self, ref: Any, context: grpc.aio.ServicerContext, call: str) -> str:
        """Return the pool named in the trigger's metadata; abort the call when there is none."""
        self._metrics.receive_call(call)
        pool: str = ref.scalerMetadata.get("pool", "")
        if not 0 < len(pool) <= _POOL_CHARS_MAX:
            text = f"the trigger of ScaledObject {ref.namespace}/{ref.name} needs 'pool' in its metadata"
            await self._refuse(context, call, grpc.StatusCode.INVALID_ARGUMENT, text)
        return pool

    async def _refuse(self, context: grpc.aio.ServicerContext, call: str, code: grpc.StatusCode, text: str) -> None:
        self._metrics.receive_refusal(call, code.name.lower())
        await context.abort(code, text)

    def _add_streams(self, more: int) -> None:
        self._streams += more
        self._metrics.receive_streams(self._streams)

    @contextlib.asynccontextmanager
    async def served(self, host: str, port: int, tls: Tls | None) -> AsyncIterator[int]:
        """Serve on ``port`` (0: a free one) and yield the port. Without ``tls`` connections are not encrypted.

        Raises OSError when the port is taken, ValueError for files without valid certificates.
        """
        credentials = None if tls is None else _credentials(tls)
        server = grpc.aio.server(handlers=(self.handlers(),), options=_OPTIONS, maximum_concurrent_rpcs=CALLS_MAX)
        where = host_and_port(host, port)
        try:
            if credentials is None:
                bound = server.add_insecure_port(where)
            else:
                bound = server.add_secure_port(where, credentials)
        except RuntimeError as error:
            raise OSError(f"STREAM_GW_SCALER_PORT: cannot listen on {where} ({error})") from None
        await server.start()
        try:
            yield bound
        finally:
            self._is_closing = True
            self._desired.notify()
            await server.stop(_STOP_S)


def _serialize(message: Any) -> bytes:
    data: bytes = message.SerializeToString()
    return data


def _credentials(tls: Tls) -> grpc.ServerCredentials:
    """Return credentials that load the files again at each handshake. Raises ValueError for invalid files."""
    known = _read_files(tls)

    def newer_configuration() -> Any:
        """Return the new configuration for a handshake; None: the files have not changed. Called by another thread."""
        nonlocal known
        try:
            found = _read_files(tls)
        except ValueError as error:
            log.warning("scaler certificate not reloaded: error=%s", error)
            return None
        if found == known:
            return None
        known = found
        log.info("scaler certificate reloaded")
        return _server_configuration(found)

    return grpc.dynamic_ssl_server_credentials(
        _server_configuration(known), newer_configuration, require_client_authentication=True
    )


def _read_files(tls: Tls) -> tuple[bytes, bytes, bytes]:
    """Read certificate, key and client CAs. Raises ValueError that names the invalid setting."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    try:
        # Without a password OpenSSL would ask the terminal for one
        context.load_cert_chain(tls.cert, tls.key, password="")
    except OSError as error:
        raise ValueError(
            f"STREAM_GW_SCALER_CERT and STREAM_GW_SCALER_KEY: {tls.cert} and {tls.key} must be a certificate and its "
            "key in PEM form, without a passphrase"
        ) from error
    try:
        context.load_verify_locations(tls.client_ca)
        return tls.cert.read_bytes(), tls.key.read_bytes(), tls.client_ca.read_bytes()
    except OSError as error:
        raise ValueError(f"STREAM_GW_SCALER_CLIENT_CA: {tls.client_ca} must hold certificates in PEM form") from error


def _server_configuration(files: tuple[bytes, bytes, bytes]) -> Any:
    cert, key, client_ca = files
    return grpc.ssl_server_certificate_configuration([(key, cert)], root_certificates=client_ca)
