"""For the interpreter that runs vLLM in tests: a poll that spins lets others run, and AMX is not used.

vLLM's processes wait for each other in a loop around ``sched_yield``. With as many of them as cores, on a CPU that also
computes, they starve the API server: chunks come in one lump, and a reader who leaves is noticed when all is done. A
short sleep in its place costs the tests nothing and gives the server its turn.

On a CPU with AMX, vLLM and oneDNN take kernels of their own for bfloat16. On one machine every engine died at its first
token, where vLLM's attention runs for the first time. Its AMX kernels are the likely cause; this is not proven.

A ``.pth`` file imports this module. As ``sitecustomize`` it would be hidden by the one of Debian's Python.
"""

import importlib.abc
import importlib.util
import os
import sys
import time

os.sched_yield = lambda: time.sleep(0.0002)
os.environ.setdefault("ONEDNN_MAX_CPU_ISA", "AVX512_CORE_BF16")


class _HideAmx(importlib.abc.MetaPathFinder):
    """Makes ``torch.cpu`` answer that there is no AMX, once torch is imported."""

    def find_spec(self, fullname, path, target=None):
        if fullname != "torch.cpu":
            return None
        sys.meta_path.remove(self)
        spec = importlib.util.find_spec(fullname)
        execute = spec.loader.exec_module

        def execute_and_hide(module):
            execute(module)
            module._is_amx_tile_supported = lambda: False

        spec.loader.exec_module = execute_and_hide
        return spec


sys.meta_path.insert(0, _HideAmx())
