"""Tokens per second with several decode steps in one dispatch, against one at a time.

The engines take turns, and the best of the repeats counts. Every answer has the same tokens in all of them.
"""

from __future__ import annotations

import argparse
import json
import time
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table

from jaxserve import LLM, SamplingParams

NUM_TOKENS = 128


def make_params(rows: int) -> list[SamplingParams]:
    """Greedy and drawn rows, in turns."""
    return [
        SamplingParams(temperature=0.8 * (row % 2), seed=row, max_tokens=NUM_TOKENS, ignore_eos=True)
        for row in range(rows)
    ]


def measure(llms: dict[int, LLM], rows: int, repeats: int) -> dict[int, float]:
    """Returns tokens/s by steps of a dispatch, for `rows` rows that decode together."""
    prompts = [f"Question {row}: what is a KV cache?" for row in range(rows)]
    params, best, answers = make_params(rows), dict.fromkeys(llms, 0.0), []
    for _ in range(repeats + 1):  # the first compiles
        for steps, llm in llms.items():
            start = time.perf_counter()
            outputs = llm.generate(prompts, params, use_tqdm=False)
            best[steps] = max(best[steps], rows * NUM_TOKENS / (time.perf_counter() - start))
            answers.append([output.outputs[0].token_ids for output in outputs])
    assert all(answer == answers[0] for answer in answers), "the answers differ"
    return best


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="demo", help="model (default: demo)")
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--steps", type=int, nargs="+", default=[1, 4, 8], help="the first is compared with")
    parser.add_argument("--repeats", type=int, default=5, help="the best run counts (default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    llms = {steps: LLM(args.model, max_decode_steps=steps) for steps in args.steps}
    table = Table(title=f"Tokens/s of {args.model}, by decode steps in one dispatch")
    for column in ("rows", *map(str, args.steps)):
        table.add_column(column, justify="right")
    figures: list[dict[str, Any]] = []
    for rows in args.rows:
        found = measure(llms, rows, args.repeats)
        first = found[args.steps[0]]
        table.add_row(str(rows), *(f"{rate:,.0f} ({rate / first:.2f}x)" for rate in found.values()))
        figures.append({"rows": rows, "tokens_per_second": found})
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(figures, indent=1) + "\n")


if __name__ == "__main__":
    main()
