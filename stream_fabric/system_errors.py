"""Words for the user about a failure of the network or of a file: no class names, no numbers of the system."""

from __future__ import annotations

import os
import socket
import ssl


def reason(error: BaseException) -> str:
    """Say why a connection or a file failed, for example ``connection refused``."""
    cause = getattr(error, "os_error", error)  # aiohttp wraps the error of a connection
    if isinstance(cause, ssl.SSLError):  # its numbers are not the system's
        return str(error)
    if isinstance(cause, socket.gaierror):
        return "the host name is not known"
    if isinstance(cause, OSError) and cause.errno is not None and cause.errno > 0:
        text = os.strerror(cause.errno)
        return text[0].lower() + text[1:]
    if isinstance(error, TimeoutError):
        return "timed out"
    return str(error) or type(error).__name__
