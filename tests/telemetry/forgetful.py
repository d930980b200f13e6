"""``stream-gw`` with a consumer that does not heed claims: what goes wrong without them."""

from __future__ import annotations

import sys

from telemetry.consume.blocks import Block

if __name__ == "__main__":
    Block.decode = classmethod(lambda cls, text: None)  # type: ignore[assignment,method-assign]
    from stream_gw.cli.main import main

    sys.exit(main())
