"""LiteLLM's three ways to a server of OpenAI's and Anthropic's protocols."""

from __future__ import annotations

import json
import os
from typing import Any

import pytest

from tests.scripted import scenario
from tests.server.running import RunningServer

os.environ["LITELLM_LOCAL_MODEL_COST_MAP"] = "true"  # it would fetch prices
litellm = pytest.importorskip("litellm", reason="it is in the environment of make test-agents")
chats = pytest.mark.parametrize("provider", ["hosted_vllm", "openai", "anthropic"])


def ask(server: RunningServer, provider: str, messages: Any, **options: Any) -> Any:
    """Returns the answer, made of its chunks if it is streamed."""
    base = server.url if provider == "anthropic" else f"{server.url}/v1"
    given = {"model": f"{provider}/demo", "messages": messages, "api_base": base, "api_key": "none"}
    answer = litellm.completion(**given, max_retries=0, **options)
    if not options.get("stream"):
        return answer
    return litellm.stream_chunk_builder(list(answer), messages=messages)


@chats
@pytest.mark.parametrize("is_streamed", [False, True])
def test_two_tools_to_the_end(scripted: RunningServer, provider: str, is_streamed: bool) -> None:
    options = {"tools": scenario.TOOLS, "stream": is_streamed}
    if is_streamed:
        options["stream_options"] = {"include_usage": True}
    messages: list[Any] = [{"role": "user", "content": scenario.ASK}]
    called = ask(scripted, provider, messages, **options).choices[0]
    calls = called.message.tool_calls
    assert called.finish_reason == "tool_calls" and called.message.reasoning_content == scenario.REASONING
    made = [(call.function.name, json.loads(call.function.arguments)) for call in calls]
    assert made == [("get_weather", {"city": "Paris"}), ("get_time", {})]
    results = [
        {"role": "tool", "tool_call_id": call.id, "content": scenario.RESULTS[call.function.name]} for call in calls
    ]
    answer = ask(scripted, provider, [*messages, called.message.model_dump(), *results], **options)
    assert answer.choices[0].message.content == scenario.ANSWER
    usage = answer.usage
    assert usage.total_tokens == usage.prompt_tokens + usage.completion_tokens
    assert 0 < usage.prompt_tokens_details.cached_tokens < usage.prompt_tokens


@chats
@pytest.mark.parametrize("is_streamed", [False, True])
def test_forced_calls_of_the_demo_model(demo: RunningServer, provider: str, is_streamed: bool) -> None:
    named = {"type": "function", "function": {"name": "get_weather"}}
    for choice, name in (("required", None), (named, "get_weather")):
        options = {"tools": scenario.TOOLS, "tool_choice": choice, "parallel_tool_calls": False, "temperature": 0}
        messages = [{"role": "user", "content": "Paris?"}]
        answer = ask(demo, provider, messages, stream=is_streamed, **options)
        (call,) = answer.choices[0].message.tool_calls
        assert call.function.name == (name or call.function.name)
        assert json.loads(call.function.arguments) in ({"city": "Paris"}, {"city": "Rome"}, {})


@chats
def test_stop_sequences_and_a_stream_that_is_left(scripted: RunningServer, provider: str) -> None:
    cut = ask(scripted, provider, [{"role": "user", "content": scenario.LIST}], stop=[scenario.STOP])
    assert cut.choices[0].message.content.rstrip(", ") == scenario.CUT
    before = scenario.count_aborts(scripted)
    base = scripted.url if provider == "anthropic" else f"{scripted.url}/v1"
    stream = litellm.completion(
        model=f"{provider}/demo",
        messages=[{"role": "user", "content": scenario.COUNT}],
        api_base=base,
        api_key="none",
        stream=True,
    )
    next(iter(stream))
    stream.completion_stream.close()
    del stream
    scenario.wait_for_abort(scripted, before)


@pytest.mark.parametrize("is_streamed", [False, True])
def test_responses(scripted: RunningServer, is_streamed: bool) -> None:
    def respond(items: Any) -> Any:
        answer = litellm.responses(
            model="openai/demo",
            input=items,
            api_base=f"{scripted.url}/v1",
            api_key="none",
            tools=[{"type": "function", **function} for function in scenario.FUNCTIONS],
            stream=is_streamed,
        )
        return list(answer)[-1].response if is_streamed else answer

    question = {"role": "user", "content": scenario.ASK}
    called = respond([question])
    items = [item.model_dump() for item in called.output]
    calls = [item for item in items if item["type"] == "function_call"]
    results = [
        {"type": "function_call_output", "call_id": call["call_id"], "output": scenario.RESULTS[call["name"]]}
        for call in calls
    ]
    answer = respond([question, *items, *results])
    assert answer.output[-1].content[0].text == scenario.ANSWER and answer.usage.input_tokens_details.cached_tokens > 0
