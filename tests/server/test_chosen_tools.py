"""Reasoning and calls that the model chooses itself, to the end, through the clients of OpenAI and Anthropic.

The model answers from a script. In Python each answer and event is checked against the type that its client publishes.
"""

from __future__ import annotations

import json
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import anthropic
import openai
import pytest
from anthropic.types import Message, MessageTokensCount, RawMessageStreamEvent
from openai.types.chat import ChatCompletion, ChatCompletionChunk
from openai.types.responses import Response, ResponseStreamEvent
from pydantic import BaseModel, TypeAdapter

from tests.node_packages import install_packages
from tests.scripted import scenario
from tests.scripted.running import PAGE_SIZE, run_script
from tests.server.running import RunningServer

NODE = Path(__file__).parent / "node"
streams = pytest.mark.parametrize("is_streamed", [False, True])


@pytest.fixture(scope="module")
def scripted(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    with run_script(tmp_path_factory.mktemp("script"), scenario.SCRIPT) as server:
        yield server


@pytest.fixture(scope="module")
def client(scripted: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{scripted.url}/v1", api_key="none", max_retries=0)


@pytest.fixture(scope="module")
def claude(scripted: RunningServer) -> anthropic.Anthropic:
    return anthropic.Anthropic(base_url=scripted.url, api_key="none", max_retries=0)


def check(kind: Any, value: BaseModel) -> None:
    """The value has the published type, which the client itself does not check, without conversions."""
    TypeAdapter(kind).validate_python(value.model_dump(exclude_unset=True, by_alias=True), strict=True)


@streams
def test_chat(client: openai.OpenAI, is_streamed: bool) -> None:
    def ask(messages: list[Any]) -> Any:
        options: Any = {"model": "demo", "messages": messages, "tools": scenario.TOOLS}
        if not is_streamed:
            answer = client.chat.completions.create(**options)
            check(ChatCompletion, answer)
            return answer
        with client.chat.completions.stream(**options, stream_options={"include_usage": True}) as stream:
            for event in stream:
                if event.type == "chunk":
                    check(ChatCompletionChunk, event.chunk)
            return stream.get_final_completion()

    messages: list[Any] = [{"role": "user", "content": scenario.ASK}]
    called = ask(messages)
    message, usage = called.choices[0].message, called.usage
    calls = [(call.function.name, json.loads(call.function.arguments)) for call in message.tool_calls]
    assert calls == scenario.CALLS and called.choices[0].finish_reason == "tool_calls"
    assert message.reasoning == scenario.REASONING and usage.completion_tokens_details.reasoning_tokens > 0
    messages.append(message)  # as users do: with all that the client has put there
    for each in message.tool_calls:
        result = scenario.RESULTS[each.function.name]
        messages.append({"role": "tool", "tool_call_id": each.id, "content": result})
    answer = ask(messages)
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == (scenario.ANSWER, "stop")
    assert usage.prompt_tokens // PAGE_SIZE * PAGE_SIZE <= answer.usage.prompt_tokens_details.cached_tokens


@streams
def test_responses(client: openai.OpenAI, is_streamed: bool) -> None:
    tools: list[Any] = [{"type": "function", "strict": True, **function} for function in scenario.FUNCTIONS]

    def ask(items: list[Any]) -> Any:
        options: Any = {"model": "demo", "input": items, "tools": tools, "include": ["reasoning.encrypted_content"]}
        if not is_streamed:
            answer = client.responses.create(**options)
            check(Response, answer)
            return answer
        for event in client.responses.create(**options, stream=True):
            check(ResponseStreamEvent, event)
        return event.response

    question = {"role": "user", "content": scenario.ASK}
    called = ask([question])
    thought, *calls = called.output
    assert [(call.name, json.loads(call.arguments)) for call in calls] == scenario.CALLS
    assert thought.content[0].text == scenario.REASONING
    assert called.usage.output_tokens_details.reasoning_tokens > 0
    results = [
        {"type": "function_call_output", "call_id": call.call_id, "output": scenario.RESULTS[call.name]}
        for call in calls
    ]
    answer = ask([question, *called.output, *results])
    assert [item.type for item in answer.output] == ["reasoning", "message"]
    assert answer.output_text == scenario.ANSWER and answer.status == "completed"
    assert called.usage.input_tokens // PAGE_SIZE * PAGE_SIZE <= answer.usage.input_tokens_details.cached_tokens


@streams
def test_messages(claude: anthropic.Anthropic, is_streamed: bool) -> None:
    functions = [{**function, "strict": True} for function in scenario.FUNCTIONS]
    tools = [{"input_schema": each.pop("parameters"), **each} for each in functions]

    def ask(messages: list[Any]) -> Any:
        options: Any = {"model": "demo", "messages": messages, "tools": tools}
        count = claude.messages.count_tokens(**options)
        check(MessageTokensCount, count)
        options |= {"max_tokens": 300, "thinking": {"type": "adaptive"}}
        if is_streamed:
            for event in claude.messages.create(**options, stream=True):
                check(RawMessageStreamEvent, event)
            with claude.messages.stream(**options) as stream:
                message: Any = stream.get_final_message()
        else:
            message = claude.messages.create(**options)
            check(Message, message)
        assert message.usage.input_tokens + message.usage.cache_read_input_tokens == count.input_tokens
        return message

    question = {"role": "user", "content": scenario.ASK}
    called = ask([question])
    thought, *calls = called.content
    assert [(call.name, call.input) for call in calls] == scenario.CALLS and called.stop_reason == "tool_use"
    assert thought.thinking == scenario.REASONING and called.usage.output_tokens_details.thinking_tokens > 0
    results = [
        {"type": "tool_result", "tool_use_id": call.id, "content": scenario.RESULTS[call.name]} for call in calls
    ]
    answer = ask([question, {"role": "assistant", "content": called.content}, {"role": "user", "content": results}])
    assert [block.type for block in answer.content] == ["thinking", "text"]
    assert (answer.content[1].text, answer.stop_reason) == (scenario.ANSWER, "end_turn")


def test_the_clients_for_node(scripted: RunningServer) -> None:
    command = [install_packages(NODE), "chosen.mjs", scripted.url, scenario.describe()]
    done = subprocess.run(command, cwd=NODE, capture_output=True, text=True, check=False, timeout=120)
    assert done.returncode == 0, done.stdout + done.stderr
    assert len(re.findall(r"^ok ", done.stdout, re.MULTILINE)) == 6
