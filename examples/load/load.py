"""Load with Python's standard library alone: time to first token, gaps between tokens, tokens per second.

USERS=20 SECONDS=30 python examples/load/load.py
"""

from __future__ import annotations

import http.client
import json
import os
import statistics
import threading
import time
from urllib.parse import urlsplit

BASE = urlsplit(os.environ.get("BASE_URL", "http://127.0.0.1:8080"))
HEADERS = {"authorization": f"Bearer {os.environ.get('API_KEY', 'sk-dev')}", "content-type": "application/json"}
BODY = {
    "model": os.environ.get("MODEL", "sim-small"),
    "messages": [{"role": "user", "content": "Tell me of rivers."}],
    "max_tokens": int(os.environ.get("TOKENS", "64")),
    "stream": True,
}


class Measured:
    """Times and failures of all readers so far."""

    def __init__(self) -> None:
        self.lock = threading.Lock()
        self.first_s: list[float] = []
        self.gap_s: list[float] = []
        self.failures: list[str] = []

    def add(self, first_s: float, gap_s: list[float]) -> None:
        with self.lock:
            self.first_s.append(first_s)
            self.gap_s += gap_s

    def fail(self, why: str) -> None:
        with self.lock:
            self.failures.append(why)


def read_one(measured: Measured) -> None:
    """Ask once and read the stream to its end."""
    kind = http.client.HTTPSConnection if BASE.scheme == "https" else http.client.HTTPConnection
    connection = kind(BASE.hostname or "", BASE.port, timeout=60)
    began = last = time.perf_counter()
    first_s, gap_s, done = 0.0, [], False
    try:
        connection.request("POST", f"{BASE.path.rstrip('/')}/v1/chat/completions", json.dumps(BODY), HEADERS)
        response = connection.getresponse()
        if response.status != 200:
            measured.fail(f"{response.status} {response.read().decode()[:200]}")
            return
        for line in response:
            now = time.perf_counter()
            if line.startswith(b"data: [DONE]"):
                done = True
            elif line.startswith(b"data: ") and _text(line[6:]):
                if first_s:
                    gap_s.append(now - last)
                else:
                    first_s = now - began
                last = now
    except (OSError, http.client.HTTPException) as error:
        measured.fail(repr(error))
        return
    finally:
        connection.close()
    if done:
        measured.add(first_s, gap_s)
    else:
        measured.fail("the stream ended without [DONE]")


def _text(data: bytes) -> str:
    choices = json.loads(data).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""


def main() -> None:
    users, seconds = int(os.environ.get("USERS", "8")), float(os.environ.get("SECONDS", "10"))
    measured, began = Measured(), time.monotonic()

    def reader() -> None:
        while time.monotonic() < began + seconds:
            read_one(measured)

    threads = [threading.Thread(target=reader) for _ in range(users)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    took_s = time.monotonic() - began  # the last answers end after SECONDS
    print(f"answers {len(measured.first_s)}, failures {len(measured.failures)}")
    for why in measured.failures[:3]:
        print("  ", why)
    for name, found in (("first token", measured.first_s), ("gap", measured.gap_s)):
        if len(found) > 1:
            parts = statistics.quantiles(found, n=100, method="inclusive")  # never above the longest
            print(f"{name}: median {parts[49] * 1000:.1f} ms, 99th percentile {parts[98] * 1000:.1f} ms")
    print(f"tokens per second: {(len(measured.first_s) + len(measured.gap_s)) / took_s:.0f}")


if __name__ == "__main__":
    main()
