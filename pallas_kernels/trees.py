"""Drafts as a tree: which of its row's new tokens each new token sees.

A word of 64 bits a token, as [2] uint32, the low half first: bit j says that the token sees the row's j-th new token.
Tokens come after those that they see, and see themselves. All older tokens of the row are seen. So the words of a chain
say what a causal mask does.
"""

from __future__ import annotations

import jax
import jax.numpy as jnp

MAX_TOKENS = 64  # new tokens of a row


def see_ancestors(
    words: jax.Array,  # [..., Q, 2] u32, of queries
    numbers: jax.Array,  # [..., E] i32, of keys among the new tokens of their row; below 0 they are older
) -> jax.Array:
    """Which keys are older than a query's row's new tokens, or in its word: [..., Q, E] bool."""
    is_low = (numbers < 32)[..., None, :]
    bits = jnp.where(is_low, words[..., :1], words[..., 1:]) >> (numbers & 31).astype(jnp.uint32)[..., None, :]
    return (numbers < 0)[..., None, :] | (bits & 1 > 0)


def check_ancestors(ancestors: jax.Array | None, num_tokens: int, max_query_len: int | None, *, tree: bool) -> None:
    """ValueError where `ancestors` are not what a shape, with or without a `tree`, and a bucket want."""
    if (ancestors is not None) != tree:
        raise ValueError(f"ancestors are for AttnShape.tree, which is {tree}, and needs them")
    if ancestors is None:
        return
    if ancestors.shape != (num_tokens, 2) or ancestors.dtype != jnp.uint32:
        raise ValueError(f"ancestors must be uint32 [{num_tokens}, 2], got {ancestors.dtype}{list(ancestors.shape)}")
    if max_query_len is None or max_query_len > MAX_TOKENS:
        raise ValueError(f"a tree has at most {MAX_TOKENS} tokens a row, max_query_len is {max_query_len}")
