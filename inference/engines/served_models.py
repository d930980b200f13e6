"""The models that an OpenAI-compatible server lists, and the adapters that vLLM loads and unloads while it runs."""

from __future__ import annotations

import asyncio
import logging
import ssl
from collections.abc import Sequence
from typing import Any, NamedTuple

import aiohttp
import msgspec

from inference.engines.server_load import SERVES_NONE
from stream_fabric.errors import EngineFailed
from stream_fabric.pool.records import Loaded
from stream_fabric.system_errors import reason

log = logging.getLogger(__name__)

_BEGUN = "Once upon a time"
_TIMEOUT_S = 5.0
_READ_EVERY_S = 5.0
_TIMES = (9, 10)
"""OpenSSL's codes of a certificate that is not valid yet, and of one that has expired."""
_NAMES = (62, 64)
"""OpenSSL's codes of a certificate for another name, and for another address."""


class ServedModels(NamedTuple):
    """A server's models, as it lists them."""

    names: Sequence[str]
    adapters: tuple[str, ...]
    """Those that are LoRA adapters of another."""
    max_model_len: int
    """Maximum context of vLLM's base model, in tokens; 0: unknown."""


class LoadedModels:
    """A server's models. ``loaded`` has the adapters of vLLM as they were read last."""

    def __init__(self, base_url: str) -> None:
        self._base_url = base_url
        self.names: Sequence[str] = ()
        """Models at the start, adapters included."""
        self.loaded = Loaded()
        self.max_model_len = 0

    async def start(self, session: aiohttp.ClientSession) -> None:
        """Raises EngineFailed with what to do."""
        self.names, adapters, self.max_model_len = await list_models(session, self._base_url, _TIMEOUT_S)
        self.loaded = Loaded(adapters)

    async def check_template(self, session: aiohttp.ClientSession) -> None:
        """Learn from vLLM whether its chat template can go on with an answer."""
        continues = await continues_chats(session, self._base_url, self.names[0])
        self.loaded = msgspec.structs.replace(self.loaded, continues_chats=continues)

    async def keep_reading(self, session: aiohttp.ClientSession) -> None:
        """Read vLLM's adapters again and again: ``/v1/load_lora_adapter`` and a restart change them."""
        while True:
            await asyncio.sleep(_READ_EVERY_S)
            await self.read(session)

    async def read(self, session: aiohttp.ClientSession) -> None:
        """Read vLLM's adapters once. A failure keeps what is known: the metrics tell whether the server serves."""
        try:
            adapters = (await list_models(session, self._base_url, _TIMEOUT_S)).adapters
        except EngineFailed as error:
            log.debug("read of the model server's adapters failed: error=%s", error.message)
            return
        if adapters != self.loaded.adapters:
            log.info("adapters of the model server changed: adapters=%s", ",".join(adapters))
            self.loaded = msgspec.structs.replace(self.loaded, adapters=adapters)


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
            if response.status in (401, 403):
                raise EngineFailed(
                    f"{url} answered {response.status}: it refuses the API key; "
                    "set --upstream-api-key (STREAM_GW_UPSTREAM_API_KEY) to the server's"
                )
            if response.status != 200:
                raise EngineFailed(f"{url} answered {response.status}; check that the server is OpenAI-compatible")
            data = msgspec.json.decode(body)["data"]
            names = [item["id"] for item in data]
            adapters = tuple(item["id"] for item in data if item.get("parent"))
    except aiohttp.ClientConnectorCertificateError as error:
        raise EngineFailed(f"the certificate of {url} does not verify: {_certificate_fault(error)}") from error
    except aiohttp.ClientConnectorSSLError as error:
        raise EngineFailed(
            f"{url} refuses TLS ({_tls_fault(error)}); if the server speaks no TLS, --upstream begins with http://"
        ) from error
    except (aiohttp.ClientError, TimeoutError) as error:
        raise EngineFailed(f"{url} does not answer ({reason(error)}); start the model server first") from error
    except (msgspec.MsgspecError, KeyError, TypeError, AttributeError) as error:
        raise EngineFailed(
            f"{url} did not answer with a list of models; check that it is an OpenAI-compatible server"
        ) from error
    if not names:
        raise EngineFailed(f"{url} lists no model")
    return ServedModels(names, adapters, _max_model_len(data))


def _tls_fault(error: aiohttp.ClientConnectorSSLError) -> str:
    fault = error.os_error
    return (isinstance(fault, ssl.SSLError) and fault.reason) or str(error)


def _certificate_fault(error: aiohttp.ClientConnectorCertificateError) -> str:
    """Return what is wrong with a server's certificate, and the remedy."""
    fault = error.certificate_error
    if not isinstance(fault, ssl.SSLCertVerificationError):
        return str(fault)
    if fault.verify_code in _TIMES:
        remedy = "renew it, or correct this host's clock"
    elif fault.verify_code in _NAMES:
        remedy = "name the host in --upstream as the certificate has it"
    else:
        remedy = "set SSL_CERT_FILE to a PEM file with the CA that signed it"
    return f"{fault.verify_message.rstrip('.')}; {remedy}"


async def continues_chats(session: aiohttp.ClientSession, base_url: str, model: str) -> bool:
    """Whether vLLM leaves an answer open that a chat asks it to continue.

    Its own templates for DeepSeek since V3.2 pass ``continue_final_message`` over and end the answer: the model would
    begin another one. A server that does not answer with a prompt is believed to keep to the field, or to refuse it.
    """
    messages = [{"role": "user", "content": "Tell me a story."}, {"role": "assistant", "content": _BEGUN}]
    asked = {"messages": messages, "continue_final_message": True, "add_generation_prompt": False}

    async def ask(path: str, body: dict[str, Any]) -> dict[str, Any]:
        timeout = aiohttp.ClientTimeout(total=_TIMEOUT_S)
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
