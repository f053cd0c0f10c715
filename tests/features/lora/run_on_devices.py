"""Run by test_devices.py in a process with four virtual CPU devices: prints what an engine over all of them answers."""

from __future__ import annotations

import json
import sys
from pathlib import Path

from jaxserve import LLM, LoRARequest
from tests.e2e.helpers import CACHE, SIZES, greedy


def run(model: str, adapter: str, count: int) -> list[list[int]]:
    """The tokens of a row with the adapter and of one without, of `count` devices."""
    llm = LLM(
        model,
        enable_lora=True,
        max_loras=2,
        tensor_parallel_size=count,
        dtype="float32",
        skip_tokenizer_init=True,
        show_progress=False,
        **(SIZES | CACHE),
    )
    prompts = [{"prompt_token_ids": [5, 6, 7, 8, 9]}] * 2
    outputs = llm.generate(prompts, greedy(12), lora_request=[LoRARequest("a", 1, adapter), None], use_tqdm=False)
    return [output.outputs[0].token_ids for output in outputs]


if __name__ == "__main__":
    found = {}
    for folder in sys.argv[1:]:
        paths = str(Path(folder) / "model"), str(Path(folder) / "adapter")
        found[Path(folder).name] = [run(*paths, 1), run(*paths, 4)]
    print(json.dumps(found))
