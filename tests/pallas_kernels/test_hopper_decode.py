"""Hopper's decode kernel and its combine in the interpreter, with race detection, against the reference."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from pallas_kernels.hopper import attention, decode, wgmma
from pallas_kernels.hopper.attention import HopperConfig
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.decode_memory import DecodeRing
from pallas_kernels.hopper.prefill_plan import PrefillConfig
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.mosaic_gpu.splits import fits
from pallas_kernels.spec import AttnShape, KVSpec
from pallas_kernels.testing.case import Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from pallas_kernels.worklist import StepRows
from tests.pallas_kernels.gpu_interpreter import reset_interpreter

# Few unit slots, because each costs the interpreter a block; rows are cut at 64 tokens.
SPLIT = HopperConfig(
    DecodeConfig(stages=2, ctas_per_sm=1, num_sms=2, min_split_tokens=64, unit_cost=0), PrefillConfig()
)
WHOLE = replace(SPLIT, decode=replace(SPLIT.decode, num_sms=1, min_split_tokens=512))
# One of each kind of head, page and mask: the others show nothing which these do not.
CI = (
    "empty rows between drafts, 8:2 of 128",
    "decode 8:1 of 128, window, softcap, sinks",
    "decode fp8 4:4 of 64, window",
    "drafts verified, 3:1, window, sinks",
    "padded heads, few pages per row",
)
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]
BF16 = KVSpec(2, 128, 64, "bfloat16")
WIDE_PAGES = KVSpec(1, 128, 256, "bfloat16")
OTHERS = (
    Case("pages larger than a tile", ((0, 1), (255, 1)), 2, WIDE_PAGES, window=40, max_query_len=1),
    Case("padded heads, few pages per row", ((100, 1),), 2, KVSpec(1, 80, 128, "float16", "padded"), max_query_len=1),
    Case("rows of 64 query rows", ((61, 4), (3, 2)), 16, replace(BF16, num_kv_heads=1), max_query_len=4),
)


def is_for_decode(case: Case) -> bool:
    longest = case.max_query_len
    return attention.find_obstacle(case.shape) is None and longest is not None and fits(longest, case.shape.group_size)


def shrink(case: Case) -> Case:
    """Without most padding rows: they cost blocks."""
    return replace(case, max_rows=len(case.rows) + 1)


DECODE_CASES = [
    pytest.param(case, id=case.name, marks=[] if case.name in CI else THOROUGH)
    for case in map(shrink, filter(is_for_decode, (*CASES, *OTHERS)))
]
assert len([param for param in DECODE_CASES if not param.marks]) == len(CI), "a case was renamed"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For breaking a kernel: clears traces before and after, and resets the interpreter."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()
    reset_interpreter()


def check(case: Case, config: HopperConfig | None, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(case)
    out, _ = run_case(case, inputs, impl="gpu_interpret", config=config)
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    # JAX 0.12 raises, 0.11 only prints, and forgets with the next kernel.
    assert "RACE DETECTED" not in capsys.readouterr().out


@pytest.mark.slow
@pytest.mark.thorough
def test_units_of_200_tiles_and_of_one(capsys: pytest.CaptureFixture[str]) -> None:
    rows = (25_599, 1), (0, 1), (63, 1)
    spec = KVSpec(1, 64, 128, "bfloat16")
    sizes = {"max_rows": 3, "max_tokens": 3, "max_query_len": 1, "table_width": 200, "max_pages": 202}
    check(Case("200 tiles", rows, 1, spec, **sizes), WHOLE, capsys)


@pytest.mark.parametrize("case", DECODE_CASES)
def test_same_as_reference(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    check(case, SPLIT, capsys)


def test_no_rows(capsys: pytest.CaptureFixture[str]) -> None:
    check(Case("", (), 4, BF16, max_rows=2, max_tokens=4, max_query_len=1), SPLIT, capsys)


def test_config_for_tests_splits_rows() -> None:
    seq_lens = jnp.asarray([191, 64, 0])
    query_lens = jnp.asarray([1, 1, 0])
    rows = StepRows(jnp.asarray([0, 1, 2, 2]), query_lens, seq_lens, jnp.asarray([2, 2, 2]), 3, 1, 192)
    shape = AttnShape(4, BF16, "bfloat16")
    work = attention.plan_work(rows, shape, config=SPLIT)
    assert work.chunks is None
    assert work.decode.row_num_units.tolist() == [2, 1, 0]
    assert attention.plan_work(rows, shape, config=WHOLE).decode.row_num_units.tolist() == [1, 1, 0]


SMALL = Case("", ((150, 1),), 2, replace(BF16, num_kv_heads=1), max_rows=1, max_tokens=1, max_query_len=1)
SMALL_FP8 = replace(SMALL, spec=replace(SMALL.spec, dtype="float8_e4m3fn"))


@pytest.mark.parametrize("case", [pytest.param(SMALL, id="bf16"), pytest.param(SMALL_FP8, id="fp8", marks=THOROUGH)])
def test_a_unit_longer_than_the_ring(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    check(case, WHOLE, capsys)


FP8_SCORES = replace(WHOLE, decode=replace(WHOLE.decode, fp8_scores=True))
FP8_CASES = (
    SMALL_FP8,
    *(
        case
        for case in map(shrink, CASES)
        if case.spec.dtype == "float8_e4m3fn" and not case.spec.is_latent and is_for_decode(case)
    ),
)
assert len(FP8_CASES) > 3, "a case was renamed"


@pytest.mark.parametrize(
    "case",
    [pytest.param(case, id=case.name or "small", marks=[] if case is SMALL_FP8 else THOROUGH) for case in FP8_CASES],
)
def test_keys_of_8_bits_need_no_widening(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    check(case, FP8_SCORES, capsys)


@pytest.mark.parametrize(
    ("spec", "pages"),
    [(KVSpec(1, 64, 64, "bfloat16"), "bfloat16"), (KVSpec(1, 576, 64, "float8_e4m3fn", value_dim=512), "latents")],
)
def test_scores_of_8_bits_are_refused_where_no_key_has_8_bits(spec: KVSpec, pages: str) -> None:
    case = Case("", ((60, 3),), 4, spec, max_tokens=8, max_query_len=3)
    with pytest.raises(ValueError, match=f"fp8_scores is for keys of 8 bits, these pages hold {pages}"):
        run_case(case, make_inputs(case), impl="gpu_interpret", config=FP8_SCORES)


def test_queries_of_other_rows_do_not_change_the_scale_of_a_row() -> None:
    case = Case("", ((60, 3), (9, 5)), 4, KVSpec(1, 64, 64, "float8_e4m3fn"), max_rows=2, max_tokens=8, max_query_len=5)
    inputs = make_inputs(case)
    larger = inputs.q.copy()
    larger[3:] *= 1000
    found = [
        run_case(case, replace(inputs, q=q), impl="gpu_interpret", config=FP8_SCORES)[0] for q in (inputs.q, larger)
    ]
    rows = [np.asarray(out[:3], np.float32) for out in found]
    np.testing.assert_array_equal(*rows)


def test_queries_are_the_sum_of_two_parts() -> None:
    q = np.random.default_rng(0).standard_normal((2, 1, 8, 128)).astype(np.float16)
    q[:, :, 3] /= 30  # heads of a group have one scale
    parts, scales = decode.split_queries(jnp.asarray(q), jnp.dtype("float8_e4m3fn"))
    found = np.asarray(parts, np.float32).sum(axis=2) * np.asarray(scales)[..., None, None]
    assert parts.shape == (2, 1, 2, 8, 128) and scales.shape == (2, 1)
    for head in (0, 3):
        error = np.linalg.norm(found[:, :, head] - q[:, :, head])
        assert error < 2e-3 * np.linalg.norm(q[:, :, head].astype(np.float32))
    first = np.asarray(parts[:, :, 0], np.float32) * np.asarray(scales)[..., None, None]
    assert np.linalg.norm(first - q) > 2e-2 * np.linalg.norm(q.astype(np.float32)), "why there are two"
    assert not np.isnan(np.asarray(decode.split_queries(0 * jnp.asarray(q), parts.dtype)[0], np.float32)).any()


# The interpreter's words for a race, and for a barrier completed twice before the other warpgroup saw it.
FAULTS = ("RACE DETECTED", "no threads observed phase", "missed observing phase")


def finds_fault(case: Case, capsys: pytest.CaptureFixture[str], config: HopperConfig = WHOLE) -> bool:
    try:
        out, _ = run_case(case, make_inputs(case), impl="gpu_interpret", config=config)
        jax.block_until_ready(out)
    except jax.errors.JaxRuntimeError as error:
        return any(fault in str(error) for fault in FAULTS)
    return "RACE DETECTED" in capsys.readouterr().out


@pytest.mark.parametrize("case", [pytest.param(SMALL, id="bf16"), pytest.param(SMALL_FP8, id="fp8", marks=THOROUGH)])
def test_missing_commit_is_found(case: Case, broken: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken.setattr(compat, "commit_smem", lambda: None)
    assert finds_fault(case, capsys)


@pytest.mark.thorough
def test_missing_wait_is_found(broken: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """The first wait that is traced belongs to the memory warpgroup: for a slot to be free."""
    broken.setattr(compat, "barrier_wait", _skip_first(compat.barrier_wait))
    assert finds_fault(SMALL, capsys)


@pytest.mark.thorough
def test_a_missing_wait_for_keys_that_are_not_widened_is_found(
    broken: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def refill(
        ring: DecodeRing, index: Any, ids: Any, unit: Any, pages: Any, part: int, name: str, scratch: Any
    ) -> None:
        source = (pages, ring.find_page_row(unit.head, part))
        ring.copy_tile(index, ids, unit, source, scratch[name], scratch[f"{name}_loaded"])

    broken.setattr(DecodeRing, "refill", refill)
    # Of three tiles, the third could be fetched just in time. Of eleven all would have to be.
    assert finds_fault(replace(SMALL_FP8, rows=((700, 1),), table_width=11), capsys, FP8_SCORES)


def _skip_first(operation: Callable[..., None]) -> Callable[..., None]:
    calls = iter([True])

    def run(*args: object) -> None:
        if not next(calls, False):
            operation(*args)

    return run


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (AttnShape(4, replace(BF16, dtype="float32"), "float32"), "bfloat16 or float16, these are float32"),
        (AttnShape(4, replace(BF16, dtype="float16"), "bfloat16"), "pages are bfloat16 or float8_e4m3fn"),
        (AttnShape(4, replace(BF16, head_dim=80), "bfloat16"), "layout 'padded'"),
        (AttnShape(4, replace(BF16, head_dim=512), "bfloat16"), "these as 512"),
        (AttnShape(4, KVSpec(2, 64, 64, "bfloat16", "paired"), "bfloat16"), "'paired'"),
        (AttnShape(64, BF16, "bfloat16"), "at most 16 query heads per KV head, these are 32"),
        (AttnShape(4, replace(BF16, page_size=8), "bfloat16"), "page_size is a power of two from 16, this is 8"),
        (AttnShape(4, replace(BF16, page_size=48), "bfloat16"), "this is 48"),
    ],
)
def test_obstacles_say_what_works(shape: AttnShape, words: str) -> None:
    assert words in attention.find_obstacle(shape)


@pytest.mark.parametrize("head_dim", [16, 64, 80, 128, 192, 256])
@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
def test_default_config_fits_shared_memory(head_dim: int, dtype: str) -> None:
    spec = KVSpec(2, head_dim, 64, dtype)
    spec = replace(spec, layout=attention.choose_layout(spec))
    shape = AttnShape(8, spec, "bfloat16")
    assert attention.find_obstacle(shape) is None
    config = decode.default_config(shape)
    size = decode.count_smem_bytes(shape, config.stages) + 1024
    assert size <= wgmma.MAX_SMEM_BYTES
    assert config.ctas_per_sm * (size + 1024) <= wgmma.SM_SMEM_BYTES
    assert config.stages >= 3


def test_config_names_what_is_wrong() -> None:
    with pytest.raises(ValueError, match="tile_tokens must be 64 or 128, got 48"):
        DecodeConfig(tile_tokens=48)
    with pytest.raises(ValueError, match="stages must be at least 2, got 1"):
        DecodeConfig(stages=1)
