"""What end-to-end tests share: small engines on golden checkpoints, and a look at the logits they compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, Self

import jax
import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.core.layers.linear import PACKED
from jaxserve.core.scheduler import StepPlan
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.option_flags import spell_flag
from tests.golden_cases import GoldenCase, load_case
from tests.programs import PROGRAMS, QUICK_ENV

MAX_MODEL_LEN = 160
ROOT = Path(__file__).parents[2]
# Two buckets, so that an engine compiles in seconds, and chunks, so that prompts are cut.
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "precompile_bs_paddings": [4],
    "precompile_token_paddings": [64],
}
# In place of these, the buckets that the engine chooses.
ALL_BUCKETS: dict[str, Any] = {"precompile_bs_paddings": None, "precompile_token_paddings": None}
CACHE: dict[str, Any] = {"compilation_cache_dir": str(PROGRAMS)}
DEMO: dict[str, Any] = SIZES | CACHE | {"dtype": "float32", "max_model_len": 384}


def make_llm(case: str | GoldenCase, **options: Any) -> LLM:
    """A small engine of a golden checkpoint, in float32."""
    case = load_case(case) if isinstance(case, str) else case
    defaults = {"dtype": "float32", "max_model_len": MAX_MODEL_LEN, "skip_tokenizer_init": True}
    return LLM(str(case.path), **({"show_progress": False} | SIZES | CACHE | defaults | options))


def make_demo(model: str = "demo", **options: Any) -> LLM:
    """A small engine of the demo model, in float32."""
    return LLM(model, **({"show_progress": False} | DEMO | options))


def read_weights(llm: LLM | AsyncLLM) -> Any:
    """The parameters as `update_weights` takes them, as numpy arrays: those that a CPU reads packed are whole again."""
    head = llm.ready.shapes.model.embedding.head

    def is_packed(node: Any) -> bool:
        return isinstance(node, Mapping) and PACKED in node

    def read(path: Any, leaf: Any) -> np.ndarray:
        if not is_packed(leaf):
            return np.asarray(jax.device_get(leaf))
        matrix = _unpack(np.asarray(leaf[PACKED]))
        return matrix.T if path[0].key == head else matrix

    return jax.tree_util.tree_map_with_path(read, llm.ready.runner.params, is_leaf=is_packed)


def _unpack(packed: np.ndarray) -> np.ndarray:
    """Returns the matrices [..., in, out] of `packing.pack`, which this process need not compile anything for."""
    is_wide = packed.dtype == np.float32
    if packed.ndim > (3 if is_wide else 5):
        return np.stack([_unpack(each) for each in packed])
    if is_wide:
        return packed.swapaxes(0, 1).reshape(packed.shape[1], -1)
    pairs = packed.reshape(*packed.shape[:-1], 16, 2)  # [panels, in / 32, halves, pairs of rows, columns, 2]
    return pairs.transpose(1, 3, 5, 0, 2, 4).reshape(32 * packed.shape[1], -1)


def list_flags(options: Mapping[str, Any]) -> list[str]:
    """Returns options as flags of the commands."""
    values = {name: value if isinstance(value, list) else [value] for name, value in options.items()}
    return [part for name, given in values.items() for part in (spell_flag(name), ",".join(map(str, given)))]


def write_tiny_llama(folder: Path, **changes: Any) -> Path:
    """Puts a config.json of a few thousand parameters into a folder, for random weights; returns the folder."""
    config = {
        "model_type": "llama",
        "architectures": ["LlamaForCausalLM"],
        "vocab_size": 64,
        "hidden_size": 64,
        "intermediate_size": 64,
        "num_hidden_layers": 2,
        "num_attention_heads": 2,
        "num_key_value_heads": 1,
        "head_dim": 64,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    (folder / "config.json").write_text(json.dumps(config | changes))
    return folder


def run_on_devices(count: int, script: str, *args: str) -> Any:
    """Runs Python code in a process with `count` CPU devices; returns the JSON value of its last line."""
    done = subprocess.run(
        [sys.executable, "-c", script, *args],
        env=os.environ
        | {
            "XLA_FLAGS": f"--xla_force_host_platform_device_count={count}",
            "JAX_PLATFORMS": "cpu",
            "PYTHONPATH": str(ROOT),
        }
        | QUICK_ENV,
        capture_output=True,
        text=True,
        check=False,
        cwd=ROOT,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def greedy(max_tokens: int = 64, **changes: Any) -> SamplingParams:
    return SamplingParams(**({"temperature": 0, "max_tokens": max_tokens, "ignore_eos": True} | changes))


def generate_ids(llm: LLM, prompts: Sequence[Sequence[int]], params: Any) -> list[list[int]]:
    outputs = llm.generate([{"prompt_token_ids": list(prompt)} for prompt in prompts], params, use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


class LogitsRecorder:
    """Keeps the logits [V] of every (prompt, position) that an engine computes, within a `with` block."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
        self._runner, self._batch = llm.ready.runner, llm.ready.engine.scheduler.batch
        self._start, self._run = self._runner.start, self._runner._run
        self._selected: Any = None

    def __enter__(self) -> Self:
        self._runner.start, self._runner._run = self._record, self._keep  # type: ignore[method-assign]
        return self

    def __exit__(self, *_: object) -> None:
        self._runner.start, self._runner._run = self._start, self._run  # type: ignore[method-assign]

    def _keep(self, *args: Any) -> Any:
        selected, hidden = self._run(*args)
        self._selected = jax.device_get(selected.logits)
        return selected, hidden

    def _record(self, plan: StepPlan) -> Any:
        started = self._start(plan)
        tickets = (*plan.decode_tickets, *(chunk.ticket for chunk in plan.chunks))
        for ticket, logits in zip(tickets, self._selected, strict=False):
            sequence = self._batch.by_ticket[ticket]
            self.logits[sequence.request.prompt_token_ids, sequence.num_computed_tokens - 1] = logits
        return started
