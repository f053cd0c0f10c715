"""What end-to-end tests share: small engines on golden checkpoints, and a look at the logits they compute."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import jax
import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.scheduler import StepPlan
from tests.golden_cases import GoldenCase, load_case
from tests.programs import PROGRAMS

MAX_MODEL_LEN = 160
ROOT = Path(__file__).parents[2]
# For `make_llm`, which else gives an engine one bucket of each kind.
ALL_BUCKETS: dict[str, Any] = {"precompile_bs_paddings": None, "precompile_token_paddings": None}


def make_llm(case: str | GoldenCase, **options: Any) -> LLM:
    """A small engine: two buckets, so that it compiles in seconds, and chunks, so that prompts are cut."""
    case = load_case(case) if isinstance(case, str) else case
    sizes = {"max_num_seqs": 3, "max_num_batched_tokens": 64} | options
    defaults = {
        "dtype": "float32",
        "max_model_len": MAX_MODEL_LEN,
        "skip_tokenizer_init": True,
        "precompile_bs_paddings": [sizes["max_num_seqs"]],
        "precompile_token_paddings": [sizes["max_num_batched_tokens"]],
        "compilation_cache_dir": str(PROGRAMS),
        "show_progress": False,
    }
    return LLM(str(case.path), **(defaults | sizes))


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
        },
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
    """Keeps the logits [V] of every (prompt, position) that an engine computes."""

    def __init__(self, llm: LLM) -> None:
        self.logits: dict[tuple[tuple[int, ...], int], np.ndarray] = {}
        runner, self._batch = llm.ready.runner, llm.ready.engine.scheduler.batch
        self._start, self._run = runner.start, runner._run
        self._selected: Any = None
        runner.start, runner._run = self._record, self._keep  # type: ignore[method-assign]

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
