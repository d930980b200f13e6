"""Checks credentials and mints capability tokens."""

from __future__ import annotations

from collections.abc import Awaitable, Callable, Iterable
from typing import Annotated

import msgspec

from stream_fabric.accounts.records import Scope
from stream_fabric.errors import BadRequest, Forbidden, KeyRevoked, StreamGwError, Unauthenticated, UserSuspended
from stream_fabric.limits import USER_CHARS_MAX
from stream_fabric.stream.ids import StreamId, TenantId, UserId, is_stream_id
from stream_gw.auth.keys import KEY_PREFIX, KeyStore
from stream_gw.auth.principal import ALL_SCOPES, KeyUse, Principal
from stream_gw.auth.tokens import PREFIX, Claims, TokenSigner

TOKEN_S_MAX = 24 * 3600
_CREDENTIAL_CHARS_MAX = 4096
_SCOPES_MAX = 16
_MODELS_MAX = 1000


class TokenRequest(msgspec.Struct, forbid_unknown_fields=True):
    """Body of ``POST /v1/tokens``."""

    scopes: Annotated[list[Scope], msgspec.Meta(max_length=_SCOPES_MAX)] = msgspec.field(
        default_factory=lambda: sorted(ALL_SCOPES)
    )
    user: Annotated[str, msgspec.Meta(extra_json_schema={"minLength": 1, "maxLength": USER_CHARS_MAX})] | None = None
    models: Annotated[list[str], msgspec.Meta(max_length=_MODELS_MAX)] | None = None
    stream: str | None = None
    """The only stream that the token may read, and nothing else; ``scopes`` must be ``["read"]``."""
    expires_in_s: Annotated[int, msgspec.Meta(extra_json_schema={"minimum": 1, "maximum": TOKEN_S_MAX})] = 3600
    """Seconds that the token is valid. Checked in ``mint`` as ``user`` is, with an error that names the field."""


class UnknownKey(Unauthenticated):
    """A key of the database that this gateway does not know. It may have been made a moment ago."""


class UnknownTokenKey(UnknownKey, KeyRevoked):
    """A capability token of a key, or of a key's generation, that this gateway does not know."""


async def _nothing_newer() -> bool:
    return False


class Authenticator:
    """API keys and capability tokens of one fleet."""

    def __init__(self, keys: KeyStore, tokens: TokenSigner) -> None:
        self.keys = keys
        self._tokens = tokens
        self.catch_up: Callable[[], Awaitable[bool]] = _nothing_newer
        """Reads the keys that were published meanwhile; False: nothing was read."""

    def authenticate(self, credential: str | None, now: float) -> Principal:
        """Return the owner of an API key or capability token. ``now``: unix seconds.

        Raises Unauthenticated, or UserSuspended for a credential of a suspended user.
        """
        if not credential:
            raise Unauthenticated("no credential; send Authorization: Bearer <API key or capability token>")
        if len(credential) > _CREDENTIAL_CHARS_MAX:
            raise Unauthenticated(f"the credential is longer than {_CREDENTIAL_CHARS_MAX} characters")
        principal = (
            self._principal_of_token(credential, now)
            if credential.startswith(PREFIX)
            else self.keys.find(credential, now)
        )
        if principal is None:
            unknown = UnknownKey if credential.startswith(KEY_PREFIX) else Unauthenticated
            raise unknown("the credential is unknown or revoked")
        self.check_user(principal.tenant, principal.user)
        return principal

    def check_user(self, tenant: TenantId, user: str | None) -> None:
        """Raises UserSuspended."""
        if self.keys.users.is_suspended(tenant, user):
            raise UserSuspended("this user is suspended; ask the operator", param="user")

    def authenticate_cookie(self, token: str, now: float) -> Principal:
        """Return the owner of a cookie's token, with scope ``read`` at most. Raises Unauthenticated.

        An API key is refused. A browser sends cookies with requests that other sites cause, so a cookie must not change
        anything.
        """
        principal = self.authenticate(token if token.startswith(PREFIX) else None, now)
        return msgspec.structs.replace(principal, scopes=principal.scopes & {"read"})

    def is_valid(self, who: Principal, now: float) -> bool:
        """True if a caller that was authenticated before may still call."""
        return self.reason_to_end(who, now) is None

    def reason_to_end(self, who: Principal, now: float) -> StreamGwError | None:
        """Return the error that ends the connections of a caller that was authenticated before; None: it may stay."""
        if who.key is not None and not self.keys.is_valid(who.tenant, who.key, now):
            return KeyRevoked(
                "the API key was revoked or has expired; the stream may be read with another key of the tenant"
            )
        if who.stream is not None and who.expires_at is not None and who.expires_at <= now:
            return Unauthenticated("the link to this stream has expired; ask for a new one")
        try:
            self.check_user(who.tenant, who.user)
        except UserSuspended as error:
            return error
        return None

    def check_minter(self, owner: Principal) -> None:
        """Check that the caller has an API key, before its request is read. Raises Forbidden."""
        if owner.expires_at is not None:
            raise Forbidden("a capability token cannot mint tokens; use an API key")

    def mint(self, owner: Principal, request: TokenRequest, now: float, link: int = 0) -> tuple[str, int]:
        """Sign a token with no more rights than its owner; return (token, expiry in unix seconds). ``link``: generation
        of the links to its stream.

        Raises Forbidden or BadRequest.
        """
        self.check_minter(owner)
        if not 1 <= request.expires_in_s <= TOKEN_S_MAX:
            raise BadRequest(
                f"expires_in_s must be 1 to {TOKEN_S_MAX}, got {request.expires_in_s}", param="expires_in_s"
            )
        if request.user is not None and not 1 <= len(request.user) <= USER_CHARS_MAX:
            raise BadRequest(f"user must have 1 to {USER_CHARS_MAX} characters, got {len(request.user)}", param="user")
        for scope in request.scopes:
            owner.require(scope)
        _check_stream(request)
        models = request.models
        if owner.models is not None:
            models = sorted(owner.models if models is None else owner.models.intersection(models))
        expires_at = int(now) + request.expires_in_s
        user = owner.user if request.user is None else request.user
        if owner.user not in (None, user):
            raise Forbidden(f"this key belongs to user {owner.user!r}; leave user out or name that user")
        key, generation = (None, 0) if owner.key is None else (owner.key.id, owner.key.generation)
        claims = Claims(owner.tenant, request.scopes, expires_at, user, models, key, generation)
        token = self._tokens.sign(msgspec.structs.replace(claims, stream=request.stream, link=link))
        if len(token) > _CREDENTIAL_CHARS_MAX:
            raise BadRequest(f"the token would be longer than {_CREDENTIAL_CHARS_MAX} characters; name fewer models")
        return token, expires_at

    def _principal_of_token(self, token: str, now: float) -> Principal | None:
        """Return the owner of a capability token; None for a signature that is not ours. Raises Unauthenticated when
        expired."""
        claims = self._tokens.verify(token)
        if claims is None:
            return None
        if claims.exp <= now:
            raise Unauthenticated("the capability token has expired; mint another")
        if claims.user == "":  # of an earlier release: checks that compare users would take it for no user
            raise Unauthenticated("the capability token names an empty user; mint another")
        tenant, use = TenantId(claims.tenant), None if claims.key is None else KeyUse(claims.key, claims.gen)
        if use is not None and not self.keys.is_valid(tenant, use, now):
            kind = KeyRevoked if self.keys.has_seen(tenant, use) else UnknownTokenKey
            raise kind("the API key that minted this capability token is revoked or has expired")
        return self.keys.current(
            Principal(
                tenant,
                frozenset(claims.scopes),
                None if claims.user is None else UserId(claims.user),
                self.keys.allowed_models(tenant, None if claims.models is None else frozenset(claims.models)),
                claims.exp,
                use,
                None if claims.stream is None else StreamId(claims.stream),
                claims.link,
            )
        )


def _check_stream(request: TokenRequest) -> None:
    """Check the limit to one stream. Raises BadRequest."""
    if request.stream is None:
        return
    if not is_stream_id(request.stream):
        raise BadRequest(f"no stream id {request.stream[:64]!r}: it is resp_ and 32 hex digits", param="stream")
    if request.scopes != ["read"]:
        raise BadRequest('a token of one stream can only read it; send "scopes": ["read"]', param="scopes")


def bearer(headers: Iterable[tuple[bytes, bytes]]) -> str | None:
    """Return the credential of an ``Authorization`` header, or of ``x-api-key``, which Anthropic's SDKs send."""
    for name, value in headers:
        if name == b"authorization" and value[:7].lower() == b"bearer ":
            return value[7:].strip().decode("latin-1")
        if name == b"x-api-key":
            return value.decode("latin-1")
    return None
