"""Against transformers' own logits processors, on stored arrays (`scripts/make_sampling_goldens.py` makes them)."""

from __future__ import annotations

from pathlib import Path

import jax.numpy as jnp
import numpy as np
import pytest

from jaxserve.core.sampling import SamplingInputs, compute_logprobs, make_row_setting, sampler_state_specs, set_row
from jaxserve.core.sampling.sampler_state import SamplerState
from jaxserve.core.sampling.thresholds import find_threshold, make_filters, search_until_exact
from tests.core.sampling.cases import shape_logits

GOLDENS = dict(np.load(Path(__file__).parents[2] / "goldens" / "sampling.npz"))
LOGITS, TOKENS = GOLDENS["logits"], GOLDENS["tokens"]
ROWS, VOCAB = LOGITS.shape
PROMPT = 4  # of each row's tokens; the others are output
BAD_WORDS = [[5], [7, 9], [1, 2, 3]]


def shape(repetition: float = 1.0, **settings: object) -> np.ndarray:
    """The logits of rows that have their tokens, shaped."""
    state = SamplerState(
        **{name: jnp.zeros(spec.shape, spec.dtype) for name, spec in vars(sampler_state_specs(ROWS, VOCAB)).items()}
    )
    for row, tokens in enumerate(TOKENS):
        setting = make_row_setting(VOCAB, tokens[:PROMPT].tolist(), tokens[PROMPT:].tolist(), **settings)
        state = set_row(state, jnp.int32(row), setting)
    blank, ones = jnp.zeros(ROWS), jnp.ones(ROWS)
    inputs = SamplingInputs(
        temperature=ones,
        top_k=jnp.zeros(ROWS, jnp.int32),
        top_p=ones,
        min_p=blank,
        seed_low=jnp.zeros(ROWS, jnp.int32),
        seed_high=jnp.zeros(ROWS, jnp.int32),
        sequence_index=jnp.zeros(ROWS, jnp.int32),
        positions=jnp.full(ROWS, TOKENS.shape[1], jnp.int32),
        presence=blank,
        frequency=blank,
        repetition=repetition * ones,
        has_edits=jnp.ones(ROWS, jnp.int32),
    )
    return np.asarray(shape_logits(jnp.asarray(LOGITS), inputs, state, jnp.arange(ROWS), vocab_size=VOCAB))


def test_repetition_penalty() -> None:
    np.testing.assert_allclose(shape(repetition=1.3), GOLDENS["repetition"], rtol=1e-5)


def test_logit_bias() -> None:
    bias = dict(zip(GOLDENS["bias_ids"].tolist(), GOLDENS["bias_values"].tolist(), strict=True))
    np.testing.assert_allclose(shape(logit_bias=bias), GOLDENS["bias"], rtol=1e-5, atol=1e-6)


def test_bad_words() -> None:
    found = shape(bad_words=BAD_WORDS)
    np.testing.assert_array_equal(np.isneginf(found), np.isneginf(GOLDENS["bad_words"]))
    assert np.isneginf(found).sum() == ROWS + 2, "one word of one token, and one row each that began the others"


@pytest.mark.parametrize(
    ("name", "top_k", "top_p", "min_p"), [("top_k", 20, 1.0, 0.0), ("top_p", 0, 0.8, 0.0), ("min_p", 0, 1.0, 0.05)]
)
def test_filters_keep_the_same_tokens(name: str, top_k: int, top_p: float, min_p: float) -> None:
    scaled = LOGITS - LOGITS.max(axis=1, keepdims=True)
    filters = make_filters(jnp.int32(top_k), jnp.float32(top_p), jnp.float32(min_p), VOCAB)
    thresholds = np.stack([find_threshold(search_until_exact, jnp.asarray(row), filters) for row in scaled])
    np.testing.assert_array_equal(scaled >= thresholds[:, None], np.isfinite(GOLDENS[name]))


def test_log_probabilities() -> None:
    found = compute_logprobs(jnp.asarray(LOGITS), vocab_size=VOCAB)
    np.testing.assert_allclose(found, GOLDENS["logprobs"], rtol=1e-5, atol=1e-5)
