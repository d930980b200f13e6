"""LangChain on stream-gw: a whole answer, and a streamed one with its usage.

pip install langchain-openai
python examples/python/langchain_chat.py
"""

from __future__ import annotations

import os

from langchain_openai import ChatOpenAI


def main() -> None:
    model = ChatOpenAI(
        model=os.environ.get("MODEL", "sim-small"),
        base_url=os.environ.get("BASE_URL", "http://127.0.0.1:8080") + "/v1",
        api_key=os.environ.get("API_KEY", "sk-dev"),
        max_tokens=20,
        stream_usage=True,
    )
    print("whole:", model.invoke("Tell me of rivers.").content)
    print("streamed: ", end="")
    tokens = 0
    for chunk in model.stream("Tell me of rivers."):
        print(chunk.content, end="", flush=True)
        tokens += (chunk.usage_metadata or {}).get("output_tokens", 0)
    print("\ntokens:", tokens)


if __name__ == "__main__":
    main()
