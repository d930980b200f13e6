"""``stream-gw export``: writes the Helm chart, the compose file or the dashboards to a folder."""

from __future__ import annotations

import argparse
import os
import re
import shutil
from pathlib import Path

import stream_gw

_SOURCES = {
    "helm": {"infra/helm/stream-gw": "stream-gw"},
    "compose": {
        "infra/compose.yaml": "compose.yaml",
        "infra/compose": "compose",
        "dashboards/alerts/alerts.yaml": "dashboards/alerts/alerts.yaml",
        "dashboards/alerts/recording.yaml": "dashboards/alerts/recording.yaml",
        "dashboards/grafana": "dashboards/grafana",
    },
    "dashboards": {
        "dashboards/grafana": "grafana",
        "dashboards/alerts/alerts.yaml": "alerts/alerts.yaml",
        "dashboards/alerts/recording.yaml": "alerts/recording.yaml",
    },
}
"""By what is exported: path in the source tree, and path in the folder. ``setup.py`` puts them into the wheel."""
_NEXT = {
    "helm": "helm install llm {folder}/stream-gw; values and their meaning: {folder}/stream-gw/values.yaml",
    "compose": "docker compose -f {folder}/compose.yaml up; docs/kubernetes.md says how its images are built",
    "dashboards": "import {folder}/grafana/*.json into Grafana, and load {folder}/alerts/*.yaml in Prometheus",
}
_BUILD = re.compile(r"^ *build: .*\n", re.MULTILINE)


def add_flags(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "what", choices=tuple(_SOURCES), help="helm: the chart; compose: the compose file and its files"
    )
    parser.add_argument("folder", type=Path, help="folder to write to; it is made where there is none")
    parser.add_argument("--force", action="store_true", help="replace files that are there")


def run(args: argparse.Namespace) -> int:
    root = _files_root()
    folder: Path = args.folder
    files = {
        folder / target / path.relative_to(source) if source.is_dir() else folder / target: path
        for source, target in ((root / name, target) for name, target in _SOURCES[args.what].items())
        for path in ([source] if source.is_file() else _files_of(source))
    }
    there = sorted(str(target) for target in files if target.exists())
    if there and not args.force:
        raise ValueError(f"{there[0]} is there, and {len(there) - 1} more; name another folder, or --force")
    for target, path in files.items():
        target.parent.mkdir(parents=True, exist_ok=True)
        if path.name == "compose.yaml":
            target.write_text(_movable(path.read_text()))
        else:
            shutil.copyfile(path, target)
    print(f"{len(files)} files in {folder}\n{_NEXT[args.what].format(folder=folder)}")
    return 0


def _files_of(folder: Path) -> list[Path]:
    """Return the files in the folder and in folders that it links to: the chart links to the dashboards."""
    return sorted(Path(where, name) for where, _, names in os.walk(folder, followlinks=True) for name in names)


def _movable(compose: str) -> str:
    """Return the compose file for a folder that holds everything it mounts; the source tree is elsewhere."""
    return (
        _BUILD.sub("", compose).replace("../dashboards/", "./dashboards/").replace("infra/compose.yaml", "compose.yaml")
    )


def _files_root() -> Path:
    """Return the folder that holds the files as the source tree does. Raises ValueError where there is none."""
    package = Path(stream_gw.__file__).parent
    for root in (package / "exported", package.parent):
        if (root / "infra" / "compose.yaml").is_file():
            return root
    raise ValueError("this installation was built without the chart, the compose file and the dashboards")
