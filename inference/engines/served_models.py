"""The models that an OpenAI-compatible server lists."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from inference.engines.server_load import SERVES_NONE
from stream_fabric.errors import EngineFailed
from stream_fabric.system_errors import reason

log = logging.getLogger(__name__)

_BEGUN = "Once upon a time"
_PROMPT_S = 5.0


class ServedModels(NamedTuple):
    """A server's models, as it lists them."""

    names: Sequence[str]
    adapters: tuple[str, ...]
    """Those that are LoRA adapters of another."""
    max_model_len: int
    """Maximum context of vLLM's base model, in tokens; 0: unknown."""


async def list_models(session: aiohttp.ClientSession, base_url: str, timeout_s: float) -> ServedModels:
    """Ask the server for its models. Raises EngineFailed with what to do."""
    url = f"{base_url}/v1/models"
    try:
        timeout = aiohttp.ClientTimeout(total=timeout_s)
        async with session.get(url, timeout=timeout, allow_redirects=False) as response:
            body = await response.read()
            if 300 <= response.status < 400 and (location := response.headers.get("location")) is not None:
                raise EngineFailed(f"{url} redirects to {location}; set --upstream to the server's own URL")
            if response.status in SERVES_NONE:
                raise EngineFailed(
                    f"{url} answered {response.status}: the model server loads its model or does not run; wait for it"
                )
            if response.status != 200:
                raise EngineFailed(
                    f"{url} answered {response.status}; check the API key and that the server is OpenAI-compatible"
                )
            data = msgspec.json.decode(body)["data"]
            names = [item["id"] for item in data]
            adapters = tuple(item["id"] for item in data if item.get("parent"))
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{url} does not answer ({reason(error)}); start the model server first") from error
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailed(
            f"{url} did not answer with a list of models; check that it is an OpenAI-compatible server"
        ) from error
    if not names:
        raise EngineFailed(f"{url} lists no model")
    return ServedModels(names, adapters, _max_model_len(data))


async def continues_chats(session: aiohttp.ClientSession, base_url: str, model: str) -> bool:
    """Whether vLLM leaves an answer open that a chat asks it to continue.

    Its own templates for DeepSeek since V3.2 pass ``continue_final_message`` over and end the answer: the model would
    begin another one. A server that does not answer with a prompt is believed to keep to the field, or to refuse it.
    """
    messages = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": _BEGUN}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_PROMPT_S)
        async with session.post(f"{base_url}/{path}", json={"model": model, **body}, timeout=timeout) as response:
            answer: dict[str, Any] = msgspec.json.decode(await response.read())
            return answer

    try:
        prompt: str = (await ask("detokenize", {"tokens": (await ask("tokenize", asked))["tokens"]}))["prompt"]
        continues = prompt.rstrip().endswith(_BEGUN)
    except (aiohttp.ClientError, TimeoutError, msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        log.debug("model server did not show the prompt of a continued chat: error=%r", error)
        return True
    if not continues:
        log.warning(
            "chat template ends an answer that is to be continued: chats are repeated or lost with their replica"
        )
    return continues


def _max_model_len(models: Sequence[dict[str, Any]]) -> int:
    """Return the maximum context of vLLM's base model; 0: unknown. Other servers may truncate what exceeds theirs."""
    known = (item.get("max_model_len") for item in models if item.get("owned_by") == "vllm")
    return max((tokens for tokens in known if isinstance(tokens, int)), default=0)
