"""Kubernetes' control plane with KEDA and Prometheus, and the tools that check a chart, built from Go modules.

python3 infra/local-kube/build.py helm     helm, kubeconform and what schemas are made of
python3 infra/local-kube/build.py kube     these and everything else
python3 infra/local-kube/build.py --there kube   builds nothing; the exit code says whether all is there

A program that is there is left as it is, so a build that was stopped goes on where it was. Two runs at once: the second
waits. ``JOBS=1`` compiles one package at a time, and ``nice`` is passed on.
"""

from __future__ import annotations

import fcntl
import functools
import hashlib
import json
import os
import shutil
import subprocess
import sys
import time
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

_VERSIONS = Path(__file__).with_name("versions.toml")
_FREE_GB = {"helm": 4, "kube": 16}
_KEDA = "github.com/kedacore/keda/v2"


def folder() -> Path:
    """Where it all lies, of these versions."""
    cache = Path(os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache")
    text = _VERSIONS.read_bytes()
    key = f"{tomllib.loads(text.decode())['kubernetes']}-{hashlib.sha256(text).hexdigest()[:8]}"
    return cache / "stream-gw" / f"kube-{key}"


class Program(NamedTuple):
    """One that is compiled. ``module``: whose replacements hold for it."""

    name: str
    package: str
    module: str
    version: str
    staging: str = ""
    """Replacements by a folder beside the module: the version of what is published of them. Empty: they are none."""
    variables: tuple[str, ...] = ()
    """Linker variables as ``package.Name=value``."""


def programs(versions: dict[str, str]) -> dict[str, list[Program]]:
    kubernetes, etcd, keda, prometheus = (versions[name] for name in ("kubernetes", "etcd", "keda", "prometheus"))
    major, minor, patch = prometheus.split(".")
    staging = f"v0{kubernetes.removeprefix('1')}"  # as which its parts are published
    version = "k8s.io/component-base/version"
    told = {
        # Clients look at it: Helm at a chart's kubeVersion, KEDA at what the server can do
        "gitVersion": f"v{kubernetes}",
        "gitMajor": kubernetes.split(".")[0],
        "gitMinor": kubernetes.split(".")[1],
        "gitTreeState": "clean",
        "gitCommit": "0" * 40,
    }
    tools = [
        Program("helm", "helm.sh/helm/v4/cmd/helm", "helm.sh/helm/v4", f"v{versions['helm']}"),
        Program(
            "kubeconform",
            "github.com/yannh/kubeconform/cmd/kubeconform",
            "github.com/yannh/kubeconform",
            f"v{versions['kubeconform']}",
        ),
    ]
    etcd_module = "go.etcd.io/etcd/server/v3"
    plane = [Program("etcd", etcd_module, etcd_module, f"v{etcd}")]
    plane += [
        Program(
            name,
            f"k8s.io/kubernetes/cmd/{name}",
            "k8s.io/kubernetes",
            f"v{kubernetes}",
            staging,
            tuple(f"{version}.{variable}={value}" for variable, value in told.items()),
        )
        for name in ("kubectl", "kube-scheduler", "kube-controller-manager", "kube-apiserver")
    ]
    plane += [
        Program(
            f"keda-{name}", f"{_KEDA}/cmd/{name}", _KEDA, f"v{keda}", variables=(f"{_KEDA}/version.Version={keda}",)
        )
        for name in ("operator", "adapter", "webhooks")
    ]
    module = "github.com/prometheus/prometheus"
    plane += [
        Program(
            name,
            f"{module}/cmd/{name}",
            module,
            f"v0.{int(major) * 100 + int(minor)}.{patch}",  # the module has no version 3
            variables=(f"github.com/prometheus/common/version.Version={prometheus}",),
        )
        for name in ("prometheus", "promtool")
    ]
    return {"helm": tools, "kube": tools + plane}


class Builder:
    def __init__(self, root: Path, versions: dict[str, str]) -> None:
        self._root = root
        self._versions = versions
        self._go_home = root / "go"
        jobs = os.environ.get("JOBS") or str(os.cpu_count())
        self._env = {
            **os.environ,
            "CGO_ENABLED": "0",
            "GOFLAGS": f"-mod=mod -modcacherw -trimpath -buildvcs=false -p={jobs}",
            "GOMODCACHE": str(self._go_home / "mod"),
            "GOCACHE": str(self._go_home / "build"),
            "GOWORK": "off",
        }

    def missing(self, what: str) -> list[str]:
        """Files of the folder that are not there."""
        names = [f"bin/{program.name}" for program in programs(self._versions)[what]]
        return [name for name in [*names, "share/kubernetes.json", "share/keda"] if not (self._root / name).exists()]

    def build(self, what: str) -> None:
        if self.missing(what):
            self._make(what)
        if self._go_home.exists():
            shutil.rmtree(self._go_home)

    def _make(self, what: str) -> None:
        self._check(what)
        (self._root / "bin").mkdir(exist_ok=True)
        (self._root / "share").mkdir(exist_ok=True)
        self._once("share/kubernetes.json", self._openapi)
        self._once("share/keda", self._keda)
        for program in programs(self._versions)[what]:
            self._once(f"bin/{program.name}", functools.partial(self._compile, program))

    def _check(self, what: str) -> None:
        if shutil.which("go") is None:
            raise SystemExit("missing: go, 1.26 or later, to build Kubernetes' tools; see https://go.dev/dl")
        free_gb = shutil.disk_usage(self._root).free >> 30
        if free_gb < _FREE_GB[what]:
            raise SystemExit(f"{self._root} has {free_gb} GB left; to build {what} takes {_FREE_GB[what]} for a while")

    def _once(self, name: str, make: Callable[[Path], None]) -> None:
        """Make a file in a temporary folder and move it, so that it exists whole or not at all."""
        to = self._root / name
        if to.exists():
            return
        print(f"{name} …", end="", flush=True)
        began = time.monotonic()
        partial = self._root / f"partial-{to.name}"
        shutil.rmtree(partial) if partial.is_dir() else partial.unlink(missing_ok=True)
        make(partial)
        partial.rename(to)
        print(f" {time.monotonic() - began:.0f} s", flush=True)

    def _compile(self, program: Program, to: Path) -> None:
        variables = " ".join(f"-X {variable}" for variable in program.variables)
        where = self._wrapper(program)
        self._go("build", "-ldflags", f"-s -w {variables}", "-o", str(to), program.package, cwd=where)

    def _wrapper(self, program: Program) -> Path:
        """A module that requires the program's and repeats its replacements: Go heeds those of the main module only."""
        upstream = self._edited(self._downloaded(program.module, program.version)["GoMod"])
        lines = ["module wrapper", f"go {upstream['Go']}", f"require {program.module} {program.version}"]
        for replace in upstream["Replace"] or ():
            old, new = replace["Old"], replace["New"]
            by = f"{new['Path']} {new.get('Version', '')}"
            if new["Path"].startswith("."):
                if not program.staging:
                    continue
                by = f"{old['Path']} {program.staging}"
            lines.append(f"replace {old['Path']} {old.get('Version', '')} => {by}")
        lines += [f"exclude {one['Path']} {one['Version']}" for one in upstream["Exclude"] or ()]
        where = self._go_home / "wrappers" / program.module.replace("/", "_")
        if not where.exists():
            where.mkdir(parents=True)
            (where / "go.mod").write_text("\n".join(lines) + "\n")
        return where

    def _openapi(self, to: Path) -> None:
        source = self._downloaded("k8s.io/kubernetes", f"v{self._versions['kubernetes']}")["Dir"]
        shutil.copyfile(f"{source}/api/openapi-spec/swagger.json", to)

    def _keda(self, to: Path) -> None:
        """KEDA's definitions, roles and webhooks."""
        source = self._downloaded(_KEDA, f"v{self._versions['keda']}")["Dir"]
        shutil.copytree(f"{source}/config", to)

    def _downloaded(self, module: str, version: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._go("mod", "download", "-json", f"{module}@{version}"))
        return facts

    def _edited(self, path: str) -> dict[str, Any]:
        facts: dict[str, Any] = json.loads(self._go("mod", "edit", "-json", path))
        return facts

    def _go(self, *args: str, cwd: Path | None = None) -> str:
        self._go_home.mkdir(exist_ok=True)
        done = subprocess.run(["go", *args], env=self._env, cwd=cwd or self._go_home, capture_output=True, text=True)
        if done.returncode:
            raise SystemExit(f"\ngo {' '.join(args)}:\n{done.stdout[-2000:]}{done.stderr[-4000:]}")
        return done.stdout


def main(args: list[str]) -> int:
    only_look = args[:1] == ["--there"]
    what = args[-1] if args else ""
    if what not in _FREE_GB or len(args) > 1 + only_look:
        print(__doc__, file=sys.stderr)
        return 2
    root = folder()
    builder = Builder(root, tomllib.loads(_VERSIONS.read_text()))
    if only_look:
        return int(bool(builder.missing(what)))
    root.mkdir(parents=True, exist_ok=True)
    with (root.parent / f"{root.name}.lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        builder.build(what)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
