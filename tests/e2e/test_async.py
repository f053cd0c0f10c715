"""`AsyncLLM`: streams, errors of one request, aborts, and shutdown."""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import AsyncIterator, Iterator

import pytest

from jaxserve import AsyncLLM, OutputKind, RequestOutput, SamplingParams
from jaxserve.errors import EngineStoppedError, InvalidRequestError, WeightsError
from tests.e2e.engines import Engines
from tests.e2e.helpers import DEMO, make_demo, read_weights

OPTIONS = DEMO | {"compile": "used", "show_progress": False}  # a server compiles all: tests/server
QUESTION = [{"role": "user", "content": "What is a KV cache?"}]


@pytest.fixture(scope="module")
def llm() -> Iterator[AsyncLLM]:
    engine = AsyncLLM(**OPTIONS)
    yield engine
    scheduler = engine._ready.engine.scheduler
    engine.shutdown()
    assert not scheduler.has_unfinished and all(pool.num_referenced == 0 for pool in scheduler.pages.pools)
    engine.shutdown()  # twice is no fault


async def collect(stream: AsyncIterator[RequestOutput]) -> list[RequestOutput]:
    return [output async for output in stream]


def test_streams_give_what_generate_gives(llm: AsyncLLM, engines: Engines) -> None:
    prompts = ["Once upon a time", "There was a", "In the morning", "A", "name: Ada"]
    params = SamplingParams(temperature=0, max_tokens=20, output_kind=OutputKind.DELTA)

    async def run() -> list[list[RequestOutput]]:
        return await asyncio.gather(*(collect(llm.generate(prompt, params)) for prompt in prompts))

    streams = asyncio.run(run())
    plain, whole_params = engines.get(make_demo), SamplingParams(temperature=0, max_tokens=20)
    expected = plain.generate(prompts, whole_params, use_tqdm=False)
    for stream, whole in zip(streams, expected, strict=True):
        assert "".join(output.outputs[0].text for output in stream) == whole.outputs[0].text
        assert [i for output in stream for i in output.outputs[0].token_ids] == whole.outputs[0].token_ids
        assert stream[-1].finished and len(stream) > 1


def test_what_an_engine_says_of_itself(llm: AsyncLLM) -> None:
    before = llm.stats()
    asyncio.run(collect(llm.generate("Once upon a time", SamplingParams(temperature=0, max_tokens=4))))
    after, cache = llm.stats(), llm.view.describe_cache()
    assert (llm.max_model_len, llm.model.max_model_len, llm.limits.max_num_seqs) == (384, 384, 4)
    assert after.num_steps > before.num_steps and after.num_running == 0
    assert cache["num_pages"] == max(pool.total for pool in after.pools) + 1, "the null page is one of them"
    assert (cache["block_size"], cache["num_gpu_blocks"]) == (cache["page_size"], max(p.total for p in after.pools))
    assert cache["num_host_pages"] == after.host.total == 0
    assert (
        llm.tokenizer is asyncio.run(llm.get_tokenizer()) and llm.defaults.params == llm.get_default_sampling_params()
    )
    assert llm.view.seconds_to_admit() == 0.0, "nothing waits"


def test_chat_is_cumulative_by_default(llm: AsyncLLM) -> None:
    outputs = asyncio.run(collect(llm.chat(QUESTION, SamplingParams(temperature=0, max_tokens=40))))
    texts = [output.outputs[0].text for output in outputs]
    assert all(later.startswith(earlier) for earlier, later in itertools.pairwise(texts))
    assert outputs[-1].metrics is not None and outputs[-1].metrics.first_token_time is not None


def test_chat_takes_what_the_server_takes(llm: AsyncLLM) -> None:
    tool = {"type": "function", "function": {"name": "look_up", "parameters": {"type": "object", "properties": {}}}}
    template = (
        "{{ tools[0].function.name }} {{ enable_thinking }} {{ add_generation_prompt }} {{ messages[-1].content }}"
    )
    begun = [*QUESTION, {"role": "assistant", "content": "It is a"}]
    short = SamplingParams(temperature=0, max_tokens=4)

    async def run() -> list[RequestOutput]:
        streams = (
            llm.chat(
                QUESTION,
                short,
                tools=[tool],
                chat_template=template,
                chat_template_kwargs={"enable_thinking": False},
                priority=2,
                service_tier="flex",
                cache_salt="a",
                timeout=60,
            ),
            llm.chat(begun, short, continue_final_message=True),
            llm.generate("Once", SamplingParams(max_tokens=200, ignore_eos=True), priority=1, timeout=1e-6),
        )
        return [(await collect(stream))[-1] for stream in streams]

    shaped, continued, late = asyncio.run(run())
    assert shaped.prompt == "look_up False True What is a KV cache?"
    assert continued.prompt is not None and continued.prompt.endswith("It is a")
    assert late.outputs[0].finish_reason == "timeout"


def test_a_bad_request_fails_alone(llm: AsyncLLM) -> None:
    async def run() -> list[object]:
        good = collect(llm.generate("Once", SamplingParams(temperature=0, max_tokens=10)))
        too_long = collect(llm.generate({"prompt_token_ids": [5] * 400}))
        no_tokens = collect(llm.generate({"prompt_token_ids": []}))
        return await asyncio.gather(good, too_long, no_tokens, return_exceptions=True)

    good, too_long, no_tokens = asyncio.run(run())
    assert isinstance(good, list) and len(good[-1].outputs[0].token_ids) == 10
    assert isinstance(too_long, InvalidRequestError) and "maximum context length is 384" in str(too_long)
    assert isinstance(no_tokens, InvalidRequestError)


def test_a_fault_of_the_host_reaches_everybody_and_nobody_hangs() -> None:
    engine = AsyncLLM(**OPTIONS)

    def fail() -> None:
        raise ZeroDivisionError("a bug")

    async def run() -> list[object]:
        started = asyncio.Event()

        async def read() -> None:
            async for _ in engine.generate("Once", SamplingParams(max_tokens=200, ignore_eos=True)):
                started.set()

        running = asyncio.create_task(read())
        await started.wait()
        engine._ready.engine.scheduler.plan = fail  # type: ignore[method-assign, assignment]
        late = collect(engine.generate("Once", SamplingParams(max_tokens=2)))
        return await asyncio.wait_for(asyncio.gather(running, late, return_exceptions=True), timeout=60)

    for outcome in asyncio.run(run()):
        assert isinstance(outcome, EngineStoppedError) and "a bug" in str(outcome)
    engine.shutdown()


def test_abort_and_leaving_early_free_the_rows(llm: AsyncLLM) -> None:
    params = SamplingParams(temperature=0, max_tokens=200, ignore_eos=True)

    async def run() -> str | None:
        async for _ in llm.generate("Once upon a time", params):
            break
        reason = None
        async for output in llm.generate("Once upon a time", params, request_id="mine"):
            if len(output.outputs[0].token_ids) >= 3:
                await llm.abort("mine")
            reason = output.outputs[0].finish_reason
        await llm.abort("mine")  # it has ended: nothing happens
        await llm.abort("never seen")
        return reason

    assert asyncio.run(run()) == "abort"
    again = asyncio.run(collect(llm.generate("Once", SamplingParams(temperature=0, max_tokens=3))))
    assert again[-1].finished


def test_weights_change_under_streams(llm: AsyncLLM) -> None:
    """Readers get what ends meanwhile, and the others go on with the new weights."""
    params = SamplingParams(temperature=0, max_tokens=100, ignore_eos=True, output_kind=OutputKind.DELTA)
    weights = read_weights(llm)

    async def run(running: str) -> list[RequestOutput]:
        outputs = []
        async for output in llm.generate("Once upon a time", params):
            if not outputs:
                await llm.update_weights(weights, running=running)  # type: ignore[arg-type]
            outputs.append(output)
        return outputs

    for running, reason in (("requeue", "length"), ("abort", "abort")):
        *_, last = asyncio.run(run(running))
        assert last.finished and last.outputs[0].finish_reason == reason
    assert last.metrics is not None and last.metrics.num_preemptions == 0
    with pytest.raises(WeightsError):
        asyncio.run(llm.update_weights({}))
