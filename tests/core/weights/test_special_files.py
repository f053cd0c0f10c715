"""Checkpoints with something else in place of their files, and with files made to fill the memory."""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core.weights import file_formats as formats
from jaxserve.core.weights import header, json_files, reader
from jaxserve.core.weights.file_formats import describe_foreign
from jaxserve.core.weights.header import MAX_TENSORS, parse_header
from jaxserve.core.weights.json_files import MAX_JSON_BYTES, read_generation_config, read_hf_config
from jaxserve.core.weights.reader import MAX_INDEX_BYTES, open_checkpoint
from jaxserve.errors import ConfigError, JaxServeError, WeightsError
from tests.core.weights.checkpoints import make_tensors, raw_file, split_shards, write_shards, write_single

INDEX = "model.safetensors.index.json"
READERS: dict[str, Callable[[Path], Any]] = {
    "config.json": read_hf_config,
    "generation_config.json": read_generation_config,
    "model.safetensors": open_checkpoint,
    INDEX: open_checkpoint,
}
BOUNDS = {
    "config.json": MAX_JSON_BYTES,
    "generation_config.json": MAX_JSON_BYTES,
    INDEX: MAX_INDEX_BYTES,
}


@pytest.mark.parametrize("name", READERS)
@pytest.mark.parametrize("target", [None, "/dev/zero"])
def test_special_files_are_refused_by_name(tmp_path: Path, name: str, target: str | None) -> None:
    if target is None:
        os.mkfifo(tmp_path / name)
    else:
        (tmp_path / name).symlink_to(target)
    with pytest.raises(JaxServeError, match=r"(FIFO|character device)") as caught:
        READERS[name](tmp_path)
    assert isinstance(caught.value, ConfigError | WeightsError) and caught.value.field == str(tmp_path / name)


def test_a_shard_that_is_a_fifo_is_refused(tmp_path: Path) -> None:
    write_shards(tmp_path, split_shards(make_tensors()))
    shard = sorted(tmp_path.glob("*.safetensors"))[-1]
    shard.unlink()
    os.mkfifo(shard)
    with pytest.raises(WeightsError, match="FIFO") as caught:
        open_checkpoint(tmp_path)
    assert caught.value.field == str(shard)


def test_links_to_regular_files_are_read(tmp_path: Path) -> None:
    blobs, snapshot = tmp_path / "blobs", tmp_path / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    write_single(blobs, make_tensors())
    (blobs / "config.json").write_text('{"a": 1}')
    for blob in blobs.iterdir():
        (snapshot / blob.name).symlink_to(Path("..") / "blobs" / blob.name)
    assert read_hf_config(snapshot) == {"a": 1}
    assert open_checkpoint(snapshot).names == make_tensors().keys()


@pytest.mark.parametrize("name", BOUNDS)
def test_large_files_are_refused_unread(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    for room in (json_files, reader):
        monkeypatch.setattr(room, "parse_json_object", lambda *args: pytest.fail("parsed"))
    with (tmp_path / name).open("wb") as file:
        file.truncate(BOUNDS[name] + 1)
    with pytest.raises(JaxServeError, match=rf"at most {BOUNDS[name] // 2**20} MiB") as caught:
        READERS[name](tmp_path)
    assert str(tmp_path / name) in str(caught.value)


def test_a_large_adapter_is_described_without_its_base(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "adapter_config.json").write_text('{"base_model_name_or_path": "some/base"}')
    assert "of 'some/base'" in str(describe_foreign(tmp_path))
    monkeypatch.setattr(formats, "MAX_JSON_BYTES", 4)
    assert "a LoRA adapter is no model" in str(describe_foreign(tmp_path))


def test_a_header_of_a_million_tensors_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(header, "parse_json_object", lambda *args: pytest.fail("parsed"))
    entries = ",".join(f'"{n}":{{"dtype":"F32","shape":[0],"data_offsets":[0,0]}}' for n in range(10**6))
    with pytest.raises(WeightsError, match="500,000 tensors"):
        parse_header(raw_file(f"{{{entries}}}".encode()), "f")


def test_a_header_of_endless_lists_is_refused_unparsed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files.json, "loads", lambda *args, **kwargs: pytest.fail("parsed"))
    with pytest.raises(WeightsError, match=r"header.* 8,000,000 values"):
        parse_header(raw_file(b'{"a":{"shape":[' + b"0," * 8 * 10**6 + b"0]}}"), "f")


def test_an_index_of_a_million_tensors_is_refused_unparsed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(json_files.json, "loads", lambda *args, **kwargs: pytest.fail("parsed"))
    names = ",".join(f'"{n}":"model-1.safetensors"' for n in range(10**6))
    (tmp_path / INDEX).write_text(f'{{"weight_map":{{{names}}}}}')
    with pytest.raises(WeightsError, match="1,001,000 values"):
        open_checkpoint(tmp_path)


def test_shards_are_counted_together(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    shards = split_shards(make_tensors())
    write_shards(tmp_path, shards)
    assert max(map(len, shards.values())) < 9 < sum(map(len, shards.values()))
    monkeypatch.setattr(reader, "MAX_TENSORS", 9)
    with pytest.raises(WeightsError, match="9 tensors"):
        open_checkpoint(tmp_path)


@pytest.mark.thorough
def test_a_model_larger_than_any_published_is_read(tmp_path: Path) -> None:
    count = 95_000
    assert count < MAX_TENSORS
    entries = {
        f"model.layers.{n}.weight": {"dtype": "F32", "shape": [1, 0, 1], "data_offsets": [0, 0]} for n in range(count)
    }
    (tmp_path / "model-1.safetensors").write_bytes(raw_file(entries))
    (tmp_path / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(entries, "model-1.safetensors")}))
    assert len(open_checkpoint(tmp_path).names) == count
