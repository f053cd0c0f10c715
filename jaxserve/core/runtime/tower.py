"""Runs the tower of a model that reads images: whole images in a row, each a row of attention without causal masks."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.sharding import Mesh
from jaxtyping import Array, Float, Int

from jaxserve.core.layers.context import LayerContext
from jaxserve.core.models.decoder import fit_devices
from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.runtime.sizes import attention_shapes, choose_layouts, make_specs
from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES
from jaxserve.errors import ConfigError
from jaxserve.families.towers import find_tower
from pallas_kernels.backends import find_backend
from pallas_kernels.batch import prepare_batch
from pallas_kernels.layout import pool_shape
from pallas_kernels.platform import traced_platform
from pallas_kernels.spec import AttnShape, BatchMeta, KVSpec

PAGE_SIZE = 64  # patches; a power of two, which the GPU kernels want


def fit_tower(config: TowerConfig, tensor_parallel_size: int) -> TowerConfig:
    """Returns the tower whose specs fit a mesh of this size; devices share its heads and columns.

    Raises:
        ConfigError: they do not divide; names sizes that work.
    """
    try:
        return replace(config, blocks=fit_devices(config.blocks, tensor_parallel_size))
    except ConfigError as error:
        message = f"of the tower that reads images: {str(error).removeprefix(f'{error.field}: ')}"
        raise ConfigError(message, field=error.field, value=error.value) from error


def choose_tower_impl(config: TowerConfig, impl: str, num_devices: int, platform: str) -> tuple[str, str]:
    """Returns the attention implementation of a tower, and the reason for users.

    Args:
        impl: that of the text model, which the tower has, too, unless it cannot do the tower's heads.
    """
    _, shape = _describe_attention(config, impl, num_devices, platform)
    obstacle = find_backend(impl).module.find_obstacle(shape)
    return (impl, "that of the text model") if obstacle is None else ("xla", f"portable attention: {obstacle}")


def run_tower(
    config: TowerConfig,
    params: Mapping[str, Any],
    arrays: Mapping[str, Array],
    lengths: Int[Array, " I"],
    *,
    impl: str,
    mesh: Mesh | None,
) -> Float[Array, "M P D"]:
    """Returns the vectors of images, for use inside a program; M = N / merge_size^2, in the model's dtype.

    Args:
        params: a tree of `tower_param_specs`, sharded by its specs if there is a mesh.
        arrays: as `Tower.inputs` describes them. The images lie behind each other, padding behind the last.
        lengths: patches of each image, 0 behind the last.
        impl: as `choose_tower_impl` chooses it.

    What padding holds, changes no image; its own vectors mean nothing.
    """
    num_patches, num_devices = arrays["patches"].shape[0], 1 if mesh is None else mesh.size
    pages, shape = _describe_attention(config, impl, num_devices, traced_platform())
    num_pages, batch = _make_batch(lengths, num_patches, shape, impl)
    pool = jnp.zeros(pool_shape(pages, num_pages), pages.dtype)  # of all layers, one after another
    if mesh is not None:
        pool = lax.with_sharding_constraint(pool, DEFAULT_RULES.sharding(mesh, KV_POOL_AXES))
    blocks = config.blocks
    ctx = LayerContext(
        mesh=mesh,
        products=blocks.products,
        few_rows=blocks.few_rows,
        num_rows=batch.query_start_loc[-1],
        rotary=None,
        batch=batch,
        pool=pool,
        offset=0,
        window=None,
    )
    return find_tower(config).run(config, params, arrays, ctx)


def _describe_attention(config: TowerConfig, impl: str, num_devices: int, platform: str) -> tuple[KVSpec, AttnShape]:
    """Returns the pages of all devices together, and the attention of one of them."""
    blocks = config.blocks
    specs = choose_layouts(impl, make_specs(blocks, PAGE_SIZE, blocks.dtype), platform)
    (shape,) = attention_shapes(blocks, specs, num_devices)
    return specs[0], shape


def _make_batch(lengths: Int[Array, " I"], num_patches: int, shape: AttnShape, impl: str) -> tuple[int, BatchMeta]:
    """Returns the number of scratch pages, and the batch whose rows are images with pages of their own."""
    num_images, width = lengths.shape[0], -(-num_patches // PAGE_SIZE)
    used = (lengths + PAGE_SIZE - 1) // PAGE_SIZE
    first = 1 + jnp.cumsum(used) - used  # behind the null page
    starts = jnp.concatenate([jnp.zeros(1, jnp.int32), jnp.cumsum(lengths)])
    count = jnp.sum(lengths > 0, dtype=jnp.int32)
    batch = prepare_batch(
        first[:, None] + jnp.arange(width, dtype=jnp.int32),
        lengths,
        starts,
        jnp.stack([jnp.int32(0), count, count]),
        num_tokens=num_patches,
        shape=shape,
        max_query_len=None,
        impl=impl,
    )
    return 1 + num_patches // PAGE_SIZE + num_images, batch
