from __future__ import annotations

import re

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.sampling import compute_logprobs, gather_logprobs, gather_prompt_logprobs
from jaxserve.core.sampling.logprobs import LogprobArrays
from tests.core.sampling.cases import make_logits

gather = jax.jit(gather_logprobs, static_argnames=("k", "vocab_size"))
compute_each = jax.jit(compute_logprobs, static_argnames="vocab_size")
SIZES = [1, 5, 37, 331, 4096]


def log_softmax(logits: np.ndarray) -> np.ndarray:
    wide = logits.astype(np.float64)
    wide -= wide.max(axis=-1, keepdims=True)
    return wide - np.log(np.exp(wide).sum(axis=-1, keepdims=True))


def assert_logprobs(found: LogprobArrays, logits: np.ndarray, ids: np.ndarray, k: int) -> None:
    expected = log_softmax(logits)
    likeliest = np.argsort(-logits, axis=-1, kind="stable")[:, :k]  # the lowest id first among equals
    np.testing.assert_array_equal(found.ids, np.concatenate([ids[:, None], likeliest], axis=1))
    np.testing.assert_allclose(
        found.values, np.take_along_axis(expected, np.asarray(found.ids), axis=1), rtol=2e-6, atol=2e-6
    )
    chosen = np.take_along_axis(logits, ids[:, None], axis=1)
    np.testing.assert_array_equal(found.rank, 1 + (logits > chosen).sum(axis=-1))


@pytest.mark.parametrize("k", [0, 1, 5, 20])
@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("kind", ["normal", "tied", "constant", "masked"])
def test_logprobs_are_numpys(kind, size, k) -> None:
    k = min(k, size)
    logits, rng = make_logits(6, size, seed=k), np.random.default_rng(size)
    if kind == "tied":
        logits = np.round(logits)
    elif kind == "constant":
        logits[:] = 3
    elif kind == "masked":
        logits[:, 1:][rng.random((6, size - 1)) < 0.9] = -np.inf
    ids = rng.integers(0, size, 6).astype(np.int32)
    ids[0] = logits[0].argmax()
    found = gather(logits, ids, k, vocab_size=size)
    assert found.values.shape == found.ids.shape == (6, k + 1) and found.rank[0] == 1
    assert_logprobs(found, logits, ids, k)


@pytest.mark.parametrize("size", SIZES)
def test_one_token_has_one_value(size) -> None:
    """Chosen, among the likeliest, or in the whole row; alone or in a batch: the same bits."""
    logits = make_logits(8, size)
    ids, k = logits.argmax(axis=-1).astype(np.int32), min(5, size)
    together = gather(logits, ids, k, vocab_size=size)
    np.testing.assert_array_equal(together.values[:, 0], together.values[:, 1])
    everything = np.asarray(compute_each(logits, vocab_size=size))
    np.testing.assert_array_equal(np.take_along_axis(everything, np.asarray(together.ids), axis=1), together.values)
    np.testing.assert_allclose(everything, log_softmax(logits), rtol=2e-6, atol=2e-6)
    for row in range(8):
        alone = gather(logits[row : row + 1], ids[row : row + 1], k, vocab_size=size)
        for left, right in zip(alone, together, strict=True):
            np.testing.assert_array_equal(left[0], right[row])


def test_padding_takes_no_part() -> None:
    logits = make_logits(4, 384)
    logits[:, 331:] = 50
    ids = np.arange(4, dtype=np.int32)
    assert_logprobs(gather(logits, ids, 20, vocab_size=331), logits[:, :331], ids, 20)
    everything = compute_each(logits, vocab_size=331)
    assert np.all(everything[:, 331:] == -np.inf) and np.isfinite(everything[:, :331]).all()


@pytest.mark.parametrize("fault", [np.nan, np.inf])
def test_a_faulty_row_has_no_logprobs_and_harms_no_other(fault) -> None:
    logits, ids = make_logits(3, 331), np.arange(3, dtype=np.int32)
    expected = gather(logits, ids, 5, vocab_size=331)
    logits[1, 200] = fault
    found = gather(logits, ids, 5, vocab_size=331)
    assert np.isnan(found.values[1]).any()
    assert np.all((found.ids >= 0) & (found.ids < 384))
    for left, right in zip(found, expected, strict=True):
        np.testing.assert_array_equal(left[::2], right[::2])


def test_more_tokens_than_there_are_is_refused() -> None:
    with pytest.raises(ValueError, match=r"^k: 332 .* 331"):
        gather_logprobs(jnp.zeros((1, 384)), jnp.zeros(1, jnp.int32), 332, vocab_size=331)


def make_head(hidden_size: int, size: int) -> np.ndarray:
    return np.random.default_rng(1).normal(size=(hidden_size, size)).astype(np.float32)


@pytest.mark.parametrize("num_tokens", [1, 63, 64, 130])
@pytest.mark.parametrize("k", [0, 3])
def test_prompt_logprobs_are_those_of_every_position(num_tokens, k) -> None:
    rng, head = np.random.default_rng(num_tokens), make_head(8, 331)
    hidden = rng.normal(size=(num_tokens, 8)).astype(np.float32)
    targets = rng.integers(0, 320, num_tokens).astype(np.int32)
    # Small integers: a product of matrices is then exact in any order, and so are the ties.
    hidden, head = np.round(hidden * 2), np.round(head * 2)
    program = jax.jit(
        lambda hidden, targets: gather_prompt_logprobs(hidden, lambda h: h @ head, targets, k, vocab_size=320)
    )
    assert_logprobs(program(hidden, targets), (hidden @ head)[:, :320], targets, k)


def test_prompt_logprobs_never_hold_all_logits() -> None:
    tokens, size = 2048, 2048
    shapes = [jax.ShapeDtypeStruct(*of) for of in (((tokens, 8), "f4"), ((tokens,), "i4"), ((8, size), "f4"))]

    def program(hidden, targets, head):
        return gather_prompt_logprobs(hidden, lambda h: h @ head, targets, 5, vocab_size=size)

    memory = jax.jit(program).lower(*shapes).compile().memory_analysis()
    assert memory.temp_size_in_bytes < tokens * size * 4 / 6


@pytest.mark.parametrize("platform", ["cpu", "cuda", "tpu"])
def test_no_platform_sorts_the_vocabulary(platform) -> None:
    logits, ids = jax.ShapeDtypeStruct((2, 8192), jnp.float32), jax.ShapeDtypeStruct((2,), jnp.int32)
    text = gather.trace(logits, ids, 20, vocab_size=8192).lower(lowering_platforms=(platform,)).as_text()
    sorted_widths = [
        int(width)
        for line in text.splitlines()
        if "top_k" in line.lower()
        for width in re.findall(r"2x(\d+)xf32", line)
    ]
    assert sorted_widths and max(sorted_widths) <= 20 * 128
    sorts = [line for line in text.splitlines() if "stablehlo.sort" in line]
    assert len(sorts) == 1 and "stablehlo.while" not in text
