"""`compile="used"`: an engine that is ready sooner, and compiles what its steps need when they first need it."""

from __future__ import annotations

import random
from typing import Any

import pytest

from jaxserve import SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.rows import SampleVariant
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.errors import ConfigError, DeviceStepError
from jaxserve.server.launch import make_state
from jaxserve.server.options import ServerConfig
from tests.e2e.helpers import ALL_BUCKETS, generate_ids, greedy, make_llm

SIZES = {"max_num_batched_tokens": 96, **ALL_BUCKETS}


def test_only_what_a_prompt_needs_is_compiled_and_only_once() -> None:
    llm = make_llm("llama_gqa", **SIZES)
    programs = llm.ready.runner.device.programs
    assert list(programs.of_kind("forward")) == [Bucket(64, 4)] and len(programs) == 2
    generate_ids(llm, [[5, 6, 7]], greedy(4))
    assert list(programs.of_kind("forward")) == [Bucket(64, 4), Bucket(2, 2)]
    assert (
        list(programs.of_kind("sample")) == [(4, 1, SampleVariant.GREEDY), (2, 1, SampleVariant.GREEDY)]
        and len(programs) == 5
    )
    before = llm.ready.runner.num_compiles
    generate_ids(llm, [[5, 6, 7]], greedy(4))
    assert len(programs) == 5 and llm.ready.runner.num_compiles == before
    llm.generate([{"prompt_token_ids": [5] * 80}], greedy(2, logprobs=1, bad_words=None), use_tqdm=False)
    assert (
        Bucket(96, 4) in programs.of_kind("forward")
        and set(programs.of_kind("logprobs")) == {(2, 1), (4, 1)}
        and not programs.of_kind("prompt_logprobs")
    )


@pytest.mark.thorough
def test_tokens_are_those_of_an_engine_that_compiled_everything() -> None:
    rng = random.Random(3)
    prompts = [[rng.randrange(331) for _ in range(rng.choice([1, 3, 32, 90]))] for _ in range(10)]
    params = [
        SamplingParams(
            temperature=rng.choice([0, 0.8]),
            seed=index,
            max_tokens=rng.randint(1, 12),
            repetition_penalty=rng.choice([1.0, 1.3]),
            ignore_eos=True,
        )
        for index in range(10)
    ]
    used, closed = (make_llm("llama_gqa", **SIZES, compile=choice) for choice in ("used", "all"))
    assert generate_ids(used, prompts, params) == generate_ids(closed, prompts, params)
    assert len(used.ready.runner.device.programs) < len(closed.ready.runner.device.programs)


def test_a_program_that_does_not_compile_fails_its_step_only(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm("llama_gqa")
    expected = generate_ids(llm, [[5, 6, 7]], greedy(4))
    programs = llm.ready.runner.device.programs
    compile_missing = programs.compile_missing

    def fail(kind: str, key: Any) -> Any:
        raise MemoryError("LLVM is out of memory")

    object.__setattr__(programs, "compile_missing", fail)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6, 7]}], greedy(4, temperature=0.5), use_tqdm=False)
    assert isinstance(output.error, DeviceStepError) and "LLVM is out of memory" in str(output.error)
    assert generate_ids(llm, [[5, 6, 7]], greedy(4)) == expected
    object.__setattr__(programs, "compile_missing", compile_missing)
    assert len(generate_ids(llm, [[5, 6, 7]], greedy(4, temperature=0.5, seed=1))[0]) == 4


def test_who_builds_the_engine_chooses_where_the_option_does_not() -> None:
    auto = EngineConfig.from_options()
    assert auto.with_compile("used").compile.compile == "used" and auto.with_compile("all").compile.compile == "all"
    assert EngineConfig.from_options(compile="all").with_compile("used").compile.compile == "all"
    with pytest.raises(ConfigError, match="compile: must be one of auto, all, used, got 'some'"):
        EngineConfig.from_options(compile="some")


def test_a_server_keeps_its_programs_closed() -> None:
    make_state(EngineConfig.from_options(compile="all"), ServerConfig())
    with pytest.raises(ConfigError, match="compile: a server compiles every program before it is ready"):
        make_state(EngineConfig.from_options(compile="used"), ServerConfig())


@pytest.mark.parametrize(("max_logprobs", "count"), [(400, 331), (-1, -1)])
def test_a_vocabulary_smaller_than_max_logprobs(max_logprobs: int, count: int) -> None:
    """More likeliest tokens may be asked for than there are, 331 (`compile_logprobs` once took the limit as it was)."""
    llm = make_llm("llama_gqa", max_logprobs=max_logprobs)
    (output,) = llm.generate([{"prompt_token_ids": [5, 6]}], greedy(2, logprobs=count), use_tqdm=False)
    assert output.outputs[0].logprobs is not None
    assert [len(found) for found in output.outputs[0].logprobs] == [331, 331]


@pytest.mark.parametrize(("options", "users"), [({}, "4 users"), ({"num_kv_pages_override": 6}, "1 user")])
def test_a_start_says_what_the_engine_holds(
    options: dict[str, int], users: str, capsys: pytest.CaptureFixture[str]
) -> None:
    sizes = {"max_model_len": 64, "page_size": 16, "max_num_seqs": 4}
    make_llm("llama_gqa", kv_cache_dtype="bfloat16", show_progress=True, **sizes, **options)
    tokens = 16 * (options["num_kv_pages_override"] - 1) if options else 256
    assert (
        f"jaxserve: KV cache: {tokens} tokens in bfloat16; model in float32; max_model_len 64; 4 rows: "
        f"{users} at once with 64 tokens each\n"
    ) in capsys.readouterr().err


def test_without_progress_calls_show_none_unless_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    titles: list[str] = []

    def choose(enabled: bool) -> ShowProgress:
        return lambda title, **_: titles.append(title) or hide_progress(title) if enabled else hide_progress(title)

    monkeypatch.setattr("jaxserve.engine.llm.choose_progress", choose)
    for shown in (False, True):
        llm = make_llm("llama_gqa", show_progress=shown)
        titles.clear()
        for use_tqdm in (None, False, True):
            llm.generate([{"prompt_token_ids": [5, 6]}], greedy(2), use_tqdm=use_tqdm)
        llm.embed([[5, 6]])
        assert titles == ["Generating"] * (3 if shown else 1)
