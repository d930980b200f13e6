"""A keys file with an operator and one tenant."""

from __future__ import annotations

from pathlib import Path

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key


def operator_and_tenant(path: Path, tenant: str) -> tuple[str, str]:
    """Write the file. Returns a key that may only operate, and a key of ``tenant``."""
    operator, own = new_key(HostRandom()), new_key(HostRandom())
    path.write_text(
        f"""
        [[tenant]]
        id = "operations"
        [[tenant.key]]
        sha256 = "{key_digest(operator)}"
        scopes = ["admin"]

        [[tenant]]
        id = "{tenant}"
        [[tenant.key]]
        sha256 = "{key_digest(own)}"
        """
    )
    return operator, own
