"""Compares a kernel with the definition of its rule on the device that is to serve with it."""

from __future__ import annotations

from functools import partial

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.recurrent.api import advance_states
from pallas_kernels.recurrent.spec import RuleShape, RuleTokens, StateRows

_LAYERS, _LAYER, _SLOTS = 2, 1, 5
_CHUNKS = (1, 70, 0, 3, 2)  # tokens of the rows of a step
_LIMITS = {"float32": 1e-4, "bfloat16": 0.03}  # of the largest number, by the states' dtype


def recur(tokens: RuleTokens, state: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """The answers [t, N, B] and the state, as the pool keeps it, behind the tokens of a text, by the definition, in
    float64."""
    group, is_delta = tokens.v.shape[1] // tokens.q.shape[1], tokens.beta is not None
    q, k, v, decay = (np.asarray(each, np.float64) for each in tokens[:4])
    q, k = (np.repeat(each, group, axis=1) for each in (q, k))
    answers, state = np.zeros(v.shape), np.asarray(state, np.float64)
    state = state if is_delta else state.swapaxes(1, 2)
    for at in range(len(v)):
        state = state * np.exp(decay[at])[:, None, None]
        change = v[at]
        if is_delta:
            change = tokens.beta[at][:, None] * (change - np.einsum("nab,na->nb", state, k[at]))
        state = state + k[at][:, :, None] * change[:, None]
        answers[at] = np.einsum("nab,na->nb", state, q[at])
    return answers, state if is_delta else state.swapaxes(1, 2)


def cut(tokens: RuleTokens, span: slice) -> RuleTokens:
    """Some tokens."""
    return RuleTokens(*(None if each is None else each[span] for each in tokens))


def find_fault(impl: str, shape: RuleShape, num_rows: int, device: jax.Device | None = None) -> str | None:
    """What is wrong with a kernel on the device, in words for users; None if its values are right.

    Runs a step of single tokens, with as many tokens as `num_rows`, and one with chunks, with the shape's.
    """
    decode, mixed = min(num_rows, len(_CHUNKS) - 1), _fit_chunks(min(num_rows, len(_CHUNKS)), shape.num_tokens)
    for num_tokens, lengths in ((num_rows, (1,) * decode), (shape.num_tokens, mixed)):
        try:
            error = _measure_error(impl, shape, num_tokens, num_rows, lengths, device)
        except Exception as raised:  # whatever a compiler or a driver raises
            text = str(raised).strip() or "without a word"
            return f"{type(raised).__name__}: {text.splitlines()[0][:300]}"
        if not error <= _LIMITS[shape.state_dtype]:  # NaN included
            return f"states or answers of rows of {lengths} tokens differ by {error:.3g} of the largest number"
    return None


def _fit_chunks(num_rows: int, num_tokens: int) -> tuple[int, ...]:
    lengths, room = [], num_tokens
    for length in _CHUNKS[:num_rows]:
        lengths.append(min(length, room))
        room -= lengths[-1]
    return tuple(lengths)


def _measure_error(
    impl: str, shape: RuleShape, num_tokens: int, num_rows: int, lengths: tuple[int, ...], device: jax.Device | None
) -> float:
    """The largest difference from the definition.

    The second row begins, the fourth is not written, as where tokens are left pending; what is nobody's is NaN.
    """
    rng, used = np.random.default_rng(0), sum(lengths)
    starts = np.full(num_rows + 1, used, np.int32)
    starts[: len(lengths) + 1] = np.cumsum((0, *lengths))
    read, write = np.full((2, num_rows), _SLOTS, np.int32)
    write[: len(lengths)] = np.arange(len(lengths))
    read[: len(lengths)] = np.arange(len(lengths))
    read[1:2], write[3:4] = _SLOTS, _SLOTS
    tokens = _draw_tokens(rng, shape, num_tokens, used)
    pool = np.asarray(rng.standard_normal((_LAYERS, _SLOTS, shape.heads, *shape.state), np.float32)).astype(
        jnp.dtype(shape.state_dtype)
    )
    expected, answers = pool.astype(np.float64), np.zeros((num_tokens, shape.heads, shape.value_dim))
    for row, length in enumerate(lengths):
        span = slice(starts[row], starts[row] + length)
        before = expected[_LAYER, row] * (row != 1)
        answers[span], after = recur(cut(tokens, span), before)
        if length and write[row] < _SLOTS:
            expected[_LAYER, row] = after
    arrays = jax.device_put((tokens, pool, StateRows(starts, read, write)), device)
    run = jax.jit(partial(_apply, impl), donate_argnums=1)
    found = [np.asarray(each, np.float64) for each in run(*arrays)]
    return max(
        float(np.max(np.abs(got - want)) / np.max(np.abs(want)))
        for got, want in zip(found, (answers, expected), strict=True)
    )


def _apply(impl: str, tokens: RuleTokens, pool: jax.Array, rows: StateRows) -> tuple[jax.Array, jax.Array]:
    return advance_states(tokens, pool, _LAYER, rows, impl=impl)


def _draw_tokens(rng: np.random.Generator, shape: RuleShape, num_tokens: int, used: int) -> RuleTokens:
    q, k = rng.standard_normal((2, num_tokens, shape.keys, shape.key_dim), np.float32)
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    v = rng.standard_normal((num_tokens, shape.heads, shape.value_dim), np.float32)
    decay, beta = rng.random((2, num_tokens, shape.heads), np.float32)
    for each in (q, k, v, decay, beta):
        each[used:] = np.nan
    return RuleTokens(q, k, v, -decay, beta if shape.rule == "delta" else None)
