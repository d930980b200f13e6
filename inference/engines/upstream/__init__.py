"""The protocol of OpenAI-compatible servers: HTTP/1.1, server-sent events, chunks. All but ``http1`` is sans I/O."""
