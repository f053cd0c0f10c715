"""Tiny drafters for tests: their files, their mathematics in plain numpy, and the least that runs them."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh
from safetensors.numpy import save_file

from jaxserve.core.layers.stack import StackMode, stack_params
from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.decoder import CacheLayout
from jaxserve.core.sharding import DEFAULT_RULES, KV_POOL_AXES, make_mesh
from jaxserve.families.registry import parse_config
from jaxserve.features.speculation.drafters import passes
from jaxserve.features.speculation.drafters.base import DrafterModel, Method, expand_drafter_heads
from jaxserve.features.speculation.drafters.files import load_drafter, read_drafter
from jaxserve.features.speculation.drafters.passes import draft_logits, run_pass
from pallas_kernels import AttnShape, KVSpec, pool_shape, prepare_batch

D, V, DRAFT_V, LAYERS, HEAD_DIM, HEADS, KV_HEADS, FFN = 16, 40, 24, 9, 8, 4, 2, 20
THETA, EPS = 10000.0, 1e-5
TARGET = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": 24,
    "num_hidden_layers": LAYERS,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "rms_norm_eps": EPS,
    "max_position_embeddings": 64,
}
HEAD = {
    "architectures": ["LlamaForCausalLMEagle3"],
    "model_type": "llama",
    "vocab_size": V,
    "draft_vocab_size": DRAFT_V,
    "hidden_size": D,
    "intermediate_size": FFN,
    "num_hidden_layers": 1,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 16,
    "tie_word_embeddings": False,
    "torch_dtype": "bfloat16",
}
MIMO = {
    "model_type": "mimo",
    "architectures": ["MiMoForCausalLM"],
    "vocab_size": V,
    "hidden_size": D,
    "intermediate_size": FFN,
    "num_hidden_layers": 2,
    "num_attention_heads": HEADS,
    "num_key_value_heads": KV_HEADS,
    "head_dim": HEAD_DIM,
    "hidden_act": "silu",
    "rms_norm_eps": EPS,
    "rope_theta": THETA,
    "max_position_embeddings": 64,
    "attention_bias": True,
    "num_nextn_predict_layers": 1,
    "tie_word_embeddings": False,
}

PAGE_SIZE = 8
Tensors = dict[str, np.ndarray]


def read_target(raw: Mapping[str, object] = TARGET) -> DecoderConfig:
    """The target's config in float32."""
    return dataclasses.replace(parse_config(raw), dtype="float32")


def make_target_params(seed: int = 5) -> dict[str, Any]:
    """The part of the target that drafters read."""
    rng = np.random.default_rng(seed)
    return {name: {"weight": jnp.asarray(rng.standard_normal((V, D)), jnp.float32)} for name in ("embed", "lm_head")}


def make_layer(prefix: str, input_size: int, *, bias: bool, seed: int) -> Tensors:
    """The tensors of a layer of Llama or Qwen 2 whose attention reads `input_size` numbers."""
    rng = np.random.default_rng(seed)
    rows = {"q": HEADS * HEAD_DIM, "k": KV_HEADS * HEAD_DIM, "v": KV_HEADS * HEAD_DIM}
    shapes: dict[str, tuple[int, ...]] = {f"self_attn.{part}_proj.weight": (n, input_size) for part, n in rows.items()}
    if bias:
        shapes |= {f"self_attn.{part}_proj.bias": (n,) for part, n in rows.items()}
    shapes |= {"self_attn.o_proj.weight": (D, HEADS * HEAD_DIM), "mlp.down_proj.weight": (D, FFN)}
    shapes |= {f"mlp.{part}_proj.weight": (FFN, D) for part in ("gate", "up")}
    shapes |= {"input_layernorm.weight": (D,), "post_attention_layernorm.weight": (D,)}
    return {f"{prefix}.{name}": _draw(rng, shape) for name, shape in shapes.items()}


def make_head(
    *,
    own_embed: bool = False,
    draft_vocab_size: int = DRAFT_V,
    prefix: str = "midlayer",
    num_aux: int = 3,
    seed: int = 1,
) -> Tensors:
    """The tensors of an EAGLE-3 head; its draft vocabulary is every token but some, in order."""
    rng = np.random.default_rng(1)
    tensors = make_layer(prefix, 2 * D, bias=False, seed=2)
    shapes = {"fc.weight": (D, num_aux * D), "norm.weight": (D,), f"{prefix}.hidden_norm.weight": (D,)}
    shapes |= {"lm_head.weight": (draft_vocab_size, D)}
    shapes |= {"embed_tokens.weight": (V, D)} if own_embed else {}
    tensors |= {name: _draw(rng, shape) for name, shape in shapes.items()}
    if draft_vocab_size < V:
        ids = np.sort(rng.permutation(V)[:draft_vocab_size])
        tensors["d2t"] = ids - np.arange(draft_vocab_size)
        tensors["t2d"] = np.isin(np.arange(V), ids)
    return tensors


def make_mtp(prefix: str = "model.mtp_layers.0", seed: int = 3) -> Tensors:
    """The tensors of MiMo's layer for multi-token prediction."""
    rng = np.random.default_rng(seed)
    tensors = make_layer(prefix, D, bias=True, seed=seed + 1)
    shapes = {f"{name}_layernorm.weight": (D,) for name in ("token", "hidden", "final")}
    shapes |= {"input_proj.weight": (D, 2 * D)}
    return tensors | {f"{prefix}.{name}": _draw(rng, shape) for name, shape in shapes.items()}


def _draw(rng: np.random.Generator, shape: tuple[int, ...]) -> np.ndarray:
    centre, scale = (1.0, 0.3) if len(shape) == 1 else (0.0, 1.5 / shape[-1] ** 0.5)
    return np.asarray(centre + scale * rng.standard_normal(shape), np.float32)


def write_files(folder: Path, config: Mapping[str, object], tensors: Tensors) -> Path:
    """Writes a checkpoint's config.json and model.safetensors."""
    folder.mkdir(exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    save_file({name: np.ascontiguousarray(tensor) for name, tensor in tensors.items()}, folder / "model.safetensors")
    return folder


class ReferenceLayer:
    """A layer of Llama or Qwen 2 over a growing text, in float64: the whole text is computed anew for each token."""

    def __init__(self, tensors: Tensors, prefix: str) -> None:
        self.tensors, self.prefix = tensors, prefix
        self.keys: list[np.ndarray] = []
        self.values: list[np.ndarray] = []

    def get(self, name: str) -> np.ndarray:
        return self.tensors[f"{self.prefix}.{name}"].astype(np.float64)

    def norm(self, name: str, x: np.ndarray) -> np.ndarray:
        return rms_norm(self.get(f"{name}.weight"), x)

    def attend(self, x: np.ndarray) -> np.ndarray:
        """Appends one token with attention input `x` and returns the block's output."""
        position = len(self.keys)
        q, k, v = (self._project(part, x) for part in ("q", "k", "v"))
        self.keys.append(rotate(k, position))
        self.values.append(v)
        q = rotate(q, position)
        out = np.empty_like(q)
        for head in range(HEADS):
            shared = head // (HEADS // KV_HEADS)
            keys = np.stack([key[shared] for key in self.keys])
            scores = keys @ q[head] / HEAD_DIM**0.5
            weights = np.exp(scores - scores.max())
            out[head] = weights / weights.sum() @ np.stack([value[shared] for value in self.values])
        return self.get("self_attn.o_proj.weight") @ out.reshape(-1)

    def feed_forward(self, x: np.ndarray) -> np.ndarray:
        gate, up, down = (self.get(f"mlp.{part}_proj.weight") for part in ("gate", "up", "down"))
        return down @ (gate @ x / (1 + np.exp(-(gate @ x))) * (up @ x))

    def _project(self, part: str, x: np.ndarray) -> np.ndarray:
        out = self.get(f"self_attn.{part}_proj.weight") @ x
        if f"{self.prefix}.self_attn.{part}_proj.bias" in self.tensors:
            out = out + self.get(f"self_attn.{part}_proj.bias")
        return out.reshape(-1, HEAD_DIM)


def rms_norm(weight: np.ndarray, x: np.ndarray) -> np.ndarray:
    return weight * x / np.sqrt(np.mean(x * x) + EPS)


def rotate(heads: np.ndarray, position: int) -> np.ndarray:
    """Rotates dimensions i and i + H / 2 of each head."""
    angles = position / THETA ** (np.arange(0, HEAD_DIM, 2) / HEAD_DIM)
    first, second = np.split(heads, 2, axis=-1)
    turned = [first * np.cos(angles) - second * np.sin(angles), second * np.cos(angles) + first * np.sin(angles)]
    return np.concatenate(turned, axis=-1)


class DrafterRunner:
    """A drafter with pages for one row, its programs jitted."""

    def __init__(
        self,
        method: Method,
        folder: Path,
        target: DecoderConfig,
        target_params: Mapping[str, Any],
        *,
        mesh: Mesh | None = None,
        stack: StackMode = "unrolled",
    ) -> None:
        self.mesh, devices = mesh, 1 if mesh is None else mesh.size
        self.model: DrafterModel = expand_drafter_heads(read_drafter(method, folder, target), devices)
        params = load_drafter(self.model, folder, mesh=mesh or make_mesh(1), rules=DEFAULT_RULES)
        self.params = stack_params(params, stack)
        self.target, self.target_params, self.length = target, target_params, 0
        attention, config = self.model.config.layers[0].attention, self.model.config
        spec = KVSpec(attention.num_kv_heads, attention.head_dim, PAGE_SIZE, config.dtype)
        local = dataclasses.replace(spec, num_kv_heads=attention.num_kv_heads // devices)
        self.shape = AttnShape(attention.num_heads // devices, local, config.dtype)
        num_pages = config.max_model_len // PAGE_SIZE + 1
        self.page_table = jnp.asarray(np.random.default_rng(0).permutation(num_pages - 1)[None] + 1, jnp.int32)
        self.pages = (jnp.zeros(pool_shape(spec, config.num_layers * num_pages), config.dtype),)
        if mesh is not None:
            self.pages = jax.device_put(self.pages, DEFAULT_RULES.sharding(mesh, KV_POOL_AXES))
        offsets = tuple(index * num_pages for index in range(config.num_layers))
        self.layout = CacheLayout(offsets, (0,) * config.num_layers, (0,))
        self._read = jax.jit(partial(passes.read_target, self.model))
        self._programs = {stores: jax.jit(partial(self._run, only_stores=stores)) for stores in (False, True)}

    def follow(self, hidden: np.ndarray | None, token_ids: Sequence[int], *, only_stores: bool = False) -> jax.Array:
        """Computes tokens of the row from the target's states; returns the states at them."""
        states = self._read(self.params, None if hidden is None else jnp.asarray(hidden))
        return self._step(states, token_ids, only_stores=only_stores)

    def run_pass(self, states: jax.Array, token_id: int) -> jax.Array:
        """Computes one token from the states before it; returns its states."""
        return self._step(states, [token_id])

    def logits(self, states: jax.Array) -> np.ndarray:
        return np.asarray(draft_logits(self.model, self.params, self.target_params, self.target, states))

    def _step(self, states: Any, token_ids: Sequence[int], *, only_stores: bool = False) -> jax.Array:
        self.length += len(token_ids)
        states, self.pages = self._programs[only_stores](
            self.params,
            self.target_params,
            states,
            jnp.asarray(token_ids, jnp.int32),
            self.pages,
            jnp.asarray([self.length], jnp.int32),
        )
        return states

    def _run(
        self, params: Any, target_params: Any, states: Any, ids: Any, pages: Any, lens: Any, *, only_stores: bool
    ) -> Any:
        batch = prepare_batch(
            self.page_table,
            lens,
            jnp.asarray([0, len(ids)], jnp.int32),
            jnp.asarray([0, 0, 1], jnp.int32),
            num_tokens=len(ids),
            shape=self.shape,
            max_query_len=len(ids),
            impl="xla",
        )
        arguments = (self.model, params, target_params, self.target, states, ids, pages, (batch,))
        return run_pass(*arguments, layout=self.layout, mesh=self.mesh, only_stores=only_stores)
