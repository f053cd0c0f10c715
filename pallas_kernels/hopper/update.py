"""Writes new keys and values into their pages, in place: one small block per token, one TMA store each.

The scatter of `layout.update_kv_pages` is in place too, and is used unless `HopperConfig.write` asks for this. Which
one is faster has not been measured.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from pallas_kernels.layout import join_heads
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.spec import AttnLayer, BatchMeta


def write_tokens(
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, width]
    batch: BatchMeta,
    layer: AttnLayer,
) -> jax.Array:
    """The pool with the step's keys and values; the same memory when it is donated.

    Padding tokens, whose page is the null page, write nowhere.
    """
    tokens = join_heads(k, v, batch.shape.spec, layer.heads)  # [T, 2K, width]
    last_page = kv_pages.shape[0] - 1

    def write_token(
        tokens: jax.Ref, pages: jax.Ref, slots: jax.Ref, offset: jax.Ref, pool: jax.Ref, tile: jax.Ref, loaded: jax.Ref
    ) -> None:
        token = lax.axis_index("token")

        @pl.when(pages[token] > 0)
        def _() -> None:
            compat.copy_gmem_to_smem(tokens.at[token], tile, loaded)
            page = jnp.clip(pages[token] + offset[0], 0, last_page)
            slot = slots[token]
            compat.barrier_wait(loaded)
            compat.copy_smem_to_gmem(tile, pool.at[page, :, slot])
            compat.wait_smem_to_gmem(0)

    run = compat.kernel(
        write_token,
        out_type=(),
        grid=(tokens.shape[0],),
        grid_names=("token",),
        scratch_types=[compat.SMEM(tokens.shape[1:], kv_pages.dtype), compat.Barrier()],
        compiler_params=compat.compiler_params(),
        interpret=compat.interpret_params(batch.interpret),
    )
    pool = jax.new_ref(kv_pages)  # makes the write in place: a kernel's outputs are new arrays
    run(tokens, batch.write_pages, batch.write_offsets, jnp.asarray(layer.page_offset, jnp.int32).reshape(1), pool)
    return jax.freeze(pool)
