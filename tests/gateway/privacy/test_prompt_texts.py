"""Texts of a request that moderation checks."""

from __future__ import annotations

from typing import Any

import msgspec
import pytest

from stream_fabric.errors import Unsupported
from stream_gw.privacy.prompt_moderation import _FIELDS, texts_of

IMAGE = "data:image/png;base64,iVBORw0KGgo="


def checked(**body: Any) -> str:
    return "\n".join(texts_of(msgspec.Raw(msgspec.json.encode(body)), _FIELDS))


@pytest.mark.parametrize("text", ["data: badword", "data:text/plain,badword", "data:;base64,badword", "badword"])
def test_a_text_that_looks_like_a_data_url_is_checked(text: str) -> None:
    for content in (text, [{"type": "text", "text": text}]):
        assert "badword" in checked(messages=[{"role": "user", "content": content}])
    assert "badword" in checked(prompt=text)
    assert "badword" in checked(prompt=["x", text])
    assert "badword" in checked(messages=[{"role": "tool", "content": f'{{"url":"{text}"}}'}])


def test_images_and_files_are_left_out() -> None:
    parts = [
        {"type": "image_url", "image_url": {"url": IMAGE}},
        {"type": "file", "file": {"filename": "a.pdf", "file_data": IMAGE}},
        {"type": "text", "text": "seen"},
    ]
    told = checked(messages=[{"role": "user", "content": parts}])
    assert "seen" in told and "base64" not in told
    linked = [{"type": "image_url", "image_url": {"url": "data: badword"}}]
    assert "badword" in checked(messages=[{"role": "user", "content": linked}]), "it is no image"


def test_all_that_a_template_puts_into_the_prompt_is_checked() -> None:
    """Templates write tools as JSON, with the names of their parameters."""
    tool = {"type": "function", "function": {"name": "f", "parameters": {"properties": {"badword": {}}}}}
    assert "badword" in checked(messages=[], tools=[tool])
    assert "badword" in checked(messages=[], chat_template="badword {{ messages }}")
    assert "badword" in checked(messages=[], chat_template_kwargs={"model_identity": "badword"})


@pytest.mark.parametrize("prompt", [[1, 2], [[1, 2], [3]]])
def test_token_ids_are_refused(prompt: Any) -> None:
    with pytest.raises(Unsupported, match="send the prompt as text"):
        checked(prompt=prompt)
    with pytest.raises(Unsupported):
        checked(prompt="", prompt_embeds="AAAA")
