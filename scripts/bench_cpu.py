"""Throughput on a CPU: continuous batching of a 30M-parameter Llama with random weights.

64 requests with prompts of 16..256 and outputs of 8..256 tokens, 32 rows. `--peer PYTHON` runs transformers' static
batches of 32 on the same shapes and lengths with that interpreter (`.venv-reference/bin/python`), in the same run.
"""

from __future__ import annotations

import argparse
import json
import random
import subprocess
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams
from jaxserve.presets import load_preset

PRESET = "llama-30m"
ROWS = 32
PEER = Path(__file__).with_name("bench_transformers.py")


def make_jobs(count: int, seed: int = 0) -> list[tuple[int, int]]:
    """Returns (prompt length, output length) of each request."""
    rng = random.Random(seed)
    return [(rng.randint(16, 256), rng.randint(8, 256)) for _ in range(count)]


def measure(dtype: str, jobs: list[tuple[int, int]], repeats: int, **options: Any) -> dict[str, Any]:
    """Returns tokens/s of the best of `repeats` runs, and counts of its steps."""
    rng = random.Random(1)
    llm = LLM(
        PRESET,
        load_format="dummy",
        dtype=dtype,
        max_num_seqs=ROWS,
        max_model_len=512,
        enable_prefix_caching=False,
        compile="all",
        **options,
    )
    prompts = [{"prompt_token_ids": [rng.randrange(3, 8192) for _ in range(length)]} for length, _ in jobs]
    params = [SamplingParams(temperature=0, max_tokens=length, ignore_eos=True) for _, length in jobs]
    seconds = []
    for _ in range(repeats):
        start = time.perf_counter()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        seconds.append(time.perf_counter() - start)
        assert [len(output.outputs[0].token_ids) for output in outputs] == [length for _, length in jobs]
    counts = llm.ready.runner.counts
    return {
        "dtype": dtype,
        "tokens_per_second": sum(length for _, length in jobs) / min(seconds),
        "seconds": seconds,
        "useful_tokens": counts.useful_tokens / counts.padded_tokens,
        "steps": {str(bucket): number // repeats for bucket, number in sorted(counts.steps.items())},
    }


def run_peer(python: Path, jobs: list[tuple[int, int]]) -> dict[str, Any]:
    """Returns the figures of transformers on the same config and lengths, run by the interpreter `python`."""
    task = json.dumps({"config": load_preset(PRESET), "jobs": jobs, "rows": ROWS})
    done = subprocess.run([python, PEER], input=task, capture_output=True, text=True, check=True)
    return json.loads(done.stdout.strip().splitlines()[-1])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--requests", type=int, default=64)
    parser.add_argument("--repeats", type=int, default=3, help="the best run counts (default: 3)")
    parser.add_argument("--dtypes", nargs="+", default=["float32", "bfloat16"])
    parser.add_argument("--deterministic", action="store_true", help="measure the deterministic engine, too")
    parser.add_argument("--peer", type=Path, metavar="PYTHON", help="interpreter with torch and transformers")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    jobs = make_jobs(args.requests)
    results = [{"name": f"jaxserve {dtype}", **measure(dtype, jobs, args.repeats)} for dtype in args.dtypes]
    for dtype in args.dtypes if args.deterministic else ():
        found = measure(dtype, jobs, args.repeats, deterministic=True)
        results.append({"name": f"jaxserve {dtype}, deterministic", **found})
    if args.peer:
        results.append({"name": "transformers static float32", **run_peer(args.peer, jobs)})
    table = Table(title=f"{PRESET}, {args.requests} requests, {sum(n for _, n in jobs):,} output tokens, {ROWS} rows")
    for column in ("", "tokens/s", "of the last", "useful/padded", "steps"):
        table.add_column(column, justify="right")
    base = results[-1]["tokens_per_second"]
    for result in results:
        steps = ", ".join(f"{bucket}: {number}" for bucket, number in result.get("steps", {}).items())
        useful = f"{result['useful_tokens']:.2f}" if "useful_tokens" in result else ""
        rate = result["tokens_per_second"]
        table.add_row(result["name"], f"{rate:,.0f}", f"{rate / base:.2f}x", useful, steps)
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(results, indent=1) + "\n")


if __name__ == "__main__":
    main()
