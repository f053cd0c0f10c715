"""The sampler's meaning in float64, by sorting: which tokens a row keeps, and with what probability it draws them."""

from __future__ import annotations

import numpy as np


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
