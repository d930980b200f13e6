"""Writes ``docs/configuration.md`` from the settings: ``python -m stream_gw.cli.configuration``."""

from __future__ import annotations

from pydantic import SecretStr

from inference.agent.settings import AgentSettings
from inference.control.settings import ControllerSettings
from stream_fabric.moderation.settings import ModerationSettings
from stream_fabric.process.settings import EmitSettings, EventSettings, FabricSettings, MetricsSettings
from stream_gw.settings import DatabaseSettings, GatewaySettings
from telemetry.ask.settings import AskSettings
from telemetry.settings import TelemetrySettings

_HEAD = """# Configuration

Every setting is a flag of its role and an environment variable. A flag overrides its variable, and the variable
overrides the default.
A process that starts warns of each variable with the prefix `STREAM_GW_` that nothing reads, and names the nearest
setting. One environment may serve all roles.
Generated from the settings by `python -m stream_gw.cli.configuration`; a test compares the page with them.
"""


_SHARED: tuple[tuple[str, type[FabricSettings]], ...] = (
    ("Every role", FabricSettings),
    ("Telemetry events: gateways, agents, controllers and consumers", EventSettings),
    ("Telemetry events: gateways, agents, controllers", EmitSettings),
    (
        "Database of tenants: gateways, `tenants`, `users`, `keys`, `plans`, `prices`, `audit`",
        DatabaseSettings,
    ),
    ("Moderation: gateways for prompts, agents for answers", ModerationSettings),
    ("Metrics: agents and controllers", MetricsSettings),
)
_ROLES: tuple[tuple[str, type[FabricSettings]], ...] = (
    ("`stream-gw gateway`", GatewaySettings),
    ("`stream-gw agent`", AgentSettings),
    ("`stream-gw controller`", ControllerSettings),
    ("`stream-gw telemetry`", TelemetrySettings),
    ("`stream-gw traces`, `stream-gw usage`", AskSettings),
)


def names() -> set[str]:
    """Return the names of all settings, as environment variables without the prefix."""
    return {name.upper() for _, model in _SHARED + _ROLES for name in model.model_fields}


def table() -> str:
    """Return the Markdown text of ``docs/configuration.md``."""
    out = [_HEAD]
    listed: set[str] = set()
    for title, model in _SHARED + _ROLES:
        fields = {name: field for name, field in model.model_fields.items() if name not in listed}
        out.append(f"\n## {title}\n\n| flag | variable | default | meaning |\n| --- | --- | --- | --- |\n")
        for name, field in fields.items():
            default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
            shown = f"`{default}`" if default not in ("", None) else ""
            out.append(
                f"| `--{name.replace('_', '-')}` | `STREAM_GW_{name.upper()}` | {shown} | {field.description} |\n"
            )
        if (title, model) in _SHARED:
            listed |= fields.keys()
    return "".join(out)


if __name__ == "__main__":
    print(table(), end="")
