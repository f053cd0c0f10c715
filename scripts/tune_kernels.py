"""Searches the attention kernels' block sizes on the device at hand, and keeps the best in the tuning table.

Shapes that matter come first, and of each shape the formula's configuration, its neighbours, then those of the best so
far. Every candidate is compared with the portable path in float32 before it is timed; one that does not compile, or is
wrong, is left out. The best of each shape is stored, the formula's too where nothing beats it by more than the noise,
in place of an entry with the same key.

    python scripts/tune_kernels.py --seconds 600 --results tuned.json     # where the device is
    python scripts/tune_kernels.py --merge tuned.json                     # where the package is

Run the compile gate afterwards (`make test-kernels-full`): it compiles every entry of the table.
"""

from __future__ import annotations

import argparse
import datetime
import os
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import jax
from kernel_shapes import (
    POOL_BYTES,
    Shape,
    compute_exactly,
    list_shapes,
    make_arguments,
    make_chain,
    prepare_dry_run,
)
from kernel_timing import DRY, FULL, Effort
from plain_console import Console

from pallas_kernels import AttnShape, choose_layout, resolve_impl
from pallas_kernels.backends import find_backend
from pallas_kernels.testing.compare import RELATIVE_TOLERANCE, relative_error
from pallas_kernels.tune.search import AXES, PARTS, choose, search
from pallas_kernels.tune.store import Result, read_results, save_results, write_results
from pallas_kernels.tune.table import DATA, KERNELS, Entry, tune_key

THREADS = 12  # compilers at once: what a round has candidates for
DRY_CANDIDATES = 2
# The shapes that a server spends its time in come first: (rows, context, new tokens) of the first model in bfloat16.
FIRST = (
    *((32, 4096, 1), (1, 4096, 4096), (8, 32768, 1), (128, 4096, 1), (256, 512, 1), (1, 4096, 1)),
    *((8, 4096, 1), (1, 5120, 1024), (1, 17408, 1024), (32, 512, 1), (1, 32768, 1)),
)
_LOWERING = threading.Lock()  # tracing and lowering are Python: threads would only interleave them


def sort_shapes(shapes: Sequence[Shape]) -> list[Shape]:
    """Shapes by importance: the first model before the others, bfloat16 before 8 bits, `FIRST` before the rest. Shapes
    whose keys and values exceed POOL_BYTES are left out."""

    def rank(shape: Shape) -> tuple[bool, bool, int]:
        what = (shape.rows, shape.cached + shape.new, shape.new)
        place = FIRST.index(what) if what in FIRST else len(FIRST)
        return shape.model != shapes[0].model, shape.kv_dtype != "bfloat16", place

    return sorted((shape for shape in shapes if shape.bytes_read <= POOL_BYTES), key=rank)


@dataclass(frozen=True)
class Budget:
    """A limit of wall time for the whole search, compiling included."""

    ends: float  # by time.monotonic

    @property
    def left(self) -> float:
        """Seconds; 0 when time is up."""
        return max(0.0, self.ends - time.monotonic())


class Trials:
    """One shape on the device: its arrays, the right output, and the time of each candidate."""

    def __init__(
        self, shape: Shape, impl: str, effort: Effort, budget: Budget, pool: ThreadPoolExecutor, console: Console
    ) -> None:
        self.shape, self.impl, self.effort, self.budget = shape, impl, effort, budget
        self.threads, self.console = pool, console
        self.layout = choose_layout(impl, shape.spec)
        self.kernel = f"{impl.removesuffix('_interpret')}_{'decode' if shape.is_decode else 'prefill'}"
        self.backend = find_backend(impl)
        self.attention = AttnShape(shape.heads[0], replace(shape.spec, layout=self.layout), shape.dtype)
        self.whole = self.backend.module.default_config(self.attention)
        self.layers = max(1, min(effort.layers, POOL_BYTES // max(shape.bytes_read, 1)))
        self.arguments = jax.eval_shape(lambda: make_arguments(shape, self.layers, self.layout))
        self.kv_pages: jax.Array | None = None
        self.rest: list[jax.Array] = []
        self.expected: jax.Array | None = None  # [T, N, H] f32

    @property
    def formula(self) -> Any:
        return getattr(self.whole, PARTS[self.kernel])

    def compile(self, candidate: Any) -> Any:
        """Compiles the candidate's chain of layers for the device at hand."""
        config = replace(self.whole, **{PARTS[self.kernel]: candidate})
        run = make_chain(self.shape, self.impl, self.layers, self.layout, config)
        with _LOWERING:
            lowered = run.lower(*self.arguments)
        return lowered.compile()

    def measure(self, candidates: Sequence[Any]) -> Iterator[tuple[Any, float]]:
        """Compiles a round's candidates together, then checks and times one after the other, until time is up."""
        compiled = [(candidate, self.threads.submit(self.compile, candidate)) for candidate in candidates]
        try:
            if self.expected is None:
                self.prepare()
            # Nothing is timed beside a compiler.
            wait([future for _, future in compiled], timeout=min(self.budget.left, threading.TIMEOUT_MAX))
            for candidate, future in compiled:
                if not self.budget.left or not future.done():
                    return
                yield candidate, self.check_and_time(candidate, future)
        finally:
            for _, future in compiled:
                future.cancel()

    def prepare(self) -> None:
        """Makes the arrays and computes the right output."""
        pool, *self.rest = make_arguments(self.shape, self.layers, self.layout)
        self.expected, self.kv_pages = compute_exactly(self.shape, self.layout, pool, *self.rest)

    def check_and_time(self, candidate: Any, compiled: Future[Any]) -> float:
        """Seconds of one layer; infinite for a candidate that is refused or wrong, with the reason printed."""
        try:
            run = compiled.result()
            _, self.kv_pages, first = run(self.kv_pages, *self.rest)
            error = relative_error(first, self.expected, first.shape[0])
            if not error < RELATIVE_TOLERANCE:
                self.console.print(f"  [red]wrong by {error:.2g}:[/] {candidate}")
                return float("inf")
            seconds = self.effort.time(lambda: self.call(run)) / self.layers
        except Exception as problem:  # it does not fit, or does not compile
            self.console.print(f"  [dim]{type(problem).__name__} for {candidate}: {str(problem)[:120]}[/]")
            if self.kv_pages is None or self.kv_pages.is_deleted():  # a call that fails has taken the pool
                self.prepare()
            return float("inf")
        self.console.print(f"  {1e6 * seconds:9.1f} us, off by {error:.1e}  {candidate}")
        return seconds

    def call(self, run: Any) -> jax.Array:
        out, self.kv_pages, _ = run(self.kv_pages, *self.rest)
        return out

    def make_result(self, found: dict[Any, float]) -> Result | None:
        """The winner; None if the formula's configuration was not timed, as the gain is then unknown."""
        formula_seconds = found.get(self.formula, float("inf"))
        if formula_seconds == float("inf"):
            return None
        best, shape = choose(found, self.formula), self.shape
        rate = ("gb_per_s", shape.bytes_read / 1e9) if shape.is_decode else ("tflop_per_s", shape.flops / 1e12)
        num_tokens, (num_rows, width) = self.arguments[1].shape[0], self.arguments[4].shape
        buckets = {"num_rows": num_rows, "num_tokens": num_tokens, "max_len": width * shape.page_size}
        key = tune_key(self.kernel, self.attention, **buckets)
        device = jax.devices()[0]
        measured = {
            "us": round(1e6 * found[best], 2),
            "formula_us": round(1e6 * formula_seconds, 2),
            "tried": len(found),
            rate[0]: round(rate[1] / found[best], 2),
            "jax": jax.__version__,
            "driver": str(getattr(device.client, "platform_version", "unknown")).replace("\n", " "),
            "date": datetime.date.today().isoformat(),
        }
        return Result(
            device.device_kind,
            Entry(self.kernel, KERNELS[self.kernel], key, asdict(best), measured),
        )


def tune(trials: Trials, most: int | None) -> Result | None:
    """Searches one shape, with at most so many candidates."""
    num_tried = 0

    def measure(candidates: Sequence[Any]) -> Iterator[tuple[Any, float]]:
        nonlocal num_tried
        allowed = candidates if most is None else candidates[: most - num_tried]
        num_tried += len(allowed)
        return trials.measure(allowed)

    found = search(trials.formula, AXES[trials.kernel], measure)
    result = trials.make_result(found)
    if result is not None:
        measured = result.entry.measured or {}
        gain = measured["formula_us"] / measured["us"]
        trials.console.print(f"{trials.shape.label}: {measured['us']} us, {gain:.2f} times the formula's rate")
    return result


def tune_shapes(args: argparse.Namespace, console: Console) -> int:
    """Tunes what there is time for, and stores after every shape. Returns the number of shapes whose formula fails."""
    page_size = {"gpu": 64, "tpu": 128}.get(jax.default_backend(), 32)
    shapes = sort_shapes(list(list_shapes(page_size, dry_run=args.dry_run)))
    shapes = [shape for shape in shapes if args.only in shape.label]
    probe = next(list_shapes(page_size, dry_run=args.dry_run))
    impl, reason = resolve_impl(args.impl, AttnShape(probe.heads[0], probe.spec, probe.dtype))
    if not impl.startswith(("gpu", "ampere", "tpu")):
        raise SystemExit(f"nothing to tune: this device runs {impl!r} ({reason})")
    budget = Budget(time.monotonic() + args.seconds)
    results: list[Result] = []
    failed = begun = 0
    if args.results:
        write_results(args.results, results)
    with ThreadPoolExecutor(args.compile_threads) as pool:
        for shape in shapes:
            if not budget.left:
                break
            begun += 1
            console.print(f"[bold]{shape.label}[/], {budget.left:.0f} s left")
            trials = Trials(shape, impl, DRY if args.dry_run else FULL, budget, pool, console)
            result = tune(trials, DRY_CANDIDATES if args.dry_run else None)
            if result is not None:
                results.append(result)
                for path in save_results([result], args.output):
                    console.print(f"kept in {path}")
            elif budget.left:
                failed += 1
                console.print(f"[red]{shape.label}: the formula's configuration fails, nothing is stored[/]")
            if args.results:  # after every shape: a run that is cut off keeps what it has
                write_results(args.results, results)
    if begun < len(shapes):
        console.print(f"not searched for want of time: {len(shapes) - begun} shapes")
    return failed


def merge(path: Path, directory: Path, console: Console) -> None:
    """Puts what `--results` brought home into the package's tables."""
    results = read_results(path)
    for table in save_results(results, directory):
        console.print(f"kept in {table}")
    console.print(f"{len(results)} entries; now run the compile gate: make test-gate-full")


def make_parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", help="gpu, ampere or tpu; default: what this device gets")
    parser.add_argument("--only", default="", help="only shapes whose label contains this text")
    parser.add_argument(
        "--seconds", type=float, default=3600, help="end the search after so long, compiling included (default: 3600)"
    )
    parser.add_argument(
        "--compile-threads",
        type=int,
        default=min(THREADS, os.cpu_count() or 1),
        help="compilers at once (default: %(default)s)",
    )
    parser.add_argument("--output", type=Path, default=DATA, metavar="FOLDER", help="default: the package's own table")
    parser.add_argument("--results", type=Path, metavar="FILE", help="write all entries into this one file as well")
    parser.add_argument("--merge", type=Path, metavar="FILE", help="measure nothing: put the entries of such a file in")
    parser.add_argument("--dry-run", action="store_true", help="small shapes and few candidates, interpreted on CPU")
    return parser


def main() -> None:
    args, console = make_parser().parse_args(), Console(soft_wrap=True)
    if args.merge:
        try:
            merge(args.merge, args.output, console)
        except (OSError, ValueError) as error:
            raise SystemExit(str(error)) from error
        return
    if args.dry_run:
        prepare_dry_run()
    if failed := tune_shapes(args, console):
        raise SystemExit(f"the formula's configuration fails for {failed} shapes")


if __name__ == "__main__":
    main()
