"""Anthropic's SDK on stream-gw: a streamed message, which is then read again in OpenAI's dialect.

pip install anthropic
python examples/anthropic_messages.py
"""

from __future__ import annotations

import os
import sys
import urllib.request

from anthropic import Anthropic


def main(url: str = "", key: str = "", model: str = "") -> None:
    url = url or os.environ.get("BASE_URL", "http://127.0.0.1:8080")
    key = key or os.environ.get("API_KEY", "sk-dev")
    model = model or os.environ.get("MODEL", "sim-small")
    client = Anthropic(base_url=url, api_key=key)
    question = {"role": "user", "content": "Tell me of rivers."}
    print("prompt tokens:", client.messages.count_tokens(model=model, messages=[question]).input_tokens)
    with client.messages.stream(model=model, max_tokens=30, messages=[question]) as stream:
        for text in stream.text_stream:
            print(text, end="", flush=True)
        print("\nstopped:", stream.get_final_message().stop_reason)
        name = stream.response.headers["x-stream-id"]
    follow = urllib.request.Request(f"{url}/v1/streams/{name}?dialect=openai.chat")
    follow.add_header("Authorization", f"Bearer {key}")
    with urllib.request.urlopen(follow, timeout=10) as answer:
        print(answer.read().decode().splitlines()[-3])


if __name__ == "__main__":
    main(*sys.argv[1:4])
