"""Whole engines on CPU whose layers keep pages, a recurrent state or nothing: their tokens are those of whole texts."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.core.runtime.memory import DeviceUse, cache_budget, refuse_shortage
from jaxserve.core.runtime.startup import estimate_use
from jaxserve.errors import CapacityError, ConfigError, InvalidRequestError, NonFiniteLogitsError
from jaxserve.families.registry import FAMILIES, parse_config
from jaxserve.features.choose import make_shapes
from jaxserve.request import RequestOutput
from jaxserve.sampling_params import OutputKind
from jaxserve.structured_params import StructuredOutputsParams
from tests.engine.test_grammars import Grammar
from tests.engine.toy_layers import (
    HIDDEN,
    MAX_LEN,
    TOY,
    VOCAB,
    compute_alone,
    continue_alone,
    describe_toy,
    get_params,
    make_toy,
)

HYBRID = ("recurrence", "attention", "gate", "recurrence")
ENCODER = ("both ways", "mean", "both ways", "gate", "both ways")
DRAFTS = {"method": "ngram", "num_speculative_tokens": 3}
IMPLS = ("xla", "auto")  # portable attention, and the CPU's kernels where there is a compiler


def make_ids(length: int, seed: int) -> list[int]:
    return np.random.default_rng(seed).integers(0, VOCAB, length).tolist()


PROMPTS = [make_ids(length, length) for length in (1, 7, 33, 45, 31, 8)]


def run(llm: LLM, prompts: Sequence[Sequence[int]], count: int = 12, **params: Any) -> dict[str, RequestOutput]:
    """Serves the prompts together; after each step the state of every row is that of the tokens planned for it."""
    engine, requests, done = llm.ready.engine, llm.ready.requests, {}
    final = OutputKind.FINAL_ONLY
    given = SamplingParams(temperature=0, max_tokens=count, ignore_eos=True, output_kind=final, **params)
    for index, prompt in enumerate(prompts):
        engine.add_request(requests.make(list(prompt), given, request_id=str(index)))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
        check_states(llm)
    engine.scheduler.pages.check()
    return done


def check_states(llm: LLM) -> None:
    counts = np.asarray(llm.ready.runner.device.cache[-1]["count"])
    batch = llm.ready.engine.scheduler.batch
    for sequence in (*batch.decoding, *batch.prefilling):
        planned = min(sequence.num_computed_tokens, sequence.max_num_tokens - 1)
        assert counts[:, sequence.row].tolist() == [planned] * HYBRID.count("recurrence")


@pytest.mark.parametrize("options", [{"attention_impl": "xla"}, {"max_decode_steps": 4}])
def test_a_hybrid_answers_as_if_each_text_were_whole(
    options: dict[str, Any], monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """Prompts come in chunks, pages run out, rows have several owners, and the last tokens wait for no neighbour."""
    llm = make_toy(monkeypatch, tmp_path, HYBRID, num_kv_pages_override=14, **options)
    done, params = run(llm, PROMPTS), get_params(llm)
    for index, prompt in enumerate(PROMPTS):
        assert done[str(index)].outputs[0].token_ids == continue_alone(params, HYBRID, prompt, 12), index
    assert llm.ready.engine.scheduler.counts.num_preemptions > 0
    assert len({tuple(output.outputs[0].token_ids) for output in done.values()}) == len(PROMPTS)


def test_nothing_is_shared_where_texts_are_shorter_than_the_grid_of_snapshots(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.INFO):
        llm = make_toy(monkeypatch, tmp_path, HYBRID)
    assert "prefix caching is off: snapshots of the recurrent state lie 64 tokens apart" in caplog.text
    prompt = make_ids(40, 5)
    expected = continue_alone(get_params(llm), HYBRID, prompt, 6)
    for n in (1, 1, 2):  # the same again, then siblings
        (output,) = run(llm, [prompt], 6, n=n).values()
        assert [each.token_ids for each in output.outputs] == [expected] * n and output.num_cached_tokens == 0


def test_padding_writes_no_state(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = make_toy(monkeypatch, tmp_path, HYBRID, max_decode_steps=4, compile="all")  # and runs all on padding
    (states,) = llm.ready.runner.device.cache[1:]
    assert states["sum"].shape == (2, 4, HIDDEN) and states["count"].shape == (2, 4)
    run(llm, [make_ids(9, 1)])
    counts = np.asarray(llm.ready.runner.device.cache[-1]["count"])
    assert (np.count_nonzero(counts, axis=1) == 1).all(), "only the row of the request has a state"


def test_a_token_is_computed_once_however_late_its_mask(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = make_toy(monkeypatch, tmp_path, HYBRID)
    prompt = make_ids(9, 3)
    grammar = Grammar(slow={1, 3}, forced={5: make_ids(4, 6)})
    compiler = SimpleNamespace(compile=lambda params: grammar)
    monkeypatch.setattr(type(llm.ready.requests), "grammars", compiler)
    grammar.automaton = None  # type: ignore[attr-defined]
    (output,) = run(llm, [prompt], 12, structured_outputs=StructuredOutputsParams(regex="x")).values()
    before = continue_alone(get_params(llm), HYBRID, prompt, 5)
    whole = [*before, *make_ids(4, 6)]
    assert output.outputs[0].token_ids == whole + continue_alone(get_params(llm), HYBRID, [*prompt, *whole], 3)


def test_the_plan_counts_the_state_of_each_row(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    plain, hybrid = (
        make_toy(monkeypatch, tmp_path, kinds).ready.shapes for kinds in (("attention",), ("attention", "recurrence"))
    )
    use = estimate_use(hybrid)
    assert (use.recurrent, use.rows, estimate_use(plain).recurrent) == (4 * 4 * (HIDDEN + 1), 4, 0)
    assert use.total - estimate_use(plain).total >= use.recurrent


@pytest.mark.parametrize("rows", [100, 4000])
def test_as_many_rows_as_an_error_says_fit(rows: int) -> None:
    mib, said = 2**20, rf"of {rows} rows take .*, 10\.00 MiB each"
    use = DeviceUse(50 * mib, 0, 0, 0, 0, 0, recurrent=10 * mib * rows, rows=rows, sequence=30 * mib)
    for limit in (95, 480):
        fit = (limit - 80) // 10
        with pytest.raises(CapacityError, match=rf"{said}: max_num_seqs={fit} would fit$"):
            cache_budget(limit * mib, 1.0, use)
        assert cache_budget(limit * mib, 1.0, replace(use, recurrent=10 * mib * fit, rows=fit)) >= 30 * mib
        with pytest.raises(CapacityError):
            cache_budget(limit * mib, 1.0, replace(use, recurrent=10 * mib * (fit + 1), rows=fit + 1))
        parts = {"model": 50 * mib, "max_num_seqs": 10 * mib * rows, "kv_cache_memory_bytes": 30 * mib}
        with pytest.raises(CapacityError, match=rf"^max_num_seqs: .*{said}: max_num_seqs={fit} would fit$"):
            refuse_shortage(limit * mib, parts, use)
    with pytest.raises(CapacityError, match="no max_num_seqs would fit"):
        cache_budget(80 * mib, 1.0, use)


@pytest.mark.parametrize("impl", IMPLS)
def test_an_encoder_embeds_whole_texts(impl: str, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Its attention layers write the same pages one after another, and no step computes a logit."""
    llm = make_toy(monkeypatch, tmp_path, ENCODER, attention_impl=impl, num_kv_pages_override=30, compile="all")
    programs = llm.ready.runner.device.programs
    assert not any(programs.of_kind(kind) for kind in ("sample", "logprobs", "prompt_logprobs", "loop"))
    assert [shape[0] for shape in llm.ready.plan.pool_shapes] == [30], "one layer's pages serve all"
    texts = [make_ids(length, length) for length in (1, 8, 9, MAX_LEN, 40, 33, 9)]
    texts[-1] = texts[2]
    num_compiles = llm.ready.runner.num_compiles
    found = [np.array(each.embedding) for each in llm.embed([{"prompt_token_ids": text} for text in texts])]
    params = get_params(llm)
    for text, embedding in zip(texts, found, strict=True):
        np.testing.assert_allclose(embedding, compute_alone(params, ENCODER, text)[1], atol=2e-5)
        (alone,) = llm.embed([{"prompt_token_ids": text}])
        np.testing.assert_allclose(alone.embedding, embedding, atol=1e-6)
        assert alone.num_cached_tokens == 0
    assert llm.ready.runner.num_compiles == num_compiles
    llm.ready.engine.scheduler.pages.check()


def test_an_encoder_gets_portable_attention_where_kernels_have_causal_masks_only(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    model = parse_config(describe_toy(ENCODER))
    for name in ("auto", "tpu"):
        config = EngineConfig.from_options(attention_impl=name)
        if name == "auto":
            shapes = make_shapes(config, model, "tpu", "TPU v5 lite")
            assert shapes.impl == "xla" and "causal masks only" in shapes.impl_reason and shapes.fell_back
            continue
        with pytest.raises(ConfigError, match="causal masks only"):
            make_shapes(config, model, "tpu", "TPU v5 lite")


def test_an_encoder_refuses_to_write(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = make_toy(monkeypatch, tmp_path, ENCODER)
    with pytest.raises(InvalidRequestError, match="tasks are embed, score, not generate"):
        llm.generate({"prompt_token_ids": [1, 2]}, SamplingParams(max_tokens=2))
    with pytest.raises(InvalidRequestError, match=f"has {MAX_LEN + 1}; shorten it"):
        llm.embed({"prompt_token_ids": make_ids(MAX_LEN + 1, 0)})


def test_an_embedding_that_is_not_finite_fails_alone(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    llm = make_toy(monkeypatch, tmp_path, ENCODER)
    table = get_params(llm)["embed"]["weight"].copy()
    table[11] = np.nan
    llm.ready.runner.write_params({"embed.weight": table})
    engine, make, done = llm.ready.engine, llm.ready.requests.make_embedding, {}
    for name, ids in (("bad", [5, 11, 6]), ("good", [5, 6])):
        engine.add_request(make(ids, request_id=name))
    while engine.has_unfinished:
        done |= {output.request_id: output for output in engine.step() if output.finished}
    assert isinstance(done["bad"].error, NonFiniteLogitsError) and done["bad"].embedding is None
    assert done["good"].error is None and np.isfinite(done["good"].embedding).all()


@pytest.mark.parametrize(
    ("kinds", "options", "field", "words"),
    [
        (HYBRID, {"kv_offloading_size": 0.01}, "kv_offloading_size", "keeps a recurrent state"),
        (HYBRID, {"enable_prefix_caching": True}, "enable_prefix_caching", "64 tokens apart.*max_model_len=60"),
        (HYBRID, {"mamba_block_size": 96}, "mamba_block_size", "multiple of 64.*: 64, 128 or 192"),
        (HYBRID, {"mamba_block_size": 64, "enable_prefix_caching": False}, "mamba_block_size", "leave it out"),
        (("attention",), {"mamba_block_size": 64}, "mamba_block_size", "no recurrent state"),
        (
            HYBRID,
            {"deterministic": True, "max_num_batched_tokens": 48, "precompile_token_paddings": [48]},
            "max_num_batched_tokens",
            "must be at least 64 with deterministic",
        ),
        (ENCODER, {"enable_prefix_caching": True}, "enable_prefix_caching", "computes each text whole"),
        (("attention",), {"mamba_ssm_cache_dtype": "bfloat16"}, "mamba_ssm_cache_dtype", "no recurrent state"),
        (ENCODER, {"kv_offloading_size": 0.01}, "kv_offloading_size", "computes each text whole"),
        (ENCODER, {"max_decode_steps": 4}, "max_decode_steps", "leave it out"),
        (ENCODER, {"deterministic": True}, "deterministic", "leave it out"),
        (
            ENCODER,
            {"max_num_batched_tokens": 48, "precompile_token_paddings": [48], "max_model_len": 49},
            "max_model_len",
            "and that is 48",
        ),
        (("gate", "recurrence"), {}, "model", "no layer of toy keeps keys and values in pages"),
    ],
)
def test_options_that_mean_nothing_are_refused_by_name(
    kinds: Sequence[str],
    options: dict[str, Any],
    field: str,
    words: str,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        make_toy(monkeypatch, tmp_path, kinds, **options)
    assert raised.value.field == field
