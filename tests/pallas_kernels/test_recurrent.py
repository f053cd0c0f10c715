"""Kernels of recurrent rules in their interpreters, against recurrences in float64."""

from __future__ import annotations

import itertools
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.recurrent.api import advance_states, choose_recurrent_impl
from pallas_kernels.recurrent.self_test import cut, find_fault, recur
from pallas_kernels.recurrent.spec import RuleShape, RuleTokens, StateRows

KINDS = [("gpu_interpret", "delta"), ("gpu_interpret", "space"), ("tpu_interpret", "delta")]
KEYS, GROUP, DIM = 1, 2, 128
HEADS = KEYS * GROUP
VALUES = {"delta": 128, "space": 64}
STATES = {"delta": (HEADS, 128, 128), "space": (HEADS, 64, 128)}
TOKENS, ROWS, SLOTS, LAYERS, LAYER = 40, 5, 6, 2, 1
MOST = 1e-5  # error


def draw_tokens(random: np.random.Generator, length: int, rule: str) -> RuleTokens:
    """Random tokens; now and then with equal keys, with betas near 1 or of 2, and with no decay or a total one."""
    q, k = random.standard_normal((2, length, KEYS, DIM)).astype(np.float32)
    if random.random() < 0.4:
        k[:] = k[:1]
    q, k = (each / np.linalg.norm(each, axis=-1, keepdims=True) for each in (q, k))
    shape = (length, HEADS)
    kinds = [random.random(shape), np.full(shape, 0.999), np.full(shape, 2.0)]
    decays = [np.zeros(shape), np.full(shape, -30.0), -random.random(shape), random.choice([0.0, -1e-3, -30.0], shape)]
    beta, decay = kinds[int(random.integers(3))], decays[int(random.integers(4))]
    v = random.standard_normal((length, HEADS, VALUES[rule])).astype(np.float32)
    betas = beta.astype(np.float32) if rule == "delta" else None
    return RuleTokens(q / np.sqrt(DIM), k, v, decay.astype(np.float32), betas)


def join(texts: list[RuleTokens]) -> RuleTokens:
    """The tokens of a step: those of some rows, then nobody's, which are NaN."""
    spare = TOKENS - sum(len(text.v) for text in texts)
    parts = ([part for part in parts if part is not None] for parts in zip(*texts, strict=True))
    return RuleTokens(
        *(
            np.concatenate([*each, np.full((spare, *each[0].shape[1:]), np.nan, np.float32)]) if each else None
            for each in parts
        )
    )


def _run(tokens: RuleTokens, pool: jax.Array, starts: jax.Array, read: jax.Array, write: jax.Array, impl: str) -> Any:
    return advance_states(tokens, pool, LAYER, StateRows(starts, read, write), impl=impl)


_run_step = jax.jit(_run, static_argnames="impl")


def run(
    texts: list[RuleTokens], pool: Any, read: list[int], write: list[int], impl: str
) -> tuple[list[np.ndarray], np.ndarray]:
    """The answers of each row, and the pool."""
    lengths = [len(text.v) for text in texts]
    starts = np.full(ROWS + 1, sum(lengths), np.int32)
    starts[: len(lengths) + 1] = np.cumsum([0, *lengths])
    slots = (np.asarray(each + [SLOTS] * (ROWS - len(each)), np.int32) for each in (read, write))
    out, pool = (np.asarray(each) for each in _run_step(join(texts), pool, starts, *slots, impl=impl))
    assert not out[starts[-1] :].any(), "padding has no answer"
    return [out[first:last] for first, last in itertools.pairwise(starts)], pool


@pytest.mark.parametrize("num_steps", [8, pytest.param(100, marks=pytest.mark.thorough)])
@pytest.mark.parametrize(("impl", "rule"), KINDS)
def test_ragged_steps_equal_the_recurrence(impl: str, rule: str, num_steps: int) -> None:
    """Rows begin, go on by tokens or chunks, or have none."""
    random, pool = np.random.default_rng(num_steps), np.full((LAYERS, SLOTS, *STATES[rule]), np.nan, np.float32)
    states: dict[int, np.ndarray] = {}
    for _ in range(num_steps):
        lengths = [int(random.choice([0, 1, 1, 2, 7])) for _ in range(int(random.integers(1, ROWS + 1)))]
        texts, rows = [draw_tokens(random, length, rule) for length in lengths], random.permutation(SLOTS).tolist()
        read, write, expected = [], [], []
        for row, text in zip(rows, texts, strict=False):
            goes_on = row in states and random.random() < 0.8
            state = states[row] if goes_on else np.zeros(STATES[rule])
            read.append(row if goes_on else SLOTS)
            write.append(row)
            answers, after = recur(text, state)
            expected.append(answers)
            states |= {row: after} if len(text.v) else {}
        found, pool = run(texts, pool, read, write, impl)
        for got, want in zip(found, expected, strict=False):
            np.testing.assert_allclose(got, want, rtol=0, atol=MOST)
        for row, state in states.items():
            np.testing.assert_allclose(pool[LAYER, row], state, rtol=0, atol=MOST * max(1, np.abs(state).max()))
    assert np.isnan(pool[0]).all(), "another layer's states are not touched"


@pytest.mark.parametrize(("impl", "rule"), KINDS)
def test_any_cut_gives_the_bits_of_the_whole(impl: str, rule: str) -> None:
    """Beside any neighbours."""
    random = np.random.default_rng(1)
    text, other = draw_tokens(random, 21, rule), draw_tokens(random, 9, rule)
    pool = np.zeros((LAYERS, SLOTS, *STATES[rule]), np.float32)
    (whole, *_), left = run([text], pool, [SLOTS], [3], impl)
    pieces, at = [], 0
    for size in (1, 13, 7):
        piece = cut(text, slice(at, at + size))
        (_, found, *_), pool = run([other, piece], pool, [SLOTS, 3 if at else SLOTS], [1, 3], impl)
        pieces.append(found)
        at += size
    np.testing.assert_array_equal(np.concatenate(pieces), whole)
    np.testing.assert_array_equal(pool[LAYER, 3], left[LAYER, 3])


@pytest.mark.parametrize(("impl", "rule"), KINDS)
def test_a_state_that_is_not_finite_stays_in_its_row(impl: str, rule: str) -> None:
    random = np.random.default_rng(2)
    bad, good = draw_tokens(random, 3, rule), draw_tokens(random, 3, rule)
    bad.v[1] = np.nan
    pool = np.full((LAYERS, SLOTS, *STATES[rule]), np.nan, np.float32)
    (broken, kept, *_), _ = run([bad, good], pool, [SLOTS] * 2, [0, 1], impl)
    assert np.isnan(broken).any() and np.isfinite(kept).all()


@pytest.mark.parametrize(
    ("impl", "shape"),
    [
        ("gpu_interpret", RuleShape(2, 1, 128, 64, "float32", 8)),
        ("gpu_interpret", RuleShape(1, 2, 64, 32, "bfloat16", 8, "space")),
        ("tpu_interpret", RuleShape(3, 1, 128, 128, "bfloat16", 8)),
    ],
)
def test_the_self_test_finds_no_fault(impl: str, shape: RuleShape) -> None:
    assert find_fault(impl, shape, 5) is None


@pytest.mark.parametrize(("impl", "rule"), KINDS[1:])
def test_the_self_test_finds_wrong_values(impl: str, rule: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def forget(tokens: RuleTokens, *rest: Any, **options: Any) -> Any:
        return advance_states(tokens._replace(decay=1.01 * tokens.decay), *rest, **options)

    monkeypatch.setattr("pallas_kernels.recurrent.self_test.advance_states", forget)
    found = find_fault(impl, RuleShape(1, 1, DIM, VALUES[rule], "float32", 4, rule), 2)
    assert found is not None and "of the largest number" in found


def test_the_self_test_names_what_a_compiler_says(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> Any:
        raise RuntimeError("no such core\nmore")

    monkeypatch.setattr("pallas_kernels.recurrent.self_test.advance_states", fail)
    assert find_fault("tpu", RuleShape(1, 1, DIM, DIM, "float32", 4), 2) == "RuntimeError: no such core"


QWEN = RuleShape(16, 2, 128, 128, "float32", 2048)
NEMOTRON = RuleShape(8, 16, 128, 80, "float32", 2048, "space")


@pytest.mark.parametrize(
    ("shape", "platform", "kind", "chosen", "said"),
    [
        (QWEN, "tpu", "TPU v5 lite", "tpu", "compiled for TPU v5 lite"),
        (QWEN, "gpu", "NVIDIA H200", "gpu", "compiled for NVIDIA H200"),
        (RuleShape(30, 1, 96, 192, "float32", 2048), "gpu", "NVIDIA H200", "gpu", "compiled for NVIDIA H200"),
        (RuleShape(16, 2, 256, 128, "float32", 2048), "gpu", "NVIDIA H200", "xla", "these are of 256 and 128"),
        (NEMOTRON, "gpu", "NVIDIA H200", "xla", "values of a multiple of 32, these are of 128 and 80"),
        (replace(NEMOTRON, value_dim=64), "gpu", "NVIDIA H200", "gpu", "compiled for NVIDIA H200"),
        (NEMOTRON, "tpu", "TPU v5 lite", "xla", "XLA's operations in loops over rows and tiles"),
        (RuleShape(16, 2, 128, 128, "float16", 2048), "gpu", "NVIDIA H200", "xla", "these are of float16"),
        (QWEN, "tpu", "TPU v4", "xla", "slow here: the kernels are for Hopper and TPUs from v5e on"),
        (QWEN, "gpu", "NVIDIA A100-SXM4-40GB", "xla", "slow here: the kernels are for Hopper and TPUs from v5e on"),
        (QWEN, "cpu", "cpu", "xla", "loops over rows and tiles"),
        (
            RuleShape(16, 2, 96, 192, "float32", 2048),
            "tpu",
            "TPU v6 lite",
            "xla",
            "heads of 128 x 128, these are of 96",
        ),
        (RuleShape(16, 2, 128, 128, "float16", 2048), "tpu", "TPU v6 lite", "xla", "these are of float16"),
        (RuleShape(16, 2, 128, 128, "float32", 65536), "tpu", "TPU v6 lite", "xla", "max_num_batched_tokens"),
    ],
)
def test_what_a_device_gets(shape: RuleShape, platform: str, kind: str, chosen: str, said: str) -> None:
    name, reason = choose_recurrent_impl(shape, platform=platform, device_kind=kind)
    assert name == chosen and said in reason


def test_what_a_kernel_cannot_do_is_refused() -> None:
    tokens = RuleTokens(*map(jnp.zeros, ((4, 1, 64), (4, 1, 64), (4, 1, 64), (4, 1), (4, 1))))
    rows = StateRows(*(jnp.zeros(size, jnp.int32) for size in (3, 2, 2)))
    call = partial(advance_states, tokens, jnp.zeros((1, 2, 1, 64, 64)), 0, rows)
    with pytest.raises(ValueError, match=r"heads of 128 x 128, these are of 64 x 64"):
        call(impl="tpu_interpret")
    narrow = tokens._replace(v=jnp.zeros((4, 1, 32)))
    with pytest.raises(ValueError, match="values of a multiple of 64, these are of 64 and 32"):
        advance_states(narrow, jnp.zeros((1, 2, 1, 64, 32)), 0, rows, impl="gpu_interpret")
    with pytest.raises(ValueError, match=r"RuleShape\.rule must be one of delta, space, got 'kda'"):
        RuleShape(1, 1, 64, 64, "float32", 4, "kda")
    with pytest.raises(ValueError, match="impl must be one of"):
        call(impl="xla")
