"""Who asks, and what they may do: API keys by their hash, and short-lived capability tokens minted from them."""

from __future__ import annotations

import base64
import binascii
import hashlib
import hmac
import secrets
import string
import tomllib
from collections.abc import Iterable, Mapping
from ipaddress import ip_address
from pathlib import Path
from typing import Annotated, Literal, Protocol
from urllib.parse import urlsplit

import msgspec

from stream_fabric.errors import BadRequest, Forbidden, Unauthenticated
from stream_fabric.events import Prices
from stream_fabric.ids import TenantId, UserId
from stream_fabric.limits import CONTENT_BYTES, CONTENT_BYTES_MAX, COOKIE_BYTES_MAX

Scope = Literal["create", "read", "cancel", "input", "admin"]
ALL_SCOPES: frozenset[Scope] = frozenset({"create", "read", "cancel", "input"})
"""A tenant's. ``admin`` is the operator's: the traces of the whole fleet; a key has it only where the file says so."""
TOKEN_S_MAX = 24 * 3600
COOKIE = "stream_gw"
_CAPABILITY = "cap_"
_SECRET_CHARS_MAX = 4096


class Principal(msgspec.Struct, frozen=True):
    """An authenticated caller. ``user``, ``models``: None where the credential does not restrict them."""

    tenant: TenantId
    scopes: frozenset[Scope]
    user: UserId | None = None
    models: frozenset[str] | None = None
    expires_at: float | None = None
    """Unix seconds; None: an API key, which does not expire."""

    def require(self, scope: Scope) -> None:
        """Raises Forbidden."""
        if scope not in self.scopes:
            raise Forbidden(f"this token may not {scope}; its scopes are {', '.join(sorted(self.scopes))}")

    def require_model(self, model: str) -> None:
        """Raises Forbidden."""
        if self.models is not None and model not in self.models:
            raise Forbidden(f"this token may not use model {model[:128]!r}", param="model")

    def may_see(self, user: str | None) -> bool:
        """Whether a stream of that user of the same tenant is this caller's to read."""
        return self.user is None or self.user == user


class KeyStore(Protocol):
    """Where keys come from: a file now, a database later."""

    def find(self, key: str) -> Principal | None:
        """The principal of an API key, or None."""

    def prices(self, tenant: TenantId, model: str) -> Prices | None:
        """What the tenant pays for the model; None: nothing is set."""

    def content_bytes(self, tenant: TenantId) -> int:
        """Of a prompt and of a completion, how much the tenant's traces hold; 0: nothing, unless its plan says so."""


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


class TomlKeyStore:
    """Keys from a TOML file::

    [[tenant]]
    id = "acme"
    # trace_content = true        # its traces hold what it asks and is answered; without it they never do
    # trace_content_bytes = 16384 # of each at most
    [[tenant.key]]
    sha256 = "…"              # stream-gw key prints it
    scopes = ["create", "read", "cancel", "input"]
    models = ["llama-8b"]     # optional
    # scopes = ["admin"]      # an operator's key, whichever tenant it stands under: everybody's traces

    [price."llama-8b"]        # optional; "*": of all others; [tenant.price."…"]: this tenant's own
    prompt = 150000           # millionths of your currency for a million tokens
    cached = 75000            # of the prompt's, those that were cached; without it they cost what the others do
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
        """(tenant, None of all; model, * of all others) → prices."""

    @classmethod
    def load(cls, path: Path) -> TomlKeyStore:
        """Raises ValueError or OSError that names the file and what is wrong."""
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
        for tenant in parsed.tenant:  # one that stands there twice has what both allow
            told = tenant.trace_content_bytes if tenant.trace_content else 0
            content_bytes[TenantId(tenant.id)] = min(told, content_bytes.get(TenantId(tenant.id), told))
        return cls(principals, prices, content_bytes)

    @classmethod
    def single(cls, tenant: str, key: str) -> TomlKeyStore:
        """One tenant with one key, its operator's too: the embedded default."""
        return cls({key_digest(key): Principal(TenantId(tenant), ALL_SCOPES | {"admin"})})

    def find(self, key: str) -> Principal | None:
        # The lookup is by digest, so its timing tells nothing of a key
        return self._by_digest.get(key_digest(key))

    def prices(self, tenant: TenantId, model: str) -> Prices | None:
        if not self._prices:
            return None
        asked: list[tuple[TenantId | None, str]] = [(tenant, model), (tenant, "*"), (None, model), (None, "*")]
        return next((self._prices[key] for key in asked if key in self._prices), None)

    def content_bytes(self, tenant: TenantId) -> int:
        return self._content_bytes.get(tenant, 0)


def key_digest(key: str) -> str:
    """Keys are long and random, so one round of SHA-256 is what a thief of the file must invert."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key() -> str:
    return "sk-" + secrets.token_urlsafe(32)


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    scopes: list[Scope] = msgspec.field(default_factory=lambda: sorted(ALL_SCOPES))
    user: str | None = None
    models: list[str] | None = None
    expires_in_s: int = 3600


class _Claims(msgspec.Struct, array_like=True):
    tenant: str
    scopes: list[Scope]
    user: str | None
    models: list[str] | None
    expires_at: float


class Authenticator:
    """Checks and mints credentials. ``secret``: shared by the fleet's gateways, at least 16 bytes."""

    def __init__(self, keys: KeyStore, secret: bytes) -> None:
        if len(secret) < 16:
            raise ValueError("the token secret must have at least 16 bytes")
        self._keys = keys
        self._secret = secret

    def authenticate(self, credential: str | None, now: float) -> Principal:
        """Raises Unauthenticated. ``now``: unix seconds."""
        if not credential:
            raise Unauthenticated("no credential; send Authorization: Bearer <key or capability token>")
        if len(credential) > _SECRET_CHARS_MAX:
            raise Unauthenticated("the credential is too long to be one of ours")
        principal = (
            self._capability(credential, now) if credential.startswith(_CAPABILITY) else self._keys.find(credential)
        )
        if principal is None:
            raise Unauthenticated("the credential is unknown or has been revoked")
        return principal

    def prices(self, tenant: TenantId, model: str) -> Prices | None:
        return self._keys.prices(tenant, model)

    def content_bytes(self, tenant: TenantId) -> int:
        return self._keys.content_bytes(tenant)

    def authenticate_cookie(self, token: str, now: float) -> Principal:
        """Who a cookie's token is of, with no scope but ``read``: a browser sends it whoever made the request, so it
        must not change anything. Raises Unauthenticated, also for an API key."""
        principal = self.authenticate(token if token.startswith(_CAPABILITY) else None, now)
        return msgspec.structs.replace(principal, scopes=principal.scopes & {"read"})

    def mint(self, owner: Principal, request: TokenRequest, now: float) -> tuple[str, int]:
        """A capability token within the owner's rights, and when it expires. Raises Forbidden or BadRequest."""
        if owner.expires_at is not None:
            raise Forbidden("only an API key may mint tokens")
        if not 1 <= request.expires_in_s <= TOKEN_S_MAX:
            raise BadRequest(
                f"expires_in_s must be 1 to {TOKEN_S_MAX}, got {request.expires_in_s}", param="expires_in_s"
            )
        for scope in request.scopes:
            owner.require(scope)
        models = request.models
        if owner.models is not None:
            models = sorted(owner.models if models is None else owner.models.intersection(models))
        expires_at = int(now) + request.expires_in_s
        claims = _Claims(owner.tenant, request.scopes, request.user, models, expires_at)
        body = _b64(msgspec.json.encode(claims))
        token = f"{_CAPABILITY}{body}.{_b64(self._sign(body))}"
        if len(token) > _SECRET_CHARS_MAX:
            raise BadRequest(f"the token would have more than {_SECRET_CHARS_MAX} characters; name fewer models")
        return token, expires_at

    def _sign(self, body: str) -> bytes:
        return hmac.digest(self._secret, body.encode(), "sha256")

    def _capability(self, token: str, now: float) -> Principal | None:
        body, dot, signature = token.removeprefix(_CAPABILITY).partition(".")
        try:
            given, expected = _unb64(signature), self._sign(body)
        except (binascii.Error, ValueError):
            return None
        if not dot or not hmac.compare_digest(given, expected):
            return None
        claims = msgspec.json.decode(_unb64(body), type=_Claims)
        if claims.expires_at <= now:
            raise Unauthenticated("the capability token has expired; mint another")
        return Principal(
            TenantId(claims.tenant),
            frozenset(claims.scopes),
            None if claims.user is None else UserId(claims.user),
            None if claims.models is None else frozenset(claims.models),
            claims.expires_at,
        )


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The credential of an ``Authorization`` header; ``x-api-key`` is what Anthropic's SDKs send."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            return value.decode("latin-1")
    return None


# --- the cookie, for a browser's EventSource, which sends no header of its own -------------------------------


def cookie_of(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """The token of our cookie."""
    for name, value in headers:
        if name == b"cookie":
            for pair in value.split(b";"):
                key, _, token = pair.strip().partition(b"=")
                if key == COOKIE.encode():
                    return token.decode("latin-1")
    return None


def cookie_set(who: Principal, token: str, now: float, headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    """The header that puts the token into a browser's cookie, for as long as it is good.

    Raises Forbidden or BadRequest.
    """
    if who.expires_at is None:
        raise Forbidden("an API key is too long-lived for a cookie; send a capability token, POST /v1/tokens mints it")
    who.require("read")
    if len(COOKIE) + len(token) > COOKIE_BYTES_MAX:
        raise BadRequest(f"the token is too long: browsers keep cookies of {COOKIE_BYTES_MAX} bytes; name fewer models")
    return _set_cookie(token, int(who.expires_at - now), headers)


def cookie_cleared(headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    return _set_cookie("", 0, headers)


def _set_cookie(value: str, max_age_s: int, headers: Mapping[bytes, bytes]) -> tuple[bytes, bytes]:
    secure = "" if _is_plain_and_local(headers) else "; Secure"
    cookie = f"{COOKIE}={value}; HttpOnly; SameSite=Strict; Path=/v1/streams; Max-Age={max_age_s}{secure}"
    return b"set-cookie", cookie.encode("latin-1")


def _is_plain_and_local(headers: Mapping[bytes, bytes]) -> bool:
    """Whether a request is on its way over plain HTTP within one machine, where not every browser takes a Secure
    cookie. A proxy may have put its own address into ``Host``, so whatever speaks against it counts; no header is
    trusted for more than making the cookie stricter."""
    if headers.get(b"x-forwarded-proto", b"http") != b"http":
        return False
    origin = headers.get(b"origin")
    if origin is not None and not (origin.startswith(b"http://") and _is_loopback(origin[7:])):
        return False
    return _is_loopback(headers.get(b"host", b""))


def _is_loopback(authority: bytes) -> bool:
    try:
        name = urlsplit("//" + authority.decode("latin-1")).hostname or ""
        return name == "localhost" or name.endswith(".localhost") or ip_address(name).is_loopback
    except ValueError:
        return False


def _b64(data: bytes) -> str:
    return base64.urlsafe_b64encode(data).rstrip(b"=").decode()


def _unb64(text: str) -> bytes:
    return base64.b64decode(text.encode("ascii") + b"=" * (-len(text) % 4), altchars=b"-_", validate=True)
