"""The benchmark of sampling runs to its end and writes every figure that it prints; its step is the whole model's."""

from __future__ import annotations

import importlib
import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from pallas_kernels.backends import find_backend
from scripts.null_step import IMPL, NullModel, NullStep, load_model, make_step
from tests.scripts.test_bench_dry_runs import ROOT, run_script

pytestmark = pytest.mark.thorough


@pytest.mark.slow
@pytest.mark.thorough
def test_bench_sampling_measures_every_feature_beside_the_step_of_a_model(tmp_path: Path) -> None:
    file = tmp_path / "sampling.json"
    shown = run_script("bench_sampling.py", "--output-json", str(file))
    (point,) = json.loads(file.read_text())["figures"]["points"]
    assert (point["rows"], point["bucket_rows"], point["vocab_size"]) == (1, 2, 8192)
    assert "B = 1 in a bucket of 2" in shown and point["model"] == "llama-30m, 8 layers, 512 channels, float32"
    assert point["state_bytes_per_row"] > 4 * 8192
    seconds = point["seconds"]
    assert {"step", "greedy", "top_k", "full: everything", "all plain parameters", "masked: everything"} < set(seconds)
    for name, taken in seconds.items():
        assert taken > 0 and name in shown
        assert f"{100 * taken / seconds['step']:.1f} %" in shown
    assert [set(taken) for taken in point["rounds"]] == 2 * [set(seconds) - {"set_row (one)"}]
    for name in point["rounds"][0]:
        assert seconds[name] == min(taken[name] for taken in point["rounds"])


def test_rows_of_padding_ask_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(ROOT / "scripts")
    bench = importlib.import_module("bench_sampling")
    inputs = bench.make_inputs(1, 2, has_edits=1, **bench.FILTERS, **bench.PENALTIES)
    wanted = {"temperature": 1, "has_edits": 1, "positions": 1200} | bench.FILTERS | bench.PENALTIES
    for name, value in wanted.items():
        np.testing.assert_allclose(getattr(inputs, name), [value, 0], rtol=1e-6)


@pytest.fixture(scope="module")
def model() -> NullModel:
    return load_model("llama-30m")


@pytest.fixture(scope="module")
def step(model: NullModel) -> NullStep:
    return make_step(model, 2, 900)


def _logits(step: NullStep) -> np.ndarray:
    _, selected, _ = step.run(step.make_state())
    return np.asarray(selected.logits)


def _changes(model: NullModel) -> Iterator[tuple[str, dict[str, Any], Callable[[jax.Array], jax.Array]]]:
    """Yields the name of each leaf, the leaf and a change of its weight; queries, keys and values apart."""
    attention = model.decoder.layers[0].attention
    group, heads = attention.group_size, (-1, attention.num_kv_heads, attention.group_size + 2, attention.head_dim)

    def scale_slots(leaf: jax.Array, slots: slice) -> jax.Array:
        return leaf.reshape(heads).at[:, :, slots].multiply(2).reshape(leaf.shape)

    for index, layer in enumerate(model.params["layers"]):
        for slots in (slice(group), slice(group, group + 1), slice(group + 1, None)):
            yield "qkv", layer["qkv"], lambda leaf, slots=slots: scale_slots(leaf, slots)
        for name in set(layer) - {"qkv"}:
            yield name, layer[name], lambda leaf, index=index: leaf * (2 + index)
    for name in ("embed", "final_norm", "lm_head"):
        yield name, model.params[name], lambda leaf: leaf.at[..., ::2].multiply(2)


def test_every_parameter_takes_part_in_the_null_step(model: NullModel, step: NullStep) -> None:
    before = _logits(step)
    assert before.shape == (2, model.decoder.vocab_size) and np.isfinite(before).all()
    assert not np.array_equal(before[0], before[1])
    changes = list(_changes(model))
    assert len(changes) == 8 * 8 + 3
    for name, leaf, change in changes:
        weight = leaf["weight"]
        leaf["weight"] = change(weight)
        assert not np.allclose(before, _logits(step), atol=1e-5), name
        leaf["weight"] = weight
    np.testing.assert_array_equal(before, _logits(step))


def test_null_step_rotates_and_leaves_pages_and_kernels_alone(model: NullModel, step: NullStep) -> None:
    assert not np.allclose(_logits(step), _logits(make_step(model, 2, 7)), atol=1e-5)
    (cache, rows), _, _ = step.run(step.make_state())
    assert rows.num_computed.tolist() == [901, 901, 0]
    assert not any(np.any(pool) for pool in cache)
    with pytest.raises(ValueError, match="impl"):
        find_backend(IMPL)


def test_one_row_runs_as_it_does_in_an_engine(model: NullModel, step: NullStep) -> None:
    """In a bucket of two rows on a CPU, where the products of one row are slow."""
    single = make_step(model, 1, 900)
    assert single.bucket_rows == 2
    np.testing.assert_allclose(_logits(single)[0], _logits(step)[0], rtol=1e-4, atol=1e-5)
