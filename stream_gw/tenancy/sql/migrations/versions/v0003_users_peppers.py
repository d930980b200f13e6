"""Users of tenants, and the pepper of each API key."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0003"
down_revision = "0002"


def upgrade() -> None:
    op.add_column("api_keys", sa.Column("pepper", sa.String(8)))
    op.create_table(
        "users",
        sa.Column("tenant", sa.String(64), sa.ForeignKey("tenants.id"), primary_key=True),
        sa.Column("id", sa.String(128), primary_key=True),
        sa.Column("label", sa.String(200), nullable=False),
        sa.Column("suspended", sa.Boolean, nullable=False),
        sa.Column("limits", sa.JSON),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("created_by", sa.String(200), nullable=False),
        sa.Column("deleted_at", sa.Double),
        sa.Column("revision", sa.BigInteger, nullable=False),
    )
    op.create_index("users_revision", "users", ["revision"])
