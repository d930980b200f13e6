"""How a model server's answers are read: HTTP/1.1 or the step socket, server-sent events, chunks.

All but ``answer``, ``http1`` and ``steps`` is sans I/O.
"""
