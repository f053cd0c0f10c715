"""`jaxserve bench sweep`: decode steps by batch size and context."""

from __future__ import annotations

import argparse
import json
import tempfile
from collections.abc import Callable, Sequence
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.tools.bench.batch_sizes import BATCHES, CONTEXTS, STEPS, End, Point, SweepSizes, find_end, find_misfit
from jaxserve.tools.bench.environment import describe_environment
from jaxserve.tools.bench.plots import Line, Mark, PageTable, Panel, draw_panels
from jaxserve.tools.bench.report import add_report_flags, check_target, make_report, read_report_paths
from jaxserve.tools.bench.setup import Bench, add_iteration_flags, check_counts, fill_dry_run
from jaxserve.tools.cli.bench_common import (
    DRY_ENGINE,
    add_benchmark,
    add_defaults,
    add_plot_flags,
    check_plot_flags,
    finish,
    make_table,
    print_result,
    save_pictures,
)
from jaxserve.tools.cli.flags import add_command_options, read_engine_options

if TYPE_CHECKING:
    from matplotlib.figure import Figure

_DRY = {"batch_sizes": [1, 2, 4], "contexts": [32, 48], "steps": 4, "num_iters": 2}
_HEADER = ("batch", "context", "ms/step", "least, most", "limit ms", "% of limit", "tokens/s", "per user", "KV")


def add_sweep(group: Any) -> None:
    """Adds `bench sweep`."""
    text = "time decode steps by batch size and context: tokens/s in all and per user, memory, and where it ends"
    command = add_benchmark(group, "sweep", _run, text)
    sizes = command.add_argument_group("sizes")
    for flag, values, help_text in (
        ("--batch-sizes", BATCHES, "rows"),
        ("--contexts", CONTEXTS, "tokens of a row"),
    ):
        shown = " ".join(map(str, values))
        sizes.add_argument(
            flag, type=int, nargs="+", default=list(values), metavar="INT", help=f"{help_text} (default: {shown})"
        )
    sizes.add_argument("--steps", type=int, default=STEPS, metavar="INT", help="of a run (default: %(default)s)")
    sizes.add_argument("--layers", type=int, metavar="INT", help="of a preset, fewer than it has; random weights")
    text = "also time prompt steps, and write the figures that jaxserve simulate takes"
    sizes.add_argument("--calibrate", metavar="FILE", help=text)
    add_iteration_flags(command, num_iters=3)
    report = add_report_flags(command)
    add_plot_flags(report)
    add_command_options(command, (EngineConfig,))


def _run(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    from jaxserve.engine.progress import show_progress
    from jaxserve.tools.bench.batch_sizes import measure_point
    from jaxserve.tools.bench.calibrate import calibrate

    args = fill_dry_run(args, command, _DRY)
    check_counts(args, num_iters=1)
    paths = read_report_paths(args, "sweep")
    check_plot_flags(args)
    calibration = None if args.calibrate is None else check_target(args.calibrate, "calibrate")
    sizes = SweepSizes(tuple(sorted(set(args.batch_sizes))), tuple(args.contexts), args.steps, args.num_iters)
    bench = _open(args, sizes)
    points: list[Point] = []
    misfits: dict[int, dict[int, str]] = {context: {} for context in sizes.contexts}
    failures: list[str] = []
    total = len(sizes.contexts) * len(sizes.batches)
    report = None
    with show_progress("Measuring", unit="points") as progress:
        for done, (context, batch) in enumerate((c, b) for c in sizes.contexts for b in sizes.batches):
            progress(done, total, f"{batch} rows of {context} tokens")
            if (reason := find_misfit(bench, sizes, batch, context)) is not None:
                misfits[context][batch] = reason
            else:
                try:
                    points.append(measure_point(bench, sizes, batch, context))
                except RuntimeError as error:
                    failures.append(str(error))
            if points:  # after every point: a run that is cut off keeps its points
                figures = _summarize(bench, points, misfits)
                report = make_report(args, "sweep", describe_environment(), figures, failures=failures)
                report.save(paths)
        progress(total, total)
    if report is None:
        reasons = [*failures, *(text for found in misfits.values() for text in found.values())]
        raise ConfigError(f"nothing could be measured: {reasons[0]}", field="batch_sizes", value=args.batch_sizes)
    _show(args, bench, points, misfits)
    if calibration is not None:
        found = calibrate(bench, points, calibration, num_steps=args.steps)
        print(f"{found.describe()} It is in {calibration}.")
    return finish(report, paths)


def _open(args: argparse.Namespace, sizes: SweepSizes) -> Bench:
    """Builds the engine, of fewer layers if the flags say so, with a program for each batch size."""
    given = read_engine_options(args)
    # Each point runs its programs before its clock, so none needs to be compiled that no point runs.
    defaults = {"skip_tokenizer_init": True, "compile": "used"} | (DRY_ENGINE if args.dry_run else {})
    if args.layers is not None:
        defaults["load_format"] = "dummy"
    fitting = sizes.engine_options(defaults | given, fills_steps=args.calibrate is not None)
    options = add_defaults(args, given, fitting | defaults)
    if "precompile_bs_paddings" not in given and options["max_num_seqs"] == max(sizes.batches):
        options["precompile_bs_paddings"] = _choose_paddings(sizes.batches)
    if args.layers is None:
        return Bench.open(options)
    from jaxserve.presets import load_preset

    name = str(given.get("model", "demo"))
    config = load_preset(name)
    if config is None:
        raise ConfigError(f"is for presets; there is none called {name!r}", field="layers", value=args.layers)
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "config.json").write_text(json.dumps(config | {"num_hidden_layers": args.layers}))
        return Bench.open(options | {"model": folder}, f"{name} with {args.layers} layers")


def _choose_paddings(batches: Sequence[int]) -> tuple[int, ...]:
    """Returns the padded sizes of decode steps: the batch sizes, but two rows for one where XLA runs that faster."""
    import jax

    least = 2 if jax.default_backend() == "cpu" else 1
    return tuple(sorted({max(least, batch) for batch in batches}))


def _summarize(bench: Bench, points: Sequence[Point], misfits: dict[int, dict[int, str]]) -> dict[str, Any]:
    return {
        **bench.describe(),
        "points": [point.asdict() for point in points],
        "not_measured": [text for found in misfits.values() for text in found.values()],
        "ends": [vars(end) for end in _list_ends(points, misfits)],
    }


def _list_ends(points: Sequence[Point], misfits: dict[int, dict[int, str]]) -> list[End]:
    by_context = {at: [point for point in points if point.wanted_context == at] for at in misfits}
    return [find_end(found, misfits[at], at) for at, found in by_context.items() if found]


def _show(args: argparse.Namespace, bench: Bench, points: Sequence[Point], misfits: dict[int, dict[int, str]]) -> None:
    from jaxserve.core.runtime.memory import format_bytes

    rows = [_make_row(point) for point in points]
    ends = _list_ends(points, misfits)
    notes = [f"Weights: {format_bytes(points[0].weight_bytes)}."]
    notes += [f"Context {end.context}: {end.text}." for end in ends]
    notes += [f"Not measured: {text}." for found in misfits.values() for text in found.values()]
    shown = [_HEADER, *rows]
    at = _HEADER.index("limit ms")  # only the page has room for it
    header, *lines = [(*row[:at], *row[at + 1 :]) for row in shown]
    print_result(make_table(f"Batch sizes: {bench.title}", header, lines), bench, notes)
    save_pictures(
        args,
        f"Batch sizes: {bench.title}",
        [PageTable("Decode steps by batch size", _HEADER, rows)],
        partial(_draw, bench, points, ends),
        notes=[*notes, f"Limits measured in this run: {bench.limits.describe()}."],
        environment=describe_environment(),
    )


def _make_row(point: Point) -> tuple[str, ...]:
    from jaxserve.core.runtime.memory import format_bytes

    shown = point.seconds
    return (
        str(point.batch),
        str(point.wanted_context),
        f"{1e3 * shown.median:.2f}",
        f"{1e3 * min(shown.values):.2f}, {1e3 * max(shown.values):.2f}" if len(shown.values) > 1 else "one run",
        f"{1e3 * point.limit:.2f}",
        f"{100 * point.limit / shown.median:.0f}",
        f"{point.tokens_per_second:,.0f}",
        f"{1 / shown.median:,.1f}",
        format_bytes(point.kv_bytes),
    )


def _draw(bench: Bench, points: Sequence[Point], ends: Sequence[End]) -> list[Figure]:
    """Returns plots by batch size: tokens/s in all and per user; then the share of the limit, and the memory."""
    contexts = list(dict.fromkeys(point.wanted_context for point in points))
    ended = next((end for end in ends if end.reason != "none"), None)
    mark = None if ended is None else Mark(ended.batch, f"{ended.context} tokens: {ended.reason} ends it")

    def make_panel(y_label: str, value: Callable[[Point], float], noted: Mark | None = None) -> Panel:
        lines = []
        for context in contexts:
            found = [point for point in points if point.wanted_context == context]
            lines.append(Line(f"context of {context}", [p.batch for p in found], [value(p) for p in found]))
        return Panel("batch size", y_label, lines, log_x=True, mark=noted)

    speeds = (
        make_panel("tokens/s in all", lambda point: point.tokens_per_second, mark),
        make_panel("tokens/s per user", lambda point: 1 / point.seconds.median),
    )
    costs = (
        make_panel("% of the device's limit", lambda point: 100 * point.limit / point.seconds.median),
        make_panel("keys and values, MiB", lambda point: point.kv_bytes / 2**20),
    )
    return [
        draw_panels(f"Decoding by batch size\n{bench.title}", speeds),
        draw_panels(f"Share of the limit, and memory\n{bench.title}", costs),
    ]
