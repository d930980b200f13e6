"""The Python client: many streams over one socket. Each frame is delivered once and in order, also after reconnects.

>>> async with StreamGateway("https://gw.example", token="sk-…") as gateway:
...     async with gateway.create({"model": "m", "messages": [{"role": "user", "content": "Hi"}]}) as stream:
...         async for text in stream.text():
...             print(text, end="")
"""

from stream_gw.client.errors import ConnectionLost, GatewayError, StreamBroken
from stream_gw.client.gateway import State, StreamGateway
from stream_gw.client.items import Data, Gap, InputResult, Item, Place, Reset
from stream_gw.client.position import BEGINNING, Position
from stream_gw.client.stream import Stream
from stream_gw.client.wire import Ack

__all__ = [
    "BEGINNING",
    "Ack",
    "ConnectionLost",
    "Data",
    "Gap",
    "GatewayError",
    "InputResult",
    "Item",
    "Place",
    "Position",
    "Reset",
    "State",
    "Stream",
    "StreamBroken",
    "StreamGateway",
]
