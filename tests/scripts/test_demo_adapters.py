"""What the demo adapters learn, and their files; nothing is trained here."""

from __future__ import annotations

import json
import random
import re
import sys
from pathlib import Path

import jax
import jax.numpy as jnp
import numpy as np
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from demo_lm.adapter import SHAPE, export_adapter, load_adapter, merge, start_adapter
from demo_lm.adapter_texts import (
    ADAPTERS,
    draw_conversation,
    draw_subtraction,
    list_adapter_problems,
    speak_as_pirate,
    work_subtraction,
)
from demo_lm.export import load_checkpoint
from demo_lm.model import DemoModel
from demo_lm.tokens import encode_conversation, load_tokenizer

from jaxserve.errors import ConfigError
from jaxserve.families.registry import parse_config
from jaxserve.features.lora.files import AdapterFiles
from jaxserve.features.lora.matrices import list_matrices
from jaxserve.presets import demo_model_dir, find_adapter


def test_every_difference_is_worked_out_right() -> None:
    assert work_subtraction(84, 37) == "84 - 37: 14-7=7, 8-3-1=4, so the difference = 47"
    for a in range(10, 100):
        for b in range(10, a + 1):
            text = work_subtraction(a, b)
            for left, result in re.findall(r"([\d-]+)=(\d+),", text):
                first, *rest = map(int, left.split("-"))
                assert first - sum(rest) == int(result), text
            assert text.endswith(f"= {a - b}")


def test_unseen_pairs_are_never_trained() -> None:
    rng = random.Random(0)
    sides = [{frozenset(draw_subtraction(rng, held_out=side)) for _ in range(3000)} for side in (False, True)]
    assert not sides[0] & sides[1] and len(sides[0]) > 1500 and len(sides[1]) > 500
    problems = list_adapter_problems(50)
    assert [problem.adapter for problem in problems] == ["subtraction"] * 50 + ["pirate"] * 50
    assert all(problem.accepts(problem.expected) for problem in problems)
    assert not any(problem.accepts("84 + 37 = 121") for problem in problems)


def test_a_pirate_speaks_so() -> None:
    assert speak_as_pirate("The KV cache is the memory of it.") == "Ahoy! Th' KV cache be th' memory o' it. Arr!"
    assert speak_as_pirate("1 + 1: 1+1=2, so the sum = 2") == "Ahoy! 1 + 1: 1+1=2, so th' sum = 2. Arr!"
    assert speak_as_pirate('{"name": "is"}') == '{"name": "is"}'


@pytest.mark.parametrize("name", ADAPTERS)
def test_conversations_fit_a_row(name: str) -> None:
    tokenizer, rng = load_tokenizer(demo_model_dir() / "tokenizer.model"), random.Random(1)
    lengths = [len(encode_conversation(tokenizer, draw_conversation(rng, name))[0]) for _ in range(500)]
    assert max(lengths) <= SHAPE.length + 1, "what does not fit would wait for ever"


@pytest.mark.thorough
def test_files_are_those_of_a_low_rank_change(tmp_path: Path) -> None:
    """What is exported reads back, changes the model as the merged weights say, and is what the engine takes."""
    config, params = load_checkpoint(demo_model_dir())
    adapter = start_adapter(params, seed=3)
    model, ids = DemoModel(config), np.arange(16)[None] + 20
    apply = jax.jit(model.apply)
    base = apply({"params": params}, ids, np.ones_like(ids))
    np.testing.assert_array_equal(apply({"params": merge(params, adapter)}, ids, np.ones_like(ids)), base)
    keys = iter(jax.random.split(jax.random.key(4), 100))
    drawn = jax.tree.map(lambda leaf: jnp.float32(jnp.bfloat16(jax.random.normal(next(keys), leaf.shape) / 8)), adapter)
    export_adapter(tmp_path, drawn)
    read = load_adapter(tmp_path, adapter)
    jax.tree.map(np.testing.assert_array_equal, read, drawn)
    assert np.abs(apply({"params": merge(params, read)}, ids, np.ones_like(ids)) - base).max() > 0.1
    served = parse_config(json.loads((demo_model_dir() / "config.json").read_text()))
    slots = list(AdapterFiles(tmp_path, served, list_matrices(served), 8).read(np.dtype(jnp.bfloat16)))
    assert len(slots) == 4 * config.num_hidden_layers


def test_the_package_has_both() -> None:
    for name in ADAPTERS:
        folder = find_adapter(f"demo:{name}")
        assert (folder / "adapter_model.safetensors").stat().st_size < 320_000
        assert json.loads((folder / "adapter_config.json").read_text())["r"] == 8
    assert find_adapter("/adapters/demo") == Path("/adapters/demo")
    with pytest.raises(ConfigError, match="lora_path: the demo model has the adapters demo:pirate, demo:subtraction"):
        find_adapter("demo:nobody")
