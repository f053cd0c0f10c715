"""The peer of bench_cpu.py, run by an interpreter that has torch and transformers.

Reads {"config", "jobs", "rows"} from standard input and prints tokens/s of static batches in order of arrival. Prompts
are padded on the left to the longest of the batch, and all rows generate as many tokens as the batch's longest output.
Only the tokens that were asked for count.
"""

from __future__ import annotations

import json
import sys
import time

import torch
from transformers import LlamaConfig, LlamaForCausalLM


def main() -> None:
    task = json.load(sys.stdin)
    torch.set_num_threads(2)
    torch.manual_seed(0)
    config = {key: value for key, value in task["config"].items() if key not in ("architectures", "torch_dtype")}
    model = LlamaForCausalLM(LlamaConfig(**config)).eval()
    jobs, rows = task["jobs"], task["rows"]
    start = time.perf_counter()
    with torch.inference_mode():
        for first in range(0, len(jobs), rows):
            batch = jobs[first : first + rows]
            width, longest = max(prompt for prompt, _ in batch), max(output for _, output in batch)
            ids = torch.randint(3, config["vocab_size"], (len(batch), width))
            mask = torch.tensor([[0] * (width - prompt) + [1] * prompt for prompt, _ in batch])
            options = {"max_new_tokens": longest, "min_new_tokens": longest, "do_sample": False, "pad_token_id": 0}
            model.generate(ids, attention_mask=mask, **options)
    seconds = time.perf_counter() - start
    tokens = sum(output for _, output in jobs)
    print(json.dumps({"tokens_per_second": tokens / seconds, "seconds": [seconds]}))


if __name__ == "__main__":
    main()
