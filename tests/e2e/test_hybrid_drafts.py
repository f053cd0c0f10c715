"""Drafts for models with recurrent states: tokens are those of plain steps, whoever drafts and whatever rows meet.

`test_state_farm.py` compares the states behind them, step by step.
"""

from __future__ import annotations

import json
import shutil
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core.runtime.startup import estimate_use
from jaxserve.errors import ConfigError, NonFiniteLogitsError
from jaxserve.families.registry import parse_config
from jaxserve.presets import demo_model_dir
from tests.e2e.drafters import Mode, compare, list_texts, make_scripted, run_scripted, teach
from tests.e2e.engines import Engines
from tests.e2e.helpers import CACHE, SIZES, generate_ids, greedy, make_demo, make_llm, run_on_devices
from tests.e2e.test_fast_equals_slow import PARAMS, PROMPTS
from tests.e2e.test_speculation_text import FORMS
from tests.e2e.test_speculation_text import check as check_forms
from tests.families.naive import make_tensors
from tests.features.speculation.drafters import HEAD, TARGET, make_head, write_files
from tests.golden_cases import load_case

CASE = "qwen3_next"
MORE = ("qwen3_5", "qwen3_5_moe", "lfm2", "lfm2_moe", "granite_hybrid", "nemotron_h", "olmo_hybrid")
THOROUGH = pytest.mark.thorough
INPUTS = [{"prompt_token_ids": prompt} for prompt in PROMPTS]
ALWAYS = {"num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 64, 3]]}
FEW_PAGES: dict[str, Any] = {"page_size": 8, "num_kv_pages_override": 32}
make = partial(make_llm, CASE, **FEW_PAGES)


@pytest.fixture
def plain(engines: Engines) -> LLM:
    return engines.get(make_llm, CASE)


@pytest.fixture
def drafting(engines: Engines) -> LLM:
    """It verifies three drafts of each row in every step without chunks, and has fewer pages than four rows need."""
    return engines.get(make_scripted, make, 3)


def ask(llm: LLM, inputs: Any, params: Any) -> list[Any]:
    return llm.generate(inputs, params, use_tqdm=False)


@pytest.mark.parametrize("case", [CASE, *(pytest.param(name, marks=THOROUGH) for name in MORE)])
def test_each_family_gives_the_tokens_of_the_reference(case: str, engines: Engines) -> None:
    golden = load_case(case)
    llm = engines.get(make_scripted, make if case == CASE else partial(make_llm, case), 3)
    counts = llm.ready.engine.scheduler.counts
    for mode in Mode:
        teach(llm, [[*prompt, *ids] for prompt, ids in zip(golden.prompts, golden.greedy, strict=True)], mode)
        accepted, drafts = counts.num_accepted_tokens, counts.num_draft_tokens
        assert generate_ids(llm, golden.prompts, greedy(64)) == golden.greedy
        accepted, drafts = counts.num_accepted_tokens - accepted, counts.num_draft_tokens - drafts
        assert {Mode.RIGHT: accepted == drafts, Mode.WRONG: not accepted}.get(mode, 0 < accepted < drafts)


def test_rows_that_are_cut_preempted_and_forked(plain: LLM, drafting: LLM) -> None:
    """Greedy and seeded ones, several completions, and answers that become prompts."""
    counts = drafting.ready.engine.scheduler.counts
    preempted, hits = counts.num_preemptions, counts.prefix_hits
    params = [*PARAMS[:-2], greedy(45, n=2), SamplingParams(n=3, seed=7, max_tokens=40, ignore_eos=True, logprobs=1)]
    expected = ask(plain, INPUTS, params)
    for mode in Mode:
        run_scripted(drafting, INPUTS, params, expected, mode)
    longer = [{"prompt_token_ids": text} for text in list_texts(expected)[:6]]
    later = ask(plain, longer, greedy(20, logprobs=2))
    for mode in Mode:
        run_scripted(drafting, longer, greedy(20, logprobs=2), later, mode)
    assert counts.num_preemptions > preempted and counts.prefix_hits > hits


def test_a_row_that_is_not_finite_fails_alone(plain: LLM, drafting: LLM) -> None:
    """And its slot serves the next row."""
    inputs, params = [{"prompt_token_ids": list(range(3 + index, 20 + 3 * index))} for index in range(6)], greedy(12)
    expected = ask(plain, inputs, params)
    unused = min(set(range(3, 83)) - {token for text in list_texts(expected) for token in text})
    weights = drafting.ready.runner.params["embed"]["weight"]
    runner = drafting.ready.runner
    runner.params = runner.params | {"embed": {"weight": weights.at[unused].set(jnp.nan)}}
    try:
        teach(drafting, list_texts(expected), Mode.RIGHT)
        broken = [{"prompt_token_ids": [9, 9, unused, *range(3, 10 + index)]} for index in range(3)]
        mixed = [each for pair in zip(inputs[:3], broken, strict=True) for each in pair]
        outputs = ask(drafting, [*mixed, *inputs[3:]], params)
    finally:
        runner.params = runner.params | {"embed": {"weight": weights}}
    assert all(isinstance(output.error, NonFiniteLogitsError) for output in outputs[1:6:2])
    compare([*outputs[:6:2], *outputs[6:]], expected)


def test_the_plan_counts_pending_tokens(drafting: LLM) -> None:
    plan, use = drafting.ready.plan, estimate_use(drafting.ready.shapes)
    allocated = sum(leaf.nbytes for leaf in jax.tree.leaves(drafting.ready.runner.device.cache))
    assert drafting.ready.shapes.state.max_pending == 16 and use.pending > 0
    assert abs(allocated - plan.bytes_per_device - use.recurrent - use.pending) <= 0.02 * allocated


def test_without_drafts_nothing_is_kept(plain: LLM) -> None:
    shapes = plain.ready.shapes
    assert shapes.state.max_pending == 0 and estimate_use(shapes).pending == 0
    assert not plain.ready.runner.device.programs.of_kind("settle")


@THOROUGH
def test_nothing_compiles_after_ready(plain: LLM) -> None:
    expected = ask(plain, INPUTS, PARAMS)  # which may compile
    config = {"method": "suffix", "num_speculative_tokens": 3, "num_speculative_tokens_per_batch_size": [[1, 1, 3]]}
    llm = make(compile="all", speculative_config=config, max_num_seqs=1, precompile_bs_paddings=[1])
    before = llm.ready.runner.num_programs
    compare(ask(llm, INPUTS, PARAMS), expected)
    assert any(bucket.width > 1 and count for bucket, count in llm.ready.runner.counts.steps.items())
    assert llm.ready.runner.num_compiles == 0 and llm.ready.runner.num_programs == before


def write_hybrid(folder: Path, method: str) -> tuple[str, dict[str, Any]]:
    """Writes a hybrid target of random weights and a drafter; returns the former's folder and the options."""
    sizes = {"vocab_size": HEAD["vocab_size"], "hidden_size": HEAD["hidden_size"], "num_hidden_layers": 3}
    raw = json.loads((load_case(CASE).path / "config.json").read_text()) | sizes
    raw |= {"eos_token_id": 1, "max_position_embeddings": 160}
    config: dict[str, Any] = {"method": method, **ALWAYS}
    if method == "eagle3":
        head = HEAD | {"eagle_aux_hidden_state_layer_ids": [1, 2, 3]}
        config["model"] = str(write_files(folder / "drafter", head, make_head()))
    else:
        small = TARGET | {"num_hidden_layers": 1}
        config["model"] = str(write_files(folder / "drafter", small, make_tensors(parse_config(small), seed=4)))
    return str(write_files(folder / "target", raw, make_tensors(parse_config(raw), seed=3))), config


@pytest.mark.parametrize("method", ["eagle3", pytest.param("draft_model", marks=THOROUGH)])
@THOROUGH
def test_drafters_with_weights(method: str, tmp_path: Path) -> None:
    path, config = write_hybrid(tmp_path, method)
    inputs = [{"prompt_token_ids": [token % 40 for token in prompt]} for prompt in PROMPTS]
    common: dict[str, Any] = {"dtype": "float32", "max_model_len": 160, "skip_tokenizer_init": True}
    plain, drafting = (LLM(path, **(SIZES | CACHE | common | more)) for more in ({}, {"speculative_config": config}))
    for _ in range(2):
        compare(ask(drafting, inputs, PARAMS), ask(plain, inputs, PARAMS))
    counts = drafting.ready.engine.scheduler.counts
    assert 0 < counts.num_accepted_tokens < counts.num_draft_tokens and counts.prefix_hits > 0


def test_a_drafter_that_keeps_a_state_is_refused() -> None:
    """It would have to take back its own drafts."""
    config = {"method": "draft_model", "model": str(load_case(CASE).path), **ALWAYS}
    with pytest.raises(ConfigError, match="qwen3_next keeps a recurrent state") as raised:
        make_llm(CASE, speculative_config=config)
    assert raised.value.field == "speculative_config.model"


def write_text_model(folder: Path) -> str:
    """A hybrid with the tokenizer of the demo model, for random weights."""
    demo = demo_model_dir()
    own = json.loads((demo / "config.json").read_text())
    shared = {name: own[name] for name in ("vocab_size", "eos_token_id")} | {"max_position_embeddings": 384}
    raw = json.loads((load_case(CASE).path / "config.json").read_text()) | shared
    for path in demo.glob("tokenizer*"):
        shutil.copy(path, folder)
    (folder / "config.json").write_text(json.dumps(raw))
    return str(folder)


@THOROUGH
def test_grammars_and_forced_text_beside_drafts(tmp_path: Path) -> None:
    make = partial(make_demo, write_text_model(tmp_path), load_format="dummy")
    drafting = make_scripted(make, 3)
    tallies = check_forms(make(), drafting, FORMS)
    assert tallies[Mode.RIGHT].accepted == tallies[Mode.RIGHT].drafts > 100


@THOROUGH
def test_states_of_16_bits_are_rounded_behind_each_token(engines: Engines) -> None:
    """As between plain steps, so tokens stay the same."""
    golden = load_case(CASE)
    half = partial(make_llm, CASE, mamba_ssm_cache_dtype="bfloat16")
    expected = generate_ids(engines.get(half), golden.prompts, greedy(64))
    drafting = make_scripted(half, 3)
    for mode in Mode:
        teach(drafting, [[*prompt, *ids] for prompt, ids in zip(golden.prompts, expected, strict=True)], mode)
        assert generate_ids(drafting, golden.prompts, greedy(64)) == expected


_TP_SCRIPT = """
import json, sys
from functools import partial
from tests.e2e.drafters import *
from tests.e2e.helpers import generate_ids, greedy, make_llm
from tests.golden_cases import load_case
case, count = sys.argv[1], int(sys.argv[2])
golden = load_case(case)
llm = make_scripted(partial(make_llm, case, tensor_parallel_size=count), 3)
found = []
for mode in (Mode.RIGHT, Mode.MIXED):
    teach(llm, [[*p, *g] for p, g in zip(golden.prompts, golden.greedy)], mode)
    found.append(generate_ids(llm, golden.prompts, greedy(64)))
assert llm.ready.engine.scheduler.counts.num_accepted_tokens > 0
print(json.dumps(found))
"""


@THOROUGH
@pytest.mark.parametrize(("case", "count"), [(CASE, 2), ("lfm2", 4), ("granite_hybrid", 2)])
def test_devices_share_pending_tokens(case: str, count: int) -> None:
    assert run_on_devices(count, _TP_SCRIPT, case, str(count)) == [load_case(case).greedy] * 2
