"""Authentication: API keys, capability tokens minted from them, and the cookie that carries one for ``EventSource``."""

from stream_fabric.accounts.records import Scope
from stream_gw.auth.authenticator import TOKEN_S_MAX, Authenticator, TokenRequest, UnknownKey, bearer
from stream_gw.auth.cookie import COOKIE, cookie_cleared, cookie_of, cookie_set
from stream_gw.auth.feed import Revoked, TenantFeed
from stream_gw.auth.keys import KeyStore, dev_record, key_digest, new_key
from stream_gw.auth.keys_file import read_keys_file
from stream_gw.auth.principal import ALL_SCOPES, KeyUse, Principal
from stream_gw.auth.regions import check_region, pinned_regions

__all__ = [
    "ALL_SCOPES",
    "COOKIE",
    "TOKEN_S_MAX",
    "Authenticator",
    "KeyStore",
    "KeyUse",
    "Principal",
    "Revoked",
    "Scope",
    "TenantFeed",
    "TokenRequest",
    "UnknownKey",
    "bearer",
    "check_region",
    "cookie_cleared",
    "cookie_of",
    "cookie_set",
    "dev_record",
    "key_digest",
    "new_key",
    "pinned_regions",
    "read_keys_file",
]
