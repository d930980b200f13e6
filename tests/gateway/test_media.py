"""URLs that an engine would fetch from inside the operator's network: refused unless their host is allowed."""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import Any

import msgspec
import pytest

from stream_fabric.errors import Unsupported
from stream_gw.streams.checks.media import check_media
from tests.gateway.processes import Running
from tests.gateway.wire import MODEL, Gate, chat, refusal

METADATA = "http://169.254.169.254/latest/meta-data/"
PIXEL = "data:image/png;base64,iVBORw0KGgo="


def check(content: Any, domains: str = "", field: str = "messages") -> None:
    value = [{"role": "user", "content": content}] if field == "messages" else content
    check_media(msgspec.Raw(msgspec.json.encode({"model": "m", field: value})), domains)


def picture(url: Any, part: str = "image_url") -> list[Any]:
    return [{"type": "text", "text": "What is it?"}, {"type": part, part: url}]


@pytest.mark.parametrize("part", ["image_url", "audio_url", "video_url", "file_url"])
def test_only_data_urls_reach_an_engine(part: str) -> None:
    check(picture({"url": PIXEL}, part))
    check(picture(PIXEL, part))
    for url in (METADATA, "https://images.example/a.png", "file:///etc/passwd", "/etc/passwd.png", ""):
        for form in ({"url": url}, url):
            with pytest.raises(Unsupported, match=f"{part} must be a data URL") as raised:
                check(picture(form, part))
            assert raised.value.param == "messages"


def test_a_name_with_escapes_is_found() -> None:
    body = rb'{"messages":[{"role":"user","content":[{"image\u005furl":{"u\u0072l":"http://10.0.0.1/"}}]}]}'
    with pytest.raises(Unsupported, match=r"10\.0\.0\.1"):
        check_media(msgspec.Raw(body), "")


def test_a_long_prompt_is_checked_in_the_time_of_a_few_looks_at_it() -> None:
    """The check runs on the event loop: an expression took 7 ms for 400 kB, and each stream waited for it."""
    body = msgspec.Raw(msgspec.json.encode({"messages": [{"role": "user", "content": 'f("base", é)\n' * 25_000}]}))

    def process_time_s(look: Callable[[], object]) -> float:
        begun = time.process_time()
        look()
        return time.process_time() - begun

    check_s = min(process_time_s(lambda: check_media(body, "")) for _ in range(5))
    assert check_s < 6 * min(process_time_s(lambda: bytes(body).count(b"[")) for _ in range(5))


def test_every_field_with_parts_is_checked() -> None:
    for field in ("input", "query", "documents", "queries", "items", "data_1", "data_2", "text_1", "text_2"):
        with pytest.raises(Unsupported):
            check({"content": picture({"url": METADATA})}, field=field)


def test_texts_tools_and_calls_may_name_urls() -> None:
    check("an image_url such as http://10.0.0.1/ is only a text")
    check([{"type": "text", "text": '{"image_url": "http://10.0.0.1/"}'}])
    call = {"id": "c", "type": "function", "function": {"name": "f", "arguments": {"image_url": "http://10.0.0.1/"}}}
    said = {"role": "assistant", "content": None, "tool_calls": [call]}
    tool = {"type": "function", "function": {"name": "f", "parameters": {"image_url": METADATA}}}
    check_media(msgspec.Raw(msgspec.json.encode({"messages": [said], "tools": [tool]})), "")


def test_allowed_hosts_are_matched_as_a_whole() -> None:
    domains = "images.example, cdn.example"
    for url in ("https://images.example/a.png", "http://CDN.example:8080/a?b=c#d", "https://images.example"):
        check(picture({"url": url}), domains)
    for url in (
        "https://a.images.example/",
        "https://images.example.evil.example/",
        "https://images.example@10.0.0.1/",
        "https://10.0.0.1\\@images.example/",
        "https://images.example\\.10.0.0.1/",
        "https://images.example#@10.0.0.1/",
        "https://images.example/\n",
        "ftp://images.example/a.png",
        "//images.example/a.png",
        " https://images.example/a.png",
    ):
        with pytest.raises(Unsupported):
            check(picture({"url": url}), domains)
    check(picture({"url": METADATA}), "*")


DIALECTS = {
    "/v1/chat/completions": {"messages": [{"role": "user", "content": picture({"url": METADATA})}]},
    "/v1/responses": {"input": [{"role": "user", "content": [{"type": "input_image", "image_url": METADATA}]}]},
    "/v1/messages": {
        "max_tokens": 1,
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": METADATA}}]},
        ],
    },
    "/v1/messages/count_tokens": {
        "messages": [
            {"role": "user", "content": [{"type": "image", "source": {"type": "url", "url": METADATA}}]},
        ]
    },
    "/v1/ui/chat": {
        "id": "media",
        "messages": [
            {
                "id": "m",
                "role": "user",
                "parts": [{"type": "file", "mediaType": "image/png", "url": METADATA}],
            }
        ],
    },
    "/v1/score": {"queries": "x", "documents": {"content": picture({"url": METADATA})}},
}


@pytest.mark.parametrize("path", DIALECTS)
async def test_a_gateway_refuses_them_in_every_dialect(one: Gate, path: str) -> None:
    reply = await one.ask("POST", path, {"model": MODEL, **DIALECTS[path]})
    assert reply.status == 400, reply
    assert "169.254.169.254" in str(reply.json), "the error names the host"


async def test_an_input_of_a_running_stream_is_checked(one: Gate) -> None:
    async with one.create(chat(200)) as exchange:
        item = {"role": "user", "content": picture({"url": METADATA})}
        path = f"/v1/streams/{exchange.headers['x-stream-id']}/input"
        refusal(await one.ask("POST", path, {"id": "k", "item": item}), 400, "unsupported")


async def test_the_operator_may_allow_hosts(platform: Running) -> None:
    with platform.gateway("--media-domains", "images.example") as process:
        gate = Gate(process.facts["url"], process.pid, platform.key)
        for url, status in (("https://images.example/a.png", 200), (METADATA, 400)):
            body = {"model": MODEL, "max_tokens": 1, "messages": [{"role": "user", "content": picture({"url": url})}]}
            assert (await gate.ask("POST", "/v1/chat/completions", body)).status == status


@pytest.mark.parametrize(
    ("name", "value"),
    [
        ("priority", -1),
        ("kv_transfer_params", {"do_remote_prefill": True, "remote_host": "10.0.0.9"}),
        ("bootstrap_host", "10.0.0.9"),
        ("lora_path", "another-tenants"),
        ("input_ids", [1, 2]),
        ("custom_logit_processor", "code"),
        ("data_parallel_rank", 0),
    ],
)
async def test_fields_that_control_the_engine_are_refused(one: Gate, name: str, value: Any) -> None:
    for path, more in (
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
        ("/v1/completions", {"prompt": "x"}),
        ("/v1/embeddings", {"input": "x"}),
    ):
        reply = await one.ask("POST", path, {"model": MODEL, "max_tokens": 1, **more, name: value})
        assert refusal(reply, 400, "unsupported")["param"] == name
    ignored = {
        "model": MODEL,
        "max_tokens": 1,
        "priority": 0,
        name: None,
        "messages": [{"role": "user", "content": "x"}],
    }
    if name != "priority":
        assert (await one.ask("POST", "/v1/chat/completions", ignored)).status == 200
