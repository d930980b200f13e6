"""Stored responses and conversations, and the bytes that they take."""

from __future__ import annotations

import sqlalchemy as sa
from alembic import op

revision = "0004"
down_revision = "0003"


def upgrade() -> None:
    op.create_table(
        "responses",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("user_id", sa.String(128)),
        sa.Column("previous", sa.String(64)),
        sa.Column("request", sa.LargeBinary, nullable=False),
        sa.Column("response", sa.LargeBinary, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
    op.create_index("responses_expires", "responses", ["expires_at"])
    op.create_table(
        "conversations",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("id", sa.String(64), primary_key=True),
        sa.Column("user_id", sa.String(128)),
        sa.Column("metadata", sa.JSON, nullable=False),
        sa.Column("created_at", sa.Double, nullable=False),
        sa.Column("last_seq", sa.BigInteger, nullable=False),
        sa.Column("bytes", sa.BigInteger, nullable=False),
        sa.Column("expires_at", sa.Double, nullable=False),
    )
    op.create_index("conversations_expires", "conversations", ["expires_at"])
    op.create_table(
        "conversation_items",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("conversation", sa.String(64), primary_key=True),
        sa.Column("seq", sa.BigInteger, primary_key=True, autoincrement=False),
        sa.Column("id", sa.String(200), nullable=False),
        sa.Column("item", sa.LargeBinary, nullable=False),
    )
    op.create_index("conversation_items_id", "conversation_items", ["tenant", "conversation", "id"])
    op.create_table(
        "stored_bytes",
        sa.Column("tenant", sa.Text, primary_key=True),
        sa.Column("bytes", sa.BigInteger, nullable=False),
    )
