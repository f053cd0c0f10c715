"""Searches the attention kernels' block sizes on the device at hand, and keeps the best in the tuning table.

Every candidate is checked against the portable path before it is timed; one that does not compile, or is wrong, is
left out. An entry is written only where it beats the formula by more than the noise. Entries replace those of the same
key. Run the compile gate afterwards (`make test-kernels-full`): it compiles every entry of the table.
"""

from __future__ import annotations

import argparse
import datetime
import itertools
import json
from collections.abc import Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
from bench_kernels import DRY, FULL, Effort, Shape, list_shapes, make_program, prepare_dry_run, time_paged
from rich.console import Console

from pallas_kernels import AttnShape, choose_layout, resolve_impl
from pallas_kernels.backends import find_backend
from pallas_kernels.testing.cases import TOLERANCE
from pallas_kernels.tune.table import DATA, TuneKey, tune_key

WORTH = 0.02  # a gain below this share is noise
GRIDS: dict[str, dict[str, tuple[Any, ...]]] = {
    "gpu_decode": {
        "tile_tokens": (64, 128),
        "stages": (2, 3, 4, 6),
        "ctas_per_sm": (1, 2),
        "min_split_tokens": (256, 512, 1024),
    },
    "gpu_prefill": {"keys": (64, 128), "stages": (2, 3, 4), "registers": ((232, 40), (240, 24))},
    "ampere_decode": {
        "tile_tokens": (32, 64),
        "stages": (2, 3, 4),
        "ctas_per_sm": (1, 2),
        "min_split_tokens": (128, 256, 512),
    },
    "ampere_prefill": {"tile_tokens": (32, 64), "stages": (2, 3, 4)},
    "tpu_decode": {
        "pages_per_block": (4, 8, 16, 32),
        "compute_tokens": (256, 512, 1024),
        "num_buffers": (2, 3, 4),
        "rows_per_step": (4, 8),
    },
    "tpu_prefill": {"pages_per_block": (4, 8, 16), "compute_tokens": (256, 512, 1024), "tile_tokens": (64, 128, 256)},
}
_PARTS = {  # of the implementation's configuration
    "gpu_decode": "decode",
    "gpu_prefill": "prefill",
    "ampere_decode": "decode",
    "ampere_prefill": "prefill",
    "tpu_decode": "decode",
    "tpu_prefill": "chunk",
}


def list_candidates(kernel: str, formula: Any, *, dry_run: bool) -> Iterator[Any]:
    """Configurations of one kernel, the formula's first."""
    yield formula
    grid = GRIDS[kernel]
    for values in itertools.islice(itertools.product(*grid.values()), 1 if dry_run else None):
        try:
            candidate = replace(formula, **dict(zip(grid, values, strict=True)))
        except ValueError:
            continue  # sizes that do not go together
        if candidate != formula:
            yield candidate


def compute(shape: Shape, impl: str, config: Any = None) -> np.ndarray:
    """One layer's attention of a shape in float32."""
    run, arguments = make_program(shape, impl, 1, config)
    return np.asarray(run(*arguments)[0], np.float32)


def tune(shape: Shape, impl: str, effort: Effort, console: Console, *, dry_run: bool) -> dict[str, Any] | None:
    """The best configuration of the kernel that a shape runs, as an entry of the table; None if the formula's is."""
    backend = find_backend(impl)
    kernel = f"{impl.removesuffix('_interpret')}_{'decode' if shape.is_decode else 'prefill'}"
    num_heads, _, head_dim = shape.heads
    attention = AttnShape(num_heads, replace(shape.spec, layout=choose_layout(impl, head_dim)), shape.dtype)
    whole = backend.module.default_config(attention)
    expected = compute(shape, "xla")
    found: list[tuple[float, Any]] = []
    for candidate in list_candidates(kernel, getattr(whole, _PARTS[kernel]), dry_run=dry_run):
        config = replace(whole, **{_PARTS[kernel]: candidate})
        try:
            if not np.abs(compute(shape, impl, config) - expected).max() < 2 * TOLERANCE[shape.dtype]:
                console.print(f"  wrong: {candidate}")
                continue
            found.append((time_paged(shape, impl, effort, config), candidate))
        except Exception as problem:  # it does not fit, or does not compile
            console.print(f"  [dim]{type(problem).__name__} for {candidate}: {str(problem)[:120]}[/]")
            continue
        console.print(f"  {1e6 * found[-1][0]:9.1f} us  {candidate}")
    if not found:
        return None
    seconds, best = min(found, key=lambda pair: pair[0])
    formula_seconds = found[0][0]
    console.print(f"{shape.label}: {1e6 * seconds:.1f} us, {formula_seconds / seconds:.2f} times the formula's rate")
    if seconds > (1 - WORTH) * formula_seconds:
        return None
    rate = ("gb_per_s", shape.bytes_read / 1e9) if shape.is_decode else ("tflop_per_s", shape.flops / 1e12)
    key: TuneKey = tune_key(attention, tokens=shape.rows * shape.new, max_len=shape.cached + shape.new)
    return {
        "kernel": kernel,
        "version": backend.module.VERSIONS[kernel],
        "key": asdict(key),
        "config": asdict(best),
        "measured": {
            "us": round(1e6 * seconds, 2),
            rate[0]: round(rate[1] / seconds, 2),
            "jax": jax.__version__,
            "driver": str(getattr(jax.devices()[0].client, "platform_version", "unknown")).replace("\n", " "),
            "date": datetime.date.today().isoformat(),
        },
    }


def save_entry(entry: dict[str, Any], directory: Path) -> Path:
    """Puts an entry into its device's table, in place of one with the same key."""
    path = directory / jax.devices()[0].device_kind / f"{entry['kernel']}.json"
    entries = json.loads(path.read_text()) if path.exists() else []
    entries = [old for old in entries if (old["key"], old["version"]) != (entry["key"], entry["version"])]
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(json.dumps([*entries, entry], indent=1) + "\n")
    return path


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", help="gpu, ampere or tpu; default: what this device gets")
    parser.add_argument("--only", default="", help="only shapes whose label contains this text")
    parser.add_argument("--output", type=Path, default=DATA, metavar="FOLDER", help="default: the package's own table")
    parser.add_argument("--dry-run", action="store_true", help="small shapes and few candidates, interpreted on CPU")
    args = parser.parse_args()
    if args.dry_run:
        prepare_dry_run()
    console = Console()
    page_size = {"gpu": 64, "tpu": 128}.get(jax.default_backend(), 32)
    probe = next(list_shapes(page_size, dry_run=args.dry_run))
    impl, reason = resolve_impl(args.impl, AttnShape(probe.heads[0], probe.spec, probe.dtype))
    if not impl.startswith(("gpu", "ampere", "tpu")):
        raise SystemExit(f"nothing to tune: this device runs {impl!r} ({reason})")
    for shape in list_shapes(page_size, dry_run=args.dry_run):
        if args.only not in shape.label:
            continue
        console.print(f"[bold]{shape.label}[/]")
        entry = tune(shape, impl, DRY if args.dry_run else FULL, console, dry_run=args.dry_run)
        if entry is not None:
            console.print(f"kept in {save_entry(entry, args.output)}")


if __name__ == "__main__":
    main()
