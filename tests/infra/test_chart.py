"""The chart: its objects are valid ones, its pods are locked up, and all that it tells our processes is real."""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Callable, Iterator
from datetime import datetime
from functools import partial
from pathlib import Path
from typing import Any

import jsonschema_rs
import msgspec
import pytest
import yaml
from pydantic import SecretStr

from dashboards import boards, rules
from inference.agent.settings import AgentSettings
from inference.control.policy.scale_policy import ScalePolicy, parse_policies
from inference.control.policy.schedule import ScheduledEvent
from inference.control.settings import ControllerSettings
from stream_fabric.limits import EVENTS_CLOSE_S_MAX, LEASE_TTL_S, SPANS_CLOSE_S_MAX, VLLM_TERM_S_MAX
from stream_fabric.process.metric_names import METRICS
from stream_fabric.process.settings import FabricSettings
from stream_gw.cli.main import main
from stream_gw.settings import GatewaySettings
from telemetry.settings import TelemetrySettings
from telemetry.store.connection import MIGRATION_S_MAX
from tests.infra import schemas
from tests.infra.chart import (
    CASES,
    CHART,
    KUBERNETES,
    Object,
    component,
    environment,
    helm,
    objects,
    of_kind,
    selects,
    template,
    values,
    workloads,
)
from tests.support.kube import HOME, tool

ROLES: dict[str, type[FabricSettings]] = {
    "gateway": GatewaySettings,
    "agent": AgentSettings,
    "controller": ControllerSettings,
    "telemetry": TelemetrySettings,
}
OURS = tuple(ROLES)
SECRET = {
    "STREAM_GW_REDIS_URL": "redis://:secret@redis:6379/0",
    "STREAM_GW_CLICKHOUSE": "http://user:secret@clickhouse:8123/stream_gw",
    "STREAM_GW_CLICKHOUSE_READER": "http://reader:secret@clickhouse:8123/stream_gw",
    "STREAM_GW_UPSTREAM_API_KEY": "secret",
    "STREAM_GW_KAFKA_USER": "user",
    "STREAM_GW_KAFKA_PASSWORD": "secret",
    "STREAM_GW_TELEMETRY_TOKEN": "secret",
    "STREAM_GW_TOKEN_SECRET": "a secret of sixteen",
    "STREAM_GW_DATABASE_URL": "postgresql://user:secret@database/stream_gw",
    "STREAM_GW_KEY_PEPPER": "a pepper of sixteen",
    "STREAM_GW_MODERATION_KEY": "secret",
    "STREAM_GW_GATEWAY": "llm-stream-gw-gateway-7c9d8b6f5-x2x4z",
    "STREAM_GW_REPLICA": "llm-stream-gw-pool-qwen3-8b-7c9d8b6f5-x2x4z",
    "STREAM_GW_REVISION": "7c9d8b6f5",
}
"""Variables that pods take from Secrets or fields of the pod, instead of the chart's values."""


@pytest.fixture(scope="session")
def schema_location(tmp_path_factory: pytest.TempPathFactory) -> str:
    tool("kubeconform")
    return schemas.write(HOME / "share", tmp_path_factory.mktemp("schemas"))


@pytest.mark.parametrize("case", CASES)
def test_helm_finds_nothing_to_say(case: str) -> None:
    done = helm("lint", "--strict", str(CHART), "-f", values(case), "--kube-version", KUBERNETES)
    assert done.returncode == 0, done.stdout + done.stderr


def conform(location: str, text: str) -> subprocess.CompletedProcess[str]:
    flags = ("-strict", "-schema-location", location, "-kubernetes-version", KUBERNETES, "-output", "json", "-summary")
    return subprocess.run([tool("kubeconform"), *flags], input=text, capture_output=True, text=True, timeout=60)


@pytest.mark.parametrize("case", CASES)
def test_every_object_is_one_that_kubernetes_and_keda_describe(schema_location: str, case: str) -> None:
    done = conform(schema_location, template(case))
    assert done.returncode == 0, done.stdout + done.stderr
    summary = json.loads(done.stdout)["summary"]
    assert summary["skipped"] == 0
    assert summary["valid"] == len(objects(case)) > 10


@pytest.mark.parametrize(
    ("kind", "change", "says"),
    [
        ("Deployment", {"spec": {"replica": 1}}, "replica"),
        ("Deployment", {"spec": {"template": {"spec": {"terminationGracePeriodSeconds": "soon"}}}}, "integer"),
        ("ScaledObject", {"spec": {"fallback": {"behavior": "hope"}}}, "behavior"),
        ("ScaledObject", {"spec": {"maxReplicaCount": "many"}}, "maxReplicaCount"),
        ("ServiceMonitor", {"spec": {"endpoints": [{"port": "http", "every": "1s"}]}}, "every"),
    ],
)
def test_a_wrong_object_would_be_found(schema_location: str, kind: str, change: Object, says: str) -> None:
    one = of_kind(objects("production"), kind)[0]
    assert conform(schema_location, json.dumps(one)).returncode == 0

    def put(into: Object, what: Object) -> None:
        for name, value in what.items():
            if isinstance(value, dict) and isinstance(into.get(name), dict):
                put(into[name], value)
            else:
                into[name] = value

    put(one, change)
    done = conform(schema_location, json.dumps(one))
    assert done.returncode != 0 and says in done.stdout


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["gateway.replica=3"], "replica"),
        (["partitions=0"], "partitions"),
        (["events.by=pigeon"], "'kafka'"),
        (["image.tag=latest"], "tag"),
        (["image.digest=sha256:short"], "digest"),
        (["gateway.settings.TOKEN_SECRET=abc"], "TOKEN_SECRET"),
        (["gateway.settings.queue=1"], "queue"),
        (["gateway.settings.DRAIN_S=900"], "DRAIN_S"),
        (["poolDefaults.settings.METRICS_PORT=9000"], "METRICS_PORT"),
        (["gateway.autoscaling.min=0"], "min"),
        (["gateway.autoscaling.min=30"], "gateway.autoscaling: min (30) must be at most max (20)"),
        (["pools[0].min=41"], "pools: qwen3-8b: min (41) must be at most max (40)"),
        (["pools[1].name=qwen3-8b"], "pools: qwen3-8b: another pool's objects"),
        (["pools[1].name=qwen3.8b"], "pools: qwen3.8b: another pool's objects are named llm-stream-gw-pool-qwen3-8b"),
        (["ingress.host=https://llm.example.org"], "host"),
        (["gateway.corsOrigins={https://chat.example/path}"], "corsOrigins"),
        (["poolDefaults.engine=magic"], "'vllm'"),
        (["autoscaling.matchers=namespace=llm"], "matchers"),
        (["autoscaling.prometheus=http://user:password@prometheus"], "prometheus"),
        (["ingress.paths={/metrics}"], "paths"),
        (["networkPolicy.prometheusFrom={}"], "prometheusFrom"),
        (["redis.secret.name="], "redis.secret.name"),
        (["gateway.secrets.keyPepper.name="], "gateway.secrets.keys.name"),
        (["clickhouse.secret.name="], "clickhouse.secret.name"),
        (["kafka.secret.name="], "kafka.secret.name"),
        (["kafka.servers="], "kafka.servers"),
        (["pools[0].name=Qwen/Qwen3"], "name"),
        (["pools[0].model="], "needs a model"),
        (["poolDefaults.longestStreamSeconds=4000"], "longestStreamSeconds"),
        (["poolDefaults.plan.warm=1"], "warm"),
        (["poolDefaults.plan.peak_share=3"], "peak_share"),
        (["gateway.secretSettings.DEV_KEY=sk-1"], "secretSettings"),
        (["telemetry.settings.CLICKHOUSE_READER=http://u:p@c"], "CLICKHOUSE_READER"),
        (["gateway.imageModels={a\\,b}"], "imageModels"),
        (["autoscaling.trigger=hope"], "'external-push'"),
        (["autoscaling.trigger=external-push"], "autoscaling.push.secret"),
        (["autoscaling.trigger=external-push", "autoscaling.push.secret=a"], "autoscaling.push.clientSecret"),
        (["autoscaling.push.address=dns:///controllers"], "address"),
        (["networkPolicy.kedaFrom={}"], "kedaFrom"),
    ],
)
def test_wrong_values_are_refused_by_name(flags: list[str], says: str) -> None:
    sets = [word for flag in flags for word in ("--set", flag)]
    done = helm("template", "llm", str(CHART), "-f", values("production"), "--kube-version", KUBERNETES, *sets)
    assert done.returncode != 0
    assert says in done.stderr


def _without_each(values: Object, path: tuple[str, ...] = ()) -> Iterator[tuple[str, Object]]:
    """The values without one that templates cannot do without, and its path, for each such value."""
    for name, value in values.items():
        # Kubernetes has defaults of its own for these, and an empty value has the same effect as none
        if not value or name in ("resources", "tolerations", "maxSurge"):
            continue
        yield ".".join((*path, name)), {key: other for key, other in values.items() if key != name}
        # The schemas of these serve the entries of pools, too, where each value is optional
        if isinstance(value, dict) and {"name", "key"} != value.keys():
            for where, less in _without_each(value, (*path, name)):
                yield where, {**values, name: less}


def test_values_of_an_older_chart_are_refused_and_not_rendered_without_the_new_ones() -> None:
    validator = jsonschema_rs.validator_for(json.loads((CHART / "values.schema.json").read_text()))
    defaults = yaml.safe_load((CHART / "values.yaml").read_text())
    assert validator.is_valid(defaults)
    removed = dict(_without_each(defaults))
    assert "networkPolicy.moderation.ports" in removed
    assert [path for path, values in removed.items() if validator.is_valid(values)] == []


def test_helm_names_the_value_that_an_older_chart_did_not_have() -> None:
    done = helm("template", "llm", str(CHART), "-f", values("production"), "--set", "networkPolicy.moderation=null")
    assert done.returncode != 0
    assert "moderation" in done.stderr and "networkPolicy" in done.stderr


# --- what our processes are told ---------------------------------------------------------------------------------


def test_every_setting_can_be_given_and_a_secret_one_only_by_a_secret() -> None:
    """By a value of its own, in ``settings``, or in ``secretSettings``: no setting of any role is out of reach."""
    refused = refused_settings()[0]
    secret = {
        name.upper()
        for role in ROLES.values()
        for name, field in role.model_fields.items()
        if field.annotation is SecretStr or not field.repr
    }
    assert refused == secret | {"KAFKA_USER"}
    took = {"name": "a-secret", "key": "a-key"}
    given: dict[str, Any] = {"secretSettings": dict.fromkeys(secret, took)}
    flags = [f"--set-json={at}={json.dumps(given['secretSettings'])}" for at in
             ("gateway.secretSettings", "controller.secretSettings", "telemetry.secretSettings",
              "poolDefaults.secretSettings")]  # fmt: skip
    for name, pod in workloads(objects("production", *flags)):
        if component(pod) in OURS:
            by_secret = {
                one["name"] for one in pod["spec"]["containers"][0]["env"]
                if one.get("valueFrom", {}).get("secretKeyRef") == took
            }  # fmt: skip
            assert by_secret >= {f"STREAM_GW_{each}" for each in secret - {"UPSTREAM_API_KEY"}}, name


def refused_settings() -> list[set[str]]:
    """The secret ones, and those that the chart sets itself."""
    schema = json.loads((CHART / "values.schema.json").read_text())
    return [set(rule["not"]["enum"]) for rule in schema["$defs"]["settings"]["propertyNames"]["allOf"]]


def test_a_variable_that_the_chart_always_sets_cannot_be_set_again() -> None:
    """It would be there twice: the last one counts, and the pod's grace period, probes and ports are of the first."""
    always: dict[str, set[str]] = {}
    ever: set[str] = set()
    for case in CASES:
        for _, pod in ours(case):
            told = {name.removeprefix("STREAM_GW_") for name in environment(pod) if name.startswith("STREAM_GW_")}
            always[component(pod)] = always.get(component(pod), told) & told
            ever |= told
    refused = refused_settings()
    assert set().union(*always.values()) <= set().union(*refused)
    assert refused[1] <= ever


def test_brokers_that_ask_for_it_get_the_clients_certificate() -> None:
    for name, pod in ours("production"):
        told, container = environment(pod), pod["spec"]["containers"][0]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        for variable in ("CERT", "KEY"):
            folder, _, _ = str(told[f"STREAM_GW_KAFKA_{variable}"]).rpartition("/")
            assert volumes[mounts[folder]]["secret"] == {"secretName": "kafka-client"}, name


@pytest.mark.parametrize("case", CASES)
def test_pods_of_a_cluster_with_ipv6_alone_listen_where_probes_and_services_ask(case: str) -> None:
    for name, pod in ours(case, "--set", "listen=::"):
        hosts = {variable: value for variable, value in environment(pod).items() if variable.endswith("_HOST")}
        assert hosts and set(hosts.values()) == {"::"}, (name, hosts)


def test_every_pod_has_the_certificates_that_urls_of_stores_name() -> None:
    """A URL in a Secret names files: the CA of Redis, of PostgreSQL, a client's certificate."""
    for name, pod in ours("production"):
        (container,) = pod["spec"]["containers"]
        mounts = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["spec"]["volumes"]}
        secret = volumes[mounts["/etc/stream-gw/certificates"]]["secret"]
        assert secret == {"secretName": "stream-gw-certificates"}, name
    for name, pod in ours("trial"):
        assert "certificates" not in {volume["name"] for volume in pod["spec"]["volumes"]}, name


def test_gateways_are_told_which_models_take_images() -> None:
    pods = [pod for name, pod in ours("production") if component(pod) == "gateway"]
    assert [environment(pod)["STREAM_GW_IMAGE_MODELS"] for pod in pods] == ["qwen3-vl-8b"]


def test_gateways_are_told_the_origins_as_one_list() -> None:
    pods = [pod for name, pod in ours("production") if component(pod) == "gateway"]
    assert [environment(pod)["STREAM_GW_CORS_ORIGINS"] for pod in pods] == ["https://chat.example,https://ops.example"]


def ours(case: str, *args: str) -> list[tuple[str, Object]]:
    return [(name, pod) for name, pod in workloads(objects(case, *args)) if component(pod) in OURS]


@pytest.mark.parametrize("case", CASES)
def test_every_variable_is_a_setting_and_every_value_is_taken(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, pod in ours(case):
        role = ROLES[component(pod)]
        given = {key: value for key, value in environment(pod).items() if key.startswith("STREAM_GW_")}
        known = {f"STREAM_GW_{field.upper()}" for field in role.model_fields}
        assert not given.keys() - known, name
        assert {key for key, value in given.items() if value is None} <= SECRET.keys(), name
        with monkeypatch.context() as patch:
            for key, value in given.items():
                patch.setenv(key, SECRET[key] if value is None else value)
            role()


@pytest.mark.parametrize("case", CASES)
def test_every_command_is_a_role_and_its_flags(case: str, capsys: pytest.CaptureFixture[str]) -> None:
    for name, pod in ours(case):
        container = pod["spec"]["containers"][0]
        assert container["command"] == ["stream-gw"], name
        role, *rest = container["args"]
        assert role == component(pod), name
        assert not rest or (role == "agent" and rest[0] == "--" and len(rest) > 1), name
        with pytest.raises(SystemExit) as ended:
            main([role, "--help"])
        assert ended.value.code == 0
    capsys.readouterr()


@pytest.mark.parametrize("case", CASES)
def test_nothing_secret_is_told_but_by_secrets(case: str) -> None:
    found = objects(case)
    hidden = {
        f"STREAM_GW_{name.upper()}"
        for role in ROLES.values()
        for name, field in role.model_fields.items()
        if field.annotation is SecretStr or name == "clickhouse"
    }
    for name, pod in workloads(found):
        told = environment(pod)
        assert not [key for key in hidden & told.keys() if told[key] is not None], name
        assert "@" not in str(told.get("STREAM_GW_REDIS_URL") or ""), name
    shown = {path.name for path in boards.FOLDER.glob("*.json")} | {"pools.toml"}
    assert {name for one in of_kind(found, "ConfigMap") for name in one["data"]} <= shown


def test_a_pools_flags_reach_vllm_as_they_were_written() -> None:
    args = [pod["spec"]["containers"][0]["args"] for name, pod in ours("production") if "llama" in name]
    assert args == [
        ["agent", "--", "--tensor-parallel-size", "4", "--override-generation-config", '{"temperature": 0.6}']
    ]


@pytest.mark.parametrize("case", CASES)
def test_probes_ask_what_the_processes_answer(case: str) -> None:
    answers = {
        "gateway": {"/healthz", "/readyz"},
        "agent": {"/healthz"},
        "controller": {"/healthz"},
        "telemetry": {"/healthz", "/metrics"},
    }
    ports = {"agent": "METRICS", "controller": "METRICS", "telemetry": "TELEMETRY"}
    for name, pod in ours(case):
        (container,) = pod["spec"]["containers"]
        role = component(pod)
        port, *others = container["ports"]
        assert [one["name"] for one in others] == (["scaler"] if (case, role) == ("push", "controller") else []), name
        told = environment(pod)
        assert told[f"STREAM_GW_{ports[role]}_PORT" if role in ports else "STREAM_GW_PORT"] == str(
            port["containerPort"]
        )
        assert told[f"STREAM_GW_{ports[role]}_HOST" if role in ports else "STREAM_GW_HOST"] == "0.0.0.0", name
        for probe in ("livenessProbe", "readinessProbe", "startupProbe"):
            if probe in container:
                assert container[probe]["httpGet"]["path"] in answers[role], (name, probe)
                assert container[probe]["httpGet"]["port"] == port["name"]
        assert {"livenessProbe", "readinessProbe"} <= container.keys()


@pytest.mark.parametrize("case", CASES)
def test_a_pod_is_given_the_time_that_its_drain_takes(case: str) -> None:
    for name, pod in ours(case):
        grace_s = pod["spec"]["terminationGracePeriodSeconds"]
        told = environment(pod)
        match component(pod):
            case "gateway":
                stop_s = pod["spec"]["containers"][0]["lifecycle"]["preStop"]["sleep"]["seconds"]
                took_s = stop_s + float(told["STREAM_GW_DRAIN_S"] or 0) + EVENTS_CLOSE_S_MAX + SPANS_CLOSE_S_MAX
            case "agent":
                took_s = float(told["STREAM_GW_DRAIN_S"] or 0) + LEASE_TTL_S + VLLM_TERM_S_MAX + EVENTS_CLOSE_S_MAX
            case "telemetry":
                took_s = float(told["STREAM_GW_TELEMETRY_DRAIN_S"] or 0)
            case _:
                took_s = EVENTS_CLOSE_S_MAX
        assert grace_s >= took_s + 5, name


def test_telemetry_may_start_as_long_as_a_migration_may_take() -> None:
    (pod,) = [pod for name, pod in ours("production") if component(pod) == "telemetry"]
    probe = pod["spec"]["containers"][0]["startupProbe"]
    assert probe["periodSeconds"] * probe["failureThreshold"] >= MIGRATION_S_MAX + 60


def test_a_model_may_load_as_long_as_vllm_may_start() -> None:
    agents = [pod for name, pod in ours("production") if component(pod) == "agent"]
    assert len(agents) == 2
    for pod in agents:
        probe = pod["spec"]["containers"][0]["startupProbe"]
        start_s = float(environment(pod)["STREAM_GW_VLLM_START_S"] or 0)
        assert probe["periodSeconds"] * probe["failureThreshold"] >= start_s + 60
        assert probe["periodSeconds"] <= 2, "who takes requests is to be known as ready, or it is the first to be taken"


# --- what may happen to the cluster ------------------------------------------------------------------------------


@pytest.mark.parametrize("case", CASES)
def test_pods_are_locked_up(case: str) -> None:
    for name, pod in workloads(objects(case)):
        spec = pod["spec"]
        whole = spec["securityContext"]
        assert whole["runAsNonRoot"] is True and whole["runAsUser"] > 0, name
        assert whole["seccompProfile"] == {"type": "RuntimeDefault"}, name
        for container in spec["containers"]:
            own = container["securityContext"]
            assert own["allowPrivilegeEscalation"] is False, name
            assert own["capabilities"] == {"drop": ["ALL"]}, name
            # The images of two trial stores write beside their data
            assert own.get("readOnlyRootFilesystem") or component(pod) in ("kafka", "clickhouse"), name
            assert container["resources"]["requests"].keys() == {"cpu", "memory"}, name
            assert not re.search(r":latest$", container["image"]) and re.search(r"[:@]", container["image"]), name
        assert not any("hostPath" in volume for volume in spec["volumes"]), name


@pytest.mark.parametrize("case", CASES)
def test_only_a_controller_that_needs_it_gets_a_token(case: str) -> None:
    found = objects(case)
    with_token = {component(pod) for _, pod in workloads(found) if pod["spec"]["automountServiceAccountToken"]}
    assert with_token == (
        {"controller"} if case in ("production", "by-redis", "no-telemetry", "push", "spot") else set()
    )
    roles = of_kind(found, "Role")
    assert [rule for role in roles for rule in role["rules"]] == (
        [{"apiGroups": [""], "resources": ["pods"], "verbs": ["list", "patch"]}] if with_token else []
    )
    assert not of_kind(found, "ClusterRole")


def test_controllers_mark_only_the_agents_of_their_release() -> None:
    pods = dict(ours("production"))
    told = str(environment(pods["llm-stream-gw-controller"])["STREAM_GW_POD_SELECTOR"])
    selector = dict(part.split("=") for part in told.split(","))
    assert selector["app.kubernetes.io/instance"] == "llm"
    assert {component(pod) for pod in pods.values() if selects(selector, pod)} == {"agent"}


@pytest.mark.parametrize("case", CASES)
def test_selectors_find_the_pods_that_they_are_for_and_ports_are_theirs(case: str) -> None:
    found = objects(case)
    pods = [pod for _, pod in workloads(found)]
    for one in found:
        match one["kind"]:
            case "Service":
                selector = one["spec"]["selector"]
                wanted = {port["targetPort"] for port in one["spec"]["ports"]}
            case "PodDisruptionBudget":
                selector, wanted = one["spec"]["selector"]["matchLabels"], set()
            case "NetworkPolicy":
                selector = one["spec"]["podSelector"]["matchLabels"]
                wanted = {port["port"] for way in one["spec"].get("ingress", ()) for port in way["ports"]}
            case _:
                continue
        chosen = [pod for pod in pods if selects(selector, pod)]
        if not chosen:  # of a release without pools
            assert case == "no-telemetry" and one["metadata"]["name"].endswith("-agent")
        for pod in chosen:
            names = {port["name"] for container in pod["spec"]["containers"] for port in container["ports"]}
            assert wanted <= names, one["metadata"]["name"]


@pytest.mark.parametrize("case", [case for case in CASES if case != "by-redis"])
def test_nothing_reaches_a_pod_or_leaves_it_but_what_is_let(case: str) -> None:
    found = objects(case)
    policies = of_kind(found, "NetworkPolicy")
    for name, pod in workloads(found):
        over = [one["spec"] for one in policies if selects(one["spec"]["podSelector"]["matchLabels"], pod)]
        assert {"Ingress", "Egress"} <= {way for spec in over for way in spec["policyTypes"]}, name
        if component(pod) == "placeholder":  # it needs nobody
            assert len(over) == 1, name
            continue
        assert len(over) == 2, f"{name}: the one for all, and its own"
        for spec in over:
            assert all(way.capitalize() in spec["policyTypes"] for way in ("ingress", "egress") if way in spec), name
        for spec in over:
            assert all(way.get("ports") for way in spec.get("egress", ()) if "to" not in way), name
        agents_own = component(pod) == "agent"
        come = [way for spec in over for way in spec.get("ingress", ())]
        assert all(way.get("from") for way in come) or component(pod) == "gateway", name
        assert not agents_own or [port["port"] for way in come for port in way["ports"]] == ["metrics"]


@pytest.mark.parametrize(
    ("url", "port"),
    [("http://server.llm.svc:8000", 8000), ("http://server", 80), ("https://server/v1", 443), ("http://[fd00::1]", 80)],
)
def test_pods_may_go_to_the_addresses_that_they_are_told(url: str, port: int) -> None:
    pool = {"name": "there", "engine": "openai", "upstream": url, "models": ["m"]}
    flags = ("--set", "kafka.servers=b-1.kafka:9096\\,b-2.kafka:9097", "--set-json", f"pools={json.dumps([pool])}",
             "--set", f"moderation.url={url}", "--set", f"gateway.otlpEndpoint={url}")  # fmt: skip
    reached = {
        one["metadata"]["name"].rpartition("-")[2]: [
            {each["port"] for each in way["ports"]} for way in one["spec"].get("egress", ())
        ]
        for one in of_kind(objects("production", *flags), "NetworkPolicy")
    }
    for role in ROLES:
        assert {9092, 9093, 9096, 9097} in reached[role], role
    assert {443, port} in reached["agent"] and {443, port} in reached["gateway"]
    assert {4318, port} in reached["gateway"]


def test_operators_come_in_by_the_ingress_only_where_that_is_said() -> None:
    def paths(*more: str) -> list[str]:
        flags = ("--set", "ingress.enabled=true", "--set", "ingress.host=llm.example.org", *more)
        (one,) = of_kind(objects("production", *flags), "Ingress")
        return [path["path"] for path in one["spec"]["rules"][0]["http"]["paths"]]

    assert paths() == ["/v1", "/static"]
    assert paths("--set", "ingress.paths={/v1,/static,/ops}") == ["/v1", "/static", "/ops"]


def test_an_ingress_of_nginx_waits_for_an_answer_that_is_not_streamed() -> None:
    (one,) = of_kind(objects("production"), "Ingress")
    said = {name.rpartition("/")[2]: value for name, value in one["metadata"]["annotations"].items()}
    sdks_wait_s = 600
    assert int(said["proxy-read-timeout"]) >= sdks_wait_s, "it is silent until it is complete, and a 504 is asked again"
    assert said["proxy-buffer-size"] == "8k", "the cookie of POST /v1/cookie does not fit into nginx's 4k"


def test_an_ingress_may_serve_every_name_of_a_domain() -> None:
    (one,) = of_kind(objects("production", "--set", "ingress.host=*.example.org"), "Ingress")
    assert one["spec"]["rules"][0]["host"] == "*.example.org"
    assert one["spec"]["tls"][0]["hosts"] == ["*.example.org"]


def test_policies_can_be_left_out() -> None:
    assert not of_kind(objects("by-redis"), "NetworkPolicy")


@pytest.mark.parametrize("case", CASES)
def test_a_new_chart_of_the_same_images_starts_no_pod_again(case: str) -> None:
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    for name, pod in workloads(objects(case)):
        del pod["spec"]["containers"][0]["image"]
        assert chart["version"] not in json.dumps(pod), name


def test_names_that_kubernetes_would_cut_are_refused() -> None:
    done = helm("template", "a" * 40, str(CHART), "-f", values("production"), "--kube-version", KUBERNETES)
    assert done.returncode != 0 and "too long" in done.stderr


@pytest.mark.parametrize(
    ("release", "says"),
    [("a" * 43, "too long"), ("stream-gw" + "a" * 43, ""), ("2026", "begins with a letter"), ("llm.eu", "no dot")],
)
def test_a_release_whose_services_kubernetes_would_refuse_is_refused(release: str, says: str) -> None:
    done = helm(
        "template", release, str(CHART), "-f", values("trial"), "--set-json=pools=[]", "--kube-version", KUBERNETES
    )
    assert (done.returncode != 0) == bool(says) and says in done.stderr
    if not says:
        names = [one["metadata"]["name"] for one in yaml.safe_load_all(done.stdout) if one and one["kind"] == "Service"]
        assert names and max(map(len, names)) <= 63


def test_an_objective_between_tokens_reaches_the_engines_that_can_keep_it() -> None:
    def told(*flags: str) -> list[str | None]:
        pods = [pod for _, pod in workloads(objects("production", *flags)) if component(pod) == "agent"]
        return [environment(pod).get("STREAM_GW_ITL_OBJECTIVE_MS") for pod in pods]

    objective = ("--set-json", 'poolDefaults.plan={"itl_objective_s":0.05}')
    assert told() == [None] * 2
    assert told(*objective) == ["50"] * 2
    assert told(*objective, "--set", "poolDefaults.settings.ITL_OBJECTIVE_MS=0") == ["0"] * 2
    upstream = "poolDefaults.engine=openai,poolDefaults.upstream=http://vllm:8000"
    assert told(*objective, "--set", upstream) == [None] * 2


def test_what_vllm_compiles_is_kept_where_it_can_be_written() -> None:
    folders = {
        "VLLM_CACHE_ROOT": "/models/vllm",
        "TORCHINDUCTOR_CACHE_DIR": "/models/vllm/inductor",
        "TRITON_CACHE_DIR": "/models/vllm/triton",
    }
    pods = [pod for name, pod in ours("production") if component(pod) == "agent"]
    assert len(pods) == 2
    for pod in pods:
        assert folders.items() <= environment(pod).items()
    claim = "poolDefaults.modelCache.persistentVolumeClaim.readOnly=true"
    image = 'poolDefaults.modelCache={"image":{"reference":"models:1"}}'
    for told in (claim, image, "poolDefaults.keepCompiled=false"):
        agents = [pod for _, pod in workloads(objects("production", "--set-json", told)) if component(pod) == "agent"]
        assert len(agents) == 2
        for pod in agents:
            assert not folders.keys() & environment(pod).keys(), told


# --- scaling -----------------------------------------------------------------------------------------------------


def scaled(case: str, *args: str) -> dict[str, Object]:
    return {one["spec"]["scaleTargetRef"]["name"]: one for one in of_kind(objects(case, *args), "ScaledObject")}


@pytest.mark.parametrize("case", CASES)
def test_what_is_scaled_has_no_number_of_its_own(case: str) -> None:
    found = objects(case)
    others = {one["spec"]["scaleTargetRef"]["name"] for one in of_kind(found, "HorizontalPodAutoscaler")}
    targets = scaled(case).keys() | others
    for one in of_kind(found, "Deployment"):
        assert ("replicas" in one["spec"]) == (one["metadata"]["name"] not in targets), one["metadata"]["name"]


def test_a_pool_asks_for_one_number_and_knows_what_to_do_without() -> None:
    pool = scaled("production")["llm-stream-gw-pool-qwen3-8b"]["spec"]
    (trigger,) = pool["triggers"]
    asked = trigger["metadata"]
    assert asked["query"] == 'max(pool_desired_replicas{pool="qwen3-8b",namespace="llm",cluster="a"})'
    assert (trigger["metricType"], asked["threshold"], asked["ignoreNullValues"]) == ("AverageValue", "1", "false")
    assert trigger["authenticationRef"] == {"name": "prometheus"}
    assert pool["fallback"] == {"failureThreshold": 3, "replicas": 2, "behavior": "currentReplicasIfHigher"}
    assert (pool["minReplicaCount"], pool["maxReplicaCount"]) == (2, 40)
    behavior = pool["advanced"]["horizontalPodAutoscalerConfig"]["behavior"]
    assert behavior["scaleUp"]["stabilizationWindowSeconds"] == 0
    assert behavior["scaleDown"]["policies"] == [
        {"type": "Pods", "value": 4, "periodSeconds": 15},
        {"type": "Percent", "value": 100, "periodSeconds": 15},
    ]
    assert {one["tolerance"] for one in behavior.values()} == {"0"}, "or eleven wanted of ten would be near enough"


def test_controllers_tell_keda_themselves_where_that_is_asked_for() -> None:
    """The one address, the names of the Secrets' keys, and the way there: each as the other end has it."""
    found = objects("push")
    pool = scaled("push")["llm-stream-gw-pool-qwen3-8b"]["spec"]
    (trigger,) = pool["triggers"]
    assert (trigger["type"], trigger["metricType"]) == ("external-push", "AverageValue")
    assert trigger["metadata"] == {
        "scalerAddress": "llm-stream-gw-scaler.llm.svc:9467",
        "enableTLS": "true",
        "pool": "qwen3-8b",
    }
    (own,) = of_kind(found, "TriggerAuthentication")
    assert trigger["authenticationRef"] == {"name": own["metadata"]["name"]}
    assert {one["parameter"]: (one["name"], one["key"]) for one in own["spec"]["secretTargetRef"]} == {
        "caCert": ("stream-gw-scaler-keda", "ca.crt"),
        "tlsClientCert": ("stream-gw-scaler-keda", "tls.crt"),
        "tlsClientKey": ("stream-gw-scaler-keda", "tls.key"),
    }
    (service,) = [one for one in of_kind(found, "Service") if one["metadata"]["name"] == "llm-stream-gw-scaler"]
    assert service["spec"]["clusterIP"] == "None"
    (pod,) = [pod for _, pod in workloads(found) if component(pod) == "controller"]
    assert selects(service["spec"]["selector"], pod)
    told = environment(pod)
    ports = {one["name"]: one["containerPort"] for one in pod["spec"]["containers"][0]["ports"]}
    assert str(ports["scaler"]) == told["STREAM_GW_SCALER_PORT"] == str(service["spec"]["ports"][0]["port"])
    (mount,) = [one for one in pod["spec"]["containers"][0]["volumeMounts"] if one["name"] == "scaler"]
    (volume,) = [one for one in pod["spec"]["volumes"] if one["name"] == "scaler"]
    assert volume["secret"] == {"secretName": "stream-gw-scaler"}
    files = {str(told[f"STREAM_GW_SCALER_{name}"]) for name in ("CERT", "KEY", "CLIENT_CA")}
    assert files == {f"{mount['mountPath']}/{name}" for name in ("tls.crt", "tls.key", "ca.crt")}
    (policy,) = [one for one in of_kind(found, "NetworkPolicy") if one["metadata"]["name"].endswith("-controller")]
    (way,) = [one for one in policy["spec"]["ingress"] if one["ports"] == [{"port": "scaler"}]]
    assert way["from"] == [{"namespaceSelector": {"matchLabels": {"kubernetes.io/metadata.name": "keda"}}}]


@pytest.mark.parametrize("case", ["push", "production"])
def test_a_pool_is_not_ended_because_keda_reaches_nobody(case: str) -> None:
    """KEDA takes who does not answer for inactive, and ends what may be empty, where the fallback is 0."""
    flags = ("--kube-version", KUBERNETES, "--set", "poolDefaults.fallbackReplicas=0")
    done = helm("template", "llm", str(CHART), "-f", values(case), *flags)
    assert done.returncode != 0 and "fallbackReplicas must be at least 1 where min is 0" in done.stderr
    assert helm("template", "llm", str(CHART), "-f", values("by-redis"), *flags).returncode == 0


def planned(case: str, folder: Path) -> dict[str, ScalePolicy]:
    """The pools that the controllers are told of, as they read them."""
    (told,) = [one["data"]["pools.toml"] for one in of_kind(objects(case), "ConfigMap") if "pools.toml" in one["data"]]
    (folder / "pools.toml").write_text(told)
    return parse_policies((folder / "pools.toml").read_bytes(), "pools.toml")


def test_controllers_plan_every_pool_within_the_bounds_that_keda_has(tmp_path: Path) -> None:
    plans = planned("production", tmp_path)
    assert plans == {
        "qwen3-8b": ScalePolicy(
            models=("Qwen/Qwen3-8B", "qwen3-8b-french"),
            replicas_min=2,
            replicas_max=40,
            warm_min=1,
            ttft_objective_s=0.8,
            cold_start_s=240,
            schedule=(
                ScheduledEvent(12, 7200, cron="0 9 * * mon-fri", timezone="Europe/Berlin", name="opening"),
                ScheduledEvent(30, 5400, at=datetime.fromisoformat("2026-12-24T18:00:00+01:00")),
            ),
        ),
        "llama-3.3-70b": ScalePolicy(models=("meta-llama/Llama-3.3-70B-Instruct",), replicas_min=0, replicas_max=6),
    }
    by_pool = {one["metadata"]["labels"].get("stream-gw/pool"): one["spec"] for one in scaled("production").values()}
    for name, plan in plans.items():
        bounds = by_pool[name]["minReplicaCount"], by_pool[name]["maxReplicaCount"]
        assert bounds == (plan.replicas_min, plan.replicas_max)
        assert METRICS["pool_desired_replicas"].labels == ("pool",)
    assert planned("no-telemetry", tmp_path) == {}


def test_batch_requests_of_a_pool_go_to_its_pool_on_spot_nodes(tmp_path: Path) -> None:
    assert planned("spot", tmp_path) == {
        "qwen3-8b": ScalePolicy(models=("Qwen/Qwen3-8B",), replicas_max=4, batch_pools=("qwen3-8b-spot",)),
        "qwen3-8b-spot": ScalePolicy(
            models=("Qwen/Qwen3-8B",),
            replicas_max=8,
            schedule=(ScheduledEvent(8, 28800, cron="0 22 * * *", timezone="Europe/Berlin", name="night"),),
        ),
    }
    agents = {name: pod["spec"] for name, pod in ours("spot") if component(pod) == "agent"}
    (spot,) = [spec for name, spec in agents.items() if name.endswith("spot")]
    assert spot["nodeSelector"] == {"karpenter.sh/capacity-type": "spot"}
    assert {one["key"] for one in spot["tolerations"]} == {"nvidia.com/gpu", "spot"}
    assert spot["terminationGracePeriodSeconds"] == 90


_PROBES = (-1, 0, 1, 2, 3, 10, 11, 60, 61, 10_000, 10_001, 2_678_400, 2_678_401, -0.5, 0.001, 0.999, 1.001, 1.5, 10.5)
_WITH: dict[str, dict[str, object]] = {
    "warm_min": {"replicas_max": 10_000},
    "utilisation_low": {"utilisation_aimed": 1, "utilisation_max": 1},
    "utilisation_aimed": {"utilisation_low": 1e-9, "utilisation_max": 1},
    "utilisation_max": {"utilisation_low": 1e-9, "utilisation_aimed": 2e-9},
    "shed_free_s": {"ttft_objective_s": 1e9},
    "shed_batch_s": {"ttft_objective_s": 1e9},
    "shed_standard_s": {"ttft_objective_s": 1e9, "shed_free_s": 0, "shed_batch_s": 0},
    "shed_interactive_s": {"ttft_objective_s": 1e9, "shed_free_s": 0, "shed_batch_s": 0, "shed_standard_s": 0},
}
"""Other settings of a plan that leave the probed one all the room that it has."""


def _is_taken(make: Callable[[], object]) -> bool:
    try:
        make()
    except ValueError:
        return False
    return True


def _policy_takes(name: str, value: float) -> bool:
    """Whether controllers take it, and the agents that are told of an objective between tokens."""
    objective_ms = value * 1000 if name == "itl_objective_s" else 0.0
    given = _WITH.get(name, {}) | {name: value}
    return _is_taken(lambda: (msgspec.convert(given, ScalePolicy), AgentSettings(itl_objective_ms=objective_ms)))


def test_a_plan_takes_what_a_policy_has_and_nothing_else() -> None:
    definitions = json.loads((CHART / "values.schema.json").read_text())["$defs"]
    bounds = definitions["plan"]["properties"]
    others = {"models", "adjacent", "batch_pools", "schedule", "replicas_min", "replicas_max"}
    assert {*bounds, *others} == set(ScalePolicy.__struct_fields__)
    for name, bound in bounds.items():
        validator = jsonschema_rs.validator_for(bound)
        for value in (*_PROBES, True):
            assert validator.is_valid(value) == _policy_takes(name, value), f"{name} = {value}"


def test_a_schedule_takes_what_an_event_has() -> None:
    items = json.loads((CHART / "values.schema.json").read_text())["$defs"]["schedule"]["items"]
    validator = jsonschema_rs.validator_for(items)
    event: dict[str, object] = {"replicas": 1, "for_s": 60, "cron": "0 9 * * 1"}
    assert set(items["properties"]) == set(ScheduledEvent.__struct_fields__)
    for name in ("for_s", "replicas"):
        for value in _PROBES:
            one = event | {name: value}
            taken = _is_taken(partial(msgspec.convert, one, ScheduledEvent))
            is_bounded = name == "replicas" and value > 10_000  # the chart's own bound of all counts
            assert validator.is_valid(one) == (taken and not is_bounded), f"{name} = {value}"


def test_scale_in_can_be_paused_for_a_pool_or_for_all() -> None:
    def paused(*args: str) -> set[str]:
        name = "autoscaling.keda.sh/paused-scale-in"
        found = scaled("production", *args).items()
        return {target for target, one in found if one["metadata"].get("annotations", {}).get(name) == "true"}

    assert paused() == {"llm-stream-gw-pool-llama-3-3-70b"}
    assert paused("--set", "autoscaling.pauseScaleIn=true") == paused() | {"llm-stream-gw-pool-qwen3-8b"}


def test_gateways_scale_on_a_metric_of_theirs() -> None:
    assert METRICS["open_streams"].roles == ("gateway",)
    triggers = scaled("production")["llm-stream-gw-gateway"]["spec"]["triggers"]
    assert triggers[0]["metadata"]["query"] == 'sum(open_streams{namespace="llm",cluster="a"})'
    (own,) = of_kind(objects("by-redis"), "HorizontalPodAutoscaler")
    assert [metric["pods"]["metric"]["name"] for metric in own["spec"]["metrics"]] == ["open_streams"]


# --- watching ----------------------------------------------------------------------------------------------------


def test_prometheus_gets_the_committed_rules() -> None:
    made: list[Any] = []
    for one in of_kind(objects("production"), "PrometheusRule"):
        made += one["spec"]["groups"]
    files: list[Any] = []
    for name in ("alerts.yaml", "recording.yaml"):
        files += yaml.safe_load((rules.FOLDER / name).read_text())["groups"]
    assert made == files


def test_prometheus_finds_every_role() -> None:
    found = objects("production")
    services = of_kind(found, "Service")
    watched = set()
    for monitor in of_kind(found, "ServiceMonitor"):
        selector = monitor["spec"]["selector"]["matchLabels"]
        (service,) = [one for one in services if selector.items() <= one["metadata"]["labels"].items()]
        (endpoint,) = monitor["spec"]["endpoints"]
        assert endpoint["port"] in {port["name"] for port in service["spec"]["ports"]}
        watched.add(selector["app.kubernetes.io/component"])
    assert watched == set(ROLES)


def test_the_dashboards_are_the_committed_ones() -> None:
    (made,) = [one for one in of_kind(objects("production"), "ConfigMap") if "pools.toml" not in one["data"]]
    assert made["data"].keys() == {path.name for path in boards.FOLDER.glob("*.json")}
    for name, text in made["data"].items():
        assert json.loads(text) == json.loads((boards.FOLDER / name).read_text())


def test_the_chart_is_of_this_version() -> None:
    project = Path(CHART).parents[2] / "pyproject.toml"
    version = re.search(r'^version = "(.*)"', project.read_text(), re.MULTILINE)
    chart = yaml.safe_load((CHART / "Chart.yaml").read_text())
    assert version and chart["version"] == chart["appVersion"] == version[1]


def test_a_placeholder_holds_a_replicas_place_and_yields_it_at_once() -> None:
    found = objects("production")
    pods = dict(workloads(found))
    place, replica = pods["llm-stream-gw-place-qwen3-8b"]["spec"], pods["llm-stream-gw-pool-qwen3-8b"]["spec"]
    (idle,), (serving,) = place["containers"], replica["containers"]
    assert idle["resources"] == serving["resources"] and idle["resources"]["limits"]["nvidia.com/gpu"] == 1
    assert idle["image"] == serving["image"], "a replica finds its image on the node"
    for where in ("nodeSelector", "tolerations"):
        assert place[where] == replica[where]
    assert place["terminationGracePeriodSeconds"] == 0 and "priorityClassName" not in replica
    (priority,) = of_kind(found, "PriorityClass")
    assert (priority["metadata"]["name"], priority["value"]) == (place["priorityClassName"], -10)
    assert priority["preemptionPolicy"] == "Never" and not priority["globalDefault"]
    assert [name for name in pods if "-place-" in name] == ["llm-stream-gw-place-qwen3-8b"]
    (deployed,) = [one for one in found if one["metadata"]["name"] == "llm-stream-gw-place-qwen3-8b"]
    assert deployed["spec"]["strategy"] == {"type": "Recreate"}, "a rolling update would bring an additional node"
    for one in found:  # neither its budget nor what scales replicas counts it
        if one["kind"] == "PodDisruptionBudget":
            chosen = one["spec"]["selector"]["matchLabels"]
            assert not selects(chosen, pods["llm-stream-gw-place-qwen3-8b"])
    there = objects("production", "--set", "placeholders.priorityClassName=spare")
    assert not of_kind(there, "PriorityClass")
    assert dict(workloads(there))["llm-stream-gw-place-qwen3-8b"]["spec"]["priorityClassName"] == "spare"
    assert not of_kind(objects("trial"), "PriorityClass")
