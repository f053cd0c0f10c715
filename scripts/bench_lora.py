"""Adapters: what a step with them takes, next to the same step without, by the number of slots and of rows.

Both forms of an engine's decode program run in turns on padding, in one process, whatever the slots hold: the products
are those of the whole bank. The time is that of the clock and of the process, which counts all its threads.
"""

from __future__ import annotations

import statistics
import time
from typing import Any

import jax
from instrument import make_parser, read_run

from jaxserve import LLM
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.memory import params_bytes
from jaxserve.core.runtime.runner import ModelRunner
from jaxserve.families.registry import param_specs


def time_steps(runner: ModelRunner, bucket: Bucket, steps: int) -> tuple[float, float]:
    """Returns the seconds of a step's forward pass, and those of the process."""
    packed = runner._layouts[bucket].new()
    start, used = time.perf_counter(), time.process_time()
    for _ in range(steps):
        selected, _ = runner._run(bucket, packed)
    jax.block_until_ready(selected)
    return (time.perf_counter() - start) / steps, (time.process_time() - used) / steps


def measure(model: str, slots: int, rank: int, rows: int, rounds: int, steps: int, **options: Any) -> dict[str, float]:
    """Returns the medians of both forms in seconds, their ratios, and the share of the bank's bytes in the weights'."""
    sizes = {"max_num_seqs": rows, "precompile_bs_paddings": [rows], "precompile_token_paddings": [rows + 32]}
    lora = {"enable_lora": True, "max_loras": slots, "max_lora_rank": rank}
    llm = LLM(model, show_progress=False, max_num_batched_tokens=rows + 32, **sizes, **lora, **options)
    ready, plain = llm.ready, Bucket(rows, rows)
    forms = plain, Bucket(rows, rows, adapters=slots)
    for bucket in forms:
        time_steps(ready.runner, bucket, 2)
    runs = [[time_steps(ready.runner, bucket, steps) for bucket in forms] for _ in range(rounds)]
    base, adapted = (statistics.median(run[form][0] for run in runs) for form in (0, 1))
    ratio = statistics.median(with_adapters[1] / without[1] for without, with_adapters in runs)
    weights = params_bytes(param_specs(ready.shapes.model), ready.shapes.num_devices, ready.shapes.platform)
    bank = sum(feature.params_bytes(ready.shapes) for feature in ready.shapes.features)
    return {
        "slots": slots,
        "rows": rows,
        "seconds": base,
        "seconds_with_adapters": adapted,
        "ratio": statistics.median(with_adapters[0] / without[0] for without, with_adapters in runs),
        "process_time_ratio": ratio,
        "bank_share": bank / weights,
    }


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--model", default="demo", help="as for jaxserve serve (default: demo)")
    parser.add_argument("--load-format", default="auto", help="dummy: random weights")
    parser.add_argument("--dtype", default="auto", help="of the model and the adapters")
    parser.add_argument("--slots", type=int, nargs="+", default=[1, 4, 8], help="max_loras (default: 1 4 8)")
    parser.add_argument("--rank", type=int, default=16, help="max_lora_rank (default: 16)")
    parser.add_argument("--rows", type=int, nargs="+", default=[8, 32], help="decoding rows (default: 8 32)")
    parser.add_argument("--rounds", type=int, default=15)
    parser.add_argument("--steps", type=int, default=20, help="of a round, for each form")
    run = read_run(parser, {"slots": [2], "rows": [4], "rounds": 1, "steps": 2})
    args, found = run.args, []
    for slots in args.slots:
        for rows in args.rows:
            options = {"load_format": args.load_format, "dtype": args.dtype}
            found.append(measure(args.model, slots, args.rank, rows, args.rounds, args.steps, **options))
            run.save({"forms": found})
    lines = [
        (
            f"{each['slots']:.0f}",
            f"{each['rows']:.0f}",
            f"{1e3 * each['seconds']:.2f} ms",
            f"{each['ratio']:.2f}",
            f"{each['process_time_ratio']:.2f}",
            f"{each['bank_share']:.1%}",
        )
        for each in found
    ]
    header = ("slots", "rows", "a step without", "with / without", "the same, process", "bank / weights")
    run.show(f"Adapters of rank {args.rank}, {args.model}", header, lines)


if __name__ == "__main__":
    main()
