"""The command line: every role, the whole platform on one machine, and what an operator needs beside them."""

from __future__ import annotations

import argparse
import asyncio
import contextlib
import json
import math
import shlex
import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, TypeVar

from pydantic import SecretStr, ValidationError
from pydantic_core import PydanticUndefined

from inference.agent import main as agent_main
from inference.agent.settings import AgentSettings
from inference.control import main as controller_main
from inference.control.settings import ControllerSettings
from inference.simulate import flags as simulate_flags
from stream_fabric.errors import StreamGwError
from stream_fabric.logs import configure
from stream_fabric.settings import FabricSettings
from stream_gw import main as gateway_main
from stream_gw.auth import key_digest, new_key
from stream_gw.settings import GatewaySettings
from telemetry.ask import flags as ask_flags
from telemetry.settings import TelemetrySettings
from telemetry.store import StoreUnavailable

if TYPE_CHECKING:
    from stream_gw import up

S = TypeVar("S", bound=FabricSettings)

_ENV = "STREAM_GW_"
_VLLM_EPILOG = "engine vllm: what follows -- goes to vLLM, as in: --engine vllm --model NAME -- --max-model-len 8192"


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="stream-gw", description="Streams LLM tokens from GPU replicas to readers, through any gateway."
    )
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    up = commands.add_parser("up", help="the whole platform on this machine", epilog=_VLLM_EPILOG)
    _add_up_flags(up)
    for name, model, text in (
        ("gateway", GatewaySettings, "one gateway: HTTP, SSE and WebSocket"),
        ("agent", AgentSettings, "one agent beside an engine"),
        ("controller", ControllerSettings, "one controller"),
        ("telemetry", TelemetrySettings, "one consumer: events into ClickHouse; dlq: what is no event"),
    ):
        role = commands.add_parser(name, help=text, epilog=_VLLM_EPILOG if name == "agent" else None)
        _add_setting_flags(role, model)
        if name == "telemetry":
            _add_dlq_flags(role)
    doctor = commands.add_parser("doctor", help="check what the platform needs and say what is missing")
    doctor.add_argument("--redis-url", help=f"the Redis to check ({_ENV}REDIS_URL)")
    demo = commands.add_parser("demo", help="start the platform, show the main job, stop; the exit code tells")
    demo.add_argument("--port", type=_port, default=0, help="port of the first gateway; 0: any free one")
    ask_flags.add_traces(commands.add_parser("traces", help="ask why a request was slow, and what the fleet did"))
    ask_flags.add_usage(commands.add_parser("usage", help="what is billed; reconcile: do the accounts agree"))
    key = commands.add_parser("key", help="make an API key and the entry of its hash for the keys file")
    key.add_argument("--tenant", required=True, help="the tenant it is for")
    _add_replicas_flags(commands.add_parser("replicas", help="what every replica does; drain or activate one"))
    _add_pools_flags(commands.add_parser("pools", help="how many replicas are wanted and why; hold or release a pool"))
    simulate_flags.add_capacity(commands.add_parser("capacity", help="a workload in replicas, GPUs and dollars"))
    simulate_flags.add_simulate(commands.add_parser("simulate", help="recorded traffic against policies of scaling"))
    flags = list(sys.argv[1:] if argv is None else argv)
    vllm_flags: list[str] = []
    if flags[:1] in (["agent"], ["up"]) and "--" in flags:
        at = flags.index("--")
        flags, vllm_flags = flags[:at], flags[at + 1 :]
    args = parser.parse_args(flags)
    if args.command == "up" and args.upstream and args.engine != "openai":
        up.error(f"argument --upstream: is for --engine openai; the engine is {args.engine}")
    if vllm_flags:
        args.vllm_flags = shlex.join(vllm_flags)
    configure()
    try:
        return _run(args)
    except KeyboardInterrupt:
        return 130
    except ExceptionGroup as group:
        expected, rest = group.split((StreamGwError, OSError, ValueError))
        if rest is not None or expected is None:
            raise
        for error in _flat(expected):
            _refuse(args.command, error)
    except (StreamGwError, OSError, ValueError) as error:
        _refuse(args.command, error)
    return 1


def _flat(group: BaseExceptionGroup[Any]) -> list[BaseException]:
    leaves: list[BaseException] = []
    for error in group.exceptions:
        leaves += _flat(error) if isinstance(error, BaseExceptionGroup) else [error]
    return leaves


def _refuse(command: str, error: BaseException) -> None:
    print(f"stream-gw {command}: {error}", file=sys.stderr)


def _run(args: argparse.Namespace) -> int:
    match args.command:
        case "gateway":
            gateway_main.run(
                _settings(GatewaySettings, args), lambda url: _say(args, {"url": url}, f"gateway at {url}")
            )
        case "agent":
            agent_main.run(
                _settings(AgentSettings, args),
                lambda replica, url: _say(args, {"replica": replica, **_metrics(url)}, f"replica {replica} is ready"),
            )
        case "controller":
            controller_main.run(
                _settings(ControllerSettings, args), lambda url: _say(args, _metrics(url), "controller is ready")
            )
        case "traces" | "usage":
            from telemetry.ask import command as ask_command
            from telemetry.ask.settings import AskSettings

            with contextlib.suppress(KeyboardInterrupt):
                return asyncio.run(ask_command.run(_settings(AskSettings, args), args, print))
        case "telemetry":
            _telemetry(_settings(TelemetrySettings, args), args)
        case "up":
            from stream_gw import up

            return up.run(_up_options(args))
        case "demo":
            from stream_gw import demo

            return asyncio.run(demo.run(args.port))
        case "doctor":
            from stream_gw import doctor
            from telemetry.check import check_events

            return asyncio.run(doctor.run(args.redis_url, check_events))
        case "replicas":
            asyncio.run(_replicas(_settings(FabricSettings, args), args))
        case "pools":
            asyncio.run(_pools(_settings(FabricSettings, args), args))
        case "capacity" | "simulate":
            return _simulate(args)
        case "key":
            key = new_key()
            print(f"key, shown once: {key}\n")
            print(f'[[tenant]]\nid = {json.dumps(args.tenant)}\n[[tenant.key]]\nsha256 = "{key_digest(key)}"')
    return 0


def _simulate(args: argparse.Namespace) -> int:
    from inference.simulate import command

    try:
        (command.run_capacity if args.command == "capacity" else command.run_simulate)(args, print)
    except (OSError, ValueError) as error:
        _refuse(args.command, error)
        return 2
    return 0


def _add_dlq_flags(parser: argparse.ArgumentParser) -> None:
    parser.set_defaults(dlq=None)
    what = parser.add_subparsers(dest="what", metavar="{dlq}", title="without one, consumes events")
    verbs = what.add_parser("dlq", help="records that are no events").add_subparsers(dest="dlq", required=True)
    for name, text in (
        ("list", "those put aside and not replayed, oldest first"),
        ("replay", "send them into the log again, after what refused them was mended"),
    ):
        verb = verbs.add_parser(name, help=text)
        verb.add_argument("--count", type=int, default=100 if name == "list" else 1_000_000, help="so many at most")
        verb.add_argument("--json", action="store_true", help="print JSON", default=argparse.SUPPRESS)
        if name == "replay":
            verb.add_argument("id", nargs="*", help="only these, as list names them")


def _telemetry(settings: TelemetrySettings, args: argparse.Namespace) -> None:
    try:
        from telemetry import main as telemetry_main
    except ImportError as error:
        raise StoreUnavailable(f"pip install 'stream-gw[chdb]', or [clickhouse] for a server ({error})") from None
    if args.dlq is None:
        telemetry_main.run(settings, lambda url: _say(args, {"url": url}, f"telemetry at {url}"))
        return
    asyncio.run(telemetry_main.dlq(settings, args.dlq, args.count, getattr(args, "id", ()), args.json, print))


def _up_options(args: argparse.Namespace) -> up.UpOptions:
    """Raises ValueError, before anything is started, when the engine cannot be."""
    from stream_gw import up

    if args.vllm_flags and args.engine != "vllm":
        raise ValueError(f"what follows -- goes to vLLM; it means nothing to --engine {args.engine}")
    engine = ("engine", "model", "sim", "upstream", "vllm_flags", "vllm_python")
    given = {name: getattr(args, name) for name in engine if getattr(args, name)}
    if args.engine == "vllm":  # these may come from the environment, as every agent reads it
        settings = _settings(AgentSettings, argparse.Namespace(**given))
        agent_main.check(settings)
        given |= {name: getattr(settings, name) for name in ("model", "vllm_flags", "vllm_python")}
    if args.replicas is None:
        args.replicas = 1 if args.engine == "vllm" else 2
    options = {name: getattr(args, name) for name in up.UpOptions.__dataclass_fields__}
    return up.UpOptions(**options | given)


def _metrics(url: str) -> dict[str, str]:
    return {"metrics": url} if url else {}


def _say(args: argparse.Namespace, facts: dict[str, Any], text: str) -> None:
    print(json.dumps({"ready": args.command, **facts}) if args.json else text, flush=True)


def _add_up_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--gateways", type=_count, default=2, help="how many; gateway k listens on port + k (default 2)"
    )
    parser.set_defaults(vllm_flags="")
    parser.add_argument(
        "--replicas",
        type=_count,
        help="how many agents, each with an engine (default 2; of engine vllm 1: several share the GPUs that this "
        "shell sees, so give each its part with -- --gpu-memory-utilization)",
    )
    parser.add_argument(
        "--engine", choices=("sim", "openai", "vllm"), default="sim", help="sim: a simulated GPU (default)"
    )
    parser.add_argument("--upstream", default="", help="engine openai: base URL of an OpenAI-compatible server")
    parser.add_argument("--sim", default="", help="engine sim: its settings, as itl_ms=20,ttft_ms=100,max_num_seqs=64")
    parser.add_argument("--model", default="", help="engine vllm: the model's name or folder")
    parser.add_argument(
        "--vllm-python",
        default="",
        help="engine vllm: the Python of vLLM's environment; else the vllm command of ours, or the PATH's",
    )
    parser.add_argument(
        "--port", type=_port, default=8080, help="port of the first gateway; 0: free ones (default 8080)"
    )
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1)")
    parser.add_argument("--redis-url", default="", help="a Redis to use; else one is started")
    parser.add_argument("--dev-key", default="sk-dev", help="the API key of tenant dev (default sk-dev)")
    parser.add_argument(
        "--telemetry",
        action=argparse.BooleanOptionalAction,
        help="keep a trace of every request in ClickHouse's engine (default: where it is installed, stream-gw[chdb])",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON line when ready")


def _add_fabric_flags(parser: argparse.ArgumentParser) -> argparse.ArgumentParser:
    """What goes before a verb, and the same for after it."""
    parser.set_defaults(partitions=None)
    common = argparse.ArgumentParser(add_help=False, argument_default=argparse.SUPPRESS)
    for one in (common, parser):
        one.add_argument("--redis-url", help=f"the platform's Redis ({_ENV}REDIS_URL)")
        one.add_argument("--json", action="store_true", help="print JSON")
    return common


def _add_pools_flags(parser: argparse.ArgumentParser) -> None:
    common = _add_fabric_flags(parser)
    parser.add_argument("--learned", action="store_true", help="also what controllers have learned of each, and when")
    verbs = parser.add_subparsers(dest="verb", metavar="{hold,release}", title="without one, lists the pools")
    hold = verbs.add_parser("hold", help="take nothing away for a while, as during a rollout", parents=[common])
    hold.add_argument("pool", help="its name")
    hold.add_argument("--for-s", type=_seconds, default=3600.0, help="for how long (default 3600)")
    release = verbs.add_parser("release", help="end a hold before its time", parents=[common])
    release.add_argument("pool", help="its name")


async def _pools(settings: FabricSettings, args: argparse.Namespace) -> None:
    from stream_gw import pools

    if args.verb is None:
        await pools.show(settings.redis_url, json=args.json, say=print, learned=args.learned)
        return
    seconds = args.for_s if args.verb == "hold" else 0.0
    await pools.hold(settings.redis_url, args.pool, seconds, json=args.json, say=print)


def _add_replicas_flags(parser: argparse.ArgumentParser) -> None:
    common = _add_fabric_flags(parser)
    verbs = parser.add_subparsers(dest="verb", metavar="{drain,activate}", title="without one, lists the replicas")
    for name, text in (
        ("drain", "it takes nothing new, finishes what runs, and its agent leaves"),
        ("activate", "a warm one (its agent's setting standby) takes requests"),
    ):
        verb = verbs.add_parser(name, help=text, parents=[common])
        verb.add_argument("replica", help="its name, or as much of its beginning as no other has")
        verb.add_argument("--no-wait", action="store_true", help="only tell it, don't wait until its state shows it")
        verb.add_argument("--wait-s", type=_seconds, default=30.0, help="how long to wait (default 30)")


async def _replicas(settings: FabricSettings, args: argparse.Namespace) -> None:
    from stream_gw import replicas

    if args.verb is None:
        await replicas.show(settings.redis_url, json=args.json, say=print)
        return
    wait_s = None if args.no_wait else args.wait_s
    await replicas.order(settings.redis_url, args.verb, args.replica, wait_s, json=args.json, say=print)


def _add_setting_flags(parser: argparse.ArgumentParser, model: type[FabricSettings]) -> None:
    for name, field in model.model_fields.items():
        default = field.default.get_secret_value() if isinstance(field.default, SecretStr) else field.default
        shown = "" if default in ("", None, PydanticUndefined) else f"; default {default}"
        flag = "--" + name.replace("_", "-")
        text = f"{field.description} ({_ENV}{name.upper()}{shown})".replace("%", "%%")
        if field.annotation is bool:
            parser.add_argument(flag, dest=name, help=text, action=argparse.BooleanOptionalAction)
        else:
            parser.add_argument(flag, dest=name, help=text)
    parser.add_argument("--json", action="store_true", help="print one JSON line when ready")


def _settings(model: type[S], args: argparse.Namespace) -> S:
    """Flags over variables over defaults. Raises ValueError naming each wrong setting and what is allowed."""
    given = {name: value for name in model.model_fields if (value := getattr(args, name, None)) is not None}
    try:
        settings = model(**given)
        configure(settings.log_format)
        return settings
    except ValidationError as error:
        lines = []
        for item in error.errors():
            if not item["loc"]:  # of several settings together; the input would be all of them, passwords too
                lines.append(str(item["ctx"]["error"]))
                continue
            name = str(item["loc"][0])
            # A Redis URL may hold a password
            hidden = any(word in name for word in ("key", "secret", "url", "password"))
            value = "" if hidden else f", got {item['input']!r}"
            lines.append(f"--{name.replace('_', '-')} ({_ENV}{name.upper()}): {item['msg']}{value}")
        raise ValueError("; ".join(lines)) from None


def _count(text: str) -> int:
    if not text.isdecimal() or not 1 <= int(text) <= 64:
        raise argparse.ArgumentTypeError(f"must be 1 to 64, got {text!r}")
    return int(text)


def _seconds(text: str) -> float:
    try:
        seconds = float(text)
    except ValueError:
        seconds = math.nan
    if not 0 <= seconds <= 3600:
        raise argparse.ArgumentTypeError(f"must be 0 to 3600 seconds, got {text!r}")
    return seconds


def _port(text: str) -> int:
    if not text.isdecimal() or int(text) > 65535:
        raise argparse.ArgumentTypeError(f"must be a port, 0 to 65535, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
