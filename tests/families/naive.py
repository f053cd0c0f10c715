"""The smallest thing that runs a model: fixed page tables, no scheduler, no engine."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors import safe_open

from jaxserve.core.layers.memory import RecurrentState
from jaxserve.core.layers.recurrent import choose_slots
from jaxserve.core.layers.stack import StackMode, stack_params, stack_specs
from jaxserve.core.models.base import DecoderConfig, ParamSpec, WeightSource
from jaxserve.core.models.decoder import compute_logits, forward, normalize_last
from jaxserve.core.runtime.memory import plan_cache
from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES
from jaxserve.families.registry import param_specs, weight_sources
from pallas_kernels import AttnShape, KVSpec, prepare_batch

PAGE_SIZE = 16


def read_tensors(folder: Path) -> dict[str, np.ndarray]:
    """All tensors of a checkpoint's safetensors files."""
    tensors = {}
    for path in sorted(folder.glob("*.safetensors")):
        with safe_open(path, "numpy") as file:
            tensors |= {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 not a dict
    return tensors


def build_params(config: DecoderConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, Any]:
    """The canonical tree, in `config.dtype`; fails on shapes that differ from the specs."""
    specs = param_specs(config)
    params: dict[str, Any] = {"layers": [{} for _ in config.layers]}
    for path, source in _choose_sources(config, tensors).items():
        leaf = np.asarray(source.build(*(tensors[name] for name in source.names)))
        *parents, name = path.split(".")
        tree, spec_tree = params, specs
        for key in parents:
            spec_tree = spec_tree[int(key) if isinstance(spec_tree, list) else key]
            tree = tree[int(key)] if isinstance(tree, list) else tree.setdefault(key, {})
        assert leaf.shape == spec_tree[name].shape, path
        tree[name] = jnp.asarray(leaf).astype(config.dtype)
    assert jax.tree.structure(params) == jax.tree.structure(specs)
    return params


def make_tensors(config: DecoderConfig, seed: int) -> dict[str, np.ndarray]:
    """Random float32 tensors under the checkpoint's names; norm weights lie around their neutral value."""
    rng = np.random.default_rng(seed)
    tensors = {}
    for path, source in weight_sources(config).items():
        centre = 1.0 if path.endswith("_norm.weight") and not config.norm.unit_offset else 0.0
        for name, shape in zip(source.names, source.shapes, strict=True):
            scale = 0.3 if len(shape) <= 1 else 1.5 / math.sqrt(shape[-1])
            tensors[name] = np.asarray(centre + scale * rng.standard_normal(shape), np.float32)
    return tensors


def shard_params(config: DecoderConfig, params: Mapping[str, Any], mesh: Mesh, mode: StackMode) -> Any:
    """The runtime tree, every leaf where its spec puts it."""
    specs = stack_specs(param_specs(config), mode)

    def place(spec: ParamSpec, leaf: jax.Array) -> jax.Array:
        return jax.device_put(leaf, DEFAULT_RULES.sharding(mesh, spec.axes))

    return jax.tree.map(place, specs, stack_params(params, mode))


class NaiveRunner:
    """Holds the pools and runs rows of tokens through a model, one jitted program per token count."""

    def __init__(
        self,
        config: DecoderConfig,
        params: Any,
        num_rows: int,
        *,
        mesh: Mesh | None = None,
        impl: str | None = "xla",
        pages_per_row: int | None = None,
    ) -> None:
        self.config, self.params, self.num_rows = config, params, num_rows
        per_row = pages_per_row or -(-config.max_model_len // PAGE_SIZE)
        num_pages = num_rows * per_row + 1
        order = np.random.default_rng(0).permutation(num_rows * per_row) + 1  # page 0 is the null page
        self.page_table = jnp.asarray(order.reshape(num_rows, per_row), jnp.int32)
        self.lengths = np.zeros(num_rows, np.int32)
        devices = 1 if mesh is None else mesh.size
        specs = [
            KVSpec(heads.num_kv_heads, heads.head_dim, PAGE_SIZE, config.dtype, value_dim=heads.value_dim)
            for heads in (group.memory for group in config.kv_groups)
        ]
        plan = plan_cache(
            config,
            specs=specs,
            max_chunk=config.max_model_len,
            num_devices=devices,
            budget=0,
            num_pages=[num_pages] * len(specs),
        )
        self.cache = tuple(jnp.zeros(shape, config.dtype) for shape in plan.pool_shapes)
        states = [self._make_states(*each, mesh) for each in config.states]
        if mesh is not None:
            self.cache = jax.device_put(self.cache, DEFAULT_RULES.sharding(mesh, KV_POOL_AXES))
        self.cache = (*self.cache, *states)
        shapes = [
            AttnShape(
                group.memory.num_heads // devices,
                dataclasses.replace(spec, num_kv_heads=spec.num_kv_heads // devices),
                config.dtype,
                group.window,
                causal=group.memory.causal,
            )
            for group, spec in zip(config.kv_groups, specs, strict=True)
        ]

        def step(params, token_ids, cache, seq_lens, query_start_loc):
            rows = {
                "page_table": self.page_table,
                "seq_lens": seq_lens,
                "query_start_loc": query_start_loc,
                "distribution": jnp.array([0, 0, num_rows], jnp.int32),
                "num_tokens": token_ids.shape[0],
                # A bound is that of a verify step, which takes states through its tokens one by one, and not in tiles.
                "max_query_len": None if config.states else token_ids.shape[0],
                "impl": impl,
            }
            batches = tuple(prepare_batch(shape=shape, **rows) for shape in shapes)
            slots = choose_slots(jnp.arange(num_rows), seq_lens, jnp.diff(query_start_loc), num_rows)
            hidden, cache, _ = forward(
                config, params, token_ids, cache, batches, layout=plan.layout, mesh=mesh, slots=slots
            )
            finish = compute_logits if config.generates else normalize_last
            return finish(config, params, hidden), cache

        self.step = jax.jit(
            step, compiler_options={"xla_backend_optimization_level": 0}
        )  # compiling is what takes time

    def _make_states(self, state: RecurrentState, num_layers: int, mesh: Mesh | None) -> dict[str, jax.Array]:
        """The pool of a recurrent state, in which nothing is what a text that begins may see."""
        pool = {}
        for array in state.arrays:
            values = jnp.full((num_layers, self.num_rows, *array.shape), 9, array.dtype)
            sharding = None if mesh is None else DEFAULT_RULES.sharding(mesh, (None, None, *array.axes))
            pool[array.name] = jax.device_put(values, sharding)
        return pool

    def run(self, rows: Sequence[Sequence[int]], pad_to: int | None = None) -> list[np.ndarray]:
        """Appends tokens to every row and returns each row's logits [len(row), V]; padding holds odd tokens.

        Of a model without a head it returns the hidden states [len(row), D].
        """
        lengths = [len(row) for row in rows]
        starts = np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32)
        ids = np.full(pad_to or starts[-1], self.config.vocab_size - 1, np.int32)
        ids[: starts[-1]] = np.concatenate([np.asarray(row, np.int32) for row in rows])
        self.lengths = self.lengths + np.asarray(lengths, np.int32)
        logits, self.cache = self.step(
            self.params, jnp.asarray(ids), self.cache, jnp.asarray(self.lengths), jnp.asarray(starts)
        )
        logits = np.asarray(logits)
        return [logits[start : start + length] for start, length in zip(starts, lengths, strict=False)]


def unused_tensors(config: DecoderConfig, tensors: Mapping[str, np.ndarray]) -> set[str]:
    """Names that no parameter is made of."""
    return set(tensors) - {name for source in _choose_sources(config, tensors).values() for name in source.names}


def _choose_sources(config: DecoderConfig, tensors: Mapping[str, np.ndarray]) -> dict[str, WeightSource]:
    return {path: source.choose(tensors.keys()) for path, source in weight_sources(config).items()}
