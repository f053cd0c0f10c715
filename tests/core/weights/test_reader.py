"""Checkpoints of one file and of many: found whole, or refused by name."""

from __future__ import annotations

import json
from pathlib import Path

import ml_dtypes
import numpy as np
import pytest

from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import WeightsError
from tests.core.weights.checkpoints import BF16, make_tensors, raw_file, split_shards, write_shards, write_single

INDEX = "model.safetensors.index.json"


@pytest.mark.parametrize("dtype", [np.float32, np.float16, BF16, np.int64, np.int32, np.bool_])
def test_reads_single(tmp_path: Path, dtype: type) -> None:
    tensors = make_tensors(dtype)
    checkpoint = open_checkpoint(write_single(tmp_path, tensors))
    assert checkpoint.names == tensors.keys()
    for name, tensor in tensors.items():
        checkpoint.prefetch(name)
        view = checkpoint.read(name)
        np.testing.assert_array_equal(view, tensor)
        assert view.dtype == dtype and not view.flags.writeable and not view.flags.owndata
        checkpoint.release(name)
        np.testing.assert_array_equal(view, tensor)  # released bytes are read again, not lost


def test_reads_shards(tmp_path: Path) -> None:
    tensors = make_tensors()
    checkpoint = open_checkpoint(write_shards(tmp_path, split_shards(tensors)))
    assert checkpoint.names == tensors.keys()
    for name, tensor in tensors.items():
        np.testing.assert_array_equal(checkpoint.read(name), tensor)


def test_views_outlive_the_checkpoint(tmp_path: Path) -> None:
    tensors = make_tensors()
    view = open_checkpoint(write_single(tmp_path, tensors)).read("embed.weight")
    (tmp_path / "model.safetensors").unlink()
    np.testing.assert_array_equal(view, tensors["embed.weight"])


def test_unaligned_and_odd_tensors(tmp_path: Path) -> None:
    header = {
        "scalar": {"dtype": "BF16", "shape": [], "data_offsets": [1, 3]},
        "byte": {"dtype": "U8", "shape": [1], "data_offsets": [0, 1]},
        "none": {"dtype": "F32", "shape": [0, 3], "data_offsets": [3, 3]},
    }
    (tmp_path / "model.safetensors").write_bytes(raw_file(header, b"\7" + np.array(1.5, ml_dtypes.bfloat16).tobytes()))
    checkpoint = open_checkpoint(tmp_path)
    assert checkpoint.read("scalar") == 1.5 and checkpoint.read("none").shape == (0, 3)
    assert checkpoint.dtype_name("byte") == "U8"
    checkpoint.prefetch("none")


def test_nothing_there(tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"neither model\.safetensors nor"):
        open_checkpoint(tmp_path)
    (tmp_path / "pytorch_model.bin").write_bytes(b"")
    with pytest.raises(WeightsError, match=r"pytorch_model\.bin is a pickle"):
        open_checkpoint(tmp_path)


def test_empty_file_and_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(WeightsError, match="empty"):
        open_checkpoint(tmp_path)
    file.unlink()
    file.mkdir()
    with pytest.raises(WeightsError, match="cannot be read"):
        open_checkpoint(tmp_path)


def test_both_forms(tmp_path: Path) -> None:
    write_single(tmp_path, make_tensors())
    write_shards(tmp_path, split_shards(make_tensors()))
    with pytest.raises(WeightsError, match="both there"):
        open_checkpoint(tmp_path)


def test_an_index_of_one_file(tmp_path: Path) -> None:
    """Some converters write an index whatever the number of files: it says nothing else than the file."""
    tensors = make_tensors()
    write_shards(tmp_path, {"model.safetensors": tensors})
    assert open_checkpoint(tmp_path).names == tensors.keys()


def test_truncated_shard_is_named(tmp_path: Path) -> None:
    write_shards(tmp_path, split_shards(make_tensors()))
    shard = tmp_path / "model-00002-of-00003.safetensors"
    shard.write_bytes(shard.read_bytes()[:-1])
    with pytest.raises(WeightsError, match="truncated") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.field == str(shard)


def test_missing_shard(tmp_path: Path) -> None:
    write_shards(tmp_path, split_shards(make_tensors()))
    (tmp_path / "model-00002-of-00003.safetensors").unlink()
    with pytest.raises(WeightsError, match=r"1 of 3 shards .* missing.*model-00002-of-00003"):
        open_checkpoint(tmp_path)


def test_doubled_tensor(tmp_path: Path) -> None:
    shards = split_shards(make_tensors())
    first, second = list(shards)[:2]
    name = next(iter(shards[first]))
    shards[second][name] = shards[first][name]
    with pytest.raises(WeightsError, match="two shards") as caught:
        open_checkpoint(write_shards(tmp_path, shards))
    assert caught.value.value == name


def test_listed_but_absent(tmp_path: Path) -> None:
    shards = split_shards(make_tensors())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    weight_map["ghost"] = next(iter(shards))
    with pytest.raises(WeightsError, match="'ghost' is missing"):
        open_checkpoint(write_shards(tmp_path, shards, weight_map))


def test_listed_in_the_wrong_shard(tmp_path: Path) -> None:
    shards = split_shards(make_tensors())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    weight_map["embed.weight"] = next(file for file in shards if "embed.weight" not in shards[file])
    with pytest.raises(WeightsError, match=r"'embed\.weight' is missing"):
        open_checkpoint(write_shards(tmp_path, shards, weight_map))


def test_held_but_not_listed(tmp_path: Path) -> None:
    shards = split_shards(make_tensors())
    weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    del weight_map["embed.weight"]
    with pytest.raises(WeightsError, match=r"1 tensors that the index does not list: 'embed\.weight'"):
        open_checkpoint(write_shards(tmp_path, shards, weight_map))


@pytest.mark.parametrize(
    "text",
    [
        b"",
        b"{",
        b"\xff",
        b"[]",
        b"{}",
        b'{"weight_map": []}',
        b'{"weight_map": {}}',
        b'{"weight_map": {"a": 1}}',
        b'{"weight_map": {"a": "x.bin"}}',
        b'{"weight_map": {"a": "x.safetensors", "a": "y.safetensors"}}',
        b'{"weight_map": {"a": "../x.safetensors"}}',
        b'{"weight_map": {"a": "/etc/x.safetensors"}}',
        b'{"weight_map": {"a": "x\\u0000.safetensors"}}',
        b'{"weight_map": {"a": "..\\\\x.safetensors"}}',
    ],
)
def test_corrupt_index(tmp_path: Path, text: bytes) -> None:
    (tmp_path / INDEX).write_bytes(text)
    with pytest.raises(WeightsError, match="corrupt index") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.field == str(tmp_path / INDEX)


def test_index_never_leads_out_of_the_directory(tmp_path: Path) -> None:
    outside = tmp_path / "secret.safetensors"
    outside.write_bytes(raw_file({}))
    inside = tmp_path / "model"
    inside.mkdir()
    (inside / INDEX).write_text(json.dumps({"weight_map": {"a": "../secret.safetensors"}}))
    with pytest.raises(WeightsError, match="no shard of this directory"):
        open_checkpoint(inside)
