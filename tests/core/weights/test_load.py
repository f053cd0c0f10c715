"""Loading: right values in the right place, and every mismatch refused before a device is touched."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

from jaxserve.core.models.base import WeightSource
from jaxserve.core.sharding import DEFAULT_RULES
from jaxserve.core.weights import load_safetensors, stream_pieces
from jaxserve.core.weights.load import check_tensors
from jaxserve.core.weights.paths import flatten_specs
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import WeightsError
from tests.core.weights.checkpoints import (
    BF16,
    D,
    F,
    V,
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

DTYPES = {"float32": np.float32, "bfloat16": BF16, "float16": np.float16}


def load(path: Path, specs: Any = None, sources: Any = None, ignored: tuple[str, ...] = (), **options: Any) -> Any:
    return load_safetensors(
        path,
        specs or make_specs(),
        sources or make_sources(),
        ignored,
        mesh=one_device(),
        rules=DEFAULT_RULES,
        **options,
    )


@pytest.mark.parametrize("stored", DTYPES)
@pytest.mark.parametrize("wanted", DTYPES)
def test_values_and_dtypes(tmp_path: Path, stored: str, wanted: str) -> None:
    tensors = make_tensors(DTYPES[stored])
    specs = make_specs(wanted)
    params = load(write_single(tmp_path, tensors), specs)
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    assert all(isinstance(leaf, jax.Array) and str(leaf.dtype) == wanted for leaf in jax.tree.leaves(params))
    expected = expected_params(tensors, DTYPES[wanted])
    for name, value in flatten_arrays(params).items():
        np.testing.assert_array_equal(value, expected[name], err_msg=name)


def test_sharded_checkpoint_equals_single(tmp_path: Path) -> None:
    tensors = make_tensors()
    params = load(write_shards(tmp_path, split_shards(tensors)))
    for name, value in flatten_arrays(params).items():
        np.testing.assert_array_equal(value, expected_params(tensors)[name], err_msg=name)


def test_mixed_dtypes_of_one_parameter(tmp_path: Path) -> None:
    tensors = make_tensors(BF16)
    tensors["layers.0.up.weight"] = tensors["layers.0.up.weight"].astype(np.float16)
    tensors["layers.1.up.weight"] = tensors["layers.1.up.weight"].astype(np.float32)
    params = flatten_arrays(load(write_single(tmp_path, tensors)))
    widened = {name: tensor.astype(np.float32) for name, tensor in tensors.items()}
    for name, value in expected_params(widened).items():
        np.testing.assert_array_equal(params[name], value, err_msg=name)


def test_parameters_do_not_share_memory_with_the_file(tmp_path: Path) -> None:
    """JAX on CPU keeps aligned host arrays; a mapped file kept that way would change when the file does."""
    tensors = make_tensors()
    path = write_single(tmp_path, tensors)
    params = load(path)
    file = path / "model.safetensors"
    with file.open("r+b") as stream:  # in place: the same mapped pages
        stream.seek(8)
        stream.write(b"\xff" * (file.stat().st_size - 8))
    for name, value in flatten_arrays(params).items():
        np.testing.assert_array_equal(value, expected_params(tensors)[name], err_msg=name)


def test_stream_yields_every_parameter_once(tmp_path: Path) -> None:
    tensors = make_tensors()
    seen: list[tuple[int, int]] = []
    stream = stream_pieces(
        write_single(tmp_path, tensors),
        make_specs(),
        make_sources(),
        mesh=one_device(),
        rules=DEFAULT_RULES,
        progress=lambda done, total: seen.append((done, total)),
    )
    items = list(stream)
    assert [piece.name for piece in items] == list(flatten_specs(make_specs())[0])
    total = sum(tensor.nbytes for tensor in tensors.values())
    assert seen[0] == (0, total) and seen[-1] == (total, total) and len(seen) == len(items) + 1
    assert seen == sorted(seen)


def test_ignored_tensors(tmp_path: Path) -> None:
    tensors = make_tensors() | {"layers.0.rotary.inv_freq": np.ones(3, np.float64), "x.inv_freq.y": np.ones(1)}
    write_single(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"1 tensors .*no place for: 'x\.inv_freq\.y'"):
        load(tmp_path, ignored=(r".*\.inv_freq",))
    load(tmp_path, ignored=(r".*\.inv_freq", r"x\..*"))


def test_missing_and_unmapped_are_named_together(tmp_path: Path) -> None:
    tensors = make_tensors()
    tensors["other.weight"] = tensors.pop("embed.weight")
    with pytest.raises(WeightsError, match=r"lacks 1 of 10 tensors: 'embed.weight', and holds 1 .*'other.weight'"):
        load(write_single(tmp_path, tensors))


def test_long_lists_are_cut(tmp_path: Path) -> None:
    with pytest.raises(
        WeightsError, match=r"lacks 10 of 10 tensors.* and 6 more, and holds 30 .* and 26 more"
    ) as caught:
        load(write_single(tmp_path, {f"t{i}": np.ones(1, np.float32) for i in range(30)}))
    assert len(str(caught.value)) < 600


def test_mapped_twice(tmp_path: Path) -> None:
    sources = make_sources()
    sources["final_norm"] = dataclasses.replace(sources["final_norm"], names=("layers.0.norm.weight",))
    with pytest.raises(WeightsError, match=r"mapped twice: 'layers\.0\.norm\.weight'"):
        load(write_single(tmp_path, make_tensors()), sources=sources)


def test_sources_and_specs_disagree(tmp_path: Path) -> None:
    sources = make_sources()
    sources["lm_head"] = sources.pop("embed")
    with pytest.raises(WeightsError, match="disagree: 'embed', 'lm_head'"):
        load(write_single(tmp_path, make_tensors()), sources=sources)


@pytest.mark.parametrize(
    ("name", "value", "message"),
    [
        ("embed.weight", np.ones((V + 1, D), np.float32), r"embed\.weight: has shape \(17, 8\), .* needs \(16, 8\)"),
        ("layers.1.down.weight", np.ones((F, D), np.float32), r"layers\.1\.down\.weight: has shape \(12, 8\)"),
        ("norm.weight", np.ones((1, D), np.float32), r"norm\.weight: has shape \(1, 8\), .* needs \(8,\)"),
        ("norm.weight", np.ones(D, np.float64), r"norm\.weight: .*F64.*BF16, F16, F32"),
        ("norm.weight", np.ones(D, np.int8), r"norm\.weight: .*I8"),
    ],
)
def test_wrong_shape_or_dtype(tmp_path: Path, name: str, value: np.ndarray, message: str) -> None:
    """A transposed matrix has the right size and would load as noise."""
    with pytest.raises(WeightsError, match=message) as caught:
        load(write_single(tmp_path, make_tensors() | {name: value}), progress=lambda *_: pytest.fail("began to load"))
    assert caught.value.field == name


def test_build_of_another_shape(tmp_path: Path) -> None:
    sources = make_sources()
    sources["layers.0.down"] = WeightSource(("layers.0.down.weight",), ((D, F),), lambda tensor: tensor)
    with pytest.raises(WeightsError, match=r"layers\.0\.down: .*\(8, 12\).*\(12, 8\)"):
        load(write_single(tmp_path, make_tensors()), sources=sources)


@pytest.mark.parametrize("stored", [np.float32, BF16])
def test_values_beyond_float16(tmp_path: Path, stored: Any) -> None:
    tensors = make_tensors(stored)
    tensors["layers.1.up.weight"][3, 5] = 70_000
    write_single(tmp_path, tensors)
    with pytest.raises(WeightsError, match=r"layers\.1\.\S+: .*range of float16"):
        load(tmp_path, make_specs("float16"))
    load(tmp_path, make_specs("bfloat16"))


def test_checks_touch_no_data(tmp_path: Path) -> None:
    checkpoint = open_checkpoint(write_single(tmp_path, make_tensors()))
    flat, _ = flatten_specs(make_specs())
    (tmp_path / "model.safetensors").unlink()
    check_tensors(checkpoint, flat, make_sources())
