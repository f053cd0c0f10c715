"""What vLLM's own offline examples do, with the import and the model changed and nothing else.

Each function makes the calls of one of them, on the demo model.
"""

from __future__ import annotations

import asyncio
import json
import re
from enum import StrEnum

import pytest
from pydantic import BaseModel

from jaxserve import (
    LLM,
    AsyncEngineArgs,
    AsyncLLM,
    BeamSearchParams,
    Counter,
    Gauge,
    RequestOutputKind,
    SamplingParams,
    StructuredOutputsParams,
)
from jaxserve.config import EngineConfig
from tests.doc_pages import compile_little
from tests.e2e.helpers import DEMO

MODEL = "demo"
PROMPTS = ["Hello, my name is", "Once upon a time", "The capital of France is", "The cat sat on"]


@pytest.fixture(autouse=True)
def small_engines(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where a script leaves sizes to the engine, it has those of the other tests."""
    compile_little(monkeypatch)
    from_options = EngineConfig.from_options
    monkeypatch.setattr(EngineConfig, "from_options", lambda **options: from_options(**(DEMO | options)))


def test_basic_and_metrics() -> None:
    sampling_params = SamplingParams(temperature=0.8, top_p=0.95)
    llm = LLM(model=MODEL, disable_log_stats=False)
    outputs = llm.generate(PROMPTS, sampling_params)
    for prompt, output in zip(PROMPTS, outputs, strict=True):
        assert output.prompt == prompt and isinstance(output.outputs[0].text, str)
        assert 1 <= len(output.outputs[0].token_ids) <= 16
    values = {metric.name: metric.value for metric in llm.get_metrics() if isinstance(metric, Gauge | Counter)}
    assert values["jaxserve:num_requests_running"] == 0 and values["jaxserve:prefix_cache_queries"] > 0


def test_chat() -> None:
    sampling_params = SamplingParams(max_tokens=20, temperature=0.5)
    llm = LLM(model=MODEL)
    conversation = [
        {"role": "system", "content": "You are a helpful assistant"},
        {"role": "user", "content": "Hello"},
        {"role": "assistant", "content": "Hello! How can I assist you today?"},
        {"role": "user", "content": "What is a KV cache?"},
    ]
    (output,) = llm.chat(conversation, sampling_params, use_tqdm=False, lora_request=None)
    assert output.prompt and conversation[-1]["content"] in output.prompt
    conversations = [conversation for _ in range(10)]
    assert len(llm.chat(conversations, sampling_params, use_tqdm=True)) == 10
    template = "{% for m in messages %}{{ m.role }}: {{ m.content }}\n{% endfor %}"
    outputs = llm.chat(conversations, sampling_params, use_tqdm=False, chat_template=template)
    assert {output.prompt for output in outputs} == {
        "".join(f"{message['role']}: {message['content']}\n" for message in conversation)
    }
    defaults = llm.get_default_sampling_params()
    defaults = defaults.clone(max_tokens=4)
    assert len(llm.generate(PROMPTS[0], defaults)) == 1


def test_embed() -> None:
    llm = LLM(model=MODEL, enforce_eager=True, runner="pooling")
    outputs = llm.embed(PROMPTS)
    for output in outputs:
        embedding = output.outputs.embedding
        assert len(embedding) > 16 and sum(value * value for value in embedding) == pytest.approx(1)


def test_prefix_caching() -> None:
    prefix = "You are a careful teacher who answers questions of pupils about numbers. " * 4
    prompts = [prefix + prompt for prompt in PROMPTS]
    sampling_params = SamplingParams(temperature=0.0)
    regular = LLM(model=MODEL, gpu_memory_utilization=0.4, enable_prefix_caching=False)
    regular_texts = [output.outputs[0].text for output in regular.generate(prompts, sampling_params)]
    del regular
    cached = LLM(model=MODEL, enable_prefix_caching=True, gpu_memory_utilization=0.4)
    cached.generate(prompts[0], sampling_params)
    outputs = cached.generate(prompts, sampling_params)
    assert [output.outputs[0].text for output in outputs] == regular_texts
    assert all(output.num_cached_tokens for output in outputs)
    assert cached.reset_prefix_cache()
    (again,) = cached.generate([{"prompt_token_ids": outputs[0].prompt_token_ids}], sampling_params)
    assert again.num_cached_tokens == 0 and again.outputs[0].text == regular_texts[0]


class CarType(StrEnum):
    sedan = "sedan"
    suv = "SUV"
    truck = "Truck"


class CarDescription(BaseModel):
    brand: str
    model: str
    car_type: CarType


SQL = """
root ::= select_statement
select_statement ::= "SELECT " column " from " table " where " condition
column ::= "col_1 " | "col_2 "
table ::= "table_1 " | "table_2 "
condition ::= column "= " number
number ::= "1 " | "2 "
"""


def test_structured_outputs() -> None:
    llm = LLM(model=MODEL)

    def generate(structured: StructuredOutputsParams, **options: object) -> str:
        params = SamplingParams(structured_outputs=structured, temperature=0, **options)  # type: ignore[arg-type]
        return llm.generate(prompts="Classify, write or query: ", sampling_params=params)[0].outputs[0].text

    assert generate(StructuredOutputsParams(choice=["Positive", "Negative"])) in ("Positive", "Negative")
    address = generate(StructuredOutputsParams(regex=r"[a-z]{1,9}@[a-z]{1,9}\.com\n"), stop=["\n"], max_tokens=60)
    assert re.fullmatch(r"[a-z]+@[a-z]+\.com", address)
    query = generate(StructuredOutputsParams(grammar=SQL), max_tokens=60)
    assert re.fullmatch(r"SELECT col_[12]  from table_[12]  where col_[12] = [12] ", query)
    schema = CarDescription.model_json_schema() | {"additionalProperties": False}
    for name in ("brand", "model"):
        schema["properties"][name]["maxLength"] = 12  # so that the little model comes to an end
    text = generate(StructuredOutputsParams(json=schema), max_tokens=180)
    assert CarDescription(**json.loads(text)).car_type in CarType


def test_beam_search() -> None:
    llm = LLM(model=MODEL, tensor_parallel_size=1)
    params = BeamSearchParams(beam_width=3, max_tokens=6)
    outputs = llm.beam_search([{"prompt": prompt} for prompt in PROMPTS[:2]], params)
    for output in outputs:
        assert len(output.sequences) == 3 and output.sequences[0].text
        scores = [beam.cum_logprob for beam in output.sequences]
        assert all(score < 0 for score in scores)


def test_streaming() -> None:
    async def stream(engine: AsyncLLM, prompt: str, request_id: str) -> str:
        text = ""
        params = SamplingParams(
            max_tokens=20, temperature=0.8, top_p=0.95, seed=42, output_kind=RequestOutputKind.DELTA
        )
        async for output in engine.generate(request_id=request_id, prompt=prompt, sampling_params=params):
            text += "".join(completion.text for completion in output.outputs)
            if output.finished:
                break
        return text

    async def main() -> list[str]:
        engine = AsyncLLM.from_engine_args(AsyncEngineArgs(model=MODEL, enforce_eager=True))
        try:
            texts = [await stream(engine, prompt, f"stream-{at}") for at, prompt in enumerate(PROMPTS[:2])]
            assert await engine.reset_prefix_cache()
            assert await engine.get_tokenizer()
            return texts
        finally:
            engine.shutdown()

    assert all(asyncio.run(main()))
