"""Writes ``docs/configuration.md`` from the settings: ``python -m stream_gw.configuration > docs/configuration.md``."""

from __future__ import annotations

from pydantic import SecretStr

from inference.agent.settings import AgentSettings
from inference.control.settings import ControllerSettings
from stream_fabric.settings import EmitSettings, EventSettings, FabricSettings
from stream_gw.settings import GatewaySettings
from telemetry.ask.settings import AskSettings
from telemetry.settings import TelemetrySettings

_HEAD = """# Configuration

Every setting is a flag of its role and a variable; a flag wins over the variable, the variable over the default.
Made from the settings by `python -m stream_gw.configuration`; a test compares.
"""


def table() -> str:
    out = [_HEAD]
    told: set[str] = set()
    for title, model in (
        ("Every role", FabricSettings),
        ("Telemetry events: gateways, agents, controllers, and who consumes them", EventSettings),
        ("Telemetry events: gateways, agents, controllers", EmitSettings),
        ("`stream-gw gateway`", GatewaySettings),
        ("`stream-gw agent`", AgentSettings),
        ("`stream-gw controller`", ControllerSettings),
        ("`stream-gw telemetry`", TelemetrySettings),
        ("`stream-gw traces`, `stream-gw usage`", AskSettings),
    ):
        fields = {name: field for name, field in model.model_fields.items() if name not in told}
        out.append(f"\n## {title}\n\n| flag | variable | default | what it is |\n| --- | --- | --- | --- |\n")
        for name, field in fields.items():
            default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
            shown = f"`{default}`" if default not in ("", None) else ""
            out.append(
                f"| `--{name.replace('_', '-')}` | `STREAM_GW_{name.upper()}` | {shown} | {field.description} |\n"
            )
        if model in (FabricSettings, EventSettings, EmitSettings):
            told |= fields.keys()
    return "".join(out)


if __name__ == "__main__":
    print(table(), end="")
