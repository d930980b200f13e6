"""The chart's objects as Helm makes them."""

from __future__ import annotations

import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import yaml

from tests.support.kube import tool

CHART = Path(__file__).parents[2] / "infra" / "helm" / "stream-gw"
CASES = sorted(path.stem for path in (CHART / "ci").glob("*.yaml"))
RELEASE, NAMESPACE = "llm", "llm"
KUBERNETES = "1.36.4"

Object = dict[str, Any]


def values(case: str) -> str:
    return str(CHART / "ci" / f"{case}.yaml")


def helm(*args: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([tool("helm"), *args], capture_output=True, text=True, timeout=60)


def template(case: str, *args: str) -> str:
    """Raises AssertionError with what Helm said."""
    flags = ("--namespace", NAMESPACE, "--kube-version", KUBERNETES, "-f", values(case))
    done = helm("template", RELEASE, str(CHART), *flags, *args)
    assert done.returncode == 0, done.stderr
    return done.stdout


def objects(case: str, *args: str) -> list[Object]:
    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    return [one for one in yaml.load_all(template(case, *args), Loader=loader) if one is not None]


def of_kind(found: list[Object], kind: str) -> list[Object]:
    return [one for one in found if one["kind"] == kind]


def workloads(found: list[Object]) -> Iterator[tuple[str, Object]]:
    """Each one's name and its pods' description."""
    for one in found:
        if one["kind"] in ("Deployment", "StatefulSet"):
            yield one["metadata"]["name"], one["spec"]["template"]


def component(pod: Object) -> str:
    return str(pod["metadata"]["labels"]["app.kubernetes.io/component"])


def selects(selector: dict[str, str], pod: Object) -> bool:
    return selector.items() <= pod["metadata"]["labels"].items()


def environment(pod: Object) -> dict[str, str | None]:
    """Variables of its first container; None: from elsewhere than the chart."""
    return {one["name"]: one.get("value") for one in pod["spec"]["containers"][0].get("env", [])}
