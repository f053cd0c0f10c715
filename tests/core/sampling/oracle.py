"""The sampler's meaning, token by token: how a row is shaped, which tokens it keeps, how likely it draws them."""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from tests.core.sampling.cases import RowCase


def kept_tokens(
    logits: np.ndarray, *, temperature: float, top_k: int = 0, top_p: float = 1, min_p: float = 0, slack: float = 0
) -> np.ndarray:
    """Returns bool[V]: the tokens that min_p, then top_k, then top_p keep; ties whole.

    `slack` > 0 also keeps what float32 rounding may keep, `slack` < 0 drops what it may drop.
    """
    scaled = _scaled(logits, temperature)
    order = np.sort(scaled)[::-1]
    near = np.where(scaled == 0, 0, 2 * slack * (1 + np.minimum(np.abs(scaled), 100)))
    kept = scaled >= (np.log(min_p) if min_p > 0 else -64) - near  # -64: where the sampler stops counting
    if 0 < top_k < len(logits):
        kept &= scaled >= order[top_k - 1] - np.maximum(near, 0)  # rounding keeps the order: it can only add ties
    if top_p < 1:
        survivors = np.sort(scaled[kept])[::-1]
        mass = np.cumsum(np.exp(survivors))
        needed = np.searchsorted(mass, min(top_p + 4 * slack, 1.0) * mass[-1] * (1 - 1e-13))
        kept &= scaled >= survivors[min(needed, len(survivors) - 1)] - near
    return kept


def probabilities(logits: np.ndarray, temperature: float, **filters: float) -> np.ndarray:
    """Returns f64[V]: what a row is drawn from."""
    weights = np.where(kept_tokens(logits, temperature=temperature, **filters), np.exp(_scaled(logits, temperature)), 0)
    return weights / weights.sum()


def _scaled(logits: np.ndarray, temperature: float) -> np.ndarray:
    logits = logits.astype(np.float64)
    return (logits - logits.max()) / temperature


def shape_row(logits: np.ndarray, case: RowCase) -> np.ndarray:
    """Returns f32[V]: one row's logits after everything that comes before the temperature, as vLLM words it."""
    if not case.is_on:
        return logits
    shaped = [np.float32(value) for value in logits]
    for token in range(len(shaped)):
        if case.allowed is not None and token not in case.allowed:
            shaped[token] = np.float32(-np.inf)
    for word in case.bad_words:
        begin = word[:-1]
        if case.output[len(case.output) - len(begin) :] == begin and len(begin) <= len(case.output):
            shaped[word[-1]] = np.float32(-np.inf)
    if len(case.output) < case.min_tokens:
        for token in case.banned:
            if token < len(shaped):
                shaped[token] = np.float32(-np.inf)
    for token, bias in case.bias.items():
        shaped[token] += np.float32(bias)
    for token in set(case.prompt) | set(case.output):
        factor = np.float32(case.repetition)
        shaped[token] = shaped[token] / factor if shaped[token] > 0 else shaped[token] * factor
    for token in set(case.output):
        shaped[token] -= np.float32(case.frequency) * np.float32(case.output.count(token))
        shaped[token] -= np.float32(case.presence)
    return np.array(shaped, np.float32)
