"""Clients that were not written here, with tools: agents in a loop, LangChain, LiteLLM and llm."""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from qkv_engine import StructuredOutputs
from qkv_engine.loading import demo_folder

from .running import HELLO, Running
from .scripted import WEATHER, call_text, calling

pytestmark = pytest.mark.slow
QUESTION = "Is it warm in Rome?"
TOOL = {"type": "function", "function": {"name": "weather", "description": "The weather.", "parameters": WEATHER}}


@pytest.fixture(scope="module")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Running]:
    with calling(tmp_path_factory.mktemp("calling") / "demo", model=demo_folder()) as found:
        yield found


def say_in_turn(monkeypatch: pytest.MonkeyPatch, server: Running, *texts: str) -> None:
    """Lets each answer of ``server`` be the next of ``texts``, behind the model's reasoning."""
    params, left = server.engine.params, iter(texts)

    def scripted(**changes: Any) -> Any:
        return params(**{**changes, "structured_outputs": StructuredOutputs(choice=[next(left)])})

    monkeypatch.setattr(server.engine, "params", scripted)


CALLS = call_text("locate", place="Rome"), call_text("weather", city="here"), "It is 20 degrees."


@pytest.mark.parametrize("dialect", ["chat", "responses"])
@pytest.mark.parametrize("is_streamed", [False, True], ids=["whole", "streamed"])
def test_agents_call_two_tools_in_a_loop(
    tools: Running, monkeypatch: pytest.MonkeyPatch, dialect: str, is_streamed: bool
):
    agents = pytest.importorskip("agents")
    agents.set_tracing_disabled(True)
    called: list[str] = []

    @agents.function_tool
    def locate(place: str) -> str:
        """Finds a place."""
        called.append(place)
        return "here"

    @agents.function_tool
    def weather(city: str) -> str:
        """The weather of a place."""
        called.append(city)
        return "20 degrees"

    async def ask() -> str:
        client = openai.AsyncOpenAI(base_url=f"{tools.url}/v1", api_key="any", timeout=300)
        kind = {"chat": agents.OpenAIChatCompletionsModel, "responses": agents.OpenAIResponsesModel}[dialect]
        agent = agents.Agent("guide", tools=[locate, weather], model=kind("demo", client))
        async with client:
            if not is_streamed:
                return (await agents.Runner.run(agent, QUESTION)).final_output
            result = agents.Runner.run_streamed(agent, QUESTION)
            async for _ in result.stream_events():
                pass
            return result.final_output

    say_in_turn(monkeypatch, tools, *CALLS)
    assert asyncio.run(ask()) == CALLS[-1] and called == ["Rome", "here"]


def test_langchain_calls_tools_and_forces_structured_output(tools: Running, monkeypatch: pytest.MonkeyPatch):
    langchain = pytest.importorskip("langchain_openai")
    model = langchain.ChatOpenAI(base_url=f"{tools.url}/v1", api_key="any", model="demo", timeout=300)
    with monkeypatch.context() as patched:
        say_in_turn(patched, tools, call_text("weather", city="Rome"), call_text("weather", city="Rome"))
        bound = model.bind_tools([TOOL])
        (call,) = bound.invoke(QUESTION).tool_calls
        assert (call["name"], call["args"]) == ("weather", {"city": "Rome"})
        whole = None
        for chunk in bound.stream(QUESTION):
            whole = chunk if whole is None else whole + chunk
        assert whole.tool_calls[0]["args"] == {"city": "Rome"}
    schema = {"title": "size", "type": "object", "properties": {"n": {"enum": [1, 2]}}, "required": ["n"]}
    found = model.with_structured_output(schema, method="function_calling").invoke(QUESTION)
    assert found["n"] in (1, 2)


def test_litellm_calls_tools(tools: Running, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("LITELLM_LOCAL_MODEL_COST_MAP", "True")
    litellm = pytest.importorskip("litellm")
    asked = {
        "model": "openai/demo",
        "api_base": f"{tools.url}/v1",
        "api_key": "any",
        "messages": HELLO,
        "tools": [TOOL],
    }
    say_in_turn(monkeypatch, tools, call_text("weather", city="Rome"), call_text("weather", city="Rome"))
    call = litellm.completion(**asked, timeout=300).choices[0].message.tool_calls[0]
    assert json.loads(call.function.arguments) == {"city": "Rome"}
    chunks = list(litellm.completion(**asked, stream=True, timeout=300))
    (streamed,) = litellm.stream_chunk_builder(chunks).choices[0].message.tool_calls
    assert json.loads(streamed.function.arguments) == {"city": "Rome"} and streamed.function.name == "weather"


def test_llm_calls_tools_in_a_chain(tools: Running, monkeypatch: pytest.MonkeyPatch, tmp_path: Any):
    monkeypatch.setenv("LLM_USER_PATH", str(tmp_path))
    pytest.importorskip("llm")
    from llm.default_plugins.openai_models import Chat

    called: list[str] = []

    def weather(city: str) -> str:
        """The weather."""
        called.append(city)
        return "20 degrees"

    model = Chat("demo", key="any", model_name="demo", api_base=f"{tools.url}/v1", supports_tools=True)
    model.key = "any"
    for is_streamed in (True, False):
        with monkeypatch.context() as patched:
            say_in_turn(patched, tools, call_text("weather", city="Rome"), "It is 20 degrees.")
            assert model.chain(QUESTION, tools=[weather], stream=is_streamed).text().endswith("It is 20 degrees.")
    assert called == ["Rome", "Rome"]
