"""The artifact hash of the files that a model was loaded from."""

from __future__ import annotations

import os
from pathlib import Path

import pytest

from inference.engines import artifact
from inference.engines.artifact import artifact_of


def make(folder: Path, *, weights: bytes = b"w" * 400_000, config: str = '{"layers":2}') -> Path:
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(config)
    (folder / "model-1.safetensors").write_bytes(weights)
    (folder / "model.safetensors.index.json").write_text("{}")
    (folder / "README.md").write_text("words")
    return folder


def test_the_same_files_are_one_artifact_wherever_they_lie(tmp_path: Path) -> None:
    one, two = make(tmp_path / "one"), make(tmp_path / "two")
    (two / "README.md").write_text("other words")
    found = artifact_of(str(one))
    assert len(found) == 16
    assert artifact_of(str(two)) == found
    assert artifact_of(str(one / "model-1.safetensors")) not in ("", found), "a file is a model too"


@pytest.mark.parametrize("at", [0, 200_000, 399_999])
def test_other_weights_are_another_artifact(tmp_path: Path, at: int) -> None:
    weights = bytearray(b"w" * 400_000)
    weights[at] = 0
    assert artifact_of(str(make(tmp_path / "two", weights=bytes(weights)))) != artifact_of(str(make(tmp_path / "one")))


def test_another_configuration_size_or_name_is_another_artifact(tmp_path: Path) -> None:
    found = {artifact_of(str(make(tmp_path / "one")))}
    found.add(artifact_of(str(make(tmp_path / "config", config='{"layers":3}'))))
    found.add(artifact_of(str(make(tmp_path / "size", weights=b"w" * 400_001))))
    renamed = make(tmp_path / "name")
    (renamed / "model-1.safetensors").rename(renamed / "model-2.safetensors")
    found.add(artifact_of(str(renamed)))
    assert len(found) == 4


def test_a_model_of_the_hub_is_found_where_it_was_fetched_to(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    held = tmp_path / "models--acme--tiny"
    make(held / "snapshots" / "abc")
    make(held / "snapshots" / "def", config="{}")
    (held / "refs").mkdir()
    (held / "refs" / "main").write_text("abc\n")
    plain = artifact_of(str(held / "snapshots" / "abc"))
    for name in ("HF_HUB_CACHE", "HF_HOME"):
        monkeypatch.delenv(name, raising=False)
    assert artifact_of("acme/tiny", ["--download-dir", str(tmp_path)]) == plain
    assert artifact_of("acme/tiny", [f"--download_dir={tmp_path}", "--revision", "def"]) not in ("", plain)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert artifact_of("acme/tiny") == plain
    monkeypatch.delenv("HF_HUB_CACHE")
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    (tmp_path / "home").mkdir()
    os.symlink(tmp_path, tmp_path / "home" / "hub")
    assert artifact_of("acme/tiny") == plain


@pytest.mark.parametrize("model", ["acme/nothing", "nothing", "../../etc/passwd-", "a/b/c", "acme/..", ""])
def test_what_cannot_be_found_has_none(tmp_path: Path, model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HF_HUB_CACHE", str(tmp_path))
    assert artifact_of(model) == ""
    assert artifact_of("acme/tiny", ["--revision", "../../.."]) == ""


def test_it_is_bounded(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make(tmp_path / "one")
    monkeypatch.setattr(artifact, "ARTIFACT_FILES_MAX", 2)
    assert artifact_of(str(folder)) == ""
    monkeypatch.undo()
    monkeypatch.setattr(artifact, "ARTIFACT_S_MAX", -1.0)
    assert artifact_of(str(folder)) == ""
