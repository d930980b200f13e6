"""Short hash of a model's files: replicas with the same hash have loaded the same model.

The hash covers the configuration, and the names, sizes, heads, middles and ends of the weights: files of hundreds of
gigabytes are not read whole. The calls block; run them in a thread.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Sequence
from pathlib import Path

from stream_fabric.limits import ARTIFACT_FILES_MAX, ARTIFACT_PIECE_BYTES, ARTIFACT_S_MAX

_WHOLE = ("config.json", "generation_config.json", "tokenizer_config.json", "quantize_config.json")
_WEIGHTS = (".safetensors", ".bin", ".gguf", ".pt", ".pth")
_INDEX = ".index.json"
_DIGITS = 16


def artifact_of(model: str, flags: Sequence[str] = ()) -> str:
    """Return the hash of a model; empty when it cannot be computed, or not in time.

    ``model``: folder, file or name on the Hugging Face hub. ``flags``: vLLM's flags, which may move its cache.
    """
    found = _find_model(model, flags)
    if found is None:
        return ""
    try:
        files = [found] if found.is_file() else sorted(path for path in found.iterdir() if _is_model_file(path.name))
        return _hash_files(files) if 0 < len(files) <= ARTIFACT_FILES_MAX else ""
    except OSError:
        return ""


def _is_model_file(name: str) -> bool:
    return name in _WHOLE or name.endswith((_INDEX, *_WEIGHTS))


def _hash_files(files: Sequence[Path]) -> str:
    """Hash name, size and three pieces of each file; empty when that takes too long."""
    until = time.monotonic() + ARTIFACT_S_MAX
    digest = hashlib.sha256()
    for path in files:
        if time.monotonic() > until:
            return ""
        with path.open("rb") as file:
            size = os.fstat(file.fileno()).st_size
            digest.update(f"{path.name}\0{size}\0".encode())
            # Safetensors begin with the names and shapes of all that follows
            for at in (0, size // 2, size - ARTIFACT_PIECE_BYTES):
                file.seek(max(at, 0))
                digest.update(file.read(ARTIFACT_PIECE_BYTES))
    return digest.hexdigest()[:_DIGITS]


def _find_model(model: str, flags: Sequence[str]) -> Path | None:
    """Return the model's path on this host, in vLLM's cache for a name on the hub; None: not found."""
    path = Path(model).expanduser()
    if path.exists():
        return path
    if model.count("/") != 1 or ".." in model:
        return None
    home = os.environ.get("HF_HOME") or os.path.join(os.environ.get("XDG_CACHE_HOME") or "~/.cache", "huggingface")
    cache = _flag_value(flags, "download-dir") or os.environ.get("HF_HUB_CACHE") or os.path.join(home, "hub")
    held = Path(cache).expanduser() / f"models--{model.replace('/', '--')}"
    revision = _flag_value(flags, "revision") or "main"
    if "/" in revision or ".." in revision:
        return None
    try:
        commit = (held / "refs" / revision).read_text().strip()
    except OSError:
        commit = revision
    snapshot = held / "snapshots" / commit
    return snapshot if snapshot.is_dir() else None


def _flag_value(flags: Sequence[str], name: str) -> str:
    """Return the value of vLLM's flag ``name``; empty: not set."""
    for at, flag in enumerate(flags):
        key, equals, value = flag.lstrip("-").partition("=")
        if flag.startswith("--") and key.replace("_", "-") == name:
            return value if equals else next(iter(flags[at + 1 : at + 2]), "")
    return ""
