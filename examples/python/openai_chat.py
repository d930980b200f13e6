"""OpenAI's SDK on stream-gw: a whole answer, a streamed one with its usage, and a tool call.

pip install openai
python examples/python/openai_chat.py
"""

from __future__ import annotations

import os

from openai import OpenAI
from openai.types.chat import ChatCompletionToolParam

MODEL = os.environ.get("MODEL", "sim-small")
WEATHER: ChatCompletionToolParam = {
    "type": "function",
    "function": {
        "name": "weather",
        "description": "Tells the weather of a city.",
        "parameters": {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]},
    },
}


def main() -> None:
    base_url = os.environ.get("BASE_URL", "http://127.0.0.1:8080")
    client = OpenAI(base_url=f"{base_url}/v1", api_key=os.environ.get("API_KEY", "sk-dev"))
    print("models:", ", ".join(model.id for model in client.models.list()))

    whole = client.chat.completions.create(
        model=MODEL, max_tokens=20, messages=[{"role": "user", "content": "Tell me of rivers."}]
    )
    print("whole:", whole.choices[0].message.content)

    print("streamed: ", end="")
    for chunk in client.chat.completions.create(
        model=MODEL,
        max_tokens=20,
        messages=[{"role": "user", "content": "Tell me of rivers."}],
        stream=True,
        stream_options={"include_usage": True},
    ):
        if chunk.choices:
            print(chunk.choices[0].delta.content or "", end="", flush=True)
        if chunk.usage:
            print("\ntokens:", chunk.usage.completion_tokens)

    called = client.chat.completions.create(
        model=MODEL,
        messages=[{"role": "user", "content": "What is the weather in Oslo?"}],
        tools=[WEATHER],
        tool_choice="required",
    )
    for call in called.choices[0].message.tool_calls or ():
        if call.type == "function":
            print("tool call:", call.function.name, call.function.arguments)


if __name__ == "__main__":
    main()
