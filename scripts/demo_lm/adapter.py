"""Low-rank adapters of the demo model: their training, and their files in PEFT's format."""

from __future__ import annotations

import json
import random
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import ml_dtypes
import numpy as np
import optax
import sentencepiece as spm
from rich.console import Console
from safetensors.numpy import load_file, save_file

from demo_lm.adapter_texts import draw_conversation
from demo_lm.export import PROJECTIONS
from demo_lm.model import DemoModel, Params, compute_loss
from demo_lm.optimizer import make_schedule
from demo_lm.packing import Packer, Shape, cycle_batches
from demo_lm.tokens import encode_conversation

RANK, ALPHA = 8, 16
SHAPE = Shape(rows=8, length=384, isolated=True)  # of a batch; the longest documents are two stories
_LEARNING_RATE, _WARMUP = 0.004, 20

Adapter = dict[str, dict[str, dict[str, jax.Array]]]
"""By block and projection: `a` [in, rank] and `b` [rank, out], float32."""


@dataclass(frozen=True)
class AdapterSettings:
    """What one training run is made of."""

    name: str  # of `adapter_texts.ADAPTERS`
    num_steps: int
    seed: int = 0
    report_every: int = 25


def start_adapter(params: Params, seed: int) -> Adapter:
    """An adapter of all projections: A is random and B zero, so that it changes nothing yet."""
    adapter: Adapter = {}
    keys = iter(jax.random.split(jax.random.key(seed), 1000))  # more than there are matrices
    for block in sorted(name for name in params if name.endswith(tuple(PROJECTIONS))):
        adapter[block] = {}
        for name, leaf in sorted(params[block].items()):
            width, out = leaf["kernel"].shape
            a = jax.random.normal(next(keys), (width, RANK)) * width**-0.5
            adapter[block][name] = {"a": a, "b": jnp.zeros((RANK, out))}
    return adapter


def merge(params: Params, adapter: Adapter) -> Params:
    """The parameters with an adapter added to them."""
    merged = dict(params)
    for block, names in adapter.items():
        merged[block] = {
            name: {"kernel": params[block][name]["kernel"] + ALPHA / RANK * pair["a"] @ pair["b"]}
            for name, pair in names.items()
        }
    return merged


def train_adapter(
    model: DemoModel, params: Params, tokenizer: spm.SentencePieceProcessor, settings: AdapterSettings, console: Console
) -> Adapter:
    """Returns an adapter after `settings.num_steps` batches of conversations that are drawn for its name."""
    optimizer = optax.adam(make_schedule(_LEARNING_RATE, settings.num_steps, warmup=_WARMUP))
    adapter = start_adapter(params, settings.seed)
    state = (adapter, optimizer.init(adapter))
    size = sum(x.size for x in jax.tree.leaves(adapter))
    console.print(f"{settings.name}: {size:,} parameters", highlight=False)
    rng, losses = random.Random(f"{settings.name}:{settings.seed}"), []
    packer = Packer(lambda: encode_conversation(tokenizer, draw_conversation(rng, settings.name)))
    batches = cycle_batches(packer, (SHAPE,))
    for step in range(1, settings.num_steps + 1):
        state, loss = _train_step(model, optimizer, state, params, asdict(next(batches)))
        losses.append(loss)
        if step % settings.report_every == 0 or step == settings.num_steps:
            mean = float(np.mean(jax.device_get(losses)))
            losses.clear()
            console.print(f"step {step:5d}  loss {mean:.4f}", highlight=False)
    return state[0]


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _train_step(
    model: DemoModel, optimizer: optax.GradientTransformation, state: Any, params: Params, batch: dict[str, jax.Array]
) -> tuple[Any, jax.Array]:
    adapter, moments = state
    loss, grads = jax.value_and_grad(lambda adapter: compute_loss(model, merge(params, adapter), **batch))(adapter)
    updates, moments = optimizer.update(grads, moments, adapter)
    return (optax.apply_updates(adapter, updates), moments), loss


def export_adapter(directory: Path, adapter: Adapter) -> None:
    """Writes `adapter_config.json` and `adapter_model.safetensors` into `directory`, which it makes: bfloat16."""
    directory.mkdir(parents=True, exist_ok=True)
    tensors = {}
    for block, names in adapter.items():
        for name, pair in names.items():
            for side, value in (("A", pair["a"]), ("B", pair["b"])):
                tensors[_name_tensor(block, name, side)] = np.ascontiguousarray(value.T, ml_dtypes.bfloat16)
    save_file(tensors, directory / "adapter_model.safetensors", metadata={"format": "pt"})
    config = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "base_model_name_or_path": "demo",
        "inference_mode": True,
        "r": RANK,
        "lora_alpha": ALPHA,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": [name for names in PROJECTIONS.values() for name in names],
    }
    (directory / "adapter_config.json").write_text(json.dumps(config, indent=2) + "\n")


def load_adapter(directory: Path, like: Adapter) -> Adapter:
    """The inverse of `export_adapter`: float32 that holds bfloat16 values, in the form of another adapter."""
    tensors = load_file(directory / "adapter_model.safetensors")
    return {
        block: {
            name: {side: jnp.float32(tensors[_name_tensor(block, name, side.upper())].T) for side in pair}
            for name, pair in names.items()
        }
        for block, names in like.items()
    }


def _name_tensor(block: str, name: str, side: str) -> str:
    _, layer, module = block.split("_", 2)
    return f"base_model.model.model.layers.{layer}.{module}.{name}.lora_{side}.weight"
