"""OpenAI's Agents SDK on Responses, which is its default, and on chat."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest

from tests.scripted import scenario
from tests.server.running import RunningServer

agents = pytest.importorskip("agents", reason="openai-agents is in the environment of make test-agents")
openai = pytest.importorskip("openai")
APIS = {"responses": agents.OpenAIResponsesModel, "chat": agents.OpenAIChatCompletionsModel}
pytestmark = pytest.mark.parametrize("api", APIS)
agents.set_tracing_disabled(True)


def make_agent(server: RunningServer, api: str, **settings: Any) -> Any:
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)
    options = {name: settings.pop(name) for name in ("tool_use_behavior",) if name in settings}
    return agents.Agent(
        name="helper",
        instructions="Be brief.",
        model=APIS[api](model="demo", openai_client=client),
        tools=[agents.function_tool(scenario.get_weather), agents.function_tool(scenario.get_time)],  # strict
        model_settings=agents.ModelSettings(include_usage=True, **settings),
        **options,
    )


async def run(agent: Any, question: str, is_streamed: bool) -> Any:
    if not is_streamed:
        return await agents.Runner.run(agent, question)
    result = agents.Runner.run_streamed(agent, question)
    async for _ in result.stream_events():
        pass
    return result


@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_tools_to_the_end(scripted: RunningServer, api: str, is_streamed: bool) -> None:
    result = asyncio.run(run(make_agent(scripted, api), scenario.ASK, is_streamed))
    assert result.final_output == scenario.ANSWER
    kinds = [item.type for item in result.new_items if item.type != "reasoning_item"]
    assert kinds == [*["tool_call_item"] * 2, *["tool_call_output_item"] * 2, "message_output_item"]
    outputs = [item.output for item in result.new_items if item.type == "tool_call_output_item"]
    assert outputs == list(scenario.RESULTS.values())
    thought = [item.raw_item for item in result.new_items if item.type == "reasoning_item"]
    assert scenario.REASONING in [part.text for item in thought for part in [*item.summary, *(item.content or ())]]
    usage = result.context_wrapper.usage
    assert (usage.requests, usage.total_tokens) == (2, usage.input_tokens + usage.output_tokens)
    assert usage.input_tokens_details.cached_tokens > 0 and usage.output_tokens_details.reasoning_tokens > 0


@pytest.mark.parametrize("is_streamed", [False, True])
@pytest.mark.parametrize("choice", ["required", "get_weather"])
def test_forced_calls_of_the_demo_model(demo: RunningServer, api: str, is_streamed: bool, choice: str) -> None:
    settings = {"tool_choice": choice, "parallel_tool_calls": False, "temperature": 0.0}
    agent = make_agent(demo, api, tool_use_behavior="stop_on_first_tool", **settings)
    agent.tools[0].on_invoke_tool = keep_arguments
    result = asyncio.run(run(agent, "Paris?", is_streamed))
    (call,) = [item.raw_item for item in result.new_items if item.type == "tool_call_item"]
    arguments = json.loads(call.arguments)
    if call.name == "get_weather" or choice != "required":
        assert (call.name, arguments) in [("get_weather", {"city": city}) for city in ("Paris", "Rome")]
    else:
        assert (call.name, arguments) == ("get_time", {})


async def keep_arguments(_: Any, arguments: str) -> str:
    return arguments


def test_stop_sequences_and_a_stream_that_is_left(scripted: RunningServer, api: str) -> None:
    async def leave() -> None:
        result = agents.Runner.run_streamed(make_agent(scripted, api), scenario.COUNT)
        async for event in result.stream_events():
            if event.type == "raw_response_event" and event.data.type == "response.output_text.delta":
                result.cancel()

    if api == "chat":
        cut = asyncio.run(run(make_agent(scripted, api, extra_args={"stop": scenario.STOP}), scenario.LIST, False))
        assert cut.final_output.rstrip(", ") == scenario.CUT
    before = scenario.count_aborts(scripted)
    asyncio.run(leave())
    scenario.wait_for_abort(scripted, before)
