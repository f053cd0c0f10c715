"""LangChain's agents, which LangGraph runs, on Responses, chat and Messages."""

from __future__ import annotations

from typing import Any

import pytest
from pydantic import BaseModel

from tests.scripted import scenario
from tests.server.running import RunningServer

agents = pytest.importorskip("langchain.agents", reason="langchain is in the environment of make test-agents")
from langchain_anthropic import ChatAnthropic  # noqa: E402
from langchain_openai import ChatOpenAI  # noqa: E402

TOOLS = [scenario.get_weather, scenario.get_time]
pytestmark = pytest.mark.parametrize("api", ["responses", "chat", "messages"])


class Weather(BaseModel, extra="forbid"):
    """The weather in a city."""

    city: scenario.City
    hot: bool


def connect(server: RunningServer, api: str, **options: Any) -> Any:
    given = {"model": "demo", "api_key": "none", "max_retries": 0, **options}
    if api == "messages":
        return ChatAnthropic(base_url=server.url, **given)
    return ChatOpenAI(base_url=f"{server.url}/v1", use_responses_api=api == "responses", stream_usage=True, **given)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_tools_to_the_end(scripted: RunningServer, api: str, is_streamed: bool) -> None:
    agent = agents.create_agent(connect(scripted, api), TOOLS, system_prompt="Be brief.")
    asked: Any = {"messages": [{"role": "user", "content": scenario.ASK}]}
    if is_streamed:
        values, pieces = {}, []
        for mode, part in agent.stream(asked, stream_mode=["messages", "values"]):
            if mode == "values":
                values = part
            else:
                pieces.append(part[0].text)
        assert "".join(pieces).endswith(scenario.ANSWER)
    else:
        values = agent.invoke(asked)
    _, called, *results, answer = values["messages"]
    assert [(call["name"], call["args"]) for call in called.tool_calls] == [
        ("get_weather", {"city": "Paris"}),
        ("get_time", {}),
    ]
    assert [result.content for result in results] == list(scenario.RESULTS.values())
    assert answer.text == scenario.ANSWER
    usage = answer.usage_metadata
    assert usage["total_tokens"] == usage["input_tokens"] + usage["output_tokens"]
    assert 0 < usage["input_token_details"]["cache_read"] < usage["input_tokens"]
    blocks = [block["type"] for block in called.content_blocks]
    assert blocks.count("tool_call") == 2 and ("reasoning" in blocks) is (api != "chat")  # chat's class drops it


@pytest.mark.parametrize("is_streamed", [False, True])
def test_forced_calls_of_the_demo_model(demo: RunningServer, api: str, is_streamed: bool) -> None:
    model = connect(demo, api, temperature=0, max_tokens=200)
    for choice in ("any", "get_weather"):
        bound = model.bind_tools(TOOLS, tool_choice=choice, parallel_tool_calls=False)
        if is_streamed:
            first, *rest = bound.stream("Paris?")
            answer = sum(rest, start=first)
        else:
            answer = bound.invoke("Paris?")
        (call,) = answer.tool_calls
        assert call["name"] in ("get_weather", "get_time")[: 2 if choice == "any" else 1]
        assert call["args"] in ({"city": "Paris"}, {"city": "Rome"}, {})


def test_forms_of_the_demo_model(demo: RunningServer, api: str) -> None:
    model = connect(demo, api, temperature=0, max_tokens=200)
    for method in ("json_schema", "function_calling"):
        assert isinstance(model.with_structured_output(Weather, method=method).invoke("Paris?"), Weather)


def test_stop_sequences_and_a_stream_that_is_left(scripted: RunningServer, api: str) -> None:
    model = connect(scripted, api)
    if api != "responses":
        assert model.invoke(scenario.LIST, stop=[scenario.STOP]).text.rstrip(", ") == scenario.CUT
    before = scenario.count_aborts(scripted)
    stream = model.stream(scenario.COUNT)
    next(piece for piece in stream if piece.text)
    stream.close()
    scenario.wait_for_abort(scripted, before)
