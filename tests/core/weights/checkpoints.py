"""Small checkpoints for the tests of this folder: a made-up model of two layers, and raw safetensors bytes."""

from __future__ import annotations

import json
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import jax
import ml_dtypes
import numpy as np
from safetensors.numpy import save_file

from jaxserve.core.models.base import ParamSpec, WeightSource
from jaxserve.core.sharding import make_mesh
from jaxserve.core.weights.paths import flatten_specs

D, F, V, L = 8, 12, 16, 2
BF16 = ml_dtypes.bfloat16


def make_specs(dtype: str = "float32") -> dict[str, Any]:
    """A plain table, a transposed matrix, two fused ones, a vector."""

    def layer() -> dict[str, ParamSpec]:
        return {
            "down": ParamSpec((F, D), dtype, ("ffn", None), "normal"),
            "gate_up": ParamSpec((2, D, F), dtype, (None, None, "ffn"), "normal"),
            "norm": ParamSpec((D,), dtype, (None,), "ones"),
        }

    table = ParamSpec((V, D), dtype, ("vocab", None), "normal")
    return {"embed": table, "layers": [layer() for _ in range(L)], "final_norm": layer()["norm"]}


def make_sources() -> dict[str, WeightSource]:
    """Sources of `make_specs`."""
    sources = {
        "embed": WeightSource(("embed.weight",), ((V, D),), lambda table: table),
        "final_norm": WeightSource(("norm.weight",), ((D,),), lambda norm: norm),
    }
    for index in range(L):
        prefix = f"layers.{index}"
        sources[f"{prefix}.down"] = WeightSource((f"{prefix}.down.weight",), ((D, F),), np.transpose)
        sources[f"{prefix}.gate_up"] = WeightSource(
            (f"{prefix}.gate.weight", f"{prefix}.up.weight"),
            ((F, D), (F, D)),
            lambda gate, up: np.stack([gate.T, up.T]),
        )
        sources[f"{prefix}.norm"] = WeightSource((f"{prefix}.norm.weight",), ((D,),), lambda norm: norm)
    return sources


def make_tensors(dtype: Any = np.float32, seed: int = 0) -> dict[str, np.ndarray]:
    """Tensors of a checkpoint that fits `make_sources`."""
    rng = np.random.default_rng(seed)
    shapes = {
        name: shape
        for source in make_sources().values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    return {name: rng.standard_normal(shape).astype(dtype) for name, shape in shapes.items()}


def expected_params(tensors: Mapping[str, np.ndarray], dtype: Any = np.float32) -> dict[str, np.ndarray]:
    """The canonical parameters by dotted path, computed the plain way."""
    return {
        name: np.asarray(source.build(*(tensors[tensor] for tensor in source.names))).astype(dtype)
        for name, source in make_sources().items()
    }


def write_single(path: Path, tensors: Mapping[str, np.ndarray]) -> Path:
    """Writes `model.safetensors` under `path`."""
    path.mkdir(exist_ok=True)
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, path / "model.safetensors")
    return path


def write_shards(
    path: Path, shards: Mapping[str, Mapping[str, np.ndarray]], weight_map: Mapping[str, str] | None = None
) -> Path:
    """Writes shards and their index; `weight_map` replaces the true one."""
    path.mkdir(exist_ok=True)
    for file, tensors in shards.items():
        save_file(dict(tensors), path / file)
    if weight_map is None:
        weight_map = {name: file for file, tensors in shards.items() for name in tensors}
    index = {"metadata": {"total_size": 0}, "weight_map": dict(weight_map)}
    (path / "model.safetensors.index.json").write_text(json.dumps(index))
    return path


def split_shards(tensors: Mapping[str, np.ndarray]) -> dict[str, dict[str, np.ndarray]]:
    """Three shards, so that the tensors of one fused parameter lie in different files."""
    shards: dict[str, dict[str, np.ndarray]] = {f"model-0000{i + 1}-of-00003.safetensors": {} for i in range(3)}
    for position, (name, tensor) in enumerate(sorted(tensors.items())):
        shards[list(shards)[position % 3]][name] = tensor
    return shards


def raw_file(header: object, data: bytes = b"") -> bytes:
    """A safetensors file with any header: bytes as they are, anything else as JSON."""
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    return struct.pack("<Q", len(text)) + text + data


def flatten_arrays(tree: Any) -> dict[str, np.ndarray]:
    """A tree of arrays as numpy arrays by dotted path."""
    return {name: np.asarray(leaf) for name, leaf in flatten_specs(tree)[0].items()}


def one_device() -> jax.sharding.Mesh:
    """A mesh of the first device."""
    return make_mesh(1)
