"""OpenAI's SDK on stream-gw: a response in the background whose stream breaks and goes on, then a second turn.

pip install openai
python examples/python/openai_responses.py
"""

from __future__ import annotations

import os

from openai import OpenAI

MODEL = os.environ.get("MODEL", "sim-small")


def main() -> None:
    base_url = os.environ.get("BASE_URL", "http://127.0.0.1:8080")
    client = OpenAI(base_url=f"{base_url}/v1", api_key=os.environ.get("API_KEY", "sk-dev"))
    stream = client.responses.create(model=MODEL, input="Tell me of rivers.", background=True, stream=True)
    created = next(stream)
    assert created.type == "response.created"
    name, last = created.response.id, 0
    for event in stream:
        last = event.sequence_number
        if last == 5:  # the connection breaks; the response runs on
            break
    stream.close()
    for event in client.responses.retrieve(name, stream=True, starting_after=last):
        if event.type == "response.output_text.delta":
            print(event.delta, end="", flush=True)
    print()
    second = client.responses.create(model=MODEL, input="And of lakes?", previous_response_id=name)
    print("status:", second.status)


if __name__ == "__main__":
    main()
