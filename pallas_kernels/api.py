"""What callers call. Chooses the implementation, at trace time; an explicit choice that cannot work raises."""

from __future__ import annotations

from collections.abc import Callable

import jax

from pallas_kernels import reference, xla
from pallas_kernels.layout import update_kv_pages
from pallas_kernels.platform import traced_platform
from pallas_kernels.spec import AttnParams, BatchMeta

__all__ = ["attend_with_update", "choose_impl", "ragged_paged_attention", "update_kv_pages"]

_IMPLS = {"reference": reference.attend, "xla": xla.attend}
_PLANNED = ("gpu", "tpu")


def choose_impl(platform: str) -> tuple[str, str]:
    """The implementation that `impl=None` means on "cpu", "gpu" (or "cuda", "rocm") or "tpu", and why, for users."""
    if platform == "cpu":
        return "xla", "portable attention; its loops end where the batch does"
    if platform == "tpu":
        return "xla", "portable attention with static loops; this release has no TPU kernel"
    if platform in ("gpu", "cuda", "rocm"):
        return "xla", "portable attention with static loops; this release has no GPU kernel"
    raise ValueError(f"platform must be cpu, gpu, cuda, rocm or tpu, got {platform!r}")


def attend_with_update(
    q: jax.Array,  # [T, N, H]
    k: jax.Array,  # [T, K, H]
    v: jax.Array,  # [T, K, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    params: AttnParams,
    page_offset: int | jax.Array = 0,
    impl: str | None = None,
) -> tuple[jax.Array, jax.Array]:
    """Writes the step's keys and values into their pages, then attends: the one call of a model.

    Returns the attention [T, N, H] in q's dtype and the pool. Donate the pool: the write is then in place. Tokens
    after the last row's are padding: they write to the null page, and what they attend to is finite but arbitrary.
    N and K may be one device's share under shard_map. Nothing in unused slots, not even NaN, reaches a result.
    """
    _check_shapes(q, kv_pages, batch)
    if k.shape != v.shape or k.shape != (q.shape[0], kv_pages.shape[1] // 2, q.shape[2]):
        raise ValueError(f"q {q.shape} and kv_pages {kv_pages.shape} do not fit k {k.shape} and v {v.shape}")
    attend = _find_impl(impl)
    kv_pages = update_kv_pages(k, v, kv_pages, batch, page_offset=page_offset)
    return attend(q, kv_pages, batch, params=params, page_offset=page_offset), kv_pages


def ragged_paged_attention(
    q: jax.Array,  # [T, N, H]
    kv_pages: jax.Array,  # [num_pages, 2K, page_size, H]
    batch: BatchMeta,
    *,
    params: AttnParams,
    page_offset: int | jax.Array = 0,
    impl: str | None = None,
) -> jax.Array:
    """Attention [T, N, H] in q's dtype over pages that already hold the keys and values of the step's tokens."""
    _check_shapes(q, kv_pages, batch)
    return _find_impl(impl)(q, kv_pages, batch, params=params, page_offset=page_offset)


def _find_impl(impl: str | None) -> Callable[..., jax.Array]:
    name = choose_impl(traced_platform())[0] if impl is None else impl
    if name in _PLANNED:
        raise NotImplementedError(f"impl {name!r} is not in this release; use impl='xla' (any device) or None")
    if name not in _IMPLS:
        raise ValueError(f"impl must be one of {', '.join(sorted((*_IMPLS, *_PLANNED)))} or None, got {name!r}")
    return _IMPLS[name]


def _check_shapes(q: jax.Array, kv_pages: jax.Array, batch: BatchMeta) -> None:
    num_tokens, num_heads, head_dim = q.shape
    _, heads, page_size, pool_head_dim = kv_pages.shape
    if heads % 2 or num_heads % (heads // 2):
        raise ValueError(f"q has {num_heads} heads, which the pool's {heads} rows (2 per KV head) do not divide")
    if head_dim != pool_head_dim or page_size != batch.page_size:
        raise ValueError(
            f"kv_pages {kv_pages.shape} do not fit q's head_dim {head_dim} and the batch's page_size {batch.page_size}"
        )
    if batch.positions.shape != (num_tokens,):
        raise ValueError(f"q has {num_tokens} tokens, the batch {batch.positions.shape[0]}")
