"""The front door: which implementation answers, and what it refuses."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import replace
from functools import partial
from pathlib import Path

import jax
import numpy as np
import pytest

import pallas_kernels
from pallas_kernels import AttnParams, attend_with_update, choose_impl, prepare_batch, ragged_paged_attention
from pallas_kernels.spec import BatchMeta
from pallas_kernels.testing.cases import CASES, Inputs, largest_error, make_inputs
from tests.pallas_kernels.runner import run_case

CASE = next(case for case in CASES if case.name == "mixed")
PARAMS = AttnParams(scale=1.0)


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make_inputs(CASE)


@pytest.fixture(scope="module")
def batch(inputs: Inputs) -> BatchMeta:
    prepare = partial(prepare_batch, num_tokens=CASE.max_tokens, page_size=16, max_query_len=None)
    return jax.jit(prepare)(*inputs.meta)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "cuda", "tpu"])
def test_choice_says_why(platform: str) -> None:
    name, reason = choose_impl(platform)
    assert name == "xla" and len(reason) > 20


def test_unknown_platform_is_refused() -> None:
    with pytest.raises(ValueError, match="'abacus'"):
        choose_impl("abacus")


@pytest.mark.parametrize("impl", ["tpu", "gpu"])
def test_planned_impl_says_what_works(inputs: Inputs, batch: BatchMeta, impl: str) -> None:
    with pytest.raises(NotImplementedError, match=f"'{impl}'.*impl='xla'"):
        attend_with_update(inputs.q, inputs.k, inputs.v, inputs.kv_pages, batch, params=PARAMS, impl=impl)


def test_unknown_impl_is_refused(inputs: Inputs, batch: BatchMeta) -> None:
    with pytest.raises(ValueError, match=r"gpu, reference, tpu, xla or None, got 'cuda'"):
        ragged_paged_attention(inputs.q, inputs.kv_pages, batch, params=PARAMS, impl="cuda")


def test_attention_alone_equals_attention_after_update(inputs: Inputs, batch: BatchMeta) -> None:
    out, kv_pages = run_case(CASE, inputs)
    alone = jax.jit(partial(ragged_paged_attention, params=CASE.params))(
        inputs.q, kv_pages, batch, page_offset=inputs.num_pages
    )
    assert largest_error(CASE, alone, out, inputs.num_tokens) < 1


def test_query_of_another_dtype_than_the_pool(inputs: Inputs) -> None:
    rounded = replace(inputs, kv_pages=inputs.kv_pages.astype("bfloat16"))
    out, kv_pages = run_case(CASE, rounded)
    expected, _ = run_case(CASE, rounded, impl="reference")
    assert out.dtype == np.float32 and kv_pages.dtype == "bfloat16"
    assert largest_error(CASE, out, expected, inputs.num_tokens) < 1, "matmuls in float32, though the pool is not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((64, 3, 64))}, "3 heads"),
        ({"q": np.zeros((64, 4, 32))}, "head_dim 32"),
        ({"q": np.zeros((32, 4, 64))}, "32 tokens"),
        ({"k": np.zeros((64, 1, 64))}, r"k \(64, 1, 64\)"),
        ({"v": np.zeros((63, 2, 64))}, r"v \(63, 2, 64\)"),
        ({"kv_pages": np.zeros((9, 4, 8, 64))}, "page_size 16"),
        ({"kv_pages": np.zeros((9, 3, 16, 64))}, "3 rows"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    inputs: Inputs, batch: BatchMeta, changes: dict[str, np.ndarray], message: str
) -> None:
    bad = replace(inputs, **changes)
    with pytest.raises(ValueError, match=message):
        attend_with_update(bad.q, bad.k, bad.v, bad.kv_pages, batch, params=PARAMS)


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, pallas_kernels; sys.exit(' '.join({'jax', 'numpy'} & sys.modules.keys()) or None)"
    root = Path(pallas_kernels.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="flash"):
        pallas_kernels.flash  # noqa: B018
