"""The Python client of stream-gw: a reader that stops in the middle, another that goes on, and an exact cancel.

pip install stream-gw
python examples/python/resume.py
"""

from __future__ import annotations

import asyncio
import os

from stream_gw.client import Data, StreamGateway


async def main() -> None:
    urls = os.environ.get("BASE_URLS", os.environ.get("BASE_URL", "http://127.0.0.1:8080")).split(",")
    token = os.environ.get("API_KEY", "sk-dev")
    body = {
        "model": os.environ.get("MODEL", "sim-small"),
        "max_tokens": 40,
        "messages": [{"role": "user", "content": "Tell me of rivers."}],
        "on_disconnect": "continue",
    }
    async with StreamGateway(urls, token=token) as gateway:
        stream = gateway.create(body, on_exit="detach")
        print("first reader: ", end="")
        async for item in stream:
            if isinstance(item, Data):
                print(_text(item), end="", flush=True)
                if item.seq >= 10:
                    break
        name, cursor = await stream.ready(), stream.cursor
        stream.close()  # the generation goes on
    print(f"\nleft {name} at {cursor}")

    async with StreamGateway(list(reversed(urls)), token=token) as gateway:
        rest = gateway.subscribe(name, after=cursor)
        print("second reader: ", end="")
        async for text in rest.text():
            print(text, end="", flush=True)
        print(f"\n{rest.status}, tokens: {(rest.usage or {}).get('output')}")

        long = gateway.create({**body, "max_tokens": 5000})
        await anext(long)
        ack = await long.cancel()
        print(f"cancel: {ack.result} at {ack.at}")


def _text(item: Data) -> str:
    return "".join(choice["delta"].get("content") or "" for chunk in item.chunks for choice in chunk["choices"])


if __name__ == "__main__":
    asyncio.run(main())
