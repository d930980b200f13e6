"""``stream-gw key``: makes an API key. The keys file holds only its hash."""

from __future__ import annotations

import argparse
import json

from stream_fabric.process.host import HostRandom
from stream_gw.auth import key_digest, new_key


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--tenant", required=True, type=_tenant, help="id of the tenant that owns the key")


def _tenant(text: str) -> str:
    if not text:
        raise argparse.ArgumentTypeError("must not be empty; write for example acme")
    return text


def run(args: argparse.Namespace) -> int:
    key = new_key(HostRandom())
    print(f"key, shown once: {key}\n")
    print(f'[[tenant]]\nid = {json.dumps(args.tenant)}\n[[tenant.key]]\nsha256 = "{key_digest(key)}"')
    return 0
