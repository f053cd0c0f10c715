"""Other ways in: orbax checkpoints, 16-bit models and caches, presets with dummy weights."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import jax.numpy as jnp
import pytest

from jaxserve import LLM
from jaxserve.errors import InvalidRequestError, TokenizerError
from tests.e2e.helpers import PROGRAMS, generate_ids, greedy, make_llm
from tests.golden_cases import load_case

ROOT = Path(__file__).parents[2]


@pytest.mark.slow
def test_orbax_checkpoint_is_the_same_model(tmp_path: Path) -> None:
    case = load_case("llama_gqa")
    script = [sys.executable, "scripts/convert_checkpoint.py", str(case.path), str(tmp_path / "orbax")]
    done = subprocess.run(script, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr[-2000:]
    llm = make_llm(replace(case, path=tmp_path / "orbax"))
    assert generate_ids(llm, case.prompts, greedy(64)) == [list(ids) for ids in case.greedy]


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bfloat16", pytest.param("float16", marks=pytest.mark.thorough)])
def test_sixteen_bit_models_follow_the_reference_for_a_while(dtype: str) -> None:
    case = load_case("llama_bf16" if dtype == "bfloat16" else "llama_f16")
    llm = make_llm(case, dtype=dtype)
    assert llm.ready.runner.params["embed"]["weight"].dtype == jnp.dtype(dtype)
    assert llm.ready.runner.device.cache[0].dtype == jnp.dtype(dtype)
    tokens = generate_ids(llm, case.prompts, greedy(8))
    agreed = sum(
        a == b for mine, theirs in zip(tokens, case.greedy, strict=True) for a, b in zip(mine, theirs, strict=False)
    )
    assert agreed >= 0.7 * 8 * len(tokens), "near ties may flip in 16 bits, most tokens do not"


@pytest.mark.slow
@pytest.mark.thorough
def test_kv_cache_may_be_narrower_than_the_model() -> None:
    case = load_case("llama_gqa")
    llm = make_llm(case, kv_cache_dtype="bfloat16")
    assert llm.ready.runner.device.cache[0].dtype == jnp.bfloat16
    assert llm.ready.runner.params["embed"]["weight"].dtype == jnp.float32
    tokens = generate_ids(llm, case.prompts, greedy(8))
    assert [row[0] for row in tokens] == [ids[0] for ids in case.greedy]


@pytest.mark.slow
def test_preset_with_dummy_weights_works_on_token_ids() -> None:
    options = {"load_format": "dummy", "max_model_len": 64, "max_num_seqs": 2, "max_num_batched_tokens": 64}
    llm = LLM("llama-30m", **options, compilation_cache_dir=str(PROGRAMS), show_progress=False)
    assert len(generate_ids(llm, [[1, 2, 3]], greedy(5))[0]) == 5
    with pytest.raises(InvalidRequestError, match="prompt_token_ids"):
        llm.generate("text")
    with pytest.raises(TokenizerError, match="there is none"):
        llm.get_tokenizer()
