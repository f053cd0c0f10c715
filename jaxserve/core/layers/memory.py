"""The memory of a layer: what it keeps between two steps. KV groups, pools and prefix rules follow from it."""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Protocol

from jaxserve.core.sharding import Axes


@dataclass(frozen=True)
class PagedKV:
    """Keys and values of every token, in pages.

    Layers with equal numbers and windows share a page table. `value_dim` is that of latents. Without `causal` a query
    sees its whole text, so what a page holds depends on the tokens behind it, too. With `mutual_images` a token of an
    image also sees those of its image that are behind it.
    """

    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    value_dim: int | None = None
    causal: bool = True
    mutual_images: bool = False


@dataclass(frozen=True)
class StateArray:
    """One array of a recurrent state, for one row, or of its streams, for one token. `axes` are logical (sharding.py).

    A `dtype` of None is the model's.
    """

    name: str
    shape: tuple[int, ...]
    dtype: str | None
    axes: Axes


@dataclass(frozen=True)
class RecurrentState:
    """A state of fixed size for each row, which every step replaces (recurrent.py reads and writes it).

    It is that after the row's last token and cannot be taken back; snapshots keep earlier ones. A text that is cut at
    multiples of `edge` tokens has the bits of the whole. `streams` are what it is made of: the arrays [..., T, C] that
    its mixer reads of T tokens, each described as that of one token. They are kept until it is known which tokens of a
    verify step stay.
    """

    arrays: tuple[StateArray, ...]
    edge: int
    streams: tuple[StateArray, ...]

    def with_dtype(self, dtype: str) -> RecurrentState:
        """Returns the state of a model of this dtype."""

        def name(arrays: tuple[StateArray, ...]) -> tuple[StateArray, ...]:
            return tuple(replace(array, dtype=array.dtype or dtype) for array in arrays)

        return replace(self, arrays=name(self.arrays), streams=name(self.streams))


@dataclass(frozen=True)
class Nothing:
    """No memory: all that the layer reads is in the step."""


LayerMemory = PagedKV | RecurrentState | Nothing


class Mixer(Protocol):
    """The config of the block that mixes the tokens of a text: attention, or another block that a family brings."""

    @property
    def memory(self) -> LayerMemory:
        """What it keeps between two steps."""
        ...

    @property
    def causal(self) -> bool:
        """Whether a token sees only those before it. If not, each text must be computed whole, in one step."""
        ...

    @property
    def num_activations(self) -> int:
        """The numbers that it holds for each token of a step, for estimates of memory."""
        ...


@dataclass(frozen=True)
class NoMixer:
    """The mixer of a layer that is a feed-forward block only."""

    memory = Nothing()
    causal = True
    num_activations = 0


NO_MIXER = NoMixer()
