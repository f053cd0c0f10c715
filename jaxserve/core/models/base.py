"""A model as data: its numbers, its parameters, and where a checkpoint keeps them."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections import Counter
from collections.abc import Callable, Mapping, Set
from dataclasses import dataclass
from typing import Any, Protocol

import jax
import numpy as np
from jaxtyping import Array, Float

from jaxserve.core.layers.attention import AttentionConfig
from jaxserve.core.layers.context import LayerContext, StepContext
from jaxserve.core.layers.embedding import EmbeddingConfig
from jaxserve.core.layers.memory import LayerMemory, Mixer, PagedKV, RecurrentState
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.layers.norm import NormConfig
from jaxserve.core.layers.pooling import LAST, PoolerConfig
from jaxserve.core.layers.rope import RopeConfig
from jaxserve.core.models.hf_config import HFConfig
from jaxserve.core.models.matrix_formats import Quantization
from jaxserve.core.models.trunk import DEFAULT_TRUNK, Trunk
from jaxserve.core.sharding import Axes
from jaxserve.errors import ConfigError
from pallas_kernels import XLA_PRODUCTS, QuantizedProducts


@dataclass(frozen=True)
class ParamSpec:
    """One parameter: everything needed to allocate, shard or initialise it.

    `axes` are logical (sharding.py). `init` is "normal" (standard deviation 0.02), "zeros", "ones", "bounds" (two) or,
    for the parts of a quantized matrix, "values", "scales" (together about normal) or "arange". `piece_axis` is the
    axis of experts, along which a layer's parameter may be read in pieces.
    """

    shape: tuple[int, ...]
    dtype: str
    axes: Axes
    init: str
    piece_axis: int | None = None

    @property
    def num_bytes(self) -> int:
        """Bytes of all shards together; two values of four bits share one."""
        return math.prod(self.shape) * jax.dtypes.itemsize_bits(np.dtype(self.dtype)) // 8


class HostArray(Protocol):
    """An array on the host, or one that is put together where it is indexed."""

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def dtype(self) -> np.dtype: ...

    def __getitem__(self, index: tuple[slice, ...], /) -> np.ndarray: ...


@dataclass(frozen=True)
class WeightSource:
    """Which tensors of a checkpoint make one canonical parameter.

    `build` takes the tensors as numpy arrays in the order of `names`, of shapes `shapes` and any one dtype, and
    returns the parameter in that dtype. Where it can, it reads nothing before its result is indexed, and then no more
    than that needs. `otherwise` is the form that other files have. `dtypes` are those that each tensor may be stored
    in, where they are not numbers of one floating type each. `part`: other parameters are made of the same tensors.
    `copy` is a tensor in which files may have the first of `names` once more.
    """

    names: tuple[str, ...]
    shapes: tuple[tuple[int, ...], ...]
    build: Callable[..., HostArray]
    otherwise: WeightSource | None = None
    dtypes: tuple[tuple[str, ...], ...] | None = None
    part: bool = False
    copy: str | None = None

    def choose(self, names: Set[str]) -> WeightSource:
        """Returns the form that a checkpoint with tensors of these names has: the first it has all of, else any of.

        It is this one if the checkpoint has none.
        """
        if self.otherwise is None or names >= set(self.names):
            return self
        other = self.otherwise.choose(names)
        if names >= set(other.names):
            return other
        return self if names.isdisjoint(other.names) or not names.isdisjoint(self.names) else other


@dataclass(frozen=True)
class Parameter:
    """One parameter: its spec, and where a checkpoint keeps it."""

    spec: ParamSpec
    source: WeightSource


Table = dict[str, Parameter]
"""Parameters by canonical dotted name: "layers.3.qkv.weight", or "qkv.weight" in the table of one layer."""


@dataclass(frozen=True)
class KVGroup:
    """Layers that share one page table. `window` is that of `LayerKind`.

    `borrowing` are those of the layers that read another's pages and have none of their own.
    """

    layers: tuple[int, ...]
    window: int | None
    memory: PagedKV
    borrowing: tuple[int, ...] = ()

    @property
    def num_owners(self) -> int:
        """Layers that have pages."""
        return len(self.layers) - len(self.borrowing)


@dataclass(frozen=True)
class LayerKind:
    """What may differ between the layers of one model. `rope` is None in a layer without rotation.

    A layer of a single block has `NO_MIXER`, or no `mlp`.

    `window`: tokens a query sees, itself included, or without causal masks those on each side of it; None for all.
    `page_owner` is the earlier layer in whose pages its keys and values are; None where it has its own pages.
    """

    mixer: Mixer
    window: int | None
    rope: RopeConfig | None
    mlp: MLPConfig | MoEConfig | None
    page_owner: int | None = None

    @property
    def attention(self) -> AttentionConfig:
        """The mixer of a layer with attention."""
        assert isinstance(self.mixer, AttentionConfig)
        return self.mixer


@dataclass(frozen=True)
class DecoderConfig:
    """A decoder-only transformer, complete and hashable: the static argument of every model function.

    `max_position_embeddings` is the trained length; `max_model_len` the longest sequence to serve, which chooses the
    rotary frequencies (core/layers/rope.py) and turns off windows at least that long. Set it with `with_max_model_len`.
    `family` is the `model_type` whose file has the layer and names the weights.
    `residual_scale` multiplies the output of each block. `parallel`: both blocks of a layer read its input.
    `quantization` says which matrices have few bits. `layer_input_size` numbers of each token go to each layer, beside
    the residual stream (core/layers/layer_inputs.py). `few_rows` is that of `StepContext`. `packed`: matrices are held
    as the CPU's product reads them (core/models/packing.py). `pooler` makes embeddings; with `only_pools` the model
    makes nothing else, and has no head. `final_norm`: whether a norm follows the layers.
    """

    family: str
    hidden_size: int
    layers: tuple[LayerKind, ...]
    norm: NormConfig
    embedding: EmbeddingConfig
    max_position_embeddings: int
    max_model_len: int
    eos_token_ids: tuple[int, ...]
    dtype: str
    residual_scale: float = 1.0
    parallel: bool = False
    quantization: Quantization | None = None
    layer_input_size: int | None = None
    few_rows: int = 0
    packed: bool = False
    final_norm: bool = True
    pooler: PoolerConfig = LAST
    only_pools: bool = False

    @property
    def products(self) -> QuantizedProducts:
        """How quantized projections are multiplied."""
        return XLA_PRODUCTS if self.quantization is None else self.quantization.products

    @property
    def local(self) -> StepContext:
        """How a device multiplies with what it holds of a matrix, where that needs no other device."""
        return StepContext(mesh=None, few_rows=self.few_rows)

    @property
    def vocab_size(self) -> int:
        """V."""
        return self.embedding.vocab_size

    @property
    def num_layers(self) -> int:
        """L."""
        return len(self.layers)

    @property
    def attentions(self) -> tuple[AttentionConfig, ...]:
        """The different forms of attention, in the order of the first layers that have them."""
        return tuple(dict.fromkeys(kind.mixer for kind in self.layers if isinstance(kind.mixer, AttentionConfig)))

    @property
    def memories(self) -> tuple[LayerMemory, ...]:
        """What each layer keeps between two steps."""
        found = (kind.mixer.memory for kind in self.layers)
        return tuple(each.with_dtype(self.dtype) if isinstance(each, RecurrentState) else each for each in found)

    @functools.cached_property
    def states(self) -> tuple[tuple[RecurrentState, int], ...]:
        """The different recurrent states, and how many layers keep each."""
        return tuple(Counter(memory for memory in self.memories if isinstance(memory, RecurrentState)).items())

    @property
    def causal(self) -> bool:
        """Whether tokens see only those before them."""
        return all(kind.mixer.causal for kind in self.layers)

    @property
    def mutual_images(self) -> bool:
        """Whether tokens of one image see each other in any layer."""
        return any(attention.mutual_images for attention in self.attentions)

    @property
    def reads_whole(self) -> bool:
        """Whether texts are computed whole, in one step: tokens see later ones, or all are pooled."""
        return not self.causal or self.pooler.needs_every_token

    @property
    def generates(self) -> bool:
        """Whether requests may ask for answers. If not, no step samples, and none computes logits."""
        return self.causal and not self.only_pools

    @property
    def embedding_size(self) -> int:
        """The numbers of a text's vector (E): of an embedding, or one for each class."""
        return self.pooler.count_numbers(self.hidden_size)

    @property
    def has_experts(self) -> bool:
        """Whether any layer is a mixture of experts."""
        return any(isinstance(kind.mlp, MoEConfig) for kind in self.layers)

    @property
    def max_supported_len(self) -> int:
        """The longest sequence that the position embeddings support.

        A layer whose window fits its own embedding sets no bound if other layers see everything: a rotary embedding
        encodes distances, and those of the layer never exceed its window.
        """
        lengths = {kind: self._max_length(kind) for kind in self.layers}
        unbounded = {kind for kind, length in lengths.items() if kind.window is None or kind.window > length}
        return min(lengths[kind] for kind in unbounded or lengths)

    @property
    def default_max_model_len(self) -> int:
        """The longest sequence that the position embedding of every layer supports."""
        return min(map(self._max_length, self.layers))

    def _max_length(self, kind: LayerKind) -> int:
        trained_length = self.max_position_embeddings
        return trained_length if kind.rope is None else kind.rope.max_length(trained_length)

    @functools.cached_property
    def windows(self) -> tuple[int | None, ...]:
        """For each layer, its window; None where no sequence exceeds it."""
        limits = (kind.window for kind in self.layers)
        return tuple(None if limit is None or limit >= self.max_model_len else limit for limit in limits)

    @functools.cached_property
    def kv_groups(self) -> tuple[KVGroup, ...]:
        """Groups of layers with pages, by equal windows and heads, full attention first, then by growing window."""
        found: dict[tuple[int | None, PagedKV], list[int]] = {}
        for index, memory in enumerate(self.memories):
            if isinstance(memory, PagedKV):
                found.setdefault((self.windows[index], memory), []).append(index)
        borrowing = {index for index, owner in enumerate(self.page_owners) if owner != index}
        groups = [
            KVGroup(tuple(layers), window, memory, tuple(index for index in layers if index in borrowing))
            for (window, memory), layers in found.items()
        ]
        return tuple(sorted(groups, key=lambda group: 0 if group.window is None else group.window))

    @functools.cached_property
    def page_owners(self) -> tuple[int, ...]:
        """For each layer, the one whose pages it reads, in the same KV group: itself, or an earlier one."""
        owners = (kind.page_owner for kind in self.layers)
        return tuple(index if owner is None else owner for index, owner in enumerate(owners))

    @functools.cached_property
    def layer_groups(self) -> tuple[int | None, ...]:
        """For each layer, the index of its KV group; None for a layer without pages."""
        index_of = {layer: index for index, group in enumerate(self.kv_groups) for layer in group.layers}
        return tuple(index_of.get(layer) for layer in range(self.num_layers))

    def change_attention(self, change: Callable[[AttentionConfig], AttentionConfig]) -> DecoderConfig:
        """Returns the config with the attention of every layer that has one replaced by what `change` makes of it."""
        return self.change_mixers(AttentionConfig, change)

    def change_mixers[M: Mixer](self, kinds: type[M] | tuple[type[M], ...], change: Callable[[M], M]) -> DecoderConfig:
        """Returns the config with every mixer of some types replaced by what `change` makes of it."""
        layers = (
            dataclasses.replace(layer, mixer=change(layer.mixer)) if isinstance(layer.mixer, kinds) else layer
            for layer in self.layers
        )
        return dataclasses.replace(self, layers=tuple(layers))

    def with_max_model_len(self, max_model_len: int) -> DecoderConfig:
        """Returns the config for sequences of at most `max_model_len` tokens; ConfigError above `max_supported_len`."""
        if not 1 <= max_model_len <= self.max_supported_len:
            raise ConfigError(
                f"{max_model_len} is outside what the model's positions support, 1 to {self.max_supported_len}",
                field="max_model_len",
                value=max_model_len,
            )
        return dataclasses.replace(self, max_model_len=max_model_len)


@dataclass(frozen=True)
class CheckpointLayer:
    """One layer of a model in a checkpoint, where the names of its tensors begin with `prefix` ("model.layers.0")."""

    config: DecoderConfig
    index: int
    prefix: str

    @property
    def kind(self) -> LayerKind:
        """The kind of this layer."""
        return self.config.layers[self.index]

    @property
    def has_experts(self) -> bool:
        """Whether this layer is a mixture of experts."""
        return isinstance(self.kind.mlp, MoEConfig)

    @property
    def dense_mlp(self) -> MLPConfig:
        """The feed-forward block of a layer without experts."""
        assert isinstance(self.kind.mlp, MLPConfig)
        return self.kind.mlp

    @property
    def page_owner(self) -> CheckpointLayer:
        """The layer whose pages this one reads."""
        owner = self.config.page_owners[self.index]
        return dataclasses.replace(self, index=owner, prefix=f"{self.prefix.removesuffix(str(self.index))}{owner}")

    def tensor(self, name: str) -> str:
        """Returns the full name of a tensor of the layer."""
        return f"{self.prefix}.{name}"


Leaves = Mapping[str, Any]
"""The parameters of one layer by canonical name, each a `Leaf`."""

Stream = Float[Array, "T D"]
"""The residual stream: what a layer reads, and adds to."""

Layer = Callable[[DecoderConfig, LayerKind, Leaves, Stream, LayerContext], tuple[Stream, Any]]
"""One layer; returns the residual stream, and `LayerContext.pool` with what it keeps of the step."""


@dataclass(frozen=True)
class Family:
    """One model family: how to read its config.json, its layer, and its parameters.

    `keys` holds every config.json key that the family knows, with the reference implementation's default for an absent
    one; `ignored_keys` are keys in files that the reference does not read. `table` returns the parameters of one layer.
    `ignored_weights` are patterns of tensors that a decoder does not need, in which {num_layers} stands for their
    number, and {num_layers+1} for one more. `quantizations` are the methods that only its files are quantized with.
    `fits_float16`: its activations stay within float16's range. `headless` are architectures that are read as this one
    and only make embeddings. Their files may name tensors without the module around all (`model.`).
    """

    model_type: str
    architecture: str
    keys: Mapping[str, object]
    parse: Callable[[HFConfig], DecoderConfig]
    layer: Layer
    table: Callable[[CheckpointLayer], Table]
    ignored_keys: tuple[str, ...] = ()
    trunk: Trunk = DEFAULT_TRUNK
    ignored_weights: tuple[str, ...] = ()
    quantizations: tuple[str, ...] = ()
    fits_float16: bool = True
    headless: tuple[str, ...] = ()
