"""Diagnosis of a failed connection to Kafka: names the broker and the setting to change.

aiokafka's error says only that it could not connect. So this module repeats the connection step by step.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Iterator, Mapping
from typing import Any

from aiokafka.conn import AIOKafkaConnection, collect_hosts, create_conn
from aiokafka.errors import KafkaError, SaslAuthenticationFailed, UnsupportedSaslMechanismError
from aiokafka.protocol.metadata import MetadataRequest

from stream_fabric.process.settings import EventSettings

_TRY_S = 5.0
_BROKERS_SHOWN_MAX = 3
_NAME_MISMATCH = (62, 64)
"""OpenSSL's codes: the certificate is for another name, or another address."""
_EXPIRED = 10


async def diagnose(settings: EventSettings, options: Mapping[str, Any]) -> str:
    """Connect to each broker, bootstrap and advertised, and describe what fails. Empty: no problem now."""
    found: list[str] = []
    for host, port, _ in collect_hosts(options["bootstrap_servers"], randomize=False):
        try:
            brokers = await _brokers(host, port, options)
        except (OSError, KafkaError, TimeoutError) as error:
            found.append(describe_error(error, f"{host}:{port}", settings))
            continue
        for node, broker_host, broker_port in brokers:
            try:
                await _close(await _connect(broker_host, broker_port, options))
            except (OSError, KafkaError, TimeoutError) as error:
                where = f"{broker_host}:{broker_port}"
                return (
                    f"{host}:{port} answers, but broker {node} tells clients to come to {where} (its "
                    f"advertised.listeners): {describe_error(error, where, settings)}"
                )
        return ""
    more = f"; and {len(found) - _BROKERS_SHOWN_MAX} more brokers" if len(found) > _BROKERS_SHOWN_MAX else ""
    return "; ".join(found[:_BROKERS_SHOWN_MAX]) + more


async def _connect(host: str, port: int, options: Mapping[str, Any]) -> AIOKafkaConnection:
    of_clients = ("bootstrap_servers", "retry_backoff_ms")
    async with asyncio.timeout(_TRY_S):
        return await create_conn(
            host, port, **{name: value for name, value in options.items() if name not in of_clients}
        )


async def _brokers(host: str, port: int, options: Mapping[str, Any]) -> list[tuple[int, str, int]]:
    """Return (node id, host, port) of each broker, as one broker advertises them."""
    connection = await _connect(host, port, options)
    try:
        async with asyncio.timeout(_TRY_S):
            reply = await connection.send(MetadataRequest([]))
        return [(node, name, number) for node, name, number, *_ in reply.brokers]
    finally:
        await _close(connection)


async def _close(connection: AIOKafkaConnection) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TRY_S):
            await connection.close()


def describe_error(error: BaseException, where: str, settings: EventSettings) -> str:
    """Describe an error of the connection to ``where``, with the setting to change."""
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return _describe_certificate(cause, where, settings)
            case ssl.SSLError():
                return _describe_tls(cause, where, settings)
            case SaslAuthenticationFailed():
                return (
                    f"{where} refuses the user {settings.kafka_user!r} by {settings.kafka_sasl}: check "
                    "STREAM_GW_KAFKA_USER, STREAM_GW_KAFKA_PASSWORD and STREAM_GW_KAFKA_SASL (Kafka keeps users for "
                    "each mechanism)"
                )
            case UnsupportedSaslMechanismError():
                return (
                    f"{where} has no login by {settings.kafka_sasl} ({cause}): set STREAM_GW_KAFKA_SASL to a mechanism "
                    "that the broker supports"
                )
            case ConnectionRefusedError():
                return (
                    f"{where} refuses connections: nothing listens there; check STREAM_GW_KAFKA_SERVERS and the broker"
                )
            case socket.gaierror():
                return f"{where}: no such host ({cause.strerror}); check STREAM_GW_KAFKA_SERVERS"
            case TimeoutError():
                return f"{where} does not answer: check the broker and the network"
            case asyncio.IncompleteReadError() | ConnectionResetError() | ConnectionAbortedError():
                return _describe_close(where, settings)
    return f"{where}: {error!r}"


def _describe_certificate(error: ssl.SSLCertVerificationError, where: str, settings: EventSettings) -> str:
    if error.verify_code in _NAME_MISMATCH:
        return (
            f"the certificate of {where} is for another name ({error.verify_message.strip('. ')}): use the "
            "names of the certificates in STREAM_GW_KAFKA_SERVERS and in the brokers' advertised.listeners"
        )
    if error.verify_code == _EXPIRED:
        return f"the certificate of {where} has expired: install a new one on the broker"
    trusted = f"trusted are those in {settings.kafka_ca}" if settings.kafka_ca else "trusted are the system's"
    return (
        f"the certificate of {where} is of an authority that is not trusted ({error.verify_message}; {trusted}): set "
        "STREAM_GW_KAFKA_CA to the PEM file of the authority that signed it"
    )


def _describe_tls(error: ssl.SSLError, where: str, settings: EventSettings) -> str:
    reason = str(error.reason)
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        shown = settings.kafka_cert or "none"
        return (
            f"{where} rejects our certificate ({reason}; sent: {shown}): set STREAM_GW_KAFKA_CERT and "
            "STREAM_GW_KAFKA_KEY to one that is signed by an authority that the brokers trust"
        )
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_MESSAGE"):
        return (
            f"{where} does not speak TLS: set STREAM_GW_KAFKA_SERVERS to its port for TLS, or set "
            "STREAM_GW_KAFKA_TLS=false"
        )
    return f"TLS with {where} failed: {error}"


def _describe_close(where: str, settings: EventSettings) -> str:
    """List the likely reasons why a broker closed the connection without a word."""
    reasons = []
    if not settings.kafka_tls:
        reasons.append("requires TLS (STREAM_GW_KAFKA_TLS=true)")
    else:
        reasons.append("does not speak TLS")
        if not settings.kafka_cert:
            reasons.append("requires a client certificate (STREAM_GW_KAFKA_CERT and STREAM_GW_KAFKA_KEY)")
    if not settings.kafka_sasl:
        reasons.append("requires a login (STREAM_GW_KAFKA_SASL)")
    return f"{where} closed the connection without a reason: perhaps the port {' or '.join(reasons)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    """Yield the error and the errors that caused it."""
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
