"""The caller's description of the pool, a layer and a step, with all checks."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import jax

DTYPES = ("float32", "bfloat16", "float16", "float8_e4m3fn")  # pages'
LAYOUTS = ("plain", "padded", "paired")  # layout.py explains them
PAIRED_HEAD_DIM = 64  # two heads fill the 128 lanes of a TPU's tile

_STATIC = {"static": True}


@dataclass(frozen=True)
class KVSpec:
    """Keys and values of one layer. `num_kv_heads` (K) counts the heads of the whole model, or of one device where the
    caller shards them.

    With `value_dim` a head stores one row a token, a latent: the key is the row, the value its first numbers.
    """

    num_kv_heads: int
    head_dim: int  # H
    page_size: int  # tokens per page
    dtype: str
    layout: str = "plain"
    value_dim: int | None = None  # of a latent

    def __post_init__(self) -> None:
        for name in ("num_kv_heads", "head_dim", "page_size"):
            if getattr(self, name) < 1:
                raise ValueError(f"KVSpec.{name} must be at least 1, got {getattr(self, name)}")
        if self.dtype not in DTYPES:
            raise ValueError(f"KVSpec.dtype must be one of {', '.join(DTYPES)}, got {self.dtype!r}")
        if self.layout not in LAYOUTS:
            raise ValueError(f"KVSpec.layout must be one of {', '.join(LAYOUTS)}, got {self.layout!r}")
        if self.layout == "paired" and self.head_dim != PAIRED_HEAD_DIM:
            raise ValueError(f"KVSpec.layout 'paired' is for head_dim {PAIRED_HEAD_DIM}, got {self.head_dim}")
        if self.head_dim == PAIRED_HEAD_DIM and self.layout == "padded" and not self.is_latent:
            raise ValueError(f"KVSpec.layout 'padded' is not for head_dim {PAIRED_HEAD_DIM}: use 'plain' or 'paired'")
        if self.value_dim is not None and not 1 <= self.value_dim <= self.head_dim:
            raise ValueError(f"KVSpec.value_dim must be 1 to head_dim {self.head_dim}, got {self.value_dim}")
        if self.is_latent and self.layout == "paired":
            raise ValueError("KVSpec.layout 'paired' is for keys beside values, a latent has one row")

    @property
    def is_latent(self) -> bool:
        """Whether a head stores one row for key and value."""
        return self.value_dim is not None

    @property
    def out_dim(self) -> int:
        """Numbers of a head's value, and of its answer (V)."""
        return self.head_dim if self.value_dim is None else self.value_dim


@dataclass(frozen=True)
class AttnShape:
    """The static shape of attention on one device, common to the layers that share a page table."""

    num_heads: int  # N
    spec: KVSpec
    dtype: str  # q's
    window: int | None = None  # the same as in AttnParams
    fixed_splits: bool = False  # a row's bits may not depend on the other rows: its keys are cut where its text says
    # Whether a query sees the keys up to its own. If not, it sees those within the window on both sides, or all
    # `seq_lens` keys of its row: an encoder, or, over stored pages, cross attention, whose rows may have more queries
    # than keys.
    causal: bool = True

    def __post_init__(self) -> None:
        if self.num_heads < 1 or self.num_heads % self.spec.num_kv_heads:
            raise ValueError(
                f"AttnShape.num_heads must be a multiple of {self.spec.num_kv_heads} KV heads, got {self.num_heads}"
            )

    @property
    def group_size(self) -> int:
        """Query heads that share one KV head (G)."""
        return self.num_heads // self.spec.num_kv_heads

    @property
    def reach(self) -> int | None:
        """The keys behind its own that a query sees, as far as its row has them; None for all."""
        return 0 if self.causal else self.window

    @property
    def span(self) -> int | None:
        """The most keys that a query sees; None for all of its row."""
        return self.window if self.causal or self.window is None else 2 * self.window + 1


@dataclass(frozen=True)
class AttnParams:
    """The static numbers of a layer's attention.

    With `window` W a query at position p sees keys p-W+1..p. Without causal masks W is a radius: keys p-W..p+W.
    """

    scale: float  # multiplies q @ k
    window: int | None = None
    softcap: float | None = None  # scores become softcap * tanh(scores / softcap)

    def __post_init__(self) -> None:
        if self.window is not None and self.window < 1:
            raise ValueError(f"AttnParams.window must be at least 1, got {self.window}")
        if self.softcap is not None and not self.softcap > 0:
            raise ValueError(f"AttnParams.softcap must be positive, got {self.softcap}")


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class HeadParams:
    """A layer's arrays per head; None for those that it lacks.

    A page of scaled heads holds keys / k_scale and values / v_scale, saturated to the range of its dtype. A latent has
    k_scale only.
    """

    sinks: jax.Array | None = None  # [N] f32, a logit that takes part in the softmax and has no value
    k_scale: jax.Array | None = None  # [K] f32
    v_scale: jax.Array | None = None  # [K] f32

    def values_scale(self, spec: KVSpec) -> jax.Array | None:
        """What the stored values are multiplied with: [K] f32."""
        return self.k_scale if spec.is_latent else self.v_scale


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class AttnLayer:
    """What one layer adds to the step's batch: its numbers, its arrays per head, and where its pages are."""

    params: AttnParams = field(metadata=_STATIC)
    heads: HeadParams = field(default_factory=HeadParams)
    page_offset: int | jax.Array = 0  # [] i32, index of the layer's first page in the pool


@jax.tree_util.register_dataclass
@dataclass(frozen=True)
class BatchMeta:
    """One step's rows and tokens, made by `prepare_batch`; the fields below the line are derived from those above."""

    page_table: jax.Array  # [S, M] i32, page ids counted from the layer's first page; 0 beyond a row's tokens
    seq_lens: jax.Array  # [S] i32, tokens of the row including this step's; 0 for padding rows
    query_start_loc: jax.Array  # [S + 1] i32, where each row's new tokens begin in the step's
    distribution: jax.Array  # [3] i32, cumulative ends of (one-token, chunk, mixed) rows
    # ------------------------------------------------------------------------------------------------------------
    positions: jax.Array  # [T] i32, each token's position in its row's text, if it is there; 0 for padding
    token_rows: jax.Array  # [T] i32, the token's row; the last one for padding
    write_pages: jax.Array  # [T] i32, the page for the token's K and V; the null page 0 for padding
    write_offsets: jax.Array  # [T] i32, and the slot in it
    last_keys: jax.Array | None  # [T] i32, the last key that each token sees; None: its own, as far as masks are causal
    work: Any  # the implementation's own pytree: the step cut into units of work
    shape: AttnShape = field(metadata=_STATIC)
    impl: str = field(metadata=_STATIC)
    interpret: bool = field(metadata=_STATIC)  # whether kernels run in their interpreter
    max_query_len: int | None = field(metadata=_STATIC)
