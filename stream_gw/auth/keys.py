"""API keys, prices and trace settings of tenants, from a TOML file."""

from __future__ import annotations

import base64
import hashlib
import string
import tomllib
from pathlib import Path
from typing import Annotated

import msgspec

from stream_fabric.events import Prices
from stream_fabric.limits import CONTENT_BYTES, CONTENT_BYTES_MAX
from stream_fabric.ports import Random
from stream_fabric.stream.ids import TenantId
from stream_gw.auth.principal import ALL_SCOPES, Principal, Scope


class _Key(msgspec.Struct, forbid_unknown_fields=True):
    sha256: str
    scopes: list[Scope] = msgspec.field(default_factory=lambda: sorted(ALL_SCOPES))
    models: list[str] | None = None


class _Price(msgspec.Struct, forbid_unknown_fields=True):
    prompt: Annotated[int, msgspec.Meta(ge=0)] = 0
    output: Annotated[int, msgspec.Meta(ge=0)] = 0
    cached: Annotated[int, msgspec.Meta(ge=0)] | None = None

    def prices(self) -> Prices:
        return Prices(self.prompt, self.prompt if self.cached is None else self.cached, self.output)


class _Tenant(msgspec.Struct, forbid_unknown_fields=True):
    id: str
    key: list[_Key] = []
    price: dict[str, _Price] = {}
    trace_content: bool = False
    trace_content_bytes: Annotated[int, msgspec.Meta(ge=1, le=CONTENT_BYTES_MAX)] = CONTENT_BYTES


class _File(msgspec.Struct, forbid_unknown_fields=True):
    tenant: list[_Tenant]
    price: dict[str, _Price] = {}


class KeyStore:
    """API keys with their principals, and prices by tenant and model. The file::

    [[tenant]]
    id = "acme"
    # trace_content = true        # store its prompts and completions in traces; default false
    # trace_content_bytes = 16384 # at most this much of each
    [[tenant.key]]
    sha256 = "…"              # printed by stream-gw key
    scopes = ["create", "read", "cancel", "input"]
    models = ["llama-8b"]     # optional
    # scopes = ["admin"]      # an operator's key: the traces of all tenants

    [price."llama-8b"]        # optional; "*": all other models; [tenant.price."…"]: one tenant's price
    prompt = 150000           # millionths of your currency per million tokens
    cached = 75000            # cached prompt tokens; default: the price of prompt
    output = 600000
    """

    def __init__(
        self,
        principals: dict[str, Principal],
        prices: dict[tuple[TenantId | None, str], Prices] | None = None,
        content_bytes: dict[TenantId, int] | None = None,
    ) -> None:
        self._by_digest = principals
        self._content_bytes = content_bytes or {}
        self._prices = prices or {}
        """By tenant (None: all tenants) and model ("*": all other models)."""

    @classmethod
    def load(cls, path: Path) -> KeyStore:
        """Read the keys file. Raises ValueError or OSError that names the file and what is wrong."""
        try:
            parsed = msgspec.convert(tomllib.loads(path.read_text("utf-8")), _File)
        except (tomllib.TOMLDecodeError, UnicodeDecodeError, msgspec.ValidationError) as error:
            raise ValueError(f"{path}: {error}") from error
        principals: dict[str, Principal] = {}
        for tenant in parsed.tenant:
            for key in tenant.key:
                digest = key.sha256.lower()
                if len(digest) != 64 or not set(digest) <= set(string.hexdigits):
                    raise ValueError(
                        f"{path}: tenant {tenant.id!r}: sha256 must be 64 hex digits, as stream-gw key prints"
                    )
                if digest in principals:
                    raise ValueError(f"{path}: tenant {tenant.id!r}: the key {digest[:8]}… is in the file twice")
                principals[digest] = Principal(
                    TenantId(tenant.id),
                    frozenset(key.scopes),
                    models=None if key.models is None else frozenset(key.models),
                )
        prices: dict[tuple[TenantId | None, str], Prices] = {
            (None, model): price.prices() for model, price in parsed.price.items()
        }
        for tenant in parsed.tenant:
            prices |= {(TenantId(tenant.id), model): price.prices() for model, price in tenant.price.items()}
        content_bytes: dict[TenantId, int] = {}
        for tenant in parsed.tenant:  # a tenant that is in the file twice gets the smaller value
            allowed = tenant.trace_content_bytes if tenant.trace_content else 0
            content_bytes[TenantId(tenant.id)] = min(allowed, content_bytes.get(TenantId(tenant.id), allowed))
        return cls(principals, prices, content_bytes)

    @classmethod
    def single(cls, tenant: str, key: str) -> KeyStore:
        """Make a store of one tenant and one key with every scope, ``admin`` too: the development default."""
        return cls({key_digest(key): Principal(TenantId(tenant), ALL_SCOPES | {"admin"})})

    def find(self, key: str) -> Principal | None:
        """Return the principal of an API key, or None."""
        # By digest: the lookup's timing reveals nothing about a key
        return self._by_digest.get(key_digest(key))

    def prices(self, tenant: TenantId, model: str) -> Prices | None:
        """Return the prices of the model for the tenant; None: the file has none."""
        if not self._prices:
            return None
        keys: list[tuple[TenantId | None, str]] = [(tenant, model), (tenant, "*"), (None, model), (None, "*")]
        return next((self._prices[key] for key in keys if key in self._prices), None)

    def content_bytes(self, tenant: TenantId) -> int:
        """Return how many bytes of each prompt and completion the tenant's traces store; 0: none."""
        return self._content_bytes.get(tenant, 0)


def key_digest(key: str) -> str:
    """SHA-256 in hex. One round is enough, because keys are long and random."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(random: Random) -> str:
    """Make an API key of 256 random bits."""
    return "sk-" + base64.urlsafe_b64encode(random.token_bytes(32)).rstrip(b"=").decode()
