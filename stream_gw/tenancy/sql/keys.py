"""API keys of tenants. The database has only their digests."""

from __future__ import annotations

import base64
from collections import Counter
from typing import Any

import msgspec
from sqlalchemy import Row, func, insert, or_, select, update

from stream_fabric.accounts.records import KeyRecord
from stream_fabric.errors import BadRequest, NotFound
from stream_fabric.limits import TENANT_KEYS_MAX
from stream_fabric.ports import Random
from stream_gw.auth.peppered import SHA256_PREFIX, Peppers, pepper_id, peppered_digest
from stream_gw.tenancy.errors import Conflict
from stream_gw.tenancy.models import Key, KeyChange, KeyCreate, NewKey, Pepper, given
from stream_gw.tenancy.sql import tables
from stream_gw.tenancy.sql.tenants import Tenants
from stream_gw.tenancy.sql.transaction import Transaction

_KEYS = tables.api_keys
_PREFIX = "sgw"
_ID_CHARS = 12
_SHOWN_DIGEST_CHARS = 8


class Keys:
    def __init__(self, transaction: Transaction) -> None:
        self._transaction = transaction

    async def find(self, key: str) -> Key:
        """Find a key by its id, revoked ones too. Raises NotFound."""
        return self._key_of(await self._row(key))

    async def page(
        self, tenant: str | None = None, after: str = "", limit: int = 100, *, revoked: bool = False
    ) -> list[Key]:
        """List keys by id, at most ``limit`` after an id. ``revoked``: also the revoked ones."""
        query = select(_KEYS).where(_KEYS.c.id > after)
        if tenant is not None:
            query = query.where(_KEYS.c.tenant == tenant)
        if not revoked:
            query = query.where(_KEYS.c.revoked_at.is_(None))
        reply = await self._transaction.connection.execute(query.order_by(_KEYS.c.id).limit(limit))
        return [self._key_of(row) for row in reply]

    async def peppers(self) -> Counter[Pepper]:
        """Count the keys that are still valid by their pepper; keys of a keys file have none."""
        now = self._transaction.now
        count = func.count().label("found")
        query = select(_KEYS.c.pepper, count).where(
            _KEYS.c.revoked_at.is_(None),
            or_(_KEYS.c.expires_at.is_(None), _KEYS.c.expires_at > now),
            _KEYS.c.digest.not_like(f"{SHA256_PREFIX}%"),
        )
        found: Counter[Pepper] = Counter()
        for row in await self._transaction.connection.execute(query.group_by(_KEYS.c.pepper)):
            found[_pepper_of(row.pepper, self._transaction.peppers)] += row.found
        return found

    async def create(self, asked: KeyCreate) -> NewKey:
        """Make a key. Raises NotFound, Conflict at the limit of the tenant's keys, BadRequest without a pepper."""
        await Tenants(self._transaction).find(asked.tenant)
        now = self._transaction.now
        return await self._make(
            {
                "tenant": asked.tenant,
                "label": asked.label,
                "scopes": sorted(set(asked.scopes)),
                "models": None if asked.models is None else sorted(set(asked.models)),
                "user_id": asked.user,
                "expires_at": None if asked.expires_in_s is None else now + asked.expires_in_s,
                "limits": None if asked.limits is None else msgspec.to_builtins(asked.limits),
                "regions": None if asked.regions is None else sorted(set(asked.regions)),
            },
            "key.create",
            None,
        )

    async def rotate(self, key: str, grace_s: float) -> NewKey:
        """Make a key with the same rights; the old one stays valid for ``grace_s``. Raises as ``create``."""
        row = await self._row(key)
        before = self._key_of(row)
        self._check_valid(before)
        copied = ("tenant", "label", "scopes", "models", "user_id", "expires_at", "limits", "regions")
        made = await self._make({name: getattr(row, name) for name in copied}, "key.rotate", before)
        ends = self._transaction.now + grace_s
        expires_at = ends if before.expires_at is None else min(ends, before.expires_at)
        await self._change(before, "key.expire", {"expires_at": expires_at})
        return made

    async def change(self, key: str, change: KeyChange) -> Key:
        """Change rights, limits, label or expiry; the key stays the same. Raises NotFound, or Conflict for a key that
        has ended."""
        before = await self.find(key)
        self._check_valid(before)
        fields = given(change)
        if not fields:
            return before
        for name in ("scopes", "models", "regions"):
            if fields.get(name) is not None:
                fields[name] = tuple(sorted(set(fields[name])))
        if "expires_in_s" in fields:
            seconds = fields.pop("expires_in_s")
            fields["expires_at"] = None if seconds is None else self._transaction.now + seconds
        return await self._change(before, "key.change", fields)

    async def revoke(self, key: str) -> Key:
        """Revoke a key and the capability tokens that it minted. Raises NotFound, Conflict if it is revoked."""
        before = await self.find(key)
        self._check_not_revoked(before)
        return await self._change(before, "key.revoke", {"revoked_at": self._transaction.now})

    async def end_tokens(self, key: str) -> Key:
        """End the capability tokens that the key minted; the key stays. Raises NotFound or Conflict."""
        before = await self.find(key)
        self._check_not_revoked(before)
        return await self._change(before, "key.end_tokens", {"generation": before.generation + 1})

    async def add_digest(self, tenant: str, key: KeyRecord) -> bool:
        """Add a key of which only the digest is known. False: the tenant has it, or had it. Raises Conflict."""
        shown = key.digest[: len(SHA256_PREFIX) + _SHOWN_DIGEST_CHARS]
        query = select(_KEYS.c.tenant).where(_KEYS.c.digest == key.digest)
        held = (await self._transaction.connection.execute(query)).one_or_none()
        if held is not None:
            if held.tenant != tenant:
                raise Conflict(f"the key {shown}… belongs to tenant {held.tenant!r}")
            return False
        copied = ("scopes", "models", "user", "expires_at", "limits", "regions")
        values = {name: msgspec.to_builtins(getattr(key, name)) for name in copied}
        values |= {"tenant": tenant, "label": "imported", "user_id": values.pop("user")}
        added = await self._insert(_new_id(self._transaction.random), key.digest, shown, values)
        await self._transaction.audit("key.import", f"key:{added.id}", None, added)
        return True

    async def _make(self, values: dict[str, Any], action: str, before: Key | None) -> NewKey:
        pepper = self._transaction.peppers.current
        if not pepper:
            raise BadRequest("no key can be made without a pepper; set STREAM_GW_KEY_PEPPER to the fleet's secret")
        id_, secret = new_key(self._transaction.random)
        digest = peppered_digest(secret, pepper)
        key = await self._insert(id_, digest, f"{_PREFIX}_{id_}", values | {"pepper": pepper_id(pepper)})
        await self._transaction.audit(action, f"key:{id_}", before, key)
        return NewKey(**msgspec.structs.asdict(key), key=secret)

    async def _insert(self, id_: str, digest: str, shown: str, values: dict[str, Any]) -> Key:
        tenant, now = values["tenant"], self._transaction.now
        held = select(func.count()).where(_KEYS.c.tenant == tenant, _KEYS.c.revoked_at.is_(None))
        if (await self._transaction.connection.execute(held)).scalar_one() >= TENANT_KEYS_MAX:
            raise Conflict(f"tenant {tenant!r} has {TENANT_KEYS_MAX} keys, the limit; revoke expired ones")
        fixed = {"id": id_, "digest": digest, "shown": shown, "generation": 0, "created_at": now}
        await self._transaction.connection.execute(
            insert(_KEYS).values(**values, **fixed, created_by=self._transaction.who)
        )
        await Tenants(self._transaction).stamp(tenant)
        return self._key_of(await self._row(id_))

    async def _change(self, before: Key, action: str, values: dict[str, Any]) -> Key:
        row = {name: msgspec.to_builtins(value) for name, value in values.items()}
        await self._transaction.connection.execute(update(_KEYS).where(_KEYS.c.id == before.id).values(**row))
        await Tenants(self._transaction).stamp(before.tenant)
        after = msgspec.structs.replace(before, **values)
        await self._transaction.audit(action, f"key:{before.id}", before, after)
        return after

    def _key_of(self, row: Row[Any]) -> Key:
        return key_of(row, self._transaction.peppers)

    async def _row(self, key: str) -> Row[Any]:
        row = (await self._transaction.connection.execute(select(_KEYS).where(_KEYS.c.id == key))).one_or_none()
        if row is None:
            raise NotFound(f"there is no key {key[:_ID_CHARS]!r}; list ids with stream-gw keys list", param="key")
        return row

    def _check_valid(self, key: Key) -> None:
        self._check_not_revoked(key)
        if key.expires_at is not None and key.expires_at <= self._transaction.now:
            raise Conflict(f"key {key.id!r} has expired; make a new one")

    @staticmethod
    def _check_not_revoked(key: Key) -> None:
        if key.revoked_at is not None:
            raise Conflict(f"key {key.id!r} is revoked")


def key_of(row: Row[Any], peppers: Peppers) -> Key:
    """Raises msgspec.ValidationError."""
    fields = tables.fields_of(row)
    fields["user"] = fields.pop("user_id")
    fields["pepper"] = None if row.digest.startswith(SHA256_PREFIX) else _pepper_of(row.pepper, peppers)
    return msgspec.convert(fields, Key)


def _pepper_of(id_: str | None, peppers: Peppers) -> Pepper:
    """Name the pepper of a row. Rows of a release without pepper ids are those of the oldest pepper."""
    if not peppers.current:
        return "unknown"
    if id_ is None:
        return "previous" if peppers.previous else "current"
    if id_ == pepper_id(peppers.current):
        return "current"
    return "previous" if peppers.previous and id_ == pepper_id(peppers.previous) else "lost"


def new_key(random: Random) -> tuple[str, str]:
    """Make an API key ``sgw_<id>_<256 random bits>``; return (id, key)."""
    id_ = _new_id(random)
    secret = base64.urlsafe_b64encode(random.token_bytes(32)).rstrip(b"=").decode()
    return id_, f"{_PREFIX}_{id_}_{secret}"


def _new_id(random: Random) -> str:
    """Make 12 lower-case letters and digits: 60 random bits."""
    return base64.b32encode(random.token_bytes(8)).decode().lower()[:_ID_CHARS]
