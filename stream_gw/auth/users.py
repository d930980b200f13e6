"""Users that differ from their tenant's other users, in memory."""

from __future__ import annotations

import hashlib

from stream_fabric.accounts.account import Subject
from stream_fabric.accounts.records import Limits, UserRecord
from stream_fabric.stream.ids import TenantId


class UserStore:
    """Records of users. A user without a record is not suspended and has its plan's limits."""

    def __init__(self) -> None:
        self._records: dict[tuple[str, str], UserRecord] = {}

    def apply(self, name: str, record: UserRecord | None) -> None:
        """Take the record of ``<tenant>:<user>``; None: it was deleted."""
        tenant, _, user = name.partition(":")
        if record is None:
            self._records.pop((tenant, user), None)
        else:
            self._records[tenant, user] = record

    def is_suspended(self, tenant: TenantId, user: str | None) -> bool:
        record = None if user is None else self._records.get((tenant, user))
        return record is not None and record.suspended

    def subject(self, tenant: TenantId, user: str, limits: Limits) -> Subject:
        """Return the user as a subject. ``limits``: those of the plan."""
        record = self._records.get((tenant, user))
        own = limits if record is None or record.limits is None else record.limits
        return Subject(user_subject(user), own)


USER_PREFIX = "user:"


def user_subject(user: str) -> str:
    """Return the name of the subject that a user's limits apply to."""
    return USER_PREFIX + hashlib.sha256(user.encode()).hexdigest()[:16]
