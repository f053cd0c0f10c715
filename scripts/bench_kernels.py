"""Attention alone over a grid of shapes: decode beside the copy rate, and prefill.

Prints decode bandwidth (bytes of keys and values over time) and prefill TFLOP/s (operations on seen keys only), each
beside the portable XLA path, cuDNN's dense attention through jax.nn and, where torch is installed, its
scaled_dot_product_attention. Dense peers read contiguous keys without pages: they show what the shape could do.

On a device that has not run the kernels yet, run `device_day.py` first: it checks them and survives their crashes.
`--dry-run` runs everything on small shapes with the kernels interpreted, on any machine.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import asdict
from functools import partial
from typing import Any

import jax
from instrument import Instrument, make_parser, read_run
from kernel_shapes import POOL_BYTES, Shape, list_shapes, platform_page_size, prepare_dry_run
from kernel_timing import DRY, FULL, Effort, sample_dense, sample_torch, time_paged

from jaxserve.tools.bench.limits import DeviceLimits, measure_limits
from pallas_kernels import AttnShape, KVSpec, resolve_impl


def measure(shape: Shape, impl: str, limits: DeviceLimits, effort: Effort, *, peers: bool) -> dict[str, Any]:
    """Returns one line of the table: seconds of each contender, or why it did not run.

    Dense peers whose causal mask begins at the first key are left out if a prefix is cached.
    """
    contenders: dict[str, Callable[[], float]] = {impl: partial(time_paged, shape, impl, effort)}
    if impl != "xla":
        contenders["xla"] = partial(time_paged, shape, "xla", effort)
    if peers and (shape.is_decode or not shape.cached):
        contenders["cudnn"] = lambda: min(sample_dense(shape, effort))
        contenders["torch"] = lambda: min(sample_torch(shape, effort))
    seconds: dict[str, float | str] = {}
    for name, run in contenders.items():
        try:
            seconds[name] = run()
        except Exception as problem:  # out of memory, not installed, not supported: the table shows it
            seconds[name] = f"{type(problem).__name__}: {problem}"[:200]
    mine = seconds[impl]
    rate = (shape.bytes_read if shape.is_decode else shape.flops) / mine if isinstance(mine, float) else None
    roof = limits.bytes_per_second if shape.is_decode else limits.flops_per_second
    return {
        "shape": asdict(shape),
        "label": shape.label,
        "seconds": seconds,
        "rate": rate,
        "share": None if rate is None else rate / roof,
    }


def print_rows(rows: list[dict[str, Any]], impl: str, limits: DeviceLimits, run: Instrument) -> None:
    title = (
        f"{impl} on {limits.device}: copy {limits.bytes_per_second / 1e12:.2f} TB/s, "
        f"matmul {limits.flops_per_second / 1e12:.0f} TFLOP/s"
    )
    names, lines = list(dict.fromkeys(name for row in rows for name in row["seconds"])), []
    for row in rows:
        unit = "TB/s" if row["shape"]["new"] == 1 else "TFLOP/s"
        found = [row["seconds"].get(name) for name in names]
        times = [f"{1e6 * seconds:.1f}" if isinstance(seconds, float) else "-" for seconds in found]
        rate = "-" if row["rate"] is None else f"{row['rate'] / 1e12:.3g} {unit}"
        lines.append((row["label"], *times, rate, "-" if row["share"] is None else f"{row['share']:.0%}"))
    problems = {f"- {name}: {s}" for row in rows for name, s in row["seconds"].items() if isinstance(s, str)}
    run.show(title, ("", *(f"{name} us" for name in names), "rate", "of the limit"), lines, sorted(problems))


def main() -> None:
    parser = make_parser(__doc__)
    parser.add_argument("--impl", help="gpu, tpu, xla, ...; default: what this device gets")
    parser.add_argument("--only", default="", help="only shapes whose label contains this text")
    parser.add_argument("--minutes", type=float, default=8, help="stop measuring after so long (default: %(default)s)")
    run = read_run(parser, {})
    args = run.args
    if args.dry_run:
        prepare_dry_run()
    begun = time.perf_counter()
    platform = jax.default_backend()
    page_size = platform_page_size()
    probe = AttnShape(32, KVSpec(8, 128, page_size, "bfloat16"), "bfloat16")
    impl, reason = resolve_impl(args.impl, probe)
    run.console.print(f"[bold]{impl}[/]: {reason}")
    limits, rows, late = measure_limits(), [], 0
    for shape in list_shapes(page_size, dry_run=args.dry_run):
        if args.only not in shape.label or shape.bytes_read > POOL_BYTES:
            continue
        if time.perf_counter() - begun > 60 * args.minutes:
            late += 1
            continue
        rows.append(measure(shape, impl, limits, DRY if args.dry_run else FULL, peers=platform == "gpu"))
        run.console.print(f"{rows[-1]['label']}: {rows[-1]['seconds']}")
        # After every shape: a run that is cut off keeps its lines.
        run.save({"impl": impl, "limits": limits.asdict(), "rows": rows})
    if rows:
        print_rows(rows, impl, limits, run)
    if late:
        run.console.print(f"not measured for want of time: {late} shapes")


if __name__ == "__main__":
    main()
