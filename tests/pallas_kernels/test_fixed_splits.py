"""Fixed splits: the bits of a row's answers are the same alone and among others, at every place of the step.

Interpreted kernels, over texts whose keys, values and queries are the same in every step. They are short, so units are
made shorter, too.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cache, partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels import attend_with_update, choose_layout, pool_shape, prepare_batch
from pallas_kernels.backends import find_backend
from pallas_kernels.hopper import wgmma
from pallas_kernels.mosaic_gpu import compat, splits
from pallas_kernels.spec import AttnLayer, AttnParams, AttnShape, HeadParams, KVSpec
from pallas_kernels.testing.case import Case, largest_error, make_inputs
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.pallas_kernels.gpu_interpreter import reset_interpreter

UNIT = 128  # keys
TOKENS, ROWS, WIDTH = 128, 4, 5  # T of a mixed step, S, and pages of a row
BF16 = KVSpec(1, 64, 64, "bfloat16")
OF_128 = replace(BF16, head_dim=128)
LATENTS = KVSpec(1, 128, 64, "bfloat16", value_dim=128)


@dataclass(frozen=True)
class Row:
    """Tokens [begin, end) of a text are new, those before them are in pages."""

    text: int
    begin: int
    end: int


@dataclass(frozen=True)
class Step:
    """What the steps of a test have in common."""

    impl: str
    shape: AttnShape
    sinks: bool = False
    softcap: float | None = None

    @property
    def params(self) -> AttnParams:
        return AttnParams(self.shape.spec.head_dim**-0.5, self.shape.window, self.softcap)


@pytest.fixture(autouse=True)
def short_units(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Programs that were made with other units must not be found, nor these by other tests."""
    jax.clear_caches()
    monkeypatch.setattr(splits, "FIXED_TOKENS", UNIT)
    monkeypatch.setattr(wgmma, "multiply_qk", multiply_qk)
    yield
    jax.clear_caches()


def multiply_qk(q: jax.Ref, k: jax.Ref, while_running: Callable[[], None] = lambda: None) -> jax.Array:
    """In place of the interpreter's wgmma, which is numpy's product: there a row's bits depend on its place."""
    scores = jnp.dot(q[...], k[...].T, preferred_element_type=jnp.float32)
    compat.commit_smem()
    while_running()
    return scores


@cache
def make_text(text: int, shape: AttnShape) -> tuple[np.ndarray, ...]:
    """q, k and v of a text's tokens, and its keys and values as pages hold them."""
    rng, spec, num_tokens = np.random.default_rng(text), shape.spec, WIDTH * shape.spec.page_size
    q = rng.standard_normal((num_tokens, shape.num_heads, spec.head_dim)).astype(shape.dtype)
    rows = [rng.standard_normal((num_tokens, spec.num_kv_heads, spec.head_dim)).astype(spec.dtype) for _ in range(2)]
    k, v = rows[0], rows[0] if spec.is_latent else rows[1]
    stored = k if spec.is_latent else np.stack([k, v], axis=2).reshape(num_tokens, -1, spec.head_dim)
    return q, k, v, stored.reshape(WIDTH, spec.page_size, -1, spec.head_dim).transpose(0, 2, 1, 3)


def attend(step: Step, rows: Sequence[Row], *, is_decode: bool, config: Any = None) -> list[np.ndarray]:
    """The answers [tokens, N, V] of each row, from one step."""
    num_tokens = ROWS if is_decode else TOKENS
    spec, lens = step.shape.spec, [row.end - row.begin for row in rows]
    texts = [make_text(row.text, step.shape) for row in rows]
    pool = np.full(pool_shape(spec, 1 + ROWS * WIDTH), np.nan, np.float32).astype(spec.dtype)
    table, seq_lens = np.zeros((ROWS, WIDTH), np.int32), np.zeros(ROWS, np.int32)
    for index, (row, text) in enumerate(zip(rows, texts, strict=True)):
        table[index] = 1 + index * WIDTH + np.arange(WIDTH)
        pool[table[index]] = text[3]
        seq_lens[index] = row.end
    starts = np.concatenate([[0], np.cumsum(lens), [sum(lens)] * (ROWS - len(rows))]).astype(np.int32)

    def gather(part: int) -> np.ndarray:
        new = np.concatenate([text[part][row.begin : row.end] for row, text in zip(rows, texts, strict=True)])
        return np.pad(new, ((0, num_tokens - len(new)), (0, 0), (0, 0)))

    num_single = sum(length == 1 for length in lens)
    meta = table, seq_lens, starts, np.array([num_single, num_single, len(rows)], np.int32)
    v = None if spec.is_latent else gather(2)
    try:
        out = jax.block_until_ready(run(step, is_decode, config, gather(0), gather(1), v, pool, *meta))
    except Exception:
        reset_interpreter()
        raise
    return [np.asarray(out)[start : start + length] for start, length in zip(starts[:-1], lens, strict=False)]


@partial(jax.jit, static_argnums=(0, 1, 2))
def run(
    step: Step, is_decode: bool, config: Any, q: jax.Array, k: jax.Array, v: jax.Array, pool: jax.Array, *meta: Any
) -> jax.Array:
    options = {"num_tokens": q.shape[0], "shape": step.shape, "max_query_len": 1 if is_decode else None}
    batch = prepare_batch(*meta, impl=step.impl, config=config, **options)
    sinks = jnp.linspace(-2, 2, step.shape.num_heads) if step.sinks else None
    return attend_with_update(q, k, v, pool, batch, AttnLayer(step.params, HeadParams(sinks)))[0]


def make_step(impl: str, num_heads: int, spec: KVSpec, *, window: int | None = None, **options: Any) -> Step:
    name = f"{impl}_interpret"
    spec = replace(spec, layout=choose_layout(name, spec))
    return Step(name, AttnShape(num_heads, spec, "bfloat16", window, fixed_splits=True), **options)


def decode(text: int, length: int) -> Row:
    return Row(text, length - 1, length)


DECODE = {
    "gpu": make_step("gpu", 4, OF_128),
    "gpu, two blocks an SM, window, sinks": make_step("gpu", 2, BF16, window=150, sinks=True),
    "gpu, latents": make_step("gpu", 4, LATENTS),
    "ampere": make_step("ampere", 4, OF_128),
    "ampere, window, sinks": make_step("ampere", 2, BF16, window=150, sinks=True),
}
CHUNKS = {
    "gpu": make_step("gpu", 4, OF_128),
    "gpu, window, sinks, softcap": make_step("gpu", 4, BF16, window=50, sinks=True, softcap=3.0),
    "gpu, latents": make_step("gpu", 4, LATENTS),
    "ampere": make_step("ampere", 4, OF_128),
    "ampere, window, softcap": make_step("ampere", 4, BF16, window=50, softcap=3.0),
}


THOROUGH = pytest.mark.slow, pytest.mark.thorough


def mark(steps: dict[str, Step], *quick: str) -> list[Any]:
    """Parameters, of which CI runs the `quick` ones."""
    assert {*quick} <= {*steps}
    return [pytest.param(step, id=name, marks=() if name in quick else THOROUGH) for name, step in steps.items()]


LENGTHS = (1, 128, 300)  # one unit, one that is whole, and three


def shrink_device(step: Step) -> Any:
    """The kernels' own configuration for a device of one core, whose blocks then have several units."""
    config = find_backend(step.impl).module.default_config(step.shape)
    return replace(config, decode=replace(config.decode, num_sms=1))


@pytest.mark.parametrize("step", mark(DECODE, "gpu", "gpu, latents", "ampere, window, sinks"))
def test_decoding_rows_have_the_same_bits_alone_and_among_others(step: Step) -> None:
    config = shrink_device(step)
    alone = {length: attend(step, [decode(length, length)], is_decode=True, config=config)[0] for length in LENGTHS}
    for others in [(320, 10, 300, 128), (128, 1, 300)]:
        rows = [decode(length, length) for length in others]
        for length, answers in zip(others, attend(step, rows, is_decode=True, config=config), strict=True):
            if length in alone:
                np.testing.assert_array_equal(answers, alone[length], err_msg=f"{length} among {others}")


@pytest.mark.thorough
@pytest.mark.parametrize("impl", ["gpu", "ampere"])
def test_splits_by_load_are_found(impl: str) -> None:
    """The same test without fixed splits."""
    step = DECODE[impl]
    with pytest.raises(AssertionError, match="among"):
        test_decoding_rows_have_the_same_bits_alone_and_among_others(
            replace(step, shape=replace(step.shape, fixed_splits=False))
        )


@pytest.mark.parametrize("step", mark(CHUNKS, "gpu"))
def test_prompts_have_the_same_bits_however_they_are_cut(step: Step) -> None:
    begin, end = 96, 200
    whole = attend(step, [Row(0, begin, end)], is_decode=False)[0]
    for first, last, others in (
        (begin, 128, [decode(1, 40)]),  # all tiles of the row begin elsewhere in the step
        (160, end, [decode(1, 200), decode(2, 7), Row(3, 32, 35)]),
    ):
        answers = attend(step, [*others, Row(0, first, last)], is_decode=False)[-1]
        np.testing.assert_array_equal(answers, whole[first - begin : last - begin], err_msg=f"{first}..{last}")


@pytest.mark.slow
@pytest.mark.thorough
def test_tiles_split_by_load_are_found() -> None:
    """The same test on a device that splits the tiles of this bucket, without fixed splits."""
    step = CHUNKS["gpu"]
    config = find_backend(step.impl).module.default_config(step.shape)
    config = replace(config, prefill=replace(config.prefill, keys=64, num_sms=16, min_split_tiles=1, unit_cost=0))
    rows = [Row(0, 96, 200)], [Row(0, 96, 128)]
    for fixed in (True, False):
        found = replace(step, shape=replace(step.shape, fixed_splits=fixed))
        whole, part = (attend(found, some, is_decode=False, config=config)[0] for some in rows)
        assert (whole[:32] == part).all() == fixed


CASES = [
    Case("decode", ((299, 1), (127, 1), (128, 1), (0, 1)), 4, replace(OF_128, num_kv_heads=2), max_query_len=1),
    Case("fp8", ((299, 1), (100, 1)), 4, replace(OF_128, dtype="float8_e4m3fn"), max_query_len=1),
    Case("256", ((299, 1), (100, 1)), 2, replace(BF16, head_dim=256), window=200, softcap=3.0, max_query_len=1),
    Case("drafts", ((297, 3), (126, 4)), 4, BF16, sinks=True, max_query_len=4),
    Case("mixed", ((299, 1), (10, 1), (200, 60)), 4, BF16),
    Case("latents", ((299, 1), (100, 1)), 4, LATENTS, max_query_len=1),
    Case("fp8 latents", ((299, 1), (100, 1)), 4, replace(LATENTS, dtype="float8_e4m3fn"), max_query_len=1),
]


# Of the kernels' parts for fixed splits CI runs each once.
QUICK = {("gpu_interpret", "mixed"), ("gpu_interpret", "fp8 latents"), ("ampere_interpret", "fp8")}


@pytest.mark.parametrize(
    ("impl", "case"),
    [
        pytest.param(impl, case, id=f"{impl}-{case.name}", marks=() if (impl, case.name) in QUICK else THOROUGH)
        for impl in ("gpu_interpret", "ampere_interpret")
        for case in CASES
    ],
)
def test_same_as_reference(impl: str, case: Case, capfd: pytest.CaptureFixture[str]) -> None:
    case = replace(case, table_width=WIDTH, max_rows=4, max_tokens=64, fixed_splits=True)
    case = case.with_layout(choose_layout(impl, case.spec))
    if (obstacle := find_backend(impl).module.find_obstacle(case.shape)) is not None:
        assert case.spec.is_latent and impl == "ampere_interpret", obstacle
        return
    inputs = make_inputs(case)
    config = find_backend(impl).module.default_config(case.shape)
    config = replace(config, decode=replace(config.decode, num_sms=1))
    out, _ = run_case(case, inputs, impl=impl, config=config)
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    assert "RACE DETECTED" not in "".join(capfd.readouterr())
