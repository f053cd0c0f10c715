"""Hopper's latent kernel in the interpreter, with race detection, against the reference."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import jax
import numpy as np
import pytest

from pallas_kernels.hopper import attention, latents, wgmma
from pallas_kernels.hopper.attention import HopperConfig
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.latent_kernel import LatentKernel
from pallas_kernels.hopper.prefill_plan import PrefillConfig
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.spec import AttnShape, KVSpec
from pallas_kernels.testing.case import Case, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.pallas_kernels.gpu_interpreter import reset_interpreter

# Few unit slots, because each costs the interpreter a block; rows are cut at 64 tokens.
SPLIT = HopperConfig(
    DecodeConfig(stages=2, ctas_per_sm=1, num_sms=2, min_split_tokens=64, unit_cost=0), PrefillConfig()
)
WHOLE = replace(SPLIT, decode=replace(SPLIT.decode, num_sms=1, min_split_tokens=512))
LATENT = KVSpec(1, 576, 64, "bfloat16", value_dim=512)
SMALL_LATENT = replace(LATENT, head_dim=192, value_dim=128)
OTHERS = (
    Case("latents of 128 heads", ((70, 1),), 128, SMALL_LATENT, max_query_len=1),
    Case("latents, window, softcap", ((130, 1), (40, 20)), 16, SMALL_LATENT, window=33, softcap=4.0),
)
QUICK = ("decode latents 16 of 576", "latents, window, softcap")
THOROUGH = [pytest.mark.slow, pytest.mark.thorough]


def shrink(case: Case) -> Case:
    """Without most padding rows: they cost blocks."""
    return replace(case, max_rows=len(case.rows) + 1)


LATENTS = [
    pytest.param(shrink(case), id=case.name, marks=[] if case.name in QUICK else THOROUGH)
    for case in (*CASES, *OTHERS)
    if case.spec.is_latent and attention.find_obstacle(case.shape) is None
]
assert len(LATENTS) > len(OTHERS) + len(QUICK), "a case was renamed"


@pytest.fixture
def broken(monkeypatch: pytest.MonkeyPatch) -> Iterator[pytest.MonkeyPatch]:
    """For breaking the kernel: clears traces before and after, and resets the interpreter."""
    jax.clear_caches()
    yield monkeypatch
    jax.clear_caches()
    reset_interpreter()


@pytest.mark.parametrize("case", LATENTS)
def test_same_as_reference(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(case)
    out, _ = run_case(case, inputs, impl="gpu_interpret", config=SPLIT)
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    assert "RACE DETECTED" not in capsys.readouterr().out


SMALL = Case("", ((150, 1),), 8, SMALL_LATENT, max_rows=1, max_tokens=1, max_query_len=1)
SMALL_FP8 = replace(SMALL, spec=replace(SMALL_LATENT, dtype="float8_e4m3fn"))


@pytest.mark.parametrize("case", [pytest.param(SMALL, id="bf16", marks=THOROUGH), pytest.param(SMALL_FP8, id="fp8")])
def test_a_unit_longer_than_the_ring(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(case)
    out, _ = run_case(case, inputs, impl="gpu_interpret", config=WHOLE)
    expected, _ = attend_by_formula(case, inputs)
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    assert "RACE DETECTED" not in capsys.readouterr().out


def finds_fault(capsys: pytest.CaptureFixture[str]) -> bool:
    try:
        out, _ = run_case(SMALL, make_inputs(SMALL), impl="gpu_interpret", config=WHOLE)
        jax.block_until_ready(out)
    except jax.errors.JaxRuntimeError as error:
        return "RACE DETECTED" in str(error)
    return "RACE DETECTED" in capsys.readouterr().out


@pytest.mark.thorough
def test_warpgroups_that_do_not_meet_are_found(broken: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken.setattr(LatentKernel, "meet", lambda *_: None)
    assert finds_fault(capsys)


@pytest.mark.thorough
def test_a_missing_commit_is_found(broken: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    broken.setattr(compat, "commit_smem", lambda: None)
    assert finds_fault(capsys)


def test_uncleaned_slots_are_found(broken: pytest.MonkeyPatch) -> None:
    broken.setattr(LatentKernel, "clean", lambda *_: None)
    out, _ = run_case(SMALL, make_inputs(SMALL), impl="gpu_interpret", config=WHOLE)
    assert np.isnan(np.asarray(out, np.float32)).any()


@pytest.mark.parametrize(
    ("shape", "words"),
    [
        (AttnShape(16, replace(LATENT, dtype="float32"), "float32"), "bfloat16 or float16, these are float32"),
        (AttnShape(16, replace(LATENT, page_size=8), "bfloat16"), "power of two from 16, this is 8"),
        (AttnShape(16, replace(LATENT, num_kv_heads=2), "bfloat16"), "one latent for all heads of a device"),
        (AttnShape(16, replace(LATENT, head_dim=40, value_dim=32), "bfloat16"), "these are 40 and 32"),
        (AttnShape(16, replace(LATENT, value_dim=192), "bfloat16"), "these are 576 and 192"),
        (AttnShape(130, LATENT, "bfloat16"), "blocks of at most 64, and 130 have no equal ones"),
        (AttnShape(16, replace(LATENT, head_dim=1024), "bfloat16"), "latents of 1024 do not fit"),
    ],
)
def test_obstacles_say_what_is_wrong(shape: AttnShape, words: str) -> None:
    assert words in str(attention.find_obstacle(shape))


@pytest.mark.parametrize("dtype", ["bfloat16", "float8_e4m3fn"])
@pytest.mark.parametrize("num_heads", [1, 16, 20, 64, 96, 128])
def test_shapes_of_models_fit(num_heads: int, dtype: str) -> None:
    for rank in (256, 512):
        shape = AttnShape(num_heads, KVSpec(1, rank + 64, 64, dtype, value_dim=rank), "bfloat16")
        assert attention.choose_layout(shape.spec) == "plain"
        assert attention.find_obstacle(shape) is None
        assert latents._count_smem_bytes(shape) <= wgmma.MAX_SMEM_BYTES
        assert attention.default_config(shape).decode.stages == 2
