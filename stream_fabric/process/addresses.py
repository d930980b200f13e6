"""Addresses as URLs write them. Light, because every process that serves HTTP loads it."""

from __future__ import annotations

from typing import Any


def host_and_port(host: str, port: int | str) -> str:
    """Join the two; an IPv6 address gets its brackets."""
    return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"


def url_of(address: tuple[Any, ...]) -> str:
    """Make the ``http`` URL of a listening socket's address."""
    return f"http://{host_and_port(*address[:2])}"
