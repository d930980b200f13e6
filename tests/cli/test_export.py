"""``stream-gw export`` gives what is in the source tree, also from a wheel."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path
from zipfile import ZipFile

import pytest
import yaml

from stream_gw.cli.main import main
from tests.house.tree import ROOT


def names(folder: Path) -> set[str]:
    """Files of the folder, and of folders that it links to."""
    walked = os.walk(folder, followlinks=True)
    return {str(Path(where, name).relative_to(folder)) for where, _, found in walked for name in found}


def test_the_chart_is_exported_whole(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["export", "helm", str(tmp_path)]) == 0
    assert names(tmp_path / "stream-gw") == names(ROOT / "infra/helm/stream-gw")
    assert (tmp_path / "stream-gw/files/alerts/alerts.yaml").exists(), "behind a link"
    assert f"helm install llm {tmp_path}/stream-gw" in capsys.readouterr().out


def test_dashboards_and_alerts_are_exported(tmp_path: Path) -> None:
    assert main(["export", "dashboards", str(tmp_path)]) == 0
    boards = sorted((tmp_path / "grafana").glob("*.json"))
    assert [board.name for board in boards] == sorted(
        path.name for path in (ROOT / "dashboards/grafana").glob("*.json")
    )
    assert all(json.loads(board.read_text()) for board in boards)
    assert yaml.safe_load((tmp_path / "alerts/alerts.yaml").read_text())["groups"]


def test_the_compose_file_finds_what_it_mounts(tmp_path: Path) -> None:
    assert main(["export", "compose", str(tmp_path)]) == 0
    compose = yaml.safe_load((tmp_path / "compose.yaml").read_text())
    mounts = [volume for service in compose["services"].values() for volume in service.get("volumes", ())]
    files = [volume.partition(":")[0] for volume in mounts if volume.startswith(".")]
    assert len(files) >= 5
    assert all((tmp_path / file).exists() for file in files), files
    assert not any("build" in service for service in compose["services"].values()), "the source tree is elsewhere"


def test_a_file_that_is_there_is_not_replaced(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "stream-gw").mkdir()
    mine = tmp_path / "stream-gw" / "values.yaml"
    mine.write_text("mine")
    assert main(["export", "helm", str(tmp_path)]) == 1
    assert str(mine) in capsys.readouterr().err
    assert names(tmp_path) == {"stream-gw/values.yaml"} and mine.read_text() == "mine"
    assert main(["export", "helm", "--force", str(tmp_path)]) == 0
    assert mine.read_text() != "mine"


@pytest.mark.platform
def test_the_wheel_carries_what_is_exported(tmp_path: Path) -> None:
    tree = tmp_path / "tree"
    listed = subprocess.run(
        ["git", "ls-files", "-co", "--exclude-standard"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    for name in listed.stdout.splitlines():
        if not name.startswith(("tests/", "bench/")) and (ROOT / name).exists():
            (tree / name).parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(ROOT / name, tree / name, follow_symlinks=False)
    command = ["wheel", "-q", "--no-build-isolation", "--no-deps", "--wheel-dir", str(tmp_path), str(tree)]
    done = subprocess.run([sys.executable, "-m", "pip", *command], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    (wheel,) = tmp_path.glob("*.whl")
    ZipFile(wheel).extractall(tmp_path / "installed")
    shutil.rmtree(tree)
    client = tmp_path / "installed/stream_gw/static/client"
    assert names(client) == names(ROOT / "clients/js/src"), "pages of a wheel import the browser client"
    for what in ("helm", "compose", "dashboards"):
        done = subprocess.run(
            [sys.executable, "-m", "stream_gw.cli", "export", what, str(tmp_path / what)],
            cwd=tmp_path, env={"PYTHONPATH": str(tmp_path / "installed")}, capture_output=True, text=True,
        )  # fmt: skip
        assert done.returncode == 0, done.stderr
    assert names(tmp_path / "helm" / "stream-gw") == names(ROOT / "infra/helm/stream-gw")
    assert (tmp_path / "compose/compose.yaml").exists() and (tmp_path / "dashboards/grafana").is_dir()
