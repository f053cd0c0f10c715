"""Engines of models with recurrent states: fast paths give the tokens of slow ones, and no state outlives a request."""

from __future__ import annotations

import json
import random
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM
from jaxserve.core.runtime.startup import estimate_use
from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from tests.e2e.engines import Engines
from tests.e2e.helpers import CACHE, SIZES, LogitsRecorder, generate_ids, greedy, make_llm, run_on_devices
from tests.e2e.test_fast_equals_slow import PARAMS, PROMPTS
from tests.families.naive import make_tensors
from tests.features.speculation.drafters import write_files
from tests.golden_cases import GoldenCase, load_case

CASE = "qwen3_next"
MORE = ("qwen3_5_moe", "lfm2", "lfm2_moe", "granite_hybrid", "granite_hybrid_dense", "nemotron_h", "olmo_hybrid")
THOROUGH = pytest.mark.thorough


@pytest.fixture(scope="module")
def llm(engines: Engines) -> LLM:
    return engines.get(make_llm, CASE)


@pytest.fixture(scope="module")
def alone(engines: Engines) -> list[list[int]]:
    """Every request by itself, with whole prompts."""
    options = {"max_num_batched_tokens": 160, "precompile_token_paddings": [160], "enable_prefix_caching": False}
    whole = engines.get(make_llm, CASE, **options)
    return [generate_ids(whole, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]


@pytest.fixture(scope="module")
def alone_llm(engines: Engines) -> LLM:
    """It caches nothing."""
    return engines.get(make_llm, CASE, enable_prefix_caching=False)


@pytest.mark.parametrize(
    "options", [{}, pytest.param({"async_scheduling": False}, marks=THOROUGH), {"max_decode_steps": 5}]
)
def test_chunks_beside_neighbours_equal_whole_texts_alone(
    options: dict[str, Any], alone: list[list[int]], engines: Engines
) -> None:
    assert generate_ids(engines.get(make_llm, CASE, **options), PROMPTS, PARAMS) == alone


@pytest.mark.parametrize("caching", [True, pytest.param(False, marks=THOROUGH)])
def test_a_preempted_row_goes_on_from_its_snapshot_or_begins_again(
    caching: bool, alone: list[list[int]], engines: Engines
) -> None:
    tight = engines.get(make_llm, CASE, num_kv_pages_override=7, enable_prefix_caching=caching)
    outputs = tight.generate([{"prompt_token_ids": prompt} for prompt in PROMPTS], PARAMS, use_tqdm=False)
    assert sum(output.metrics.num_preemptions for output in outputs if output.metrics) > 0
    assert [output.outputs[0].token_ids for output in outputs] == alone


@pytest.mark.parametrize("case", ["qwen3_5", *(pytest.param(name, marks=THOROUGH) for name in MORE)])
def test_other_families_give_the_tokens_of_the_reference(case: str, engines: Engines) -> None:
    """In chunks beside each other, with fewer pages than they need, and then from snapshots."""
    golden = load_case(case)
    llm = engines.get(make_llm, case, num_kv_pages_override=9)
    counts = llm.ready.engine.scheduler.counts
    assert generate_ids(llm, golden.prompts, greedy(64)) == golden.greedy
    preempted, hits = counts.num_preemptions, counts.prefix_hits
    assert generate_ids(llm, golden.prompts[::-1], greedy(64)) == golden.greedy[::-1]
    assert preempted > 0 and counts.prefix_hits > hits


def test_siblings_go_on_from_one_snapshot(llm: LLM) -> None:
    golden, computed = load_case(CASE), llm.ready.runner.counts.useful_tokens
    (output,) = llm.generate({"prompt_token_ids": golden.prompts[4]}, greedy(20, n=3), use_tqdm=False)
    assert [each.token_ids for each in output.outputs] == [golden.greedy[4][:20]] * 3
    length = len(golden.prompts[4])
    assert llm.ready.runner.counts.useful_tokens - computed <= length + 2 * (length - 64) + 3 * 20


@pytest.mark.parametrize(("case", "length", "hit"), [(CASE, 150, 128), ("lfm2", 110, 96)])
def test_a_row_that_goes_on_from_a_snapshot_has_the_bits_of_the_whole_text(
    case: str, length: int, hit: int, engines: Engines
) -> None:
    """Both texts are cut at a multiple of 64, or 32; what is computed behind a hit is what was computed without one."""
    llm = engines.get(make_llm, case)
    prompt = np.random.default_rng(5).integers(3, 83, length).tolist()
    found = []
    for cached in (0, hit):
        with LogitsRecorder(llm) as recorder:
            (output,) = llm.generate([{"prompt_token_ids": prompt}], greedy(1), use_tqdm=False)
        assert output.num_cached_tokens == cached
        row = jax.tree.map(lambda pool: np.asarray(pool[:, 0]), llm.ready.runner.device.cache[-1])
        found.append((output.outputs[0].token_ids, recorder.logits[tuple(prompt), length - 1], row))
    jax.tree.map(np.testing.assert_array_equal, *found)


def make_long(folder: Path, *, caching: bool) -> LLM:
    """The golden checkpoint for long texts."""
    source = load_case(CASE).path
    for path in source.iterdir():
        if path.name != "config.json" and not (folder / path.name).exists():
            (folder / path.name).symlink_to(path)
    config = json.loads((source / "config.json").read_text()) | {"max_position_embeddings": 8192}
    (folder / "config.json").write_text(json.dumps(config))
    options = {"dtype": "float32", "max_model_len": 5200, "skip_tokenizer_init": True, "show_progress": False}
    return LLM(str(folder), enable_prefix_caching=caching, **(SIZES | CACHE | options))


@pytest.fixture(scope="module")
def long_llms(tmp_path_factory: pytest.TempPathFactory) -> tuple[LLM, LLM]:
    """One that caches, and one that does not."""
    folder = tmp_path_factory.mktemp("long")
    return make_long(folder, caching=True), make_long(folder, caching=False)


@pytest.mark.parametrize("length", [70, 500, 1000, pytest.param(5000, marks=THOROUGH)])
def test_the_third_request_finds_the_whole_common_beginning(length: int, long_llms: tuple[LLM, LLM]) -> None:
    """And has the tokens of an engine that caches nothing."""
    hot, cold = long_llms
    rng, cached = np.random.default_rng(length), []
    common = rng.integers(3, 83, length).tolist()
    for tail in (13, 40, 9):
        prompt = [*common, *rng.integers(3, 83, tail).tolist()]
        (output,) = hot.generate([{"prompt_token_ids": prompt}], greedy(64), use_tqdm=False)
        assert [output.outputs[0].token_ids] == generate_ids(cold, [prompt], greedy(64))
        cached.append(output.num_cached_tokens)
    assert cached[2] == length // 64 * 64
    assert cold.ready.plan.num_snapshots == 0 and cold.ready.shapes.state.max_state_copies == 0


def test_a_conversation_computes_little_more_than_what_is_new(llm: LLM, alone_llm: LLM) -> None:
    text = np.random.default_rng(8).integers(3, 83, 30).tolist()
    for turn in range(4):
        (output,) = llm.generate([{"prompt_token_ids": text}], greedy(20), use_tqdm=False)
        assert output.outputs[0].token_ids == generate_ids(alone_llm, [text], greedy(20))[0]
        assert len(text) - output.num_cached_tokens <= (10 if turn else 30) + 64
        text = [*text, *output.outputs[0].token_ids, *range(10, 20)]


_TP_SCRIPT = """
import json, sys
from tests.e2e.helpers import generate_ids, make_llm
from tests.e2e.test_fast_equals_slow import PARAMS, PROMPTS
from tests.e2e.test_hybrid import make_wide
count = int(sys.argv[1])
options = {"tensor_parallel_size": count, "num_kv_pages_override": 12}
llm = make_llm(make_wide(sys.argv[2]) if count > 2 else "qwen3_next", **options)
found = [generate_ids(llm, prompts, params) for prompts, params in ((PROMPTS, PARAMS), (PROMPTS[::-1], PARAMS[::-1]))]
counts = llm.ready.engine.scheduler.counts
assert counts.prefix_hits > 0 and counts.num_preemptions > 0
print(json.dumps([found[0], found[1][::-1]]))
"""


def make_wide(folder: str) -> GoldenCase:
    """A checkpoint of random weights in a folder, with heads for four devices."""
    golden = load_case(CASE)
    heads = {"linear_num_key_heads": 4, "linear_num_value_heads": 8, "num_key_value_heads": 4}
    raw = golden.config | heads
    write_files(Path(folder), raw, make_tensors(parse_config(raw), seed=3))
    return replace(golden, path=Path(folder))


@THOROUGH
@pytest.mark.parametrize("count", [2, 4])
def test_devices_that_share_states_share_snapshots(count: int, alone: list[list[int]], tmp_path: Path) -> None:
    """With few pages, too."""
    if count > 2:
        whole = make_llm(make_wide(str(tmp_path)), enable_prefix_caching=False)
        alone = [generate_ids(whole, [prompt], params)[0] for prompt, params in zip(PROMPTS, PARAMS, strict=True)]
    assert run_on_devices(count, _TP_SCRIPT, str(count), str(tmp_path)) == [alone, alone]


def test_the_plan_counts_rows_snapshots_and_pages(llm: LLM) -> None:
    plan, use = llm.ready.plan, estimate_use(llm.ready.shapes)
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(llm.ready.runner.device.cache))
    assert plan.num_snapshots == 16 and use.rows == 4
    assert abs(allocated - plan.bytes_per_device - use.recurrent) <= 0.02 * allocated


def test_a_thousand_requests_leave_every_slot_free(llm: LLM) -> None:
    """Some are aborted, and the last tokens are those of the first time."""
    engine, rng, golden = llm.ready.engine, random.Random(1), load_case(CASE)
    requests = llm.ready.requests
    for index in range(1000):
        prompt = [rng.randrange(3, 83) for _ in range(rng.choice([1, 3, 9, 9, 70]))]
        engine.add_request(requests.make(prompt, greedy(rng.randint(1, 2)), request_id=f"r{index}"))
    steps = 0
    while engine.has_unfinished:
        engine.step()
        steps += 1
        engine.abort_request(f"r{steps * 7 % 1000}")
    assert not engine.scheduler.batch and not engine.scheduler.batch.is_full
    assert len(engine.scheduler.batch._free_rows) == 4
    pages = engine.scheduler.pages
    assert all(pool.num_referenced == 0 for pool in pages.pools) and pages.snapshots.num_pending == 0
    pages.drop_prefix_index()
    pages.check()
    assert pages.snapshots.num_cached == 0
    assert generate_ids(llm, golden.prompts[3:], greedy(64)) == golden.greedy[3:]


@pytest.mark.thorough
def test_states_in_half_the_bytes_are_near(engines: Engines) -> None:
    golden = load_case(CASE)
    half = engines.get(make_llm, CASE, mamba_ssm_cache_dtype="bfloat16")
    assert half.ready.runner.device.cache[-1]["state"].dtype == "bfloat16"
    found = generate_ids(half, golden.prompts[3:], greedy(8))
    assert [ids[0] for ids in found] == [ids[0] for ids in golden.greedy[3:]]


@pytest.mark.parametrize(
    "scheme", ["int8_per_channel_weight_only", pytest.param("int4_per_group_weight_only", marks=THOROUGH)]
)
def test_projections_have_few_bits_and_what_decays_is_whole(scheme: str, engines: Engines) -> None:
    quantized = engines.get(make_llm, "qwen3_5", quantization=scheme)
    first, _, _, last = quantized.ready.runner.params["layers"]
    assert all(
        leaves[name]["weight"]["values"].dtype.name in ("int8", "int4")
        for leaves, name in ((first, "qkvz"), (last, "qkv"))
    )
    whole = {name: leaf for name, leaf in first.items() if name not in ("qkvz", "o", "gate_up", "down")}
    assert {"ba", "conv", "decay", "decay_bias", "out_norm"} < whole.keys()
    assert {leaf.dtype.name for leaf in jax.tree.leaves(whole)} == {"float32"}
    golden = load_case("qwen3_5")
    tokens = generate_ids(quantized, golden.prompts, greedy(16))
    assert tokens == [generate_ids(quantized, [prompt], greedy(16))[0] for prompt in golden.prompts]
    if scheme.startswith("int8"):
        same = [
            one == other
            for ids, wanted in zip(tokens, golden.greedy, strict=True)
            for one, other in zip(ids, wanted[:16], strict=True)
        ]
        assert np.mean(same) > 0.5


def test_what_such_models_cannot_have_is_refused_by_name() -> None:
    with pytest.raises(ConfigError, match="is not for qwen3_next, which keeps a recurrent state") as raised:
        make_llm(CASE, kv_offloading_size=0.01)
    assert raised.value.field == "kv_offloading_size"


@pytest.mark.parametrize(
    ("options", "field", "words"),
    [
        ({"page_size": 256}, "page_size", "256 tokens apart.*pages that fit: 8, 16, 32, 64, 128"),
        ({"mamba_block_size": 192}, "mamba_block_size", "192 tokens apart.*at most 128 fits"),
        ({"mamba_block_size": 96}, "mamba_block_size", "sizes that work: 64, 128 or 192"),
        ({"mamba_cache_mode": "none", "enable_prefix_caching": True}, "enable_prefix_caching", "keeps none"),
        ({"mamba_cache_mode": "all"}, "mamba_cache_mode", "align"),
    ],
)
def test_distances_of_snapshots_that_do_not_fit_are_refused(options: dict[str, Any], field: str, words: str) -> None:
    with pytest.raises(ConfigError, match=words) as raised:
        make_llm(CASE, **options)
    assert raised.value.field == field
