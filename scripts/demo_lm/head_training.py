"""The head's training loop: the target's states are computed in the same program as the head's gradients."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from functools import partial

import jax
import jax.numpy as jnp
import numpy as np
import optax
from rich.console import Console
from rich.progress import Progress

from demo_lm.head import Head, HeadConfig, compute_head_loss, read_target
from demo_lm.head_texts import Text
from demo_lm.model import DemoModel, Params
from demo_lm.optimizer import make_optimizer
from demo_lm.packing import Packer, Shape, cycle_batches

_SHORT = Shape(rows=8, length=256, isolated=True)
_LONG = Shape(rows=4, length=512, isolated=True)
_LONGEST = Shape(rows=2, length=1024, isolated=False)
SHAPES = (_SHORT, _LONG, _SHORT, _LONG, _SHORT, _LONG, _SHORT, _LONGEST)
"""Batches of 2048 tokens: texts by themselves, every eighth time many in a row, as the target was trained."""

State = tuple[Params, optax.OptState]


@dataclass(frozen=True)
class HeadSettings:
    """What one training run is made of."""

    num_steps: int
    num_passes: int
    seed: int = 0
    report_every: int = 50


@dataclass(frozen=True)
class Target:
    """The model that the head drafts for, with its parameters, and the tokens that the head may draft."""

    model: DemoModel
    params: Params
    draft_ids: np.ndarray  # int32 [Vd], ascending


def train_head(
    config: HeadConfig,
    target: Target,
    texts: Sequence[Text],
    settings: HeadSettings,
    console: Console,
    *,
    shapes: tuple[Shape, ...] = SHAPES,
) -> Params:
    """Returns the head's float32 parameters after `settings.num_steps` batches, drawn from `texts` at random."""
    head, optimizer = Head(config), make_optimizer(settings.num_steps)
    params = start_params(head, target, settings.seed)
    state = (params, optimizer.init(params))
    console.print(f"{sum(x.size for x in jax.tree.leaves(params)):,} parameters", highlight=False)
    batches = cycle_batches(Packer(_Draw(texts, settings.seed)), shapes)
    losses = []
    with Progress(console=console) as progress:
        task = progress.add_task("training", total=settings.num_steps)
        for step in range(1, settings.num_steps + 1):
            batch = asdict(next(batches))
            state, loss = _train_step(head, optimizer, target.model, settings.num_passes, state, _of(target), batch)
            losses.append(loss)
            progress.update(task, completed=step)
            if step % settings.report_every == 0 or step == settings.num_steps:
                mean = float(np.mean(jax.device_get(losses)))
                losses.clear()
                progress.console.print(f"step {step:5d}  loss {mean:.3f}", highlight=False)
    return state[0]


def start_params(head: Head, target: Target, seed: int) -> Params:
    """Random matrices; the LM head begins as the target's (rows of the tied embedding), its norm as the target's."""
    cfg = head.config
    aux = jnp.zeros((1, 8, len(cfg.aux_layers) * cfg.hidden_size))
    embedded, segments = jnp.zeros((1, 8, cfg.hidden_size)), jnp.ones((1, 8), jnp.int32)
    params = jax.jit(head.init, static_argnums=4)(jax.random.key(seed), aux, embedded, segments, 1)["params"]
    start = {
        "lm_head": jnp.array(target.params["embed_tokens"][target.draft_ids]),
        "norm": {"scale": jnp.array(target.params["norm"]["scale"])},
    }
    return {**params, **start}


class _Draw:
    """All texts in a random order, then in another one, and so on."""

    def __init__(self, texts: Sequence[Text], seed: int) -> None:
        self._texts, self._rng = texts, random.Random(f"order:{seed}")
        self._left: list[Text] = []

    def __call__(self) -> tuple[list[int], list[float]]:
        if not self._left:
            self._left = self._rng.sample(self._texts, len(self._texts))
        return self._left.pop().make_document()


def _of(target: Target) -> tuple[Params, np.ndarray]:
    return target.params, target.draft_ids


@partial(jax.jit, static_argnums=(0, 1, 2, 3), donate_argnums=4)
def _train_step(
    head: Head,
    optimizer: optax.GradientTransformation,
    model: DemoModel,
    num_passes: int,
    state: State,
    target: tuple[Params, jax.Array],
    batch: dict[str, jax.Array],
) -> tuple[State, jax.Array]:
    (params, moments), (target_params, draft_ids) = state, target
    logits, aux = read_target(model, target_params, batch["tokens"], batch["segments"], head.config.aux_layers)
    compute = partial(
        compute_head_loss,
        head,
        logits=logits,
        aux=aux,
        embedded=target_params["embed_tokens"][batch["targets"]],
        weights=batch["weights"],
        segments=batch["segments"],
        draft_ids=draft_ids,
        num_passes=num_passes,
    )
    loss, grads = jax.value_and_grad(compute)(params)
    updates, moments = optimizer.update(grads, moments, params)
    return (optax.apply_updates(params, updates), moments), loss
