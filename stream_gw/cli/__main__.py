"""``python -m stream_gw.cli``: the command line without its entry point."""

import sys

from stream_gw.cli.main import main

if __name__ == "__main__":
    sys.exit(main())
