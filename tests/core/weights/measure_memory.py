"""Prints, as JSON lines, the peak memory of loading a checkpoint of a few hundred MB; run by `test_memory.py`.

Usage: python -m tests.core.weights.measure_memory FOLDER STORED-WANTED ...
(dtypes; FOLDER/STORED holds the checkpoint)
"""

from __future__ import annotations

import dataclasses
import json
import sys
import threading
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import load_safetensors, stream_pieces
from jaxserve.core.weights.paths import flatten_specs
from jaxserve.families.registry import param_specs, parse_config, weight_sources
from tests.core.weights.checkpoints import write_shards

CONFIG = {
    "model_type": "llama",
    "architectures": ["LlamaForCausalLM"],
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 3,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "vocab_size": 8192,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-5,
    "hidden_act": "silu",
    "tie_word_embeddings": False,
    "eos_token_id": 2,
}


def write_checkpoint(folder: Path, dtype: str) -> None:
    """Two shards of repeated noise: what is in them does not matter here."""
    noise = np.random.default_rng(0).standard_normal(9973).astype(jnp.dtype(dtype))
    tensors = {
        name: np.resize(noise, shape)
        for source in weight_sources(parse_config(CONFIG)).values()
        for name, shape in zip(source.names, source.shapes, strict=True)
    }
    write_shards(folder, {f"model-{i}.safetensors": dict(list(tensors.items())[i::2]) for i in range(2)})


def read_rss() -> dict[str, int]:
    """Resident bytes of this process by kind: RssAnon (allocations), RssFile (mapped files)."""
    status = (line.split() for line in Path("/proc/self/status").read_text().splitlines())
    return {line[0].rstrip(":"): int(line[1]) * 1024 for line in status if line[0] in ("RssAnon:", "RssFile:")}


def watch_rss(work: Callable[[], Any]) -> tuple[Any, dict[str, int]]:
    """Runs `work` and returns its result with the growth of each kind of resident memory at its peak."""
    before = read_rss()
    peak = dict(before)
    done = threading.Event()

    def sample() -> None:
        while not done.wait(0.0005):
            for kind, value in read_rss().items():
                peak[kind] = max(peak[kind], value)

    thread = threading.Thread(target=sample)
    thread.start()
    result = work()
    done.set()
    thread.join()
    return result, {kind: peak[kind] - before[kind] for kind in before}


def measure(folder: Path, wanted: str, *, resident: bool) -> dict[str, int]:
    """Sizes of the parameters, the peak of host buffers, and if asked the growth of resident memory; all in bytes."""
    config = dataclasses.replace(parse_config(CONFIG), dtype=wanted)
    specs, sources = param_specs(config), weight_sources(config)
    options: dict[str, Any] = {"mesh": make_mesh(1), "rules": DEFAULT_RULES}
    growth = {}
    if resident:
        params, growth = watch_rss(lambda: jax.block_until_ready(load_safetensors(folder, specs, sources, **options)))
        del params
    tracemalloc.start()
    # dropped at once: on CPU an array may be the host buffer itself, by the chance of its alignment
    for _ in stream_pieces(folder, specs, sources, **options):
        pass
    host = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    sizes = [spec.num_bytes for spec in flatten_specs(specs)[0].values()]
    return {"total": sum(sizes), "largest": max(sizes), "host": host, **growth}


def main() -> None:
    jax.device_put(np.zeros(8)).block_until_ready()
    for index, pair in enumerate(sys.argv[2:]):
        stored, wanted = pair.split("-")
        # only a fresh process has no freed memory that allocations could hide in
        print(json.dumps(measure(Path(sys.argv[1], stored), wanted, resident=index == 0)))


if __name__ == "__main__":
    main()
