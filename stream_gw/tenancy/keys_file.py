"""Reads a keys file as records."""

from __future__ import annotations

import string
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from stream_fabric.accounts.records import KeyRecord, PlanRecord, PricesRecord, Record, Scope, TenantRecord
from stream_fabric.limits import CONTENT_BYTES, CONTENT_BYTES_MAX
from stream_gw.auth.peppered import SHA256_PREFIX
from stream_gw.tenancy.models import TENANT_SCOPES, Price


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    scopes: tuple[Scope, ...] = TENANT_SCOPES
    models: tuple[str, ...] | None = None


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    key: list[_Key] = []
    price: dict[str, Price] = {}
    trace_content: bool = False
    trace_content_bytes: Annotated[int, msgspec.Meta(ge=1, le=CONTENT_BYTES_MAX)] = CONTENT_BYTES


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenant: list[_Tenant]
    price: dict[str, Price] = {}


def read_keys_file(path: Path) -> list[Record]:
    """Raises ValueError or OSError that names the file and what is wrong."""
    try:
        parsed = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
    except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
        raise ValueError(f"{path}: {error}") from error
    records: list[Record] = [PricesRecord({model: price.prices() for model, price in parsed.price.items()})]
    for tenant in parsed.tenant:
        plan = PlanRecord(
            f"of {tenant.id}", trace_content_bytes=tenant.trace_content_bytes if tenant.trace_content else 0
        )
        prices = {model: price.prices() for model, price in tenant.price.items()}
        keys = tuple(_key_record(path, tenant.id, key) for key in tenant.key)
        records += [plan, TenantRecord(tenant.id, plan.name, keys, prices=prices)]
    return records


def _key_record(path: Path, tenant: str, key: _Key) -> KeyRecord:
    digest = key.sha256.lower()
    if len(digest) != 64 or not set(digest) <= set(string.hexdigits):
        raise ValueError(f"{path}: tenant {tenant!r}: sha256 must be 64 hex digits, as stream-gw key prints")
    return KeyRecord("", SHA256_PREFIX + digest, key.scopes, key.models)
