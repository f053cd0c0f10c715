"""Counts and ratios of the demo model's engine against committed bounds: what a change may worsen while tests pass.

Counts do not depend on the machine: steps, padding, programs, compilations, prefix hits, preemptions. A breach ends the
script with status 1 and says what to write if the change is meant. Ratios of times, below `times`, only warn. Bounds
are in bench_regression.toml. `--dry-run` leaves the times out.
"""

from __future__ import annotations

import os
import shutil
import sys
import time
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from instrument import make_parser, read_run
from regression_bounds import Bound, Figure, find_breaches, flatten, read_bounds

if TYPE_CHECKING:
    from jaxserve import LLM

BOUNDS = Path(__file__).with_suffix(".toml")
MODEL = "demo"
# Small enough to be compiled in seconds, with pages for the loads of short answers only.
ENGINE: dict[str, Any] = {
    "max_num_seqs": 8,
    "max_num_batched_tokens": 64,
    "max_model_len": 512,
    "num_kv_pages_override": 41,
    "compile": "all",
    "skip_tokenizer_init": True,
}
LOADS: dict[str, dict[str, Any]] = {
    "mixed_load": {"num_prompts": 32, "random_input_len": 40, "random_output_len": 24, "random_range_ratio": 0.8},
    "shared_prefixes": {
        "name": "prefix_repetition",
        "num_prompts": 32,
        "prefix_repetition_prefix_len": 96,
        "prefix_repetition_suffix_len": 16,
        "prefix_repetition_num_prefixes": 3,
        "prefix_repetition_output_len": 8,
    },
    "few_pages": {"num_prompts": 12, "random_input_len": 64, "random_output_len": 200, "random_range_ratio": 0.2},
}
HOST_ROWS = (32, 256)
HOST_STEPS = 100
_TURNS = 3  # of measuring times, of which the least count
_LOOP_TURNS = 20_000


def count_programs() -> dict[str, int]:
    """Returns the programs of the default engine by kind, without compiling one."""
    import jax

    from jaxserve.config import EngineConfig
    from jaxserve.core.runtime.step_programs import list_programs
    from jaxserve.engine.model_files import locate_model, resolve_model
    from jaxserve.features.choose import make_shapes

    config = EngineConfig.from_options(model=MODEL)
    model = resolve_model(config, locate_model(config.model, need_weights=False))
    shapes = make_shapes(config, model, jax.default_backend(), jax.devices()[0].device_kind)
    kinds = [kind for kind, _ in list_programs(shapes.buckets, shapes.sample_programs)]
    counts = {kind: kinds.count(kind) for kind in ("forward", "sample")}
    return counts | {"others": len(kinds) - sum(counts.values())}


def run_load(llm: LLM, options: Mapping[str, Any]) -> dict[str, Any]:
    """Runs the requests of a dataset and returns what was counted meanwhile."""
    from jaxserve.tools.bench.dataset_options import DatasetOptions
    from jaxserve.tools.bench.datasets import make_requests
    from jaxserve.tools.bench.runs import RunOptions, run_requests

    model = llm.ready.shapes.model
    requests = make_requests(
        DatasetOptions(**options), vocab_size=model.vocab_size, tokenizer=None, max_model_len=model.max_model_len
    )
    llm.reset_prefix_cache()
    run = run_requests(llm, requests, RunOptions(detokenizes=False))
    return {
        "steps": run.steps,
        "useful_tokens": run.useful_tokens,
        "padded_tokens": run.padded_tokens,
        "preemptions": run.num_preemptions,
        "compiled": run.num_compiled,
        "failures": len(requests) - run.num_completed,
    } | ({"prefix_hit_share": run.prefix_hits / run.prefix_queries} if run.prefix_hits else {})


def measure_temporaries(llm: LLM) -> dict[str, float]:
    """Returns what the largest decode program needs beside its arguments, of the bytes of the pages, by attention."""
    from jaxserve.core.runtime.arguments import make_compiler
    from jaxserve.core.sharding import make_mesh

    ready = llm.ready
    bucket = ready.shapes.buckets.find(ENGINE["max_num_seqs"], ENGINE["max_num_seqs"])
    programs = {ready.shapes.impl: ready.runner.device.programs.get("forward", bucket)}
    if "xla" not in programs:
        compiler = make_compiler(ready.shapes.with_impl("xla", ""), ready.plan, make_mesh(1))
        programs["xla"] = compiler.compile("forward", bucket)
    pages = ready.plan.bytes_per_device
    return {impl: program.memory_analysis().temp_size_in_bytes / pages for impl, program in programs.items()}


def measure_host() -> dict[str, float]:
    """Returns the loop's time for a row, in turns of a fixed loop of Python on the same machine."""
    from bench_host import _Characters, measure

    loops, rows = [], {count: list[float]() for count in HOST_ROWS}
    for _ in range(_TURNS):
        loops.append(time_python_loop())
        for count, found in rows.items():
            parts = measure(count, HOST_STEPS, _Characters())
            found.append(1e-6 * (sum(parts.values()) - parts["detokenize"]))
    few, many = HOST_ROWS
    slope = (min(rows[many]) - min(rows[few])) / (many - few)
    return {"host_row": slope / min(loops), "host_step": min(rows[few]) / min(loops)}


def time_python_loop() -> float:
    """Returns the CPU seconds of one turn of a loop that does what schedulers do: calls, lists, dictionaries."""
    found: dict[int, list[int]] = {}

    def note(number: int) -> None:
        found.setdefault(number % 97, []).append(number)

    start = time.thread_time()
    for number in range(_LOOP_TURNS):
        note(number)
    return (time.thread_time() - start) / _LOOP_TURNS


def measure(*, with_times: bool) -> tuple[dict[str, Figure], dict[str, str]]:
    """Returns the figures by name, and why others were left out."""
    from jaxserve import LLM
    from pallas_kernels.cpu.library import COMPILERS

    llm, left_out = LLM(MODEL, **ENGINE), {}
    found: dict[str, Any] = {
        "default_engine": count_programs(),
        **{name: run_load(llm, options) for name, options in LOADS.items()},
        "attention": {"chosen": llm.ready.shapes.impl},
        "temporaries": measure_temporaries(llm),
    }
    if not any(map(shutil.which, COMPILERS)):
        left_out |= dict.fromkeys(("attention.chosen", "temporaries.cpu"), "no C++ compiler on this machine")
    if with_times:
        found["times"] = measure_host()
    else:
        left_out |= dict.fromkeys(("times.host_row", "times.host_step"), "a dry run")
    return dict(flatten(found)), left_out


def main() -> int:
    parser = make_parser(__doc__)
    parser.add_argument("--bounds", type=Path, default=BOUNDS, metavar="FILE", help="default: bench_regression.toml")
    run = read_run(parser, {})
    try:
        bounds = read_bounds(run.args.bounds)
    except (OSError, ValueError) as error:
        parser.error(f"--bounds: {run.args.bounds}: {error}")
    figures, left_out = measure(with_times=not run.args.dry_run)
    lines = [(name, show(value), show_bound(bounds.get(name))) for name, value in figures.items()]
    notes = [f"{name}: left out, {reason}" for name, reason in left_out.items()]
    run.show("Counts and ratios of the demo model", ("figure", "found", "bound"), lines, notes)
    run.save({"found": figures, "left_out": left_out})
    breaches = find_breaches(figures, bounds, left_out, os.path.relpath(run.args.bounds))
    for breach in breaches:
        print(f"{'warning' if breach.only_warns else 'error'}: {breach.text}", file=sys.stderr)
    return 1 if any(not breach.only_warns for breach in breaches) else 0


def show(value: Figure) -> str:
    """Returns a figure for people."""
    return f"{value:,.4g}" if isinstance(value, float) else str(value)


def show_bound(bound: Bound | None) -> str:
    """Returns a bound for people."""
    if bound is None:
        return "none"
    if bound.least == bound.most:
        return show(bound.least or 0)
    sides = ("at least", bound.least), ("at most", bound.most)
    return ", ".join(f"{word} {show(value)}" for word, value in sides if value is not None)


if __name__ == "__main__":
    sys.exit(main())
