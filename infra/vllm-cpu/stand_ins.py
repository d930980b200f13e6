"""Makes empty stand-ins for the CUDA libraries that torch is linked against: ``stand_ins.py SITE_PACKAGES``.

torch's ordinary build wants them all at load time, 3 GB of packages, and calls next to none where there is no GPU.
Each stand-in defines the symbols that torch's own libraries leave open, under their versions; each answers 100, which
is ``cudaErrorNoDevice``. They go to ``torch/lib``, where torch looks first. Needs gcc and binutils.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

CUDA = re.compile(r"lib(cu|nv|nccl)\S*\.so\S*")
NEEDED = re.compile(r"\(NEEDED\).*\[(\S+)\]")
VERSION_OF = re.compile(r"File: (\S+)|Name: (\S+)")
UNVERSIONED = re.compile(r"(cu[A-Z]|cu[a-z]+[A-Z]|nccl|nvrtc|nvshmem)\w*")
"""Names of CUDA's that carry no version; which stand-in defines them makes no difference to the loader."""
UNVERSIONED_IN = "libnccl.so.2"

Symbols = dict[str, dict[str, set[str]]]
"""By library and version; version ``""``: none."""


def lines(*command: str) -> Iterator[str]:
    yield from subprocess.run(command, check=True, capture_output=True, text=True).stdout.splitlines()


def wanted(libraries: list[Path]) -> Symbols:
    """CUDA symbols that ``libraries`` need and none of them defines."""
    needed: Symbols = {}
    open_symbols: set[tuple[str, str]] = set()
    owner: dict[str, str] = {}
    defined: set[str] = set()
    for library in libraries:
        for line in lines("readelf", "-dW", str(library)):
            found = NEEDED.search(line)
            if found and CUDA.fullmatch(found[1]):
                needed.setdefault(found[1], defaultdict(set))
        file = ""
        for line in lines("readelf", "-VW", str(library)):
            for found in VERSION_OF.finditer(line):
                file = found[1] or file
                if found[2] and CUDA.fullmatch(file):
                    owner[found[2]] = file
        for line in lines("nm", "-D", str(library)):
            *_, kind, name = line.split()
            name, _, version = name.partition("@")
            if kind in "Uw":
                open_symbols.add((name, version.lstrip("@")))
            else:
                defined.add(name)
    for name, version in open_symbols:
        if version in owner:
            needed[owner[version]][version].add(name)
        elif not version and name not in defined and UNVERSIONED.fullmatch(name):
            needed[UNVERSIONED_IN][""].add(name)
    return needed


def build(soname: str, symbols: dict[str, set[str]], out: Path) -> None:
    with tempfile.TemporaryDirectory() as folder:
        source, versions = Path(folder) / "stand_in.c", Path(folder) / "versions.map"
        names = sorted(set().union(*symbols.values()))
        source.write_text("".join(f"long {name}(void) {{ return 100; }}\n" for name in names))
        flags = ["-w", "-O1", "-fno-builtin", "-shared", "-fPIC", "-nostdlib", f"-Wl,-soname,{soname}"]
        named = {version: found for version, found in symbols.items() if version}
        if named:
            versions.write_text(
                "".join(
                    f"{v} {{ global: {' '.join(f'{n};' for n in sorted(found))} }};\n" for v, found in named.items()
                )
            )
            flags.append(f"-Wl,--version-script,{versions}")
        subprocess.run(["gcc", *flags, "-o", str(out / soname), str(source)], check=True)


def main(site_packages: Path) -> None:
    torch = site_packages / "torch"
    found = wanted([*sorted(torch.glob("lib/*.so")), *sorted(torch.glob("_C*.so"))])
    for soname, symbols in found.items():
        build(soname, symbols, torch / "lib")
    print(f"{len(found)} stand-ins for CUDA libraries")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
