"""A host of several reads no more of a checkpoint than its own shards need."""

from __future__ import annotations

from collections.abc import Iterator
from itertools import product
from typing import Any

import numpy as np
import pytest

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.models.base import ParamSpec
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights.paths import flatten_specs
from jaxserve.families.registry import param_specs, parse_config, weight_sources
from tests.families.naive import read_tensors
from tests.golden_cases import CASES, load_case


class Watched:
    """A tensor of a file that knows which of its values were read: those that become a plain array."""

    def __init__(self, values: np.ndarray, seen: np.ndarray) -> None:
        self.values, self.seen = values, seen
        self.shape, self.dtype, self.ndim, self.size = values.shape, values.dtype, values.ndim, values.size

    def __len__(self) -> int:
        return len(self.values)

    def __getitem__(self, index: Any) -> Any:
        if any(isinstance(part, np.ndarray) for part in (index if isinstance(index, tuple) else (index,))):  # copies
            self.seen[index] = True
            return self.values[index]
        return Watched(self.values[index], self.seen[index])

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        self.seen[...] = True
        return self.values

    def reshape(self, *shape: int) -> Watched:
        return Watched(self.values.reshape(*shape), self.seen.reshape(*shape))  # views of whole tensors

    def swapaxes(self, first: int, second: int) -> Watched:
        """As `np.split` asks for."""
        return Watched(self.values.swapaxes(first, second), self.seen.swapaxes(first, second))


def list_shards(spec: ParamSpec, num_heads: int) -> Iterator[tuple[slice, ...]]:
    """The index of each shard, over two devices or, where heads cannot be halved, as many as there are heads."""
    cuts = []
    for size, axis in zip(spec.shape, DEFAULT_RULES.sharding(make_mesh(1), spec.axes).spec, strict=True):
        count = 1 if axis is None else 2 if num_heads % 2 == 0 else num_heads
        cuts.append([slice(size * part // count, size * (part + 1) // count) for part in range(count)])
    return product(*cuts)


@pytest.mark.parametrize("name", CASES)
def test_a_shard_reads_its_own_values_only(name: str) -> None:
    case = load_case(name)
    config, tensors = parse_config(case.config), read_tensors(case.path)
    specs, _ = flatten_specs(param_specs(config))
    attention = next(kind.mixer for kind in config.layers if isinstance(kind.mixer, AttentionConfig))
    num_heads = attention.num_heads if attention.latent else attention.num_kv_heads
    for leaf, stored in weight_sources(config).items():
        source = stored.choose(tensors.keys())
        if len(specs[leaf].shape) < 2 or "norm" in leaf or leaf.endswith(".conv"):
            continue  # small
        files = [tensors[tensor] for tensor in source.names]
        whole, read = np.asarray(source.build(*files)), 0
        for index in list_shards(specs[leaf], num_heads):
            watched = [Watched(file, np.zeros(file.shape, bool)) for file in files]
            shard = np.asarray(source.build(*watched)[index])
            np.testing.assert_array_equal(shard, whole[index])
            seen = sum(int(each.seen.sum()) for each in watched)
            assert seen <= shard.size, leaf
            read += seen
        assert read >= (whole.size if source.part else sum(file.size for file in files)), leaf
