"""Hopper's latent kernel in the interpreter, with race detection, against the reference."""

from __future__ import annotations

from dataclasses import replace

import pytest

from pallas_kernels.hopper import attention
from pallas_kernels.hopper.attention import HopperConfig
from pallas_kernels.hopper.decode import DecodeConfig
from pallas_kernels.hopper.prefill import PrefillConfig
from pallas_kernels.testing.cases import CASES, Case, largest_error, make_inputs
from pallas_kernels.testing.runner import run_case

# Few unit slots, because each costs the interpreter a block; rows are cut at 64 tokens.
SPLIT = HopperConfig(
    DecodeConfig(stages=2, ctas_per_sm=1, num_sms=2, min_split_tokens=64, unit_cost=0), PrefillConfig()
)


def shrink(case: Case) -> Case:
    """Without most padding rows: they cost blocks."""
    return replace(case, max_rows=len(case.rows) + 1)


LATENTS = [shrink(case) for case in CASES if case.spec.is_latent and attention.find_obstacle(case.shape) is None]


@pytest.mark.parametrize("case", LATENTS, ids=lambda case: case.name)
def test_same_as_reference(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    inputs = make_inputs(case)
    out, _ = run_case(case, inputs, impl="gpu_interpret", config=SPLIT)
    expected, _ = run_case(case, inputs, impl="reference")
    assert largest_error(case, out, expected, inputs.num_tokens) < 1
    assert "RACE DETECTED" not in capsys.readouterr().out
