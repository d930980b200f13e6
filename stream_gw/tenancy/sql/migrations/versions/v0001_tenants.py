"""Tenants, keys, plans, prices and audit; the plan ``default`` without limits is revision 1."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0001"
down_revision = None

_ID = sa.BigInteger().with_variant(sa.Integer, "sqlite")


def upgrade() -> None:
    revisions = op.create_table(
        "revisions",
        sa.Column("name", sa.String(16), primary_key=True),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    plans = op.create_table(
        "plans",
        sa.Column("name", sa.String(64), primary_key=True),
        sa.Column("terms", sa.JSON, nullable=False),
        sa.Column("deleted_at", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("plans_revision", "plans", ["revision"])
    _create_tenants()
    op.create_table(
        "prices",
        sa.Column("model", sa.String(200), primary_key=True),
        sa.Column("price", sa.JSON, nullable=False),
    )
    op.create_table(
        "audit",
        sa.Column("id", _ID, primary_key=True, autoincrement=True),
        sa.Column("at", sa.Double, nullable=False),
        sa.Column("who", sa.String(200), nullable=False),
        sa.Column("action", sa.String(64), nullable=False),
        sa.Column("subject", sa.String(300), nullable=False),
        sa.Column("before", sa.JSON),
        sa.Column("after", sa.JSON),
    )
    op.create_index("audit_at", "audit", ["at"])
    op.create_index("audit_subject", "audit", ["subject"])
    op.bulk_insert(plans, [{"name": "default", "terms": {}, "revision": 1}])
    op.bulk_insert(revisions, [{"name": "last", "revision": 1}, {"name": "prices", "revision": 0}])


def _create_tenants() -> None:
    op.create_table(
        "tenants",
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("plan", sa.String(64), sa.ForeignKey("plans.name"), nullable=False),
        sa.Column("suspended", sa.Boolean, nullable=False),
        sa.Column("prices", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("deleted_at", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("tenants_revision", "tenants", ["revision"])
    op.create_index("tenants_plan", "tenants", ["plan"])
    op.create_table(
        "api_keys",
        sa.Column("id", sa.String(12), primary_key=True),
        sa.Column("tenant", sa.String(64), sa.ForeignKey("tenants.id"), nullable=False),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("digest", sa.String(80), nullable=False),
        sa.Column("shown", sa.String(32), nullable=False),
        sa.Column("scopes", sa.JSON, nullable=False),
        sa.Column("models", sa.JSON),
        sa.Column("user_id", sa.String(128)),
        sa.Column("expires_at", sa.Double),
        sa.Column("generation", sa.Integer, nullable=False),
        sa.Column("limits", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("revoked_at", sa.Double),
    )
    op.create_index("api_keys_digest", "api_keys", ["digest"], unique=True)
    op.create_index("api_keys_tenant", "api_keys", ["tenant"])
