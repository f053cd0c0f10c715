"""NaN and infinity among weights are an error that names the tensor and its file, unless they are allowed."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import pytest

from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import (
    CheckpointUpdate,
    check_update,
    load_safetensors,
    read_hf_config,
    restore_params,
    save_params,
)
from jaxserve.core.weights.finite import has_nonfinite, has_nonfinite_shard, is_finite_everywhere
from jaxserve.core.weights.paths import unflatten
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources
from tests.core.weights.checkpoints import (
    BF16,
    expected_params,
    flatten_arrays,
    make_sources,
    make_specs,
    make_tensors,
    one_device,
    split_shards,
    write_shards,
    write_single,
)
from tests.golden_cases import load_case
from tests.quantized_files import METHODS, write_file, write_quantized

FLOATS: dict[str, Any] = {
    "float32": np.float32,
    "float16": np.float16,
    "bfloat16": BF16,
    "float8_e4m3fn": ml_dtypes.float8_e4m3fn,
}
UP = "layers.1.up.weight"
BAD = [np.nan, np.inf, -np.inf]


@pytest.mark.parametrize("dtype", FLOATS)
def test_every_number_of_a_type(dtype: str) -> None:
    """The whole type, or for 32 bits its ends: with each number alone among zeros."""
    size = np.dtype(FLOATS[dtype]).itemsize
    if size < 4:
        numbers = np.arange(2 ** (8 * size), dtype=f"u{size}").view(FLOATS[dtype])
    else:
        edges = np.array([0, 1, 0x7F7FFFFF, 0x7F800000, 0x7F800001, 0x7FC00000, 0x7FFFFFFF], np.uint32)
        numbers = np.concatenate([edges, edges | np.uint32(0x80000000)]).view(np.float32)
    expected = ~np.isfinite(numbers.astype(np.float32))
    assert expected.any() and not expected.all()
    found = [has_nonfinite(np.array([0, number, 0], FLOATS[dtype])) for number in numbers]
    np.testing.assert_array_equal(found, expected)


def test_layouts_and_other_types() -> None:
    array = np.zeros((6, 8), np.float32)
    array[5, 1] = np.nan
    unaligned = np.frombuffer(b"\0" + array.tobytes(), np.float32, offset=1).reshape(6, 8)
    for view in (array, array.T, array[:, ::-1], array[1::2, 1:3], unaligned, array.reshape(2, 3, 8)[:, ::2]):
        assert has_nonfinite(view)
    assert not has_nonfinite(array[:5]) and not has_nonfinite(array[:0]) and not has_nonfinite(array[:, 2:])
    for dtype in (np.int8, np.uint8, np.int32, ml_dtypes.int4, ml_dtypes.float4_e2m1fn):
        assert not has_nonfinite(np.full(4 * np.dtype(dtype).itemsize, 255, np.uint8).view(dtype))


@pytest.mark.parametrize("dtype", FLOATS)
def test_arrays_on_devices(dtype: str) -> None:
    array = np.zeros((4, 8), FLOATS[dtype])
    bad = array.copy()
    bad[3, 7] = np.nan
    for value, expected in ((array, False), (bad, True)):
        assert has_nonfinite_shard(jnp.asarray(value)) is expected
        assert is_finite_everywhere(jnp.asarray(value)) is not expected


def load(path: Path, dtype: str = "float32", **options: Any) -> Any:
    return load_safetensors(path, make_specs(dtype), make_sources(), mesh=one_device(), rules=DEFAULT_RULES, **options)


def spoil(dtype: Any, bad: float, name: str = UP) -> dict[str, np.ndarray]:
    tensors = make_tensors(dtype)
    tensors[name].flat[-1] = bad
    return tensors


@pytest.mark.parametrize("bad", BAD)
@pytest.mark.parametrize(("stored", "held"), [(a, b) for a in list(FLOATS)[:3] for b in list(FLOATS)[:3]])
def test_loading_names_the_tensor_and_its_file(stored: str, held: str, bad: float, tmp_path: Path) -> None:
    """`up` is the second of the two matrices that are one parameter."""
    shards = split_shards(spoil(FLOATS[stored], bad))
    path = write_shards(tmp_path, shards)
    with pytest.raises(WeightsError, match=r"NaN or infinite values in .*allow_nonfinite") as caught:
        load(path, held)
    assert caught.value.field == UP and open_checkpoint(path).file(UP) in str(caught.value)
    found = flatten_arrays(load(path, held, allow_nonfinite=True))
    expected = expected_params(spoil(FLOATS[stored], bad), FLOATS[held])
    for name, value in expected.items():
        np.testing.assert_array_equal(found[name].astype(np.float32), value.astype(np.float32), err_msg=name)


def test_numbers_beyond_the_range_of_the_dtype_are_no_infinity(tmp_path: Path) -> None:
    path = write_single(tmp_path, spoil(np.float32, 3.4e38))
    with pytest.raises(WeightsError, match="beyond the range of bfloat16; use dtype float32"):
        load(path, "bfloat16")
    with pytest.raises(WeightsError, match="beyond the range of float16"):
        load(path, "float16", allow_nonfinite=True)
    load(path, "float32")


@pytest.mark.parametrize("widened", [False, True])
@pytest.mark.parametrize("case", ["llama_gqa", "deepseek_v3"])
def test_values_of_8_bit_floats(case: str, widened: bool, tmp_path: Path) -> None:
    """Those that devices hold, and those that are expanded: of latents, or as a CPU's."""
    quantized, _ = write_quantized(load_case(case).path, tmp_path, METHODS["fp8 blocks"])
    checkpoint = open_checkpoint(quantized)
    tensors = {name: np.array(checkpoint.read(name)) for name in checkpoint.names}
    name = f"model.layers.1.self_attn.{'o_proj' if case == 'llama_gqa' else 'kv_b_proj'}.weight"
    tensors[name][3, 5] = np.nan
    write_file(quantized / "model.safetensors", tensors)
    model = parse_config(read_hf_config(quantized))
    assert model.quantization is not None
    model = dataclasses.replace(model, quantization=dataclasses.replace(model.quantization, widened=widened))
    arguments = param_specs(model), weight_sources(model), ignored_weights(model)
    options: dict[str, Any] = {"mesh": one_device(), "rules": DEFAULT_RULES}
    with pytest.raises(WeightsError, match=r"NaN or infinite values in .*model\.safetensors") as caught:
        load_safetensors(quantized, *arguments, **options)
    assert caught.value.field == name
    load_safetensors(quantized, *arguments, **options, allow_nonfinite=True)


@pytest.mark.parametrize("held", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", BAD)
def test_orbax(bad: float, held: str, tmp_path: Path) -> None:
    flat = expected_params(spoil(np.float32, bad))
    save_params(tmp_path, unflatten(make_specs(), {name: jnp.asarray(value) for name, value in flat.items()}), {})
    options: dict[str, Any] = {"mesh": one_device(), "rules": DEFAULT_RULES}
    with pytest.raises(WeightsError, match=r"NaN or infinite values in .*params") as caught:
        restore_params(tmp_path, make_specs(held), **options)
    assert caught.value.field == "layers.1.gate_up"
    restored = flatten_arrays(restore_params(tmp_path, make_specs(held), **options, allow_nonfinite=True))
    found, expected = restored["layers.1.gate_up"], flat["layers.1.gate_up"].astype(FLOATS[held])
    np.testing.assert_array_equal(found.astype(np.float32), expected.astype(np.float32))
    update = CheckpointUpdate(tmp_path, make_specs(held), make_sources(), (), make_mesh(1), DEFAULT_RULES)
    update.check()
    with pytest.raises(WeightsError, match="NaN or infinite values"):
        update.items()  # nothing has been yielded
    assert dict(dataclasses.replace(update, allow_nonfinite=True).items()).keys() == flat.keys()


@pytest.mark.parametrize("place", [np.asarray, jax.numpy.asarray])
def test_new_weights_of_a_caller(place: Any) -> None:
    flat = {name: place(value) for name, value in expected_params(spoil(np.float32, np.inf)).items()}
    with pytest.raises(WeightsError, match="NaN or infinite values; set allow_nonfinite") as caught:
        check_update(make_specs(), flat)
    assert caught.value.field == "layers.1.gate_up"
    assert check_update(make_specs(), flat, allow_nonfinite=True).keys() == flat.keys()


def test_new_weights_of_files_are_checked_before_any_is_written(tmp_path: Path) -> None:
    path = write_single(tmp_path, spoil(BF16, np.nan))
    update = CheckpointUpdate(path, make_specs(), make_sources(), (), make_mesh(1), DEFAULT_RULES)
    with pytest.raises(WeightsError, match=r"NaN or infinite values in .*model\.safetensors") as caught:
        update.check()
    assert caught.value.field == UP
    allowed = dataclasses.replace(update, allow_nonfinite=True)
    allowed.check()
    assert np.isnan(dict(allowed.items())["layers.1.gate_up"]).sum() == 1
