"""The decode step of a whole model without attention: the least that a step costs beside the attention measured.

The program is the engine's own forward program of a decode bucket, on random weights: rows that advance, embedding,
norms, matrix products, rotation, head. Only attention is replaced by this module, which passes queries, keys and values
on without reading or writing a page. It is registered with the kernels only while the program is traced.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any
from unittest import mock

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.runtime.arguments import make_compiler
from jaxserve.core.runtime.device_state import KVCache, RowState, make_zeros
from jaxserve.core.runtime.inputs import InputLayout
from jaxserve.core.runtime.memory import plan_cache
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.step_arrays import HiddenStates, SelectedLines
from jaxserve.core.runtime.step_model import StepModel
from jaxserve.core.sharding import make_mesh
from jaxserve.engine.model_files import load_params, locate_model, resolve_model
from jaxserve.features.choose import make_shapes
from pallas_kernels import backends
from pallas_kernels.spec import AttnShape, KVSpec

IMPL = "null"
_MAX_MODEL_LEN = 1536  # keeps the unused pools small
_PAGES = 8

StepState = tuple[KVCache, RowState]


def choose_layout(spec: KVSpec) -> str:
    """See `pallas_kernels.backends`, as for the two below."""
    del spec
    return "plain"


def find_obstacle(shape: AttnShape) -> str | None:
    del shape
    return None


def plan_work(*_: Any, **__: Any) -> None:
    """There is none."""


def attend_with_update(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array, *_: Any, **__: Any
) -> tuple[jax.Array, jax.Array]:
    """Returns each query plus its own key and value: if one of them were left out, so would be what computes it."""
    return q + jnp.repeat(k + v, q.shape[1] // k.shape[1], axis=1), kv_pages


@dataclass(frozen=True)
class NullModel:
    """A preset's random weights and config, on one device."""

    options: dict[str, Any]
    decoder: DecoderConfig
    mesh: Mesh
    params: Any

    @property
    def name(self) -> str:
        decoder = self.decoder
        return f"{self.options['model']}, {decoder.num_layers} layers, {decoder.hidden_size} channels, {decoder.dtype}"


@dataclass(frozen=True)
class NullStep:
    """A decode step of `bucket_rows` rows, those of padding included; `run` is given the state first and returns it."""

    model: StepModel
    bucket_rows: int
    run: Callable[[StepState], tuple[StepState, SelectedLines, HiddenStates]]
    make_state: Callable[[], StepState]


def load_model(preset: str, dtype: str = "auto") -> NullModel:
    """Makes the weights of a preset (configs/models) in `dtype`, by default its own."""
    options = {"model": preset, "load_format": "dummy", "dtype": dtype}
    config, mesh = EngineConfig.from_options(**options), make_mesh(1)
    shapes = _make_shapes(options, max_num_seqs=1)
    return NullModel(options, shapes.model, mesh, load_params(config, locate_model(config.model), shapes, mesh))


def make_step(model: NullModel, rows: int, position: int) -> NullStep:
    """Compiles the step in which `rows` rows of random last tokens compute the token at `position`.

    As in an engine, the number of rows is rounded up to a bucket: on a CPU one row is computed as two.
    """
    shapes = _make_shapes(model.options, max_num_seqs=rows)
    scheduler = shapes.config.scheduler
    assert scheduler.max_num_batched_tokens is not None  # resolved
    plan = plan_cache(
        shapes.model,
        specs=shapes.specs,
        max_chunk=scheduler.max_num_batched_tokens,
        num_devices=1,
        budget=0,
        override=_PAGES,
    )
    compiler = make_compiler(shapes, plan, model.mesh)
    inputs = compiler.programs.inputs
    bucket = shapes.buckets.find(rows, rows)
    with mock.patch.dict(backends._BACKENDS, {IMPL: backends.Backend(__name__, fused=True)}):
        program = compiler.compile("forward", bucket)
    packed = _pack(InputLayout(bucket, inputs.state_shape), rows, position, shapes.model.vocab_size)
    on_device = jax.device_put(packed, inputs.replicated)

    def run(state: StepState) -> tuple[StepState, SelectedLines, HiddenStates]:
        cache, row_state, selected, hidden = program(model.params, *state, on_device, ())
        return (cache, row_state), selected, hidden

    return NullStep(compiler.programs.model, bucket.rows, run, lambda: make_zeros((inputs.cache, inputs.rows)))


def _make_shapes(options: dict[str, Any], max_num_seqs: int) -> Shapes:
    config = EngineConfig.from_options(**options, max_num_seqs=max_num_seqs)
    device = jax.devices()[0]
    decoder = resolve_model(config, locate_model(config.model))
    decoder = decoder.with_max_model_len(min(_MAX_MODEL_LEN, decoder.max_supported_len))
    shapes = make_shapes(config, decoder, device.platform, device.device_kind)
    return replace(shapes, impl=IMPL, specs=tuple(replace(spec, layout="plain") for spec in shapes.specs))


def _pack(layout: InputLayout, rows: int, position: int, vocab_size: int) -> np.ndarray:
    """Returns the inputs of a step that can be repeated: they give the rows' positions instead of advancing them."""
    packed = layout.new()
    views = layout.views(packed)
    views.row_ids[:rows] = np.arange(rows)
    views.starts[:rows] = position
    views.is_sampled[:rows] = 1
    views.token_ids[:rows] = np.random.default_rng(0).integers(0, vocab_size, rows)
    views.query_start_loc[:] = np.minimum(np.arange(layout.bucket.rows + 1), rows)
    views.distribution[:] = rows
    return packed
