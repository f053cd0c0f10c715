"""A family of tests whose layers keep each kind of memory, and its mathematics in numpy over a whole text."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax

from jaxserve import LLM
from jaxserve.core.layers.attention import AttentionConfig, attend
from jaxserve.core.layers.context import LayerContext
from jaxserve.core.layers.linear import linear
from jaxserve.core.layers.memory import LayerMemory, Nothing, RecurrentState, StateArray
from jaxserve.core.layers.mlp import MLPConfig
from jaxserve.core.layers.norm import normalize
from jaxserve.core.layers.recurrent import read_slots, write_slots
from jaxserve.core.models.base import CheckpointLayer, DecoderConfig, Family, LayerKind, Leaves, Stream, Table
from jaxserve.core.models.common import DECODER_KEYS, build_config
from jaxserve.core.models.hf_config import REQUIRED, HFConfig
from jaxserve.core.models.parameters import attention_params, norm_params, projection_params
from jaxserve.families.registry import FAMILIES
from tests.e2e.helpers import CACHE, SIZES, read_weights

HEAD, HEADS, HIDDEN, VOCAB, MAX_LEN = 16, 2, 32, 64, 60
_DECAY, _SCALE = 0.75, 15  # of dummy weights, so that no layer is lost beside the others


@dataclass(frozen=True)
class Recurrence:
    """The state is that before, times `_DECAY`, plus the token's input. It also counts its tokens."""

    causal = True
    num_activations = HIDDEN

    @property
    def memory(self) -> LayerMemory:
        arrays = StateArray("sum", (HIDDEN,), "float32", (None,)), StateArray("count", (), "int32", ())
        return RecurrentState(arrays, edge=64, streams=())


@dataclass(frozen=True)
class Gate:
    """Looks at its own token only."""

    causal = True
    memory = Nothing()
    num_activations = HIDDEN


@dataclass(frozen=True)
class Mean:
    """The mean of the whole text: it sees later tokens and keeps nothing."""

    causal = False
    memory = Nothing()
    num_activations = HIDDEN


MIXERS = {
    "attention": AttentionConfig(HEADS, 1, HEAD, HEAD**-0.5),
    "both ways": AttentionConfig(HEADS, 1, HEAD, HEAD**-0.5, causal=False),
    "recurrence": Recurrence(),
    "gate": Gate(),
    "mean": Mean(),
}


def _parse(config: HFConfig) -> DecoderConfig:
    names = config.get("kinds")
    owner = names.index("both ways") if "both ways" in names else None  # type: ignore[attr-defined]
    mlp = MLPConfig(HIDDEN, "silu")
    return build_config(
        config,
        "toy",
        layers=tuple(
            # Each text is read whole, so layers may write the same pages one after another.
            LayerKind(MIXERS[name], None, None, mlp, owner if name == "both ways" and index != owner else None)
            for index, name in enumerate(names)  # type: ignore[arg-type]
        ),
    )


def _list_params(layer: CheckpointLayer) -> Table:
    table = norm_params(layer, {"attn_norm": "norm"})
    if isinstance(layer.kind.mixer, AttentionConfig):
        return table | attention_params(layer)
    return table | projection_params(layer.config, "mix", layer.tensor("mix"), (HIDDEN, HIDDEN))


def _apply(config: DecoderConfig, kind: LayerKind, leaves: Leaves, x: Stream, ctx: LayerContext) -> tuple[Stream, Any]:
    inner, pool = normalize(config.norm, leaves["attn_norm"], x), ctx.pool
    if isinstance(kind.mixer, AttentionConfig):
        out, pool = attend(kind.mixer, config.norm, leaves, inner, ctx)
        return x + out, pool
    if isinstance(kind.mixer, Recurrence):
        inner, pool = _recur(inner, ctx)
    elif isinstance(kind.mixer, Mean):
        rows, is_token = ctx.batch.token_rows, _find_tokens(ctx)
        sums = jnp.zeros((len(ctx.batch.seq_lens), HIDDEN)).at[rows].add(jnp.where(is_token[:, None], inner, 0))
        inner = (sums / jnp.maximum(ctx.batch.seq_lens, 1)[:, None])[rows]
    else:
        assert pool is None
    return x + jnp.tanh(linear(ctx, leaves["mix"], inner)), pool


def _find_tokens(ctx: LayerContext) -> jax.Array:
    return jnp.arange(len(ctx.batch.positions)) < ctx.batch.query_start_loc[-1]


def _recur(inner: Stream, ctx: LayerContext) -> tuple[Stream, dict[str, jax.Array]]:
    """Token by token: the state of the token's row goes on."""

    def take(state: dict[str, jax.Array], token: tuple[jax.Array, ...]) -> tuple[dict[str, jax.Array], jax.Array]:
        row, value, is_token = token
        total = jnp.where(is_token, _DECAY * state["sum"][row] + value, state["sum"][row])
        count = state["count"].at[row].add(is_token)
        return {"sum": state["sum"].at[row].set(total), "count": count}, total

    slots = ctx.slots
    assert slots is not None
    before = {name: read_slots(pool, ctx.offset, slots.read) for name, pool in ctx.pool.items()}
    state, out = lax.scan(take, before, (ctx.batch.token_rows, inner, _find_tokens(ctx)))
    return out, {name: write_slots(pool, ctx.offset, slots.write, state[name]) for name, pool in ctx.pool.items()}


TOY = Family("toy", "ToyForCausalLM", DECODER_KEYS | {"kinds": REQUIRED}, _parse, _apply, _list_params)


def describe_toy(kinds: Sequence[str]) -> dict[str, Any]:
    """The config.json of a model whose layers have these mixers."""
    return {
        "model_type": "toy",
        "kinds": list(kinds),
        "vocab_size": VOCAB,
        "hidden_size": HIDDEN,
        "intermediate_size": HIDDEN,
        "num_hidden_layers": len(kinds),
        "num_attention_heads": HEADS,
        "max_position_embeddings": MAX_LEN,
        "tie_word_embeddings": True,
    }


def make_toy(monkeypatch: pytest.MonkeyPatch, folder: Path, kinds: Sequence[str], **options: Any) -> LLM:
    """An engine whose layers have these mixers, with random weights."""
    monkeypatch.setitem(FAMILIES, "toy", TOY)
    (folder / "config.json").write_text(json.dumps(describe_toy(kinds)))
    defaults = {"load_format": "dummy", "dtype": "float32", "skip_tokenizer_init": True, "page_size": 8}
    llm = LLM(str(folder), **({"show_progress": False} | SIZES | CACHE | defaults | options))
    llm.update_weights(jax.tree.map(lambda leaf: leaf * (_SCALE if leaf.ndim > 1 else 1), get_params(llm)))
    return llm


def get_params(llm: LLM) -> Any:
    """The canonical parameters as numpy arrays."""
    return read_weights(llm)


def compute_alone(params: Any, kinds: Sequence[str], token_ids: Sequence[int]) -> tuple[np.ndarray, np.ndarray]:
    """The logits [T, V] and the embedding [D] of a whole text, by the definition of each layer, in float64."""
    params = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params)
    x = params["embed"]["weight"][list(token_ids)]
    for name, leaves in zip(kinds, params["layers"], strict=True):
        inner = _norm(x, leaves["attn_norm"]["weight"])
        if name in ("attention", "both ways"):
            x = x + _attend(leaves, inner, causal=name == "attention")
            continue
        if name == "recurrence":
            for t in range(1, len(inner)):
                inner[t] += _DECAY * inner[t - 1]
        elif name == "mean":
            inner = np.broadcast_to(inner.mean(axis=0), inner.shape)
        x = x + np.tanh(inner @ leaves["mix"]["weight"])
    normed = _norm(x, params["final_norm"]["weight"])
    return normed @ params["embed"]["weight"].T, normed[-1] / np.linalg.norm(normed[-1])


def continue_alone(params: Any, kinds: Sequence[str], prompt: Sequence[int], count: int) -> list[int]:
    """The greedy tokens after a prompt, each from the whole text before it."""
    ids = list(prompt)
    for _ in range(count):
        ids.append(int(compute_alone(params, kinds, ids)[0][-1].argmax()))
    return ids[len(prompt) :]


def _norm(x: np.ndarray, weight: np.ndarray) -> np.ndarray:
    return x / np.sqrt((x * x).mean(axis=-1, keepdims=True) + 1e-6) * weight


def _attend(leaves: Any, inner: np.ndarray, *, causal: bool) -> np.ndarray:
    heads = (inner @ leaves["qkv"]["weight"]).reshape(len(inner), HEADS + 2, HEAD)
    q, k, v = heads[:, :HEADS], heads[:, HEADS], heads[:, HEADS + 1]
    scores = np.einsum("tnh,sh->nts", q, k) * HEAD**-0.5
    if causal:
        scores = np.where(np.tril(np.ones(scores.shape[1:], bool)), scores, -np.inf)
    weights = np.exp(scores - scores.max(axis=-1, keepdims=True))
    out = np.einsum("nts,sh->tnh", weights / weights.sum(axis=-1, keepdims=True), v)
    return out.reshape(len(inner), -1) @ leaves["o"]["weight"]
