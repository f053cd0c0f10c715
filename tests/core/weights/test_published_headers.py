"""Headers of published quantized files: what the model asks for is what they have.

A fixture (published/*.json) is a config.json and the tensors of its files, each [dtype, shape], where a name with
[0-23] stands for 24 of them. It says where each part was found: `published` is taken from there, `derived` follows from
config and format. `stated` are sums over the real files, which the fixture's own must equal.
"""

from __future__ import annotations

import functools
import json
import math
import re
import struct
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from jaxserve.core.models.base import DecoderConfig, ParamSpec, WeightSource
from jaxserve.core.weights import read_hf_config
from jaxserve.core.weights.load import check_tensors
from jaxserve.core.weights.paths import flatten_specs
from jaxserve.core.weights.reader import open_checkpoint
from jaxserve.errors import WeightsError
from jaxserve.families.registry import ignored_weights, param_specs, parse_config, weight_sources

Header = dict[str, tuple[str, tuple[int, ...]]]  # dtype and shape by name

FOLDER = Path(__file__).parent / "published"
BITS = {"U8": 8, "F8_E4M3": 8, "F16": 16, "BF16": 16, "I32": 32, "F32": 32, "I64": 64}
RANGE = re.compile(r"\[(\d+)-(\d+)\]")
LAYER = re.compile(r"(?<=layers\.)\d+")
METHODS = {  # of each fixture, with the ends of the names that are not read
    "deepseek-v3": ("fp8", set()),
    "deepseek-v3-awq": ("awq", set()),
    "gpt-oss-20b": ("mxfp4", set()),
    "kimi-k2-thinking": ("compressed-tensors", {"weight_shape"}),
    "llama-3.1-8b-fp8-dynamic": ("compressed-tensors", set()),
    "llama-3.3-70b-w4a16": ("compressed-tensors", {"weight_shape"}),
    "minimax-m2.7-nvfp4": ("modelopt", {"input_scale"}),
    "qwen1.5-moe-gptq": ("gptq", {"bias", "g_idx", "qzeros"}),
    "qwen3-32b-awq": ("awq", set()),
}
LARGE = (
    "deepseek-v3",
    "deepseek-v3-awq",
    "kimi-k2-thinking",
    "minimax-m2.7-nvfp4",
)  # have tens of thousands of tensors


def expand(name: str) -> Iterator[str]:
    """The names that a name with ranges stands for."""
    found = RANGE.search(name)
    if found is None:
        yield name
        return
    for index in range(int(found[1]), int(found[2]) + 1):
        yield from expand(f"{name[: found.start()]}{index}{name[found.end() :]}")


def read_fixture(name: str) -> dict[str, Any]:
    return json.loads((FOLDER / f"{name}.json").read_text())


def list_tensors(fixture: Mapping[str, Any]) -> Header:
    tensors = fixture["tensors"].items()
    return {name: (dtype, tuple(shape)) for names, (dtype, shape) in tensors for name in expand(names)}


def cut_layers(fixture: Mapping[str, Any]) -> tuple[dict[str, Any], Header]:
    """The config and the tensors of the first layers, one of each kind, and of any behind the last."""
    config = dict(fixture["config"])
    count, kept = config["num_hidden_layers"], config.get("first_k_dense_replace", 0) + 1
    config["num_hidden_layers"] = kept
    for key, value in config.items():
        if isinstance(value, list) and len(value) == count:  # something for each layer
            config[key] = value[:kept]
    tensors = {}
    for name, tensor in list_tensors(fixture).items():
        layer = LAYER.search(name)
        index = -1 if layer is None else int(layer[0])
        if index < kept:
            tensors[name] = tensor
        elif index >= count:
            tensors[LAYER.sub(str(index - count + kept), name)] = tensor
    return config, tensors


def write_header(file: Path, tensors: Header) -> None:
    """Writes a file whose tensors take no space: what is never written is a hole, and reads as zeros."""
    header, end = {}, 0
    for name, (dtype, shape) in tensors.items():
        begin, end = end, end + math.prod(shape) * BITS[dtype] // 8
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [begin, end]}
    text = json.dumps(header).encode()
    with file.open("wb") as stream:
        stream.write(struct.pack("<Q", len(text)) + text)
        stream.truncate(stream.tell() + end)


@dataclass(frozen=True)
class Cut:
    """The first layers of a model, and their tensors."""

    hf_config: dict[str, Any]
    tensors: Header
    config: DecoderConfig
    specs: dict[str, ParamSpec]
    sources: dict[str, WeightSource]

    @property
    def used(self) -> set[str]:
        """The tensors that parameters are made of."""
        return {name for source in self.sources.values() for name in source.choose(self.tensors.keys()).names}

    def check(self, folder: Path, tensors: Header) -> None:
        """Opens a checkpoint and holds it against the model, as loading does before it reads a number."""
        write_header(folder / "model.safetensors", tensors)
        check_tensors(open_checkpoint(folder), self.specs, self.sources, ignored_weights(self.config))


@functools.cache
def load_cut(name: str) -> Cut:
    hf_config, tensors = cut_layers(read_fixture(name))
    config = parse_config(hf_config)
    return Cut(hf_config, tensors, config, flatten_specs(param_specs(config))[0], weight_sources(config))


def test_every_fixture_is_listed_here_and_says_where_it_is_from() -> None:
    assert {file.stem for file in FOLDER.glob("*.json")} == METHODS.keys()
    for name in METHODS:
        fixture = read_fixture(name)
        assert fixture["source"]["model"] and fixture["source"]["config"] and fixture["published"]
        assert fixture["derived"] or {"names", "dtypes", "shapes"} <= set(fixture["published"])


@pytest.mark.parametrize("name", METHODS)
def test_sums_are_those_of_the_real_files(name: str) -> None:
    fixture = read_fixture(name)
    tensors = list_tensors(fixture)
    num_bytes = sum(math.prod(shape) * BITS[dtype] // 8 for dtype, shape in tensors.values())
    found = {
        "tensors": len(tensors),
        "bytes": num_bytes,
        "dtypes": dict(Counter(dtype for dtype, _ in tensors.values())),
    }
    assert fixture["stated"] and fixture["stated"].items() <= found.items()


@pytest.mark.parametrize("name", METHODS)
def test_a_published_header_is_accepted(name: str, tmp_path: Path) -> None:
    method, unread = METHODS[name]
    cut = load_cut(name)
    (tmp_path / "config.json").write_text(json.dumps(cut.hf_config))
    assert parse_config(read_hf_config(tmp_path)) == cut.config
    assert cut.config.quantization is not None and cut.config.quantization.method == method
    cut.check(tmp_path, cut.tensors)
    left_out = cut.tensors.keys() - cut.used
    behind = {tensor for tensor in left_out if f"layers.{cut.config.num_layers}." in tensor}
    assert {tensor.rpartition(".")[2] for tensor in left_out - behind} == unread
    assert bool(behind) == (name == "deepseek-v3")


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=pytest.mark.thorough) if name in LARGE else name for name in METHODS]
)
def test_a_tensor_that_is_not_as_published_is_named(name: str, tmp_path: Path) -> None:
    """One tensor of each kind is left out, renamed, and given another shape and dtype."""
    cut = load_cut(name)
    kinds = {}
    for tensor in sorted(cut.used):
        dtype, shape = cut.tensors[tensor]
        kinds[tensor.rpartition(".")[2], dtype, len(shape), ".experts." in tensor] = tensor
    assert any(dtype not in ("F16", "BF16", "F32") for _, dtype, *_ in kinds)
    for tensor in kinds.values():
        dtype, shape = cut.tensors[tensor]
        others = {other: value for other, value in cut.tensors.items() if other != tensor}
        with pytest.raises(WeightsError) as caught:
            cut.check(tmp_path, others)
        assert tensor.rpartition(".")[0] in str(caught.value)  # the module, as it may be stored in several forms
        with pytest.raises(WeightsError, match=f"no place for: '{re.escape(tensor)}_renamed'"):
            cut.check(tmp_path, others | {f"{tensor}_renamed": (dtype, shape)})
        with pytest.raises(WeightsError, match="the model's config needs") as caught:
            cut.check(tmp_path, others | {tensor: (dtype, (*shape, 3))})
        assert caught.value.field == tensor
        with pytest.raises(WeightsError, match="I64") as caught:
            cut.check(tmp_path, others | {tensor: ("I64", shape)})
        assert caught.value.field == tensor
