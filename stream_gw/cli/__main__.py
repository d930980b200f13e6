"""``python -m stream_gw.cli``: the command line without its entry point; ``stream-gw up`` starts its processes so."""

import contextlib
import logging
import os
import sys


def _leave(code: int) -> None:
    """End the process without the interpreter's own end, which takes 0.1 to 0.2 s of CPU time.

    A platform's processes end all at once, so on two cores that is half a second of Ctrl-C. The command has closed what
    it opened.
    """
    logging.shutdown()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError):  # its reader has gone
            stream.flush()
    os._exit(code)


if __name__ == "__main__":
    try:
        from stream_gw.cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    _leave(code)
