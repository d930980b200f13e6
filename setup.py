"""Builds the packages. With STREAM_GW_COMPILE=1: a wheel of its platform, whose hot modules mypyc has compiled and the
hottest functions of which are in C (docs/adr/0013-hot-modules-are-compiled.md).

Build it where ``requirements.lock`` is installed, because mypyc reads the types of our dependencies:

    STREAM_GW_COMPILE=1 pip wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from setuptools import Extension, setup
from setuptools.command.build_py import build_py

# Per token or chunk, and without coroutines: those of mypyc are not asyncio's in every detail
COMPILED = (
    "stream_fabric/stream/reader.py",
    "stream_fabric/stream/producer.py",
    "stream_gw/delivery/local_stream.py",
    "stream_gw/dialects/base.py",
    "stream_gw/dialects/openai_chat.py",
    "stream_gw/dialects/openai_completions.py",
    "stream_gw/dialects/anthropic/encoder.py",
    "stream_gw/dialects/ui/encoder.py",
    "stream_gw/dialects/responses/encoder.py",
    "stream_gw/dialects/responses/items.py",
    "stream_gw/transport/sse.py",
    "stream_gw/admin/viewer.py",  # its class extends one of the module above
    "inference/agent/observe/attempt_timing.py",
    "inference/agent/running.py",
    "inference/engines/upstream/chunk_template.py",
    "inference/engines/upstream/chunks.py",
    "inference/engines/upstream/sse.py",
)

NATIVE = [f"stream_fabric/native/{name}.c" for name in ("native", "delivery", "frames", "command", "bounds")]

EXPORTED = (
    "infra/helm",
    "infra/compose",
    "infra/compose.yaml",
    "dashboards/grafana",
    "dashboards/alerts/alerts.yaml",
    "dashboards/alerts/recording.yaml",
)
"""Files of the source tree that the wheel carries for ``stream-gw export``; an image's build has none of them."""


class BuildWithExported(build_py):
    """Puts the files into the package, at the same paths below ``stream_gw/exported``."""

    def run(self) -> None:
        super().run()
        if self.editable_mode:
            return
        for name in EXPORTED:
            source, target = Path(name), Path(self.build_lib, "stream_gw", "exported", name)
            target.parent.mkdir(parents=True, exist_ok=True)
            if source.is_dir():
                shutil.copytree(source, target, dirs_exist_ok=True)
            elif source.exists():
                shutil.copyfile(source, target)


COMMANDS = {"build_py": BuildWithExported}

if os.environ.get("STREAM_GW_COMPILE") == "1":
    from mypyc.build import mypycify

    modules = mypycify(["--config-file", "pyproject.toml", *COMPILED], group_name="stream_gw", opt_level="3")
    native = Extension("stream_fabric.native._native", NATIVE, extra_compile_args=["-O3", "-fvisibility=hidden"])
    setup(ext_modules=[*modules, native], cmdclass=COMMANDS)
else:
    setup(cmdclass=COMMANDS)
