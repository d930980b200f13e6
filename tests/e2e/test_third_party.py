"""More clients, unmodified: LangChain, LiteLLM, the command ``llm``, and further calls of OpenAI's SDKs.

Those for Python have environments of their own (``tests.support.venvs``).
"""

from __future__ import annotations

import asyncio
import json
import os
from pathlib import Path

import openai
import pytest
import yaml

from tests.e2e.conftest import NODE_FOLDER
from tests.e2e.test_node import result, script
from tests.gateway.wire import MODEL, Gate, chat
from tests.support.venvs import venv_with

pytestmark = [pytest.mark.platform, pytest.mark.timeout(480)]  # a first install is slow

RUN_S = 120
LANGCHAIN_PACKAGE, LITELLM_PACKAGE, LLM_PACKAGE = "langchain-openai==1.7.4", "litellm==1.110.2", "llm==0.36"


async def run(program: Path, *arguments: str, env: dict[str, str] | None = None) -> str:
    """Output of a program that succeeds."""
    kept = {name: value for name, value in os.environ.items() if name in ("PATH", "HOME", "LANG")}
    process = await asyncio.create_subprocess_exec(
        str(program), *arguments, env={**kept, **(env or {})},
        stdout=asyncio.subprocess.PIPE, stderr=asyncio.subprocess.PIPE,
    )  # fmt: skip
    async with asyncio.timeout(RUN_S):
        out, err = await process.communicate()
    assert process.returncode == 0, err.decode()
    return out.decode()


async def whole_text(gate: Gate) -> str:
    reply = await gate.ask("POST", "/v1/chat/completions", {**chat(20, 1), "stream": False})
    found: str = reply.json["choices"][0]["message"]["content"]
    return found


async def test_openai_for_node_embeds_and_retrieves(node: str, one: Gate) -> None:
    assert (NODE_FOLDER / "openai_more.mjs").exists()
    async with script(node, "openai_more.mjs", one) as process:
        assert (await result(process))["dimensions"] > 1


async def test_langchain_for_node(node: str, one: Gate, two: Gate) -> None:
    async with script(node, "langchain_chat.mjs", one) as process:
        told = await result(process)
    assert told["text"] == await whole_text(two)
    await two.until_status(told["aborted"], "cancelled")


async def test_async_openai_streams_embeds_and_cancels(one: Gate, two: Gate) -> None:
    ask = {"model": MODEL, "messages": [{"role": "user", "content": "Tell me of rivers."}], "seed": 1}
    async with openai.AsyncOpenAI(base_url=f"{one.url}/v1", api_key=one.key, max_retries=0) as client:

        async def streamed() -> str:
            parts = await client.chat.completions.create(**ask, max_tokens=20, stream=True)  # type: ignore[call-overload]
            return "".join([part.choices[0].delta.content or "" async for part in parts if part.choices])

        wanted = await whole_text(two)
        assert await asyncio.gather(*(streamed() for _ in range(5))) == [wanted] * 5
        assert (await client.models.retrieve(MODEL)).id == MODEL
        vectors = await client.embeddings.create(model=MODEL, input=["rivers", "towns"])
        assert len(vectors.data) == 2 and vectors.data[0].embedding != vectors.data[1].embedding
        with pytest.raises(openai.NotFoundError):
            await client.models.retrieve("no-such-model")
        left = await client.chat.completions.create(**ask, max_tokens=5000, stream=True)  # type: ignore[call-overload]
        stream = left.response.headers["x-stream-id"]
        async for _ in left:
            break
        await left.close()
    await two.until_status(stream, "cancelled")


LANGCHAIN = """
import asyncio, json, os
from typing import Literal
from langchain_openai import ChatOpenAI, OpenAIEmbeddings

given = {"base_url": os.environ["BASE_URL"] + "/v1", "api_key": os.environ["KEY"], "max_retries": 0}
model = ChatOpenAI(model=os.environ["MODEL"], max_tokens=20, seed=1, stream_usage=True, **given)
whole = model.invoke("Tell me of rivers.")
chunks = list(model.stream("Tell me of rivers."))
tokens = sum((chunk.usage_metadata or {}).get("output_tokens", 0) for chunk in chunks)
assert (tokens, whole.usage_metadata["output_tokens"]) == (20, 20)
assert "".join(chunk.content for chunk in chunks) == whole.content

async def later():
    return "".join([chunk.content async for chunk in model.astream("Tell me of rivers.")])

assert asyncio.run(later()) == whole.content

def weather(city: Literal["Lima", "Oslo", "Quito"]) -> str:
    "Tells the weather."
    return city

caller = ChatOpenAI(model=os.environ["MODEL"], max_tokens=300, seed=1, **given)
called = caller.bind_tools([weather], tool_choice="weather", strict=True).invoke("Oslo?")
assert [call["name"] for call in called.tool_calls] == ["weather"]
embedder = os.environ.get("EMBEDDER", os.environ["MODEL"])
vectors = OpenAIEmbeddings(model=embedder, check_embedding_ctx_length=False, **given)
assert len(vectors.embed_query("rivers")) == len(vectors.embed_documents(["rivers", "towns"])[1])
print(json.dumps(whole.content))
"""


async def test_langchain_for_python(one: Gate, two: Gate) -> None:
    python = await asyncio.to_thread(venv_with, LANGCHAIN_PACKAGE)
    env = {"BASE_URL": one.url, "KEY": one.key, "MODEL": MODEL}
    assert json.loads(await run(python, "-c", LANGCHAIN, env=env)) == await whole_text(two)


LITELLM = """
import asyncio, json, os
import litellm

ask = {
    "model": "openai/" + os.environ["MODEL"], "api_base": os.environ["BASE_URL"] + "/v1", "api_key": os.environ["KEY"],
    "messages": [{"role": "user", "content": "Tell me of rivers."}], "max_tokens": 20, "seed": 1, "num_retries": 0,
}
whole = litellm.completion(**ask)
chunks = list(litellm.completion(**ask, stream=True, stream_options={"include_usage": True}))
text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
assert text == whole.choices[0].message.content
assert whole.usage.completion_tokens == 20
assert litellm.stream_chunk_builder(chunks).usage.completion_tokens == 20

async def later():
    parts = [part async for part in await litellm.acompletion(**ask, stream=True)]
    return "".join(part.choices[0].delta.content or "" for part in parts)

assert asyncio.run(later()) == text
claude = {**ask, "model": "anthropic/" + os.environ["MODEL"], "api_base": os.environ["BASE_URL"]}
claude["allowed_openai_params"] = ["seed"]
assert litellm.completion(**claude).choices[0].message.content == text
try:
    litellm.completion(**{**ask, "model": "openai/no-such-model"})
except litellm.NotFoundError as error:
    assert error.status_code == 404
else:
    raise AssertionError("an unknown model was answered")
print(json.dumps(text))
"""


async def test_litellm(one: Gate, two: Gate) -> None:
    python = await asyncio.to_thread(venv_with, LITELLM_PACKAGE)
    env = {"BASE_URL": one.url, "KEY": one.key, "MODEL": MODEL, "LITELLM_LOCAL_MODEL_COST_MAP": "True"}
    out = await run(python, "-c", LITELLM, env=env)
    assert json.loads(out.splitlines()[-1]) == await whole_text(two)


class Llm:
    """Simon Willison's command ``llm``, with the models file that its page describes."""

    def __init__(self, python: Path, folder: Path, gate: Gate) -> None:
        self._program = python.parent / "llm"
        self._env = {"LLM_USER_PATH": str(folder)}
        model = {"model_id": "rivers", "model_name": MODEL, "api_base": f"{gate.url}/v1", "api_key_name": "ours"}
        (folder / "extra-openai-models.yaml").write_text(yaml.safe_dump([{**model, "supports_tools": True}]))
        (folder / "keys.json").write_text(json.dumps({"ours": gate.key}))

    async def told(self, *arguments: str) -> str:
        return await run(self._program, *arguments, env=self._env)

    async def answered(self) -> list[str]:
        """The answer streamed and whole, without the white space around it."""
        assert "rivers" in await self.told("models")
        ask = ["prompt", "-m", "rivers", "-o", "max_tokens", "20", "-o", "seed", "1", "Tell me of rivers."]
        answers = [(await self.told(*ask, *more)).strip() for more in ([], ["--no-stream"])]
        logged = json.loads(await self.told("logs", "--json", "-n", "2"))
        assert [entry["model"] for entry in logged] == ["rivers", "rivers"]
        return answers


async def test_the_command_llm(one: Gate, two: Gate, tmp_path: Path) -> None:
    python = await asyncio.to_thread(venv_with, LLM_PACKAGE)
    assert await Llm(python, tmp_path, one).answered() == [(await whole_text(two)).strip()] * 2


AGENTS = """
import asyncio, json, os
from agents import Agent, ModelSettings, OpenAIChatCompletionsModel, OpenAIResponsesModel, Runner, function_tool
from agents import set_tracing_disabled
from openai import AsyncOpenAI

set_tracing_disabled(True)
client = AsyncOpenAI(base_url=os.environ["BASE_URL"] + "/v1", api_key=os.environ["KEY"], max_retries=0)
called = []

@function_tool
def weather(city: str) -> str:
    "Tells the weather."
    called.append(city)
    return "Rain"

async def told(kind, stream):
    settings = ModelSettings(include_usage=True, extra_body={"seed": 1})
    agent = Agent(name="a", instructions="Be brief.", tools=[weather], model_settings=settings,
                  model=kind(model=os.environ["MODEL"], openai_client=client))
    before = len(called)
    if stream:
        result = Runner.run_streamed(agent, "Ask weather and tell me of rivers.")
        kinds = {event.type async for event in result.stream_events()}
        assert "raw_response_event" in kinds and "run_item_stream_event" in kinds
    else:
        result = await Runner.run(agent, "Ask weather and tell me of rivers.")
    assert len(called) == before + 1, "the tool ran once"
    assert result.final_output and len(result.raw_responses) == 2
    assert result.raw_responses[-1].usage.output_tokens > 5
    return result.final_output

async def main():
    kinds = (OpenAIResponsesModel, OpenAIChatCompletionsModel)
    print(json.dumps([await told(kind, stream) for kind in kinds for stream in (False, True)]))

asyncio.run(main())
"""


async def test_openai_agents(one: Gate) -> None:
    """An agent with a function, over Responses and over chat completions, whole and streamed."""
    python = await asyncio.to_thread(venv_with, "openai-agents==0.24.0")
    env = {"BASE_URL": one.url, "KEY": one.key, "MODEL": MODEL}
    outputs = json.loads((await run(python, "-c", AGENTS, env=env)).splitlines()[-1])
    assert len(outputs) == 4 and len(set(outputs)) == 1
