"""``stream-gw agent``: runs one agent with its engine until SIGTERM."""

from __future__ import annotations

import argparse

from inference.agent import main as agent_main
from inference.agent.settings import AgentSettings
from stream_fabric.stream.ids import ReplicaId
from stream_gw.cli.flags import VLLM_EPILOG, add_setting_flags, print_ready, read_settings


def add_flags(parser: argparse.ArgumentParser) -> None:
    add_setting_flags(parser, AgentSettings)
    parser.epilog = VLLM_EPILOG


def run(args: argparse.Namespace) -> int:
    def on_ready(replica: ReplicaId, metrics_url: str) -> None:
        facts = {"replica": replica, **({"metrics": metrics_url} if metrics_url else {})}
        print_ready(args, facts, f"replica {replica} is ready")

    agent_main.run(read_settings(AgentSettings, args), on_ready)
    return 0
