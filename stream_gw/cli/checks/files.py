"""Checks of the keys file and of the pools file."""

from __future__ import annotations

import tomllib

from pydantic import SecretStr

from inference.control.policy.scale_policy import parse_policies
from inference.control.settings import ControllerSettings
from stream_gw.auth import read_keys_file
from stream_gw.cli.checks.report import Report
from stream_gw.settings import GatewaySettings

_NO_KEYS = "set STREAM_GW_KEYS_FILE to a TOML file of tenants (stream-gw key makes an entry), or STREAM_GW_KEY_PEPPER"


def _is_set(secret: SecretStr) -> bool:
    return bool(secret.get_secret_value())


def check_keys(report: Report, settings: GatewaySettings) -> None:
    path, dev_key, pepper = settings.keys_file, *map(_is_set, (settings.dev_key, settings.key_pepper))
    if pepper:
        report.ok("API keys of the database", "as they are published")
    if path is None:
        if dev_key:
            report.ok("API keys", "one, STREAM_GW_DEV_KEY, of tenant dev")
        elif not pepper:
            report.skipped("API keys", _NO_KEYS)
        return
    try:
        read_keys_file(path)
        tenants = tomllib.loads(path.read_text("utf-8"))["tenant"]
    except (OSError, ValueError) as error:
        report.missing("a usable keys file", f"correct STREAM_GW_KEYS_FILE: {error}", found=str(path))
        return
    keys = sum(len(tenant.get("key", ())) for tenant in tenants)
    if keys:
        report.ok("keys file", f"{path}, {keys} keys of {len(tenants)} tenants")
    else:
        report.missing("an API key", "add what stream-gw key prints", found=f"{path} holds none")


def check_pools(report: Report, settings: ControllerSettings) -> None:
    path = settings.pools_file
    if path is None:
        report.skipped("pools file", "set STREAM_GW_POOLS_FILE for controllers that plan the number of replicas")
        return
    try:
        pools = parse_policies(path.read_bytes(), str(path))
    except (OSError, ValueError) as error:
        report.missing("a usable pools file", f"correct STREAM_GW_POOLS_FILE: {error}", found=str(path))
        return
    if pools:
        report.ok("pools file", f"{path} declares {', '.join(sorted(pools))}")
    else:
        report.missing("a declared pool", "add a table [pool.NAME]", found=f"{path} declares none", needed=False)
