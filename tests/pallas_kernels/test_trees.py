"""Drafts as trees: a chain is what a causal mask says, bit by bit, and what cannot do trees says so."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import AttnShape, KVSpec, choose_layout, prepare_batch, resolve_impl
from pallas_kernels.backends import find_backend
from pallas_kernels.mosaic_gpu.key_tiles import KeyTiles
from pallas_kernels.testing.case import Case, Inputs, largest_error, make_inputs
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from pallas_kernels.trees import see_ancestors

BF16 = KVSpec(1, 64, 64, "bfloat16")
# Trees behind whole tiles, in the middle of one, and over the edge between two.
CASE = Case("", ((128, 6), (9, 1), (125, 7)), 2, BF16, max_tokens=16, max_rows=3, max_query_len=8, tree=True)
SHAPE = AttnShape(4, replace(BF16, head_dim=128), "bfloat16", tree=True)


def make_chains(inputs: Inputs) -> np.ndarray:
    """[T, 2] u32 for rows of at most 31 tokens: each token sees all before it."""
    places = np.arange(inputs.q.shape[0]) - np.repeat(inputs.query_start_loc, [*np.diff(inputs.query_start_loc), 2])
    return np.stack([2 ** (places + 1) - 1, 0 * places], axis=1).astype(np.uint32)


@pytest.mark.parametrize("impl", ["xla", "gpu_interpret", pytest.param("ampere_interpret", marks=pytest.mark.thorough)])
def test_a_chain_has_the_bits_of_a_causal_mask(impl: str, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(CASE)
    chain, _ = run_case(CASE, replace(inputs, ancestors=make_chains(inputs)), impl=impl)
    causal, _ = run_case(replace(CASE, tree=False), replace(inputs, ancestors=None), impl=impl)
    tree, _ = run_case(CASE, inputs, impl=impl)
    found = [np.asarray(out[: inputs.num_tokens], np.float32) for out in (chain, causal, tree)]
    np.testing.assert_array_equal(found[0], found[1])
    assert not np.array_equal(found[0], found[2])
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()


@pytest.mark.thorough
def test_a_kernel_that_forgets_its_trees_is_found(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(KeyTiles, "see_ancestors", lambda _, numbers, tree: numbers < 64)
    inputs = make_inputs(CASE)
    out, _ = run_case(CASE, inputs, impl="gpu_interpret")
    expected, _ = attend_by_formula(CASE, inputs)
    assert largest_error(CASE, out, expected, inputs.num_tokens) > 1


def test_words_are_read_bit_by_bit() -> None:
    words = jnp.asarray([[1 << 31 | 5, 1 << 31 | 2]], jnp.uint32)
    seen = np.flatnonzero(see_ancestors(words, jnp.arange(-2, 64)[None])[0, 0]) - 2
    assert seen.tolist() == [-2, -1, 0, 2, 31, 33, 63]


@pytest.mark.parametrize(
    ("impl", "kind", "shape", "words"),
    [
        ("tpu", "TPU v6 lite", SHAPE, "causal masks only"),
        ("gpu", "NVIDIA H200", replace(SHAPE, spec=KVSpec(1, 576, 64, "bfloat16", value_dim=512)), "latents has no"),
    ],
)
def test_kernels_without_trees_give_way(impl: str, kind: str, shape: AttnShape, words: str) -> None:
    name, reason = resolve_impl(None, shape, platform=impl, device_kind=kind)
    assert name == "xla" and words in reason


def test_the_cpu_kernel_has_no_trees() -> None:
    obstacle = find_backend("cpu").module.find_obstacle(replace(SHAPE, spec=replace(BF16, layout="plain")))
    assert obstacle is not None


def prepare(shape: AttnShape, **options: Any) -> None:
    meta = np.zeros((2, 4), np.int32), np.zeros(2, np.int32), np.zeros(3, np.int32), np.zeros(3, np.int32)
    prepare_batch(*meta, num_tokens=64, shape=shape, **options)


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"max_query_len": 4}, "which is True, and needs them"),
        ({"max_query_len": 4, "ancestors": jnp.zeros((64, 2), jnp.int32)}, r"must be uint32 \[64, 2\], got int32"),
        ({"max_query_len": 65, "ancestors": jnp.zeros((64, 2), jnp.uint32)}, "at most 64 tokens a row"),
        ({"max_query_len": None, "ancestors": jnp.zeros((64, 2), jnp.uint32)}, "max_query_len is None"),
    ],
)
def test_words_that_do_not_fit_are_refused(options: dict[str, Any], words: str) -> None:
    with pytest.raises(ValueError, match=words):
        prepare(SHAPE, impl="xla", **options)
    with pytest.raises(ValueError, match="which is False"):
        prepare(replace(SHAPE, tree=False), impl="xla", max_query_len=4, ancestors=jnp.zeros((64, 2), jnp.uint32))


@pytest.mark.parametrize("impl", ["gpu_interpret", "ampere_interpret"])
def test_trees_of_chunks_are_refused(impl: str) -> None:
    shape = replace(SHAPE, spec=replace(SHAPE.spec, layout=choose_layout(impl, SHAPE.spec)))
    ancestors = jnp.zeros((64, 2), jnp.uint32)
    prepare(shape, impl=impl, max_query_len=16, ancestors=ancestors)
    with pytest.raises(ValueError, match=r"4 query heads per KV head .* at most 16 tokens a row, max_query_len is 17"):
        prepare(shape, impl=impl, max_query_len=17, ancestors=ancestors)


def test_trees_need_causal_masks_without_windows() -> None:
    with pytest.raises(ValueError, match="without trees"):
        replace(SHAPE, window=9)
    with pytest.raises(ValueError, match=r"tree is for causal"):
        replace(SHAPE, causal=False)
