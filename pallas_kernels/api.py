"""The public call. The batch says which implementation answers (`prepare_batch`)."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp

from pallas_kernels.backends import find_backend
from pallas_kernels.layout import pool_shape, read_tokens, update_kv_pages
from pallas_kernels.spec import AttnLayer, BatchMeta


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's keys and values into their pages, then attends: the one call of a model.

    Returns the attention [T, N, V] in q's dtype and the pool; V is H, but for latents. Donate the pool: the write is
    then in place. Tokens after the last row's are padding: they write to the null page or nowhere, and their attention
    is finite but arbitrary. N and K may be one device's share under shard_map. Nothing in unused slots, not even NaN,
    reaches a result.

    Raises:
        ValueError: an array or the layer does not fit the batch; names both.
    """
    _check_queries(q, batch)
    _check_pages(kv_pages, batch, layer)
    _check_tokens(k, v, batch)
    backend = find_backend(batch.impl)
    if backend.fused:
        layer = replace(layer, page_offset=jnp.asarray(layer.page_offset, jnp.int32))
        return _attend_fused(q, k, v, kv_pages, batch, layer)
    kv_pages = update_kv_pages(k, v, kv_pages, batch, layer)
    return backend.module.attend(q, kv_pages, batch, layer), kv_pages


def store(
    k: jax.Array,  # [T, K, H]
    v: jax.Array | None,  # [T, K, H]; None for latents
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """Writes the step's keys and values as `attend_with_update` does, and returns the pool.

    Raises:
        ValueError: an array or the layer does not fit the batch; names both.
    """
    _check_pages(kv_pages, batch, layer)
    _check_tokens(k, v, batch)
    write = getattr(find_backend(batch.impl).module, "store", update_kv_pages)
    return write(k, v, kv_pages, batch, layer)


def attend_stored(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    layer: AttnLayer,
) -> tuple[jax.Array, jax.Array]:
    """Attends to pages that hold the step's keys and values already, because another layer wrote them.

    `layer` has the page offset and the scales of that other layer. Returns as `attend_with_update`. An implementation
    that writes itself reads the step's keys and values from the pages, and writes them again where they stand. Without
    `AttnShape.causal` the batch's `seq_lens` count keys alone: this is cross attention.

    Raises:
        ValueError: an array or the layer does not fit the batch; names both.
    """
    _check_queries(q, batch)
    _check_pages(kv_pages, batch, layer)
    backend = find_backend(batch.impl)
    if not backend.fused:
        return backend.module.attend(q, kv_pages, batch, layer), kv_pages
    k, v = read_tokens(kv_pages, batch, layer, q.dtype)
    return attend_with_update(q, k, v, kv_pages, batch, layer)


@jax.jit
def _attend_fused(
    q: jax.Array, k: jax.Array, v: jax.Array | None, kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer
) -> tuple[jax.Array, jax.Array]:
    """Jitted by itself, so that a model's equal layers are traced and lowered once."""
    return find_backend(batch.impl).module.attend_with_update(q, k, v, kv_pages, batch, layer)


def _check_queries(q: jax.Array, batch: BatchMeta) -> None:
    num_tokens, num_heads, head_dim = q.shape
    shape, spec = batch.shape, batch.shape.spec
    if (num_heads, head_dim) != (shape.num_heads, spec.head_dim):
        raise ValueError(
            f"q has {num_heads} heads of {head_dim}, the batch is for {shape.num_heads} of {spec.head_dim}"
        )
    if batch.positions.shape != (num_tokens,):
        raise ValueError(f"q has {num_tokens} tokens, the batch {batch.positions.shape[0]}")


def _check_tokens(k: jax.Array, v: jax.Array | None, batch: BatchMeta) -> None:
    spec, found = batch.shape.spec, None if v is None else v.shape
    wanted = (*batch.positions.shape, spec.num_kv_heads, spec.head_dim)
    if k.shape != wanted or found != (None if spec.is_latent else wanted):
        raise ValueError(f"the batch wants k and v of {wanted}, of latents k alone; got k {k.shape} and v {found}")


def _check_pages(kv_pages: jax.Array, batch: BatchMeta, layer: AttnLayer) -> None:
    shape, spec = batch.shape, batch.shape.spec
    page = pool_shape(spec, 0)[1:]
    if kv_pages.shape[1:] != page or kv_pages.dtype != spec.dtype:
        wanted = f"wanted [num_pages, {', '.join(map(str, page))}]"
        raise ValueError(f"kv_pages {kv_pages.dtype}{list(kv_pages.shape)} do not fit the batch's {spec}: {wanted}")
    if layer.params.window != shape.window:
        raise ValueError(f"params.window is {layer.params.window}, the batch was prepared for {shape.window}")
    sizes = {"sinks": shape.num_heads, "k_scale": spec.num_kv_heads, "v_scale": spec.num_kv_heads}
    for name, size in sizes.items():
        array = getattr(layer.heads, name)
        if array is not None and array.shape != (size,):
            raise ValueError(f"heads.{name} must be [{size}], one per head, got {array.shape}")
    if spec.is_latent and layer.heads.v_scale is not None:
        raise ValueError("heads.v_scale is not for latents, whose keys and values have one scale: k_scale")
