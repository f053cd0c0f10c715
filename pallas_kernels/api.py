"""The public call. The batch says which implementation answers (`prepare_batch`)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.backends import find_backend
from pallas_kernels.layout import read_format, update_kv_pages
from pallas_kernels.spec import AttnLayer, BatchMeta


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's keys and values into their pages, then attends: the one call of a model.

    Returns the attention [T, N, H] in q's dtype and the pool. Donate the pool: the write is then in place. Tokens
    after the last row's are padding: they write to the null page or nowhere, and their attention is finite but
    arbitrary. N and K may be one device's share under shard_map. Nothing in unused slots, not even NaN, reaches a
    result.

    Raises:
        ValueError: an array or the layer does not fit the batch; names both.
    """
    _check_shapes(q, kv_pages, batch, layer)
    if k.shape != v.shape or k.shape != (q.shape[0], batch.shape.spec.num_kv_heads, q.shape[2]):
        raise ValueError(f"q {q.shape} and kv_pages {kv_pages.shape} do not fit k {k.shape} and v {v.shape}")
    backend = find_backend(batch.impl)
    if backend.fused:
        layer = replace(layer, page_offset=jnp.asarray(layer.page_offset, jnp.int32))
        return _attend_fused(q, k, v, kv_pages, batch, layer)
    kv_pages = update_kv_pages(k, v, kv_pages, batch, layer)
    return backend.module.attend(q, kv_pages, batch, layer), kv_pages


@jax.jit
def _attend_fused(
    q: jax.Array, k: jax.Array, v: jax.Array, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer
) -> tuple[jax.Array, jax.Array]:
    """Jitted by itself, so that a model's equal layers are traced and lowered once."""
    return find_backend(batch.impl).module.attend_with_update(q, k, v, kv_pages, batch, layer)


def _check_shapes(q: jax.Array, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer) -> None:
    num_tokens, num_heads, head_dim = q.shape
    shape, spec = batch.shape, batch.shape.spec
    if (num_heads, head_dim) != (shape.num_heads, spec.head_dim):
        raise ValueError(
            f"q has {num_heads} heads of {head_dim}, the batch is for {shape.num_heads} of {spec.head_dim}"
        )
    form = read_format(kv_pages.shape, head_dim)
    if form.num_kv_heads != spec.num_kv_heads or kv_pages.shape[2] != spec.page_size or kv_pages.dtype != spec.dtype:
        raise ValueError(f"kv_pages {kv_pages.dtype}{list(kv_pages.shape)} do not fit the batch's {spec}")
    if batch.positions.shape != (num_tokens,):
        raise ValueError(f"q has {num_tokens} tokens, the batch {batch.positions.shape[0]}")
    if layer.params.window != shape.window:
        raise ValueError(f"params.window is {layer.params.window}, the batch was prepared for {shape.window}")
    wanted = {"sinks": num_heads, "k_scale": spec.num_kv_heads, "v_scale": spec.num_kv_heads}
    for name, size in wanted.items():
        array = getattr(layer.heads, name)
        if array is not None and array.shape != (size,):
            raise ValueError(f"heads.{name} must be [{size}], one per head, got {array.shape}")
