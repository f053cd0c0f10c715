"""Engines whose weights are packed for a CPU's tiles, which are emulated where the processor has none."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve import LLM, SamplingParams
from jaxserve.core.runtime import products, sizes
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import make_dummy_params
from jaxserve.families.registry import describe_files, param_specs
from tests.pallas_kernels.cpu_library import BUILT
from tests.programs import PROGRAMS

pytestmark = BUILT
MODEL = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 192,
    "hidden_size": 64,
    "intermediate_size": 96,  # no multiple of 64: in float32 the block's first matrix stays as it is
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 128,
    "rms_norm_eps": 1e-5,
}
PROMPTS = [list(range(10, 10 + length)) for length in (1, 37, 5)]

Make = Callable[..., LLM]


@pytest.fixture
def make(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Make:
    def make(*, packed: bool = True, tied: bool = False, **options: Any) -> LLM:
        (tmp_path / "config.json").write_text(json.dumps(MODEL | {"tie_word_embeddings": tied}))
        monkeypatch.setattr(sizes, "has_tiles", lambda: packed)
        places = {"skip_tokenizer_init": True, "show_progress": False, "compilation_cache_dir": str(PROGRAMS)}
        numbers = {
            "max_num_seqs": 4,
            "max_num_batched_tokens": 64,
            "max_model_len": 128,
            "kv_cache_memory_bytes": 2**20,
        }
        return LLM(str(tmp_path), load_format="dummy", **places | numbers | options)

    return make


def answer(llm: LLM, prompts: list[list[int]]) -> list[list[int]]:
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
    outputs = llm.generate([{"prompt_token_ids": prompt} for prompt in prompts], params, use_tqdm=False)
    return [list(output.outputs[0].token_ids) for output in outputs]


def find_params(llm: LLM) -> Any:
    return llm.ready.engine.runner.params


def list_packed(llm: LLM) -> set[str]:
    paths, _ = jax.tree_util.tree_flatten_with_path(find_params(llm))
    names = (jax.tree_util.keystr(path, simple=True, separator=".") for path, _ in paths)
    return {name.removesuffix(".weight.packed") for name in names if name.endswith(".packed")}


@pytest.mark.parametrize("tied", [False, True])
def test_weights_are_kept_once_and_give_the_same_tokens(make: Make, tied: bool) -> None:
    packed, plain = make(dtype="float32", tied=tied), make(dtype="float32", tied=tied, packed=False)
    layer = {f"layers.{index}.{leaf}" for index in range(2) for leaf in ("qkv", "o", "down")}
    assert list_packed(packed) == layer | {"embed" if tied else "lm_head"} and not list_packed(plain)
    sizes_of = [sum(leaf.nbytes for leaf in jax.tree.leaves(find_params(llm))) for llm in (packed, plain)]
    assert sizes_of[0] == sizes_of[1]
    assert answer(packed, PROMPTS) == answer(plain, PROMPTS)


def test_a_row_has_the_bits_that_it_has_alone(make: Make) -> None:
    llm = make(dtype="bfloat16", tied=True, precompile_bs_paddings=[4], precompile_token_paddings=[64])
    assert {"embed", "layers.1.gate_up"} <= list_packed(llm)
    assert answer(llm, PROMPTS) == [answer(llm, [prompt])[0] for prompt in PROMPTS]


def test_updates_are_packed(make: Make) -> None:
    llm, other = make(dtype="float32"), make(dtype="float32", seed=1)
    specs = param_specs(describe_files(llm.ready.shapes.model))
    whole = make_dummy_params(specs, mesh=make_mesh(1), rules=DEFAULT_RULES, seed=1)
    expected = answer(other, PROMPTS)
    assert answer(llm, PROMPTS) != expected
    llm.update_weights(jax.device_get(whole))
    jax.tree.map(np.testing.assert_array_equal, find_params(llm), find_params(other))
    assert answer(llm, PROMPTS) == expected


def test_a_fault_leaves_matrices_as_they_are(make: Make, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(products, "find_packed_fault", lambda dtype: f"wrong in {dtype}")
    assert not list_packed(make(dtype="bfloat16"))
