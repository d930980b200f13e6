"""Builds the packages; with STREAM_GW_COMPILE=1 as a wheel of its platform whose hot modules mypyc has compiled
(docs/adr/0013-hot-modules-are-compiled.md).

Build it where ``requirements.lock`` is installed, because mypyc reads the types of our dependencies:

    STREAM_GW_COMPILE=1 pip wheel --no-build-isolation --no-deps --wheel-dir build/wheel .
"""

from __future__ import annotations

import os

from setuptools import setup

# Per token or chunk, and without coroutines: those of mypyc are not asyncio's in every detail
COMPILED = (
    "stream_fabric/stream/reader.py",
    "stream_fabric/stream/producer.py",
    "stream_gw/delivery/local_stream.py",
    "stream_gw/dialects/base.py",
    "stream_gw/dialects/openai_chat.py",
    "stream_gw/dialects/openai_completions.py",
    "stream_gw/dialects/anthropic/encoder.py",
    "stream_gw/transport/sse.py",
    "stream_gw/admin/viewer.py",  # its class extends one of the module above
    "inference/agent/running.py",
    "inference/engines/upstream/chunk_template.py",
)

if os.environ.get("STREAM_GW_COMPILE") == "1":
    from mypyc.build import mypycify

    setup(ext_modules=mypycify(["--config-file", "pyproject.toml", *COMPILED], group_name="stream_gw", opt_level="3"))
else:
    setup()
