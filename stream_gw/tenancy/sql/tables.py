"""Tables of the database. ``migrations/`` makes them; a test compares both.

Each row that is published has the revision of its last change. Deleted rows stay, so that their deletion is published.
Times are Unix seconds.
"""

from __future__ import annotations

from typing import Any

from sqlalchemy import (
    JSON,
    BigInteger,
    Boolean,
    Column,
    Double,
    ForeignKey,
    Index,
    Integer,
    LargeBinary,
    MetaData,
    Row,
    String,
    Table,
    Text,
)

metadata = MetaData()
_Id = BigInteger().with_variant(Integer, "sqlite")
_Json = JSON(none_as_null=True)

revisions = Table(
    "revisions",
    metadata,
    Column("name", String(16), primary_key=True),
    Column("revision", BigInteger, nullable=False),
)
"""Counters: ``last`` is the last revision, ``prices`` that of the last change of the prices for all tenants."""

plans = Table(
    "plans",
    metadata,
    Column("name", String(64), primary_key=True),
    Column("terms", _Json, nullable=False),
    Column("deleted_at", Double),
    Column("revision", BigInteger, nullable=False),
    Index("plans_revision", "revision"),
)

tenants = Table(
    "tenants",
    metadata,
    Column("id", String(64), primary_key=True),
    Column("label", String(200), nullable=False),
    Column("plan", String(64), ForeignKey("plans.name"), nullable=False),
    Column("suspended", Boolean, nullable=False),
    Column("prices", _Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("deleted_at", Double),
    Column("revision", BigInteger, nullable=False),
    Index("tenants_revision", "revision"),
    Index("tenants_plan", "plan"),
)

api_keys = Table(
    "api_keys",
    metadata,
    Column("id", String(12), primary_key=True),
    Column("tenant", String(64), ForeignKey("tenants.id"), nullable=False),
    Column("label", String(200), nullable=False),
    Column("digest", String(80), nullable=False),
    Column("shown", String(32), nullable=False),
    Column("scopes", _Json, nullable=False),
    Column("models", _Json),
    Column("user_id", String(128)),
    Column("expires_at", Double),
    Column("generation", Integer, nullable=False),
    Column("limits", _Json),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("revoked_at", Double),
    Column("regions", _Json),
    Column("pepper", String(8)),
    Index("api_keys_digest", "digest", unique=True),
    Index("api_keys_tenant", "tenant"),
)

users = Table(
    "users",
    metadata,
    Column("tenant", String(64), ForeignKey("tenants.id"), primary_key=True),
    Column("id", String(128), primary_key=True),
    Column("label", String(200), nullable=False),
    Column("suspended", Boolean, nullable=False),
    Column("limits", _Json),
    Column("created_at", Double, nullable=False),
    Column("created_by", String(200), nullable=False),
    Column("deleted_at", Double),
    Column("revision", BigInteger, nullable=False),
    Index("users_revision", "revision"),
)
"""Users that differ from their tenant's other users."""

prices = Table(
    "prices",
    metadata,
    Column("model", String(200), primary_key=True),
    Column("price", _Json, nullable=False),
)
"""Prices for all tenants; ``*``: each model that is not named."""

audit = Table(
    "audit",
    metadata,
    Column("id", _Id, primary_key=True, autoincrement=True),
    Column("at", Double, nullable=False),
    Column("who", String(200), nullable=False),
    Column("action", String(64), nullable=False),
    Column("subject", String(300), nullable=False),
    Column("before", _Json),
    Column("after", _Json),
    Index("audit_at", "at"),
    Index("audit_subject", "subject"),
)

responses = Table(
    "responses",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("id", String(64), primary_key=True),
    Column("user_id", String(128)),
    Column("previous", String(64)),
    Column("request", LargeBinary, nullable=False),
    Column("response", LargeBinary, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index("responses_expires", "expires_at"),
)
"""Stored responses. Their tenants may be those of a keys file."""

conversations = Table(
    "conversations",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("id", String(64), primary_key=True),
    Column("user_id", String(128)),
    Column("metadata", _Json, nullable=False),
    Column("created_at", Double, nullable=False),
    Column("last_seq", BigInteger, nullable=False),
    Column("bytes", BigInteger, nullable=False),
    Column("expires_at", Double, nullable=False),
    Index("conversations_expires", "expires_at"),
)
"""Conversations; ``bytes``: of their items, metadata and row together."""

conversation_items = Table(
    "conversation_items",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("conversation", String(64), primary_key=True),
    Column("seq", BigInteger, primary_key=True, autoincrement=False),
    Column("id", String(200), nullable=False),
    Column("item", LargeBinary, nullable=False),
    Index("conversation_items_id", "tenant", "conversation", "id"),
)

stored_bytes = Table(
    "stored_bytes",
    metadata,
    Column("tenant", Text, primary_key=True),
    Column("bytes", BigInteger, nullable=False),
)
"""Bytes of a tenant's responses and conversations together; changed in each of their transactions."""


def fields_of(row: Row[Any]) -> dict[str, Any]:
    """Return a row's values by column."""
    return {str(name): value for name, value in row._asdict().items()}  # msgspec takes no subclass of str as a key
