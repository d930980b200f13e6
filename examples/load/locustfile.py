"""Locust against an OpenAI-compatible server: time to first token and gaps between pieces, beside its own figures.

    pip install locust
    MODEL=sim-small API_KEY=sk-dev locust -f examples/load/locustfile.py --host http://localhost:8080 \\
        --headless --users 20 --spawn-rate 5 --run-time 30s

Locust's statistics show them as requests of type TTFT and GAP. A stream that ends without ``[DONE]`` is a failure.
"""

import json
import os
import time

from locust import HttpUser, between, task

MODEL = os.environ.get("MODEL", "sim-small")
TOKENS = int(os.environ.get("TOKENS", "64"))


class Reader(HttpUser):
    wait_time = between(0.5, 2.0)

    @task
    def chat(self) -> None:
        body = {
            "model": MODEL,
            "messages": [{"role": "user", "content": "Tell me about rivers, and about the towns beside them."}],
            "max_tokens": TOKENS,
            "stream": True,
        }
        headers = {"authorization": f"Bearer {os.environ.get('API_KEY', 'sk-dev')}"}
        began = time.perf_counter()
        with self.client.post(
            "/v1/chat/completions", json=body, headers=headers, stream=True, catch_response=True, name="chat"
        ) as response:
            if response.status_code != 200:
                response.failure(f"{response.status_code}: {response.text[:200]}")
                return
            last, done = 0.0, False
            for line in response.iter_lines(chunk_size=None):
                if line == b"data: [DONE]":
                    done = True
                elif line.startswith(b"data:") and _text(line[5:]):
                    now = time.perf_counter()
                    self._note("TTFT" if not last else "GAP", now - (last or began))
                    last = now
            if done:
                response.success()
            else:
                response.failure("the stream ended without [DONE]")

    def _note(self, kind: str, time_s: float) -> None:
        self.environment.events.request.fire(
            request_type=kind, name="chat", response_time=time_s * 1000, response_length=0, exception=None, context={}
        )


def _text(data: bytes) -> str:
    choices = json.loads(data).get("choices") or [{}]
    return (choices[0].get("delta") or {}).get("content") or ""
