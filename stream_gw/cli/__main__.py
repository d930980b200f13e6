"""``python -m stream_gw.cli``: the command line without its entry point."""

import sys

if __name__ == "__main__":
    try:
        from stream_gw.cli.main import main

        code = main()
    except KeyboardInterrupt:
        code = 130
    sys.exit(code)
