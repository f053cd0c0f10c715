"""OpenAI's client with tools, reasoning and conversations, against a tiny Qwen 3.5 whose files have the published form.

Its weights are random, so a grammar makes the calls. The server compiles programs of its own: 20 CPU seconds.
"""

from __future__ import annotations

import asyncio
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

from tests.server.running import ROOT, RunningServer, run_server
from tests.tokenizers.builders import make_byte_level, write_json
from tests.tokenizers.families import FAMILIES

pytestmark = [pytest.mark.slow, pytest.mark.thorough]
GRID = 64  # tokens between snapshots
SIZES = {
    "hidden_size": 64,
    "intermediate_size": 96,
    "num_hidden_layers": 4,
    "num_attention_heads": 4,
    "head_dim": 64,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "max_position_embeddings": 2048,
}
FLAGS = (
    *("--load-format", "dummy", "--dtype", "float32", "--served-model-name", "tiny", "--seed", "1"),
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024", "--max-queue-wait", "0"),
    *("--precompile-bs-paddings", "8", "--precompile-token-paddings", "128"),
)
WEATHER = {
    "type": "object",
    "properties": {"city": {"enum": ["Paris", "Rome"]}, "hot": {"type": "boolean"}},
    "required": ["city", "hot"],
    "additionalProperties": False,
}
TOOLS: Any = [{"type": "function", "function": {"name": "get_weather", "parameters": WEATHER}}]
ASK: Any = [{"role": "system", "content": "Help."}, {"role": "user", "content": "What is the weather in Rome?"}]
PLAIN = {"chat_template_kwargs": {"enable_thinking": False}}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A multimodal checkpoint of four layers without its weights."""
    folder = tmp_path_factory.mktemp("qwen3.5")
    tokenizer = make_byte_level(folder)
    tokenizer.add_special_tokens(["<|endoftext|>"])
    marks = ("<think>", "</think>", "<tool_call>", "</tool_call>")
    tokenizer.add_tokens([AddedToken(mark, normalized=False) for mark in marks])
    tokenizer.save(str(folder / "tokenizer.json"))
    end, pad = tokenizer.token_to_id("<|im_end|>"), tokenizer.token_to_id("<|endoftext|>")
    config = json.loads((ROOT / "configs" / "models" / "qwen3.5-0.8b.json").read_text())
    text = config["text_config"]
    text |= SIZES | {"layer_types": text["layer_types"][:4], "eos_token_id": pad}
    text["vocab_size"] = tokenizer.get_vocab_size() + 8  # the published ones are padded, too
    text["rope_parameters"]["mrope_section"] = [3, 3, 2]
    write_json(folder / "config.json", config)
    write_json(folder / "generation_config.json", {"eos_token_id": [end, pad], "temperature": 1.0, "top_k": 20})
    settings = {"tokenizer_class": "Qwen2Tokenizer", "eos_token": "<|im_end|>", "pad_token": "<|endoftext|>"}
    write_json(folder / "tokenizer_config.json", settings)
    (folder / "chat_template.jinja").write_text(FAMILIES["Qwen 3.5"])
    return folder


@pytest.fixture(scope="module")
def server(model: Path) -> Iterator[RunningServer]:
    with run_server(str(model), *FLAGS) as running:
        yield running


@pytest.fixture(scope="module")
def client(server: RunningServer) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)


def chat(client: openai.OpenAI, messages: Any, **options: Any) -> Any:
    options = {"temperature": 0, "max_tokens": 120} | options
    return client.chat.completions.create(model="tiny", messages=messages, **options)


def test_a_call_its_result_and_the_next_turn(client: openai.OpenAI) -> None:
    first = chat(client, ASK, tools=TOOLS, tool_choice="required", parallel_tool_calls=False, extra_body=PLAIN)
    message = first.choices[0].message
    (call,) = message.tool_calls
    assert first.choices[0].finish_reason == "tool_calls" and call.function.name == "get_weather"
    arguments = json.loads(call.function.arguments)
    assert arguments.keys() == {"city", "hot"} and arguments["city"] in ("Paris", "Rome")
    result = {"role": "tool", "tool_call_id": call.id, "content": "It is hot in Rome. " * 8}
    messages = [*ASK, message.model_dump(exclude_none=True), result]
    found = [chat(client, messages, tools=TOOLS, extra_body=PLAIN | {"ignore_eos": True}) for _ in range(2)]
    assert found[0].choices[0].message.content == found[1].choices[0].message.content != ""
    prompts = [first.usage.prompt_tokens, *(each.usage.prompt_tokens for each in found)]
    cached = [each.usage.prompt_tokens_details.cached_tokens for each in found]
    assert 0 < cached[0] < prompts[1] and cached[0] % GRID == 0 and prompts[0] < prompts[1]
    assert cached[1] == (prompts[2] - 1) // GRID * GRID


def test_reasoning_before_a_call_and_alone(client: openai.OpenAI, model: Path) -> None:
    added = json.loads((model / "tokenizer.json").read_text())["added_tokens"]
    closer = next(token["id"] for token in added if token["content"] == "</think>")
    options = {"temperature": 1, "seed": 3, "logit_bias": {str(closer): 1}, "n": 3, "max_tokens": 300}
    options |= {"tools": TOOLS, "tool_choice": "required", "parallel_tool_calls": False}
    whole = [choice.message for choice in chat(client, ASK, **options).choices]
    assert any(message.model_dump().get("reasoning") for message in whole)
    reasoning, arguments = [""] * 3, [""] * 3
    for chunk in chat(client, ASK, **options, stream=True):
        for choice in chunk.choices:
            reasoning[choice.index] += choice.delta.model_dump().get("reasoning") or ""
            arguments[choice.index] += "".join(call.function.arguments for call in choice.delta.tool_calls or [])
    for index, message in enumerate(whole):
        assert not message.content and message.tool_calls[0].function.name == "get_weather"
        assert reasoning[index] == (message.model_dump().get("reasoning") or "")
        assert arguments[index] == message.tool_calls[0].function.arguments
    options = {"temperature": 1, "seed": 1, "logit_bias": {str(closer): -100}, "extra_body": {"ignore_eos": True}}
    cut = chat(client, ASK, max_tokens=16, **options)
    assert cut.choices[0].message.reasoning and not cut.choices[0].message.content
    assert cut.usage.completion_tokens_details.reasoning_tokens == 16


def test_images_are_refused_as_the_model_is_served_as_text(client: openai.OpenAI) -> None:
    image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
    with pytest.raises(openai.BadRequestError, match="served for text"):
        chat(client, [{"role": "user", "content": [image]}])


def test_later_turns_of_conversations_go_on_from_snapshots(server: RunningServer) -> None:
    """Six at once; each answer of the load is that of the same prompt alone."""
    client = openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="none", max_retries=0)

    async def ask(messages: Any, seed: int) -> tuple[str, int, int]:
        body = PLAIN | {"ignore_eos": True}
        answer = await client.chat.completions.create(
            model="tiny", messages=messages, temperature=1, seed=seed, max_tokens=24, extra_body=body
        )
        usage = answer.usage
        assert usage is not None and usage.prompt_tokens_details is not None
        text = answer.choices[0].message.content or ""
        return text, usage.prompt_tokens, usage.prompt_tokens_details.cached_tokens or 0

    async def converse(mark: int) -> list[tuple[Any, tuple[str, int, int]]]:
        messages: Any = [{"role": "system", "content": f"You are number {mark}. " * 6}]
        turns = []
        for turn in range(5):
            messages = [
                *messages,
                {"role": "user", "content": f"Question {turn} of {mark}: the cat sat on the mat. " * 3},
            ]
            turns.append((messages, await ask(messages, mark)))
            messages = [*messages, {"role": "assistant", "content": turns[-1][1][0]}]
        return turns

    async def run() -> None:
        conversations = await asyncio.gather(*(converse(mark) for mark in range(6)))
        # The end of a prompt, where reasoning is left out, is no part of the next, so the second may find nothing.
        later = [answer for turns in conversations for _, answer in turns[2:]]
        assert all(cached and cached % GRID == 0 for _, _, cached in later)
        assert sum(cached for _, _, cached in later) > 0.6 * sum(length for _, length, _ in later)
        for mark, turns in enumerate(conversations):
            messages, (text, length, _) = turns[-1]
            again = await ask(messages, mark)
            assert again == (text, length, (length - 1) // GRID * GRID)

    asyncio.run(run())
    assert server.metric("jaxserve:compiles_total") == 0
