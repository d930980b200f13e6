"""Why Kafka cannot be reached, said so that it names the broker and the setting to mend. aiokafka tells only that it
could not, and logs the rest: so the way is gone once more, step by step."""

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

from stream_fabric.settings import EventSettings

_TRY_S = 5.0
_SAID_MAX = 3
_NAME_MISMATCH = (62, 64)
"""OpenSSL's codes: the certificate is for another name, or address."""
_EXPIRED = 10


async def trouble(settings: EventSettings, options: Mapping[str, Any]) -> str:
    """What is wrong on the way to the brokers; empty: nothing just now."""
    found: list[str] = []
    for host, port, _ in collect_hosts(options["bootstrap_servers"], randomize=False):
        try:
            brokers = await _brokers(host, port, options)
        except (OSError, KafkaError, TimeoutError) as error:
            found.append(words(error, f"{host}:{port}", settings))
            continue
        for node, broker_host, broker_port in brokers:
            try:
                await _closed_again(await _connected(broker_host, broker_port, options))
            except (OSError, KafkaError, TimeoutError) as error:
                where = f"{broker_host}:{broker_port}"
                return (
                    f"{host}:{port} answers, but broker {node} tells clients to come to {where} (its "
                    f"advertised.listeners): {words(error, where, settings)}"
                )
        return ""
    more = f"; and {len(found) - _SAID_MAX} brokers more" if len(found) > _SAID_MAX else ""
    return "; ".join(found[:_SAID_MAX]) + more


async def _connected(host: str, port: int, options: Mapping[str, Any]) -> AIOKafkaConnection:
    of_clients = ("bootstrap_servers", "retry_backoff_ms")
    async with asyncio.timeout(_TRY_S):
        return await create_conn(
            host, port, **{name: value for name, value in options.items() if name not in of_clients}
        )


async def _brokers(host: str, port: int, options: Mapping[str, Any]) -> list[tuple[int, str, int]]:
    """As one of them tells."""
    connection = await _connected(host, port, options)
    try:
        async with asyncio.timeout(_TRY_S):
            reply = await connection.send(MetadataRequest([]))
        return [(node, name, number) for node, name, number, *_ in reply.brokers]
    finally:
        await _closed_again(connection)


async def _closed_again(connection: AIOKafkaConnection) -> None:
    with contextlib.suppress(TimeoutError):
        async with asyncio.timeout(_TRY_S):
            await connection.close()


def words(error: BaseException, where: str, settings: EventSettings) -> str:
    """An error of a connection, with what to do about it."""
    for cause in _causes(error):
        match cause:
            case ssl.SSLCertVerificationError():
                return _of_its_certificate(cause, where, settings)
            case ssl.SSLError():
                return _of_tls(cause, where, settings)
            case SaslAuthenticationFailed():
                return (
                    f"{where} refuses the user {settings.kafka_user!r} by {settings.kafka_sasl}: see to "
                    "STREAM_GW_KAFKA_USER, STREAM_GW_KAFKA_PASSWORD and, as users are kept for each mechanism, "
                    "STREAM_GW_KAFKA_SASL"
                )
            case UnsupportedSaslMechanismError():
                return (
                    f"{where} has no login by {settings.kafka_sasl} ({cause}): set STREAM_GW_KAFKA_SASL to one that it "
                    "has"
                )
            case ConnectionRefusedError():
                return f"{where} refuses connections: nothing listens there now"
            case socket.gaierror():
                return f"{where}: no such host ({cause.strerror}); see STREAM_GW_KAFKA_SERVERS"
            case TimeoutError():
                return f"{where} does not answer"
            case asyncio.IncompleteReadError() | ConnectionResetError() | ConnectionAbortedError():
                return _closed(where, settings)
    return f"{where}: {error!r}"


def _of_its_certificate(error: ssl.SSLCertVerificationError, where: str, settings: EventSettings) -> str:
    if error.verify_code in _NAME_MISMATCH:
        return (
            f"the certificate of {where} is for another name ({error.verify_message.strip('. ')}): name brokers in "
            "STREAM_GW_KAFKA_SERVERS, and in their own advertised.listeners, as their certificates do"
        )
    if error.verify_code == _EXPIRED:
        return f"the certificate of {where} has expired: give the broker a new one"
    trusted = f"trusted are those in {settings.kafka_ca}" if settings.kafka_ca else "trusted are the system's"
    return (
        f"the certificate of {where} is of an authority that is not trusted ({error.verify_message}; {trusted}): set "
        "STREAM_GW_KAFKA_CA to the PEM of the one that signed it"
    )


def _of_tls(error: ssl.SSLError, where: str, settings: EventSettings) -> str:
    reason = str(error.reason)
    if "ALERT" in reason and ("CERTIFICATE" in reason or "UNKNOWN_CA" in reason):
        shown = settings.kafka_cert or "none"
        return (
            f"{where} does not take our certificate ({reason}; shown is {shown}): set STREAM_GW_KAFKA_CERT and "
            "STREAM_GW_KAFKA_KEY to one that an authority of the brokers' trust has signed"
        )
    if reason in ("WRONG_VERSION_NUMBER", "RECORD_LAYER_FAILURE", "HTTP_REQUEST", "UNEXPECTED_MESSAGE"):
        return f"{where} does not speak TLS: name the brokers' port for TLS, or set STREAM_GW_KAFKA_TLS=false"
    return f"no TLS with {where}: {error}"


def _closed(where: str, settings: EventSettings) -> str:
    perhaps = []
    if not settings.kafka_tls:
        perhaps.append("wants TLS (STREAM_GW_KAFKA_TLS=true)")
    else:
        perhaps.append("does not speak TLS")
        if not settings.kafka_cert:
            perhaps.append("wants a certificate of ours (STREAM_GW_KAFKA_CERT and STREAM_GW_KAFKA_KEY)")
    if not settings.kafka_sasl:
        perhaps.append("wants a login (STREAM_GW_KAFKA_SASL)")
    return f"{where} closed the connection without a word: perhaps that port {' or '.join(perhaps)}"


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__ or error.__context__
