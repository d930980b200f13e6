"""Writes ``docs/python-client.md`` from the client's docstrings: ``python -m stream_gw.cli.package.client_page``."""

from __future__ import annotations

import ast
import inspect
import textwrap
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import stream_gw.client as client

_WIDTH = 120
_HEAD = """# The Python client

`stream_gw.client` reads many streams over one WebSocket. When a connection or a gateway is lost, each stream continues
after its cursor, on any gateway. A reader gets each frame once and in order. It comes with `pip install stream-gw`.

```python
import asyncio

from stream_gw.client import StreamGateway


async def main() -> None:
    async with StreamGateway(["http://127.0.0.1:8080", "http://127.0.0.1:8081"], token="sk-dev") as gateway:
        body = {"model": "sim-small", "messages": [{"role": "user", "content": "Tell me of rivers."}]}
        async with gateway.create(body) as stream:  # a block left early cancels the stream
            async for text in stream.text():
                print(text, end="")
        print(stream.status, stream.usage)


asyncio.run(main())
```

`examples/python/resume.py` shows the cursor, a second reader and an exact cancel. [protocol.md](protocol.md) describes
the messages, and `clients/js` has the same client for JavaScript.

## Reference

Generated from the docstrings by `python -m stream_gw.cli.package.client_page`; a test compares the page with them.
Exported names are stable ([versions](versioning.md)).
"""
_ORDER = (
    "StreamGateway", "Stream", "Data", "InputResult", "Gap", "Reset", "Place", "Ack", "GatewayError", "ConnectionLost",
    "StreamBroken", "Position",
)  # fmt: skip
_OTHERS = {
    "BEGINNING": "The cursor of a stream's beginning.",
    "Item": "`Data`, `InputResult`, `Gap` or `Reset`.",
    "State": "Values of `StreamGateway.state`.",
}
_INTERNAL = {
    "StreamGateway": {"next_channel", "forget", "cancel_soon", "receive_ack", "receive_connection_error",
                      "receive_hint", "leave", "link_over"},
    "Stream": {"attach", "lost", "receive", "receive_error", "receive_head", "fail_if_unanswered", "fail"},
}  # fmt: skip
"""Methods that the client's own parts call."""


def page() -> str:
    """Return the Markdown text of ``docs/python-client.md``."""
    assert set(client.__all__) == {*_ORDER, *_OTHERS}, "a new name needs its place in this page"
    parts = [_HEAD.rstrip()]
    for name in _ORDER:
        parts += _class(name, getattr(client, name))
    parts.append("### Other names")
    parts.append("\n".join(f"- `{name}`: {about}" for name, about in _OTHERS.items()))
    return "\n\n".join(parts) + "\n"


def _class(name: str, kind: type) -> list[str]:
    parts = [f"### {name}"]
    if name in ("StreamGateway", "GatewayError"):  # the others are made by the client
        parts.append(_item(f"`{name}{_signature(kind)}`").removeprefix("- ").replace("\n  ", "\n"))
    if kind.__doc__:
        parts.append(_prose(kind.__doc__))
    members = [*_attributes(kind), *_methods(name, kind)]
    if members:
        parts.append("\n".join(members))
    return parts


def _signature(function: Any) -> str:
    """Return the parameters and the result, as a caller writes them."""
    signature = inspect.signature(function)
    shown, star = [], False
    for each in signature.parameters.values():
        if each.name == "self":
            continue
        if each.kind is each.KEYWORD_ONLY and not star:
            shown.append("*")
            star = True
        kind = f": {each.annotation}" if isinstance(each.annotation, str) else ""
        default = "" if each.default is each.empty else f" = {'…' if callable(each.default) else repr(each.default)}"
        shown.append(f"{each.name}{kind}{default}")
    result = signature.return_annotation
    told = f" -> {result}" if isinstance(result, str) and result != "None" else ""
    return f"({', '.join(shown)}){told}"


def _attributes(kind: type) -> Iterator[str]:
    """Yield the fields of a record, and the other attributes that have a docstring."""
    docs: dict[str, str] = {}
    for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(kind)))):
        body = getattr(node, "body", None)
        for line, below in pairwise(body) if isinstance(body, list) else ():
            match line, below:
                case (
                    ast.Assign(targets=[target]) | ast.AnnAssign(target=target),
                    ast.Expr(value=ast.Constant(value=str(text))),
                ):
                    docs[ast.unparse(target).removeprefix("self.")] = _prose(text, 0)
    fields = {name: "" for name in inspect.get_annotations(kind) if not name.startswith("_")}
    for name, about in (fields | docs).items():
        if not name.startswith("_"):
            yield _item(f"`{name}`" + (f": {about}" if about else ""))


def _methods(name: str, kind: type) -> Iterator[str]:
    for member, value in vars(kind).items():
        if member.startswith("_") or member in _INTERNAL.get(name, ()):
            continue
        if isinstance(value, property):
            yield _item(f"`{member}`: {_prose(value.__doc__ or '', 0)}")
        elif inspect.isfunction(value):
            kept = "await " if inspect.iscoroutinefunction(value) else ""
            assert value.__doc__, f"{name}.{member} has no docstring"
            yield _item(f"`{kept}{member}{_signature(value)}`: {_prose(value.__doc__, 0)}")


def _item(text: str) -> str:
    return textwrap.fill(f"- {text}", _WIDTH, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False)


def _prose(docstring: str, width: int = _WIDTH) -> str:
    """Turn a docstring into Markdown. ``width`` 0: one line."""
    paragraphs = [" ".join(each.split()).replace("``", "`") for each in inspect.cleandoc(docstring).split("\n\n")]
    if not width:
        return " ".join(paragraphs)
    return "\n\n".join(textwrap.fill(each, width, break_long_words=False) for each in paragraphs)


if __name__ == "__main__":
    print(page(), end="")
