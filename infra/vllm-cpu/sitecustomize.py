"""For the interpreter that runs vLLM in tests: a poll that spins lets others run.

vLLM's processes wait for each other in a loop around ``sched_yield``. With as many of them as cores, on a CPU that also
computes, they starve the API server: chunks come in one lump, and a reader who leaves is noticed when all is done. A
short sleep in its place costs the tests nothing and gives the server its turn.
"""

import os
import time

os.sched_yield = lambda: time.sleep(0.0002)
