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
from pallas_kernels import (
    AttnLayer,
    AttnParams,
    AttnShape,
    HeadParams,
    KVSpec,
    attend_stored,
    attend_with_update,
    choose_impl,
    choose_layout,
    prepare_batch,
    resolve_impl,
    store,
)
from pallas_kernels.backends import find_backend
from pallas_kernels.cpu import library
from pallas_kernels.spec import BatchMeta
from pallas_kernels.testing.case import LAYER as LAYER_INDEX
from pallas_kernels.testing.case import Inputs, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.testing.runner import run_case
from tests.pallas_kernels.cpu_library import needs_library

CASE = next(case for case in CASES if case.name == "mixed")
LAYER = AttnLayer(AttnParams(scale=1.0))


@pytest.fixture(scope="module")
def inputs() -> Inputs:
    return make_inputs(CASE)


@pytest.fixture(scope="module")
def batch(inputs: Inputs) -> BatchMeta:
    prepare = partial(prepare_batch, num_tokens=CASE.max_tokens, shape=CASE.shape, max_query_len=None)
    return jax.jit(prepare)(*inputs.meta)


@pytest.mark.parametrize(
    "impl", ["xla", needs_library("cpu"), pytest.param("tpu_interpret", marks=pytest.mark.thorough)]
)
def test_stored_keys_and_values_are_those_that_were_written(impl: str) -> None:
    case = CASE.with_layout(choose_layout(impl, CASE.spec))
    inputs = make_inputs(case)
    out, pool = run_case(case, inputs, impl=impl)
    layer = AttnLayer(case.params, inputs.heads, LAYER_INDEX * inputs.num_pages)
    prepare = partial(prepare_batch, num_tokens=case.max_tokens, shape=case.shape, max_query_len=None, impl=impl)
    run = jax.jit(lambda q, pool, *meta: attend_stored(q, pool, prepare(*meta), layer))
    again, kept = run(inputs.q, pool, *inputs.meta)
    count = int(inputs.meta[2][-1])
    np.testing.assert_array_equal(np.asarray(kept[1:], np.float32), np.asarray(pool[1:], np.float32))
    np.testing.assert_array_equal(np.asarray(again, np.float32)[:count], np.asarray(out, np.float32)[:count])


STORED = ("mixed 8:2 of 128 bfloat16, sinks", "mixed fp8 8:2 of 128", "mixed latents 8 of 576")


@pytest.mark.parametrize("name", [STORED[0], *(pytest.param(name, marks=pytest.mark.thorough) for name in STORED[1:])])
@pytest.mark.parametrize("impl", ["xla", "gpu_interpret", "ampere_interpret", needs_library("cpu")])
def test_storing_alone_writes_what_attention_writes(impl: str, name: str) -> None:
    case = next(case for case in CASES if case.name == name)
    case = case.with_layout(choose_layout(impl, case.spec))
    obstacle = find_backend(impl).module.find_obstacle(case.shape)
    if obstacle is not None:
        pytest.skip(obstacle)
    inputs = make_inputs(case)
    layer = AttnLayer(case.params, inputs.heads, LAYER_INDEX * inputs.num_pages)
    prepare = partial(prepare_batch, num_tokens=case.max_tokens, shape=case.shape, max_query_len=None, impl=impl)
    run = jax.jit(lambda k, v, pool, *meta: store(k, v, pool, prepare(*meta), layer))
    stored = run(inputs.k, inputs.v, inputs.kv_pages, *inputs.meta)
    _, pool = run_case(case, inputs)
    null = LAYER_INDEX * inputs.num_pages  # padding may be written to it
    pages = np.delete(np.arange(len(pool)), [0, null])
    stored, expected = (np.asarray(each[pages], np.float32) for each in (stored, pool))
    is_used = ~np.isnan(expected)  # a kernel may clean the rest
    np.testing.assert_array_equal(stored[is_used], expected[is_used])


@pytest.mark.thorough
def test_what_writes_while_it_attends_stores_so() -> None:
    test_storing_alone_writes_what_attention_writes("tpu_interpret", STORED[0])


@pytest.mark.parametrize(
    ("platform", "kind", "name"),
    [
        ("cpu", "cpu", "xla" if library.find_obstacle() else "cpu"),
        ("gpu", "NVIDIA H200", "gpu"),
        ("cuda", "NVIDIA H100 80GB HBM3", "gpu"),
        ("gpu", "NVIDIA A100-SXM4-40GB", "ampere"),
        ("gpu", "NVIDIA L4", "ampere"),
        ("gpu", "Tesla T4", "xla"),
        ("gpu", "NVIDIA B200", "ampere"),
        ("tpu", "TPU v5 lite", "tpu"),
        ("tpu", "TPU v6 lite", "tpu"),
        ("tpu", "TPU7x", "tpu"),
        ("tpu", "TPU v4", "xla"),
    ],
)
def test_choice_says_why(platform: str, kind: str, name: str) -> None:
    chosen, reason = choose_impl(platform, kind)
    assert chosen == name and len(reason) > 20 and (platform == "cpu" or kind in reason)


def test_pages_of_portable_attention_fill_the_lanes_of_a_tpu() -> None:
    """XLA would copy a pool of shorter rows, in every step."""
    layouts = {64: "paired", 80: "padded", 128: "plain", 192: "padded"}
    for head_dim, layout in layouts.items():
        spec = KVSpec(2, head_dim, 16, "bfloat16")
        assert choose_layout("xla", spec, platform="tpu") == choose_layout("tpu", spec) == layout
        assert choose_layout("xla", spec, platform="gpu") == choose_layout("xla", spec) == "plain"
    latent = KVSpec(1, 576, 16, "bfloat16", value_dim=512)
    assert choose_layout("xla", latent, platform="tpu") == "padded"


def test_unknown_platform_is_refused() -> None:
    with pytest.raises(ValueError, match="'abacus'"):
        choose_impl("abacus")


@pytest.mark.parametrize("impl", ["tpu", "gpu"])
def test_a_kernel_asked_for_by_name_that_cannot_run_raises(impl: str) -> None:
    with pytest.raises(ValueError, match=f"'{impl}' cannot run: it runs on {impl}, this is cpu.*impl='xla'"):
        resolve_impl(impl, CASE.shape)
    shape = AttnShape(4, KVSpec(2, 128, 64, "float16"), "float16")
    other = {"gpu": ("tpu", "TPU v6 lite"), "tpu": ("gpu", "NVIDIA H200")}[impl]
    with pytest.raises(ValueError, match=f"'{impl}' cannot run"):
        resolve_impl(impl, shape, platform=other[0], device_kind=other[1])


def test_a_kernel_on_a_device_too_old_for_it_raises_by_name_and_gives_way_by_default() -> None:
    shape, ampere = AttnShape(4, KVSpec(2, 128, 64, "bfloat16"), "bfloat16"), ("gpu", "NVIDIA A100-SXM4-40GB")
    with pytest.raises(ValueError, match=r"'gpu' cannot run: .*Hopper.*A100"):
        resolve_impl("gpu", shape, platform=ampere[0], device_kind=ampere[1])
    name, reason = resolve_impl(None, shape, platform=ampere[0], device_kind=ampere[1])
    assert name == "ampere" and "A100" in reason


def test_a_shape_that_no_kernel_does_falls_back_with_the_reason() -> None:
    shape = AttnShape(4, KVSpec(2, 128, 64, "float32"), "float32")
    name, reason = resolve_impl(None, shape, platform="gpu", device_kind="NVIDIA H200")
    assert name == "xla" and "float32" in reason
    with pytest.raises(ValueError, match=r"'gpu' cannot run: .*float32"):
        resolve_impl("gpu", shape, platform="gpu", device_kind="NVIDIA H200")


def test_only_the_tpu_kernels_need_causal_masks() -> None:
    shape = AttnShape(4, KVSpec(2, 128, 64, "bfloat16"), "bfloat16", causal=False)
    name, reason = resolve_impl(None, shape, platform="tpu", device_kind="TPU v6 lite")
    assert name == "xla" and "causal masks only" in reason
    assert resolve_impl(None, shape, platform="gpu", device_kind="NVIDIA H200")[0] == "gpu"
    assert resolve_impl(None, shape, platform="gpu", device_kind="NVIDIA A100-SXM4-40GB")[0] == "ampere"


def test_a_window_on_both_sides_is_portable_on_every_accelerator() -> None:
    shape = AttnShape(4, KVSpec(2, 128, 64, "bfloat16"), "bfloat16", window=64, causal=False)
    for kind in ("NVIDIA H200", "NVIDIA A100-SXM4-40GB"):
        name, reason = resolve_impl(None, shape, platform="gpu", device_kind=kind)
        assert name == "xla" and "a radius of 64 keys on both sides" in reason


def test_unknown_impl_is_refused() -> None:
    with pytest.raises(ValueError, match=r"xla, cpu, gpu, .* or None, got 'cuda'"):
        resolve_impl("cuda", CASE.shape)


def test_query_of_another_dtype_than_the_pool(inputs: Inputs) -> None:
    case = replace(CASE, spec=replace(CASE.spec, dtype="bfloat16"))
    rounded = replace(inputs, kv_pages=inputs.kv_pages.astype("bfloat16"))  # q stays float32
    out, kv_pages = run_case(case, rounded)
    expected, _ = attend_by_formula(case, rounded)
    assert out.dtype == np.float32 and kv_pages.dtype == "bfloat16"
    assert largest_error(CASE, out, expected, inputs.num_tokens) < 1, "matmuls in float32, though the pool is not"


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"q": np.zeros((64, 3, 64))}, "3 heads"),
        ({"q": np.zeros((64, 4, 32))}, "4 heads of 32"),
        ({"q": np.zeros((32, 4, 64))}, "32 tokens"),
        ({"k": np.zeros((64, 1, 64))}, r"k \(64, 1, 64\)"),
        ({"v": np.zeros((63, 2, 64))}, r"v \(63, 2, 64\)"),
        ({"kv_pages": np.zeros((9, 4, 8, 64), np.float32)}, "page_size=16"),
        ({"kv_pages": np.zeros((9, 4, 16, 64), np.float16)}, "float16.*dtype='float32'"),
        ({"v": None}, "and v None"),
        ({"kv_pages": np.zeros((9, 3, 16, 64), np.float32)}, r"wanted \[num_pages, 4, 16, 64\]"),
    ],
)
def test_shapes_that_do_not_fit_are_named(
    inputs: Inputs, batch: BatchMeta, changes: dict[str, np.ndarray], message: str
) -> None:
    bad = replace(inputs, **changes)
    with pytest.raises(ValueError, match=message):
        attend_with_update(bad.q, bad.k, bad.v, bad.kv_pages, batch, LAYER)


def test_head_params_and_window_must_fit(inputs: Inputs, batch: BatchMeta) -> None:
    arrays = inputs.q, inputs.k, inputs.v, inputs.kv_pages, batch
    with pytest.raises(ValueError, match=r"heads.k_scale must be \[2\].*\(4,\)"):
        attend_with_update(*arrays, replace(LAYER, heads=HeadParams(k_scale=np.ones(4))))
    with pytest.raises(ValueError, match=r"heads.sinks must be \[4\]"):
        attend_with_update(*arrays, replace(LAYER, heads=HeadParams(sinks=np.ones(2))))
    with pytest.raises(ValueError, match="window is 8, the batch was prepared for None"):
        attend_with_update(*arrays, AttnLayer(AttnParams(scale=1.0, window=8)))


def test_importing_the_package_loads_nothing() -> None:
    code = "import sys, pallas_kernels; sys.exit(' '.join({'jax', 'numpy'} & sys.modules.keys()) or None)"
    root = Path(pallas_kernels.__file__).parents[1]
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=False, cwd=root)
    assert done.returncode == 0, done.stderr
    with pytest.raises(AttributeError, match="flash"):
        pallas_kernels.flash  # noqa: B018


@pytest.mark.parametrize("fault", ["impl", "mask", "length"])
def test_last_keys_are_for_causal_attention_that_takes_them(inputs: Inputs, fault: str) -> None:
    impl = "tpu_interpret" if fault == "impl" else "xla"
    shape = replace(CASE.with_layout(choose_layout(impl, CASE.spec)).shape, causal=fault != "mask")
    last_keys = np.zeros(CASE.max_tokens - (fault == "length"), np.int32)
    message = r"last_keys \(\d+,\) are for 64 tokens of causal attention with impl 'xla' or 'cpu'"
    with pytest.raises(ValueError, match=message):
        prepare_batch(
            *inputs.meta, num_tokens=CASE.max_tokens, shape=shape, max_query_len=None, impl=impl, last_keys=last_keys
        )
