"""API keys, plans and prices of all tenants, in memory: what a gateway asks on a request's path."""

from __future__ import annotations

import base64
import hashlib
from collections.abc import Iterable, Mapping

import msgspec

from stream_fabric.accounts.account import Subject
from stream_fabric.accounts.records import (
    NO_LIMITS,
    PRICES,
    KeyRecord,
    PlanRecord,
    PricesRecord,
    Record,
    Scope,
    TenantRecord,
    UserRecord,
    record_name,
)
from stream_fabric.events import Prices
from stream_fabric.pool.placement import TIERS
from stream_fabric.pool.queue import Lane
from stream_fabric.ports import Random
from stream_fabric.stream.ids import TenantId, UserId
from stream_gw.auth.peppered import SHA256_PREFIX, Peppers
from stream_gw.auth.principal import ALL_SCOPES, KeyUse, Principal
from stream_gw.auth.regions import allowed_regions
from stream_gw.auth.users import USER_PREFIX, UserStore

KEY_PREFIX = "sgw_"
"""Begins the keys of the database, whose digests are peppered."""
_NO_PLAN = PlanRecord("")


class KeyStore:
    """The records of all tenants. ``published``: they come from the fabric and may change at any time."""

    def __init__(
        self,
        records: Iterable[Record] = (),
        *,
        dev: TenantRecord | None = None,
        pepper: bytes = b"",
        previous: bytes = b"",
        published: bool = False,
    ) -> None:
        """``dev``: tenant whose keys stay beside those that are published. ``previous``: pepper of keys that are not
        rotated yet; empty: none."""
        self._dev = dev
        self._peppers = Peppers(pepper, previous)
        self.published = published
        self.users = UserStore()
        self._tenants: dict[TenantId, TenantRecord] = {}
        self._plans: dict[str, PlanRecord] = {}
        self._prices: Mapping[str, Prices] = {}
        self._by_digest: dict[str, tuple[TenantId, KeyRecord]] = {}
        self._by_id: dict[tuple[TenantId, str], KeyRecord] = {}
        self._found: dict[str, Principal] = {}
        """Principals by digest, so that all requests of a key share one; emptied with each change."""
        for record in records if dev is None else (*records, dev):
            self.apply(record_name(record), record)

    def apply(self, name: str, record: Record | None) -> None:
        """Take a record that is new or has changed; None: the record of this name was deleted."""
        kind, _, rest = name.partition(":")
        self._found.clear()
        match record:
            case PlanRecord():
                self._plans[rest] = record
            case UserRecord() | None if kind == "user":
                self.users.apply(rest, record)
            case PricesRecord(prices=prices):
                self._prices = prices
            case TenantRecord() | None if kind == "tenant":
                self._apply_tenant(TenantId(rest), record)
            case None if kind == "plan":
                self._plans.pop(rest, None)
            case None if kind == PRICES:
                self._prices = {}

    def _apply_tenant(self, tenant: TenantId, record: TenantRecord | None) -> None:
        dev = self._dev
        if dev is not None and dev.id == tenant and record is not dev:
            record = dev if record is None else msgspec.structs.replace(record, keys=(*record.keys, *dev.keys))
        before = self._tenants.pop(tenant, None)
        for key in before.keys if before is not None else ():
            self._by_digest.pop(key.digest, None)
            self._by_id.pop((tenant, key.id), None)
        if record is not None:
            self._tenants[tenant] = record
            self._by_digest |= {key.digest: (tenant, key) for key in record.keys}
            self._by_id |= {(tenant, key.id): key for key in record.keys}

    # --- keys ----------------------------------------------------------------------------------------------

    def find(self, key: str, now: float) -> Principal | None:
        """Return the principal of an API key; None: it is unknown, revoked or has expired. ``now``: unix seconds."""
        # By digest: the lookup's timing reveals nothing about a key
        digests = self._peppers.digests(key) if key.startswith(KEY_PREFIX) else (SHA256_PREFIX + key_digest(key),)
        matches = [self._by_digest.get(digest) for digest in digests]
        tenant, record = next(filter(None, matches), (None, None))
        if tenant is None or record is None or not self._is_usable(tenant, record, now):
            return None
        return self._principal(tenant, record)

    def _principal(self, tenant: TenantId, record: KeyRecord) -> Principal:
        found = self._found.get(record.digest)
        if found is None:
            found = self._found[record.digest] = Principal(
                tenant,
                frozenset(record.scopes),
                None if record.user is None else UserId(record.user),
                self.allowed_models(tenant, None if record.models is None else frozenset(record.models)),
                key=KeyUse(record.id, record.generation),
            )
        return found

    def current(self, who: Principal) -> Principal:
        """Return the caller with the rights that its key has now.

        A capability token never has more rights than its key: those that the key has lost are lost for the token too.
        """
        key = None if who.key is None else self._by_id.get((who.tenant, who.key.id))
        if key is None:
            return who
        now = self._principal(who.tenant, key)
        if who.expires_at is None:
            return now
        scopes, models = who.scopes & now.scopes, who.models
        if now.models is not None:
            models = now.models if models is None else models & now.models
        if scopes == who.scopes and models == who.models:
            return who
        return msgspec.structs.replace(who, scopes=scopes, models=models)

    def limits_models(self, who: Principal) -> bool:
        """True if the caller's key is limited to models of its own, beside those of the plan."""
        key = None if who.key is None else self._by_id.get((who.tenant, who.key.id))
        return key is None or key.models is not None

    def is_valid(self, tenant: TenantId, use: KeyUse, now: float) -> bool:
        """True if the key may be used now: it exists in this generation, its tenant and its plan too."""
        key = self._by_id.get((tenant, use.id))
        return key is not None and key.generation == use.generation and self._is_usable(tenant, key, now)

    def has_seen(self, tenant: TenantId, use: KeyUse) -> bool:
        """True if the key is known in this generation or a later one."""
        key = self._by_id.get((tenant, use.id))
        return key is not None and key.generation >= use.generation

    def _is_usable(self, tenant: TenantId, key: KeyRecord, now: float) -> bool:
        return self._is_served(tenant) and (key.expires_at is None or now < key.expires_at)

    def _is_served(self, tenant: TenantId) -> bool:
        """True if the tenant is not suspended and its plan is known."""
        record = self._tenants.get(tenant)
        return record is not None and not record.suspended and (not record.plan or record.plan in self._plans)

    def usable(self, tenant: TenantId) -> frozenset[KeyUse]:
        """Return the keys of a tenant, those that have expired included; none while the tenant is suspended."""
        record = self._tenants.get(tenant)
        if record is None or not self._is_served(tenant):
            return frozenset()
        return frozenset(KeyUse(key.id, key.generation) for key in record.keys)

    def allowed_models(self, tenant: TenantId, models: frozenset[str] | None) -> frozenset[str] | None:
        """Return which of the models the tenant's plan allows; None: all."""
        allowed = self.plan(tenant).models
        if allowed is None:
            return models
        return frozenset(allowed) if models is None else models.intersection(allowed)

    # --- plans ---------------------------------------------------------------------------------------------

    def plan(self, tenant: TenantId) -> PlanRecord:
        """Return the tenant's plan; one without limits for a tenant that has none."""
        record = self._tenants.get(tenant)
        return _NO_PLAN if record is None else self._plans.get(record.plan, _NO_PLAN)

    def regions(self, who: Principal) -> Lane | None:
        """Return the regions that may serve the caller's requests; None: all."""
        return allowed_regions(
            self.plan(who.tenant), None if who.key is None else self._by_id.get((who.tenant, who.key.id))
        )

    def subjects(self, who: Principal, user: str | None, model: str) -> list[Subject]:
        """Return everything that a request counts against; empty: nothing.

        With published keys, the key and the user are always among them. Their running streams are then known when the
        key is revoked or the user is suspended.
        """
        plan = self.plan(who.tenant)
        found = [Subject("tenant", plan.tenant)]
        if who.key is not None:
            key = self._by_id.get((who.tenant, who.key.id))
            limits = plan.key if key is None or key.limits is None else key.limits
            found.append(Subject(key_subject(who.key.id), limits))
        if user is not None:
            found.append(self.users.subject(who.tenant, user, plan.user))
        found.append(Subject(f"model:{model}", plan.model.get(model, plan.model.get("*", NO_LIMITS))))
        return [each for each in found if each.limits.any or (self.published and each.name.startswith(_REVOCABLE))]

    def prices(self, tenant: TenantId, model: str, rank: int) -> Prices | None:
        """Return the prices of the model for the tenant's requests of the tier; None: there are none.

        ``rank``: index into ``TIERS``. An entry ``<model>@<tier>`` comes before that of the model.
        """
        record = self._tenants.get(tenant)
        own = record.prices if record is not None else {}
        names = (f"{model}@{TIERS[rank]}", model, f"*@{TIERS[rank]}", "*")
        found = (prices.get(name) for prices in (own, self._prices) for name in names)
        return next((each for each in found if each is not None), None)

    def content_bytes(self, tenant: TenantId) -> int:
        """Return how many bytes of each prompt and completion the tenant's traces store; 0: none."""
        plan = self.plan(tenant)
        return 0 if plan.retention_s == 0 else plan.trace_content_bytes


def dev_record(tenant: str, key: str) -> TenantRecord:
    """Make a tenant with one key that has every scope, ``admin`` too: the development default."""
    scopes: tuple[Scope, ...] = (*sorted(ALL_SCOPES), "admin")
    return TenantRecord(tenant, "", (KeyRecord("dev", SHA256_PREFIX + key_digest(key), scopes),))


_KEY = "key:"
_REVOCABLE = (_KEY, USER_PREFIX)


def key_subject(key: str) -> str:
    """Return the name of the subject that a key's limits apply to."""
    return _KEY + key


def key_digest(key: str) -> str:
    """SHA-256 in hex. One round is enough, because keys are long and random."""
    return hashlib.sha256(key.encode("utf-8", "surrogatepass")).hexdigest()


def new_key(random: Random) -> str:
    """Make an API key of 256 random bits."""
    return "sk-" + base64.urlsafe_b64encode(random.token_bytes(32)).rstrip(b"=").decode()
