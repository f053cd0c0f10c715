"""Pydantic AI on Responses, chat and Messages."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from tests.scripted import scenario
from tests.server.running import RunningServer

pydantic_ai = pytest.importorskip("pydantic_ai", reason="it is in the environment of make test-agents")
from pydantic_ai.messages import ThinkingPart, ToolReturnPart  # noqa: E402
from pydantic_ai.models.anthropic import AnthropicModel  # noqa: E402
from pydantic_ai.models.openai import OpenAIChatModel, OpenAIResponsesModel  # noqa: E402
from pydantic_ai.providers.anthropic import AnthropicProvider  # noqa: E402
from pydantic_ai.providers.openai import OpenAIProvider  # noqa: E402

pytestmark = pytest.mark.parametrize("api", ["responses", "chat", "messages"])


class Weather(BaseModel, extra="forbid"):
    city: scenario.City
    hot: bool


def make_agent(server: RunningServer, api: str, **options: Any) -> Any:
    if api == "messages":
        model: Any = AnthropicModel("demo", provider=AnthropicProvider(base_url=server.url, api_key="none"))
    else:
        kind = OpenAIResponsesModel if api == "responses" else OpenAIChatModel
        model = kind("demo", provider=OpenAIProvider(base_url=f"{server.url}/v1", api_key="none"))
    return pydantic_ai.Agent(model, instructions="Be brief.", retries=0, **options)


def list_parts(messages: Any, kind: type) -> list[Any]:
    return [part for message in messages for part in message.parts if isinstance(part, kind)]


@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_tools_to_the_end(scripted: RunningServer, api: str, is_streamed: bool) -> None:
    agent = make_agent(scripted, api, tools=[scenario.get_weather, scenario.get_time])

    async def run() -> tuple[str, Any]:
        if not is_streamed:
            whole = await agent.run(scenario.ASK)
            return whole.output, whole
        async with agent.run_stream(scenario.ASK) as result:
            return "".join([delta async for delta in result.stream_text(delta=True)]), result

    output, result = asyncio.run(run())
    assert output == scenario.ANSWER
    results = [part.content for part in list_parts(result.all_messages(), ToolReturnPart)]
    assert results == list(scenario.RESULTS.values())
    thought = list_parts(result.all_messages(), ThinkingPart)
    raw = [text for part in thought for text in (part.provider_details or {}).get("raw_content", ())]  # of Responses
    assert scenario.REASONING in [*raw, *(part.content for part in thought)]
    usage = result.usage
    assert (usage.requests, usage.tool_calls) == (2, 2) and usage.output_tokens > 0
    assert 0 < usage.cache_read_tokens < usage.input_tokens


def test_forms_of_the_demo_model(demo: RunningServer, api: str) -> None:
    """As a forced tool, and as the form of an answer, which of models of Messages only known ones are asked for."""
    for form in (pydantic_ai.ToolOutput, *([pydantic_ai.NativeOutput] if api != "messages" else ())):
        agent = make_agent(demo, api, output_type=form(Weather))
        settings = {"temperature": 0, "parallel_tool_calls": False} if form is pydantic_ai.ToolOutput else {}
        assert isinstance(asyncio.run(agent.run("Paris?", model_settings=settings)).output, Weather)


def test_stop_sequences_and_a_stream_that_is_left(scripted: RunningServer, api: str) -> None:
    agent = make_agent(scripted, api)
    if api != "responses":
        cut = asyncio.run(agent.run(scenario.LIST, model_settings={"stop_sequences": [scenario.STOP]}))
        assert cut.output.rstrip(", ") == scenario.CUT

    async def leave() -> None:
        async with agent.run_stream(scenario.COUNT) as result:
            async for _ in result.stream_text(delta=True):
                await result.cancel()
                break

    before = scenario.count_aborts(scripted)
    asyncio.run(leave())
    scenario.wait_for_abort(scripted, before)
