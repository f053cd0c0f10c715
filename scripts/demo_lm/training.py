"""The training loop: one donated program per batch shape, no wait for the device between reports, resumable."""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import optax
import orbax.checkpoint as ocp
import sentencepiece as spm
from rich.console import Console
from rich.progress import Progress

from demo_lm.answering import answer_exam
from demo_lm.corpus import draw_conversation
from demo_lm.exam import list_tool_problems
from demo_lm.export import load_checkpoint
from demo_lm.model import DemoConfig, DemoModel, Params, compute_loss
from demo_lm.optimizer import make_optimizer
from demo_lm.packing import Packer, Shape, cycle_batches, seed_step
from demo_lm.scoring import list_problems
from demo_lm.tokens import SPACE, encode_conversation, load_tokenizer, train_tokenizer

_SHORT = Shape(rows=16, length=256, isolated=True)
_LONG = Shape(rows=8, length=512, isolated=True)
_LONGEST = Shape(rows=4, length=1024, isolated=False)
SHAPES = (_SHORT, _LONG, _SHORT, _LONG, _SHORT, _LONG, _SHORT, _LONGEST)
"""Batches of 4096 tokens each: documents by themselves, every eighth time long texts made of many."""

_KEPT_SHARE = 0.3  # of the steps: how often a checkpoint is kept for good

State = dict[str, Any]  # "params" and "optimizer"


@dataclass(frozen=True)
class Settings:
    """What one training run is made of."""

    directory: Path  # tokenizer, checkpoints and the log of the run
    num_steps: int
    seed: int = 0
    report_every: int = 25
    check_every: int = 150
    init: Path | None = None  # an exported checkpoint whose weights are the first ones


def run_training(settings: Settings, console: Console) -> tuple[DemoConfig, Params, Path]:
    """Trains from the newest checkpoint in `settings.directory` (or from nothing) to `num_steps`.

    Returns the model's sizes, its float32 parameters and the path of the tokenizer. `log.jsonl` in the directory gets
    one line per report (step, loss, seconds) and per check (shares of exactly answered unseen questions).
    """
    tokenizer_path = settings.directory / "tokenizer.model"
    if not tokenizer_path.exists():
        train_tokenizer(tokenizer_path, seed=settings.seed)
    tokenizer = load_tokenizer(tokenizer_path)
    config = DemoConfig(vocab_size=tokenizer.vocab_size())
    model, optimizer = DemoModel(config), make_optimizer(settings.num_steps)
    empty = jnp.zeros((1, 8), jnp.int32)
    params = jax.jit(model.init)(jax.random.key(settings.seed), empty, empty)["params"]
    if settings.init is not None:
        params = adopt_checkpoint(settings.init, params, tokenizer)
    state = {"params": params, "optimizer": optimizer.init(params)}
    options = ocp.CheckpointManagerOptions(
        max_to_keep=2,
        keep_period=max(1, int(settings.num_steps * _KEPT_SHARE)),
        enable_async_checkpointing=False,
    )
    folder = (settings.directory / "checkpoints").absolute()
    with ocp.CheckpointManager(folder, options=options) as checkpoints, Progress(console=console) as progress:
        start = checkpoints.latest_step() or 0
        if start:
            state = checkpoints.restore(start, args=ocp.args.StandardRestore(state))
        size = sum(x.size for x in jax.tree.leaves(params))
        console.print(f"{size:,} parameters, step {start} of {settings.num_steps}", highlight=False)
        if start < settings.num_steps:
            run = _Run(settings, model, optimizer, tokenizer, checkpoints, progress)
            state = run.advance(state, start)
    return config, state["params"], tokenizer_path


def adopt_checkpoint(directory: Path, params: Params, tokenizer: spm.SentencePieceProcessor) -> Params:
    """Returns an exported checkpoint's parameters, for another vocabulary.

    A piece that the old vocabulary has, perhaps with a space before it, keeps its row of the embedding; another gets
    the mean of the rows of the old pieces that spell it; a piece without text keeps the row of `params`.
    """
    _, adopted = load_checkpoint(directory)
    old = spm.SentencePieceProcessor(model_file=str(directory / "tokenizer.model"))
    known = {old.id_to_piece(token_id): token_id for token_id in range(old.vocab_size())}
    rows = np.array(params["embed_tokens"])
    for token_id in range(tokenizer.vocab_size()):
        piece = tokenizer.id_to_piece(token_id)
        known_as = next((each for each in (SPACE + piece, piece) if each in known), None)
        spelled = [known[known_as]] if known_as is not None else old.encode(piece.replace(SPACE, " "))
        if spelled:
            rows[token_id] = np.asarray(adopted["embed_tokens"])[spelled].mean(axis=0)
    return {**adopted, "embed_tokens": jnp.asarray(rows)}


@dataclass(frozen=True)
class _Run:
    """What stays the same from step to step."""

    settings: Settings
    model: DemoModel
    optimizer: optax.GradientTransformation
    tokenizer: spm.SentencePieceProcessor
    checkpoints: ocp.CheckpointManager
    progress: Progress

    def advance(self, state: State, start: int) -> State:
        """Runs the steps after `start`, with reports, checks and checkpoints; returns the last state."""
        settings, rng = self.settings, seed_step(self.settings.seed, start)
        packer = Packer(lambda: encode_conversation(self.tokenizer, draw_conversation(rng)))
        batches = cycle_batches(packer, SHAPES)
        task = self.progress.add_task("training", total=settings.num_steps, completed=start)
        losses, began = [], time.perf_counter()
        for step in range(start + 1, settings.num_steps + 1):
            batch = next(batches)
            state, loss = _train_step(self.model, self.optimizer, state, asdict(batch))
            losses.append(loss)
            if step % settings.report_every == 0:
                mean = float(np.mean(jax.device_get(losses)))
                losses.clear()
                self._report(step, {"loss": mean, "seconds": time.perf_counter() - began})
                self.progress.update(task, completed=step)
            if step % settings.check_every == 0 or step == settings.num_steps:
                self._check(step, state["params"])
                self.checkpoints.save(step, args=ocp.args.StandardSave(state))
        return state

    def _check(self, step: int, params: Params) -> None:
        problems = list_problems(num_addition=64, num_json=32, per_entry=1, seed=2) + list_tool_problems(32, seed=2)
        scores = answer_exam(self.model, params, self.tokenizer, problems, explain=False)
        shares = {f"{skill}, {part}": scores.right[skill, part] / n for (skill, part), n in scores.total.items()}
        self._report(step, shares)

    def _report(self, step: int, values: dict[str, float]) -> None:
        line = "  ".join(f"{name} {value:.3f}" for name, value in values.items())
        self.progress.console.print(f"step {step:5d}  {line}", highlight=False, soft_wrap=True)
        with (self.settings.directory / "log.jsonl").open("a") as file:
            file.write(json.dumps({"step": step, "cpu_seconds": time.process_time(), **values}) + "\n")


@partial(jax.jit, static_argnums=(0, 1), donate_argnums=2)
def _train_step(
    model: DemoModel, optimizer: optax.GradientTransformation, state: State, batch: dict[str, jax.Array]
) -> tuple[State, jax.Array]:
    loss, grads = jax.value_and_grad(lambda params: compute_loss(model, params, **batch))(state["params"])
    updates, moments = optimizer.update(grads, state["optimizer"], state["params"])
    return {"params": optax.apply_updates(state["params"], updates), "optimizer": moments}, loss
