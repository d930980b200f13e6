"""Code that runs inside vLLM. It imports nothing of stream-gw, and only Python itself."""
