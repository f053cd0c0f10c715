"""`jaxserve bench serve`: its flags, and what it prints."""

from __future__ import annotations

import argparse
import math
import os
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import read_client_key
from jaxserve.errors import ConfigError, JaxServeError
from jaxserve.gguf_file import is_gguf
from jaxserve.option_flags import read_object
from jaxserve.presets import DEMO_MODEL, SMOL_MODEL, find_packaged
from jaxserve.tools.bench.datasets import DatasetOptions, add_dataset_flags, read_dataset_options
from jaxserve.tools.bench.environment import describe_environment
from jaxserve.tools.bench.load.metrics import METRICS, Slo, list_warnings
from jaxserve.tools.bench.load.target import ENDPOINTS, Target
from jaxserve.tools.bench.report import add_report_flags, make_report, read_report_paths
from jaxserve.tools.bench.setup import check_counts, fill_dry_run
from jaxserve.tools.cli.bench_common import add_benchmark, add_plot_flags, check_plot_flags, finish, save_pictures
from jaxserve.tools.cli.packages import LOAD_PACKAGES, require_packages

if TYPE_CHECKING:
    from jaxserve.tokenizers import Tokenizer
    from jaxserve.tools.bench.load.servers import ServedModel
    from jaxserve.tools.bench.serve import PointFigures, ServeOptions

DRY_RUN = {"num_prompts": 6, "random_input_len": 24, "random_output_len": 8}
_TEXTS = ("demo", "custom", "sharegpt")
_SECRET = ("api_key",)  # flags whose values no report shows


def add_serve(group: Any) -> None:
    """Adds `bench serve`; names and defaults of flags are vLLM's where it has them."""
    text = "send requests to a running server as users would, and measure what they wait for"
    command = add_benchmark(group, "serve", _run_serve, text, "")
    _add_server_flags(command.add_argument_group("server"))
    add_dataset_flags(command)
    _add_load_flags(command.add_argument_group("load"))
    report = add_report_flags(command)
    add_plot_flags(report)
    text = "ttft:MS, tpot:MS, e2el:MS: what a good request keeps; counts goodput"
    report.add_argument("--goodput", nargs="+", default=[], metavar="NAME:MS", help=text)
    text = "latencies to print, of ttft,tpot,itl,e2el (default: all; the report has all)"
    report.add_argument("--percentile-metrics", default=",".join(METRICS), metavar="NAME,...", help=text)
    text = "percentiles of latencies (default: %(default)s)"
    report.add_argument("--metric-percentiles", default="50,90,99", metavar="P,...", help=text)


def _add_server_flags(group: Any) -> None:
    group.add_argument("--base-url", metavar="URL", help="the server (default: http://127.0.0.1:8000)")
    group.add_argument("--host", metavar="HOST", help="in place of --base-url (default: 127.0.0.1)")
    group.add_argument("--port", type=int, metavar="INT", help="in place of --base-url (default: 8000)")
    text = "openai: completions, prompts as token ids; openai-chat: one user message each (default: %(default)s)"
    group.add_argument("--backend", choices=tuple(ENDPOINTS), default="openai", help=text)
    group.add_argument("--endpoint", metavar="PATH", help="default: the backend's, under /v1")
    group.add_argument("--model", metavar="NAME", help="the model to ask for (default: the server's first)")
    text = "directory or file with the model's tokenizer, or demo (default: the model, where it is a directory here)"
    group.add_argument("--tokenizer", metavar="PATH", help=text)
    text = "random token ids are below it (default: the tokenizer's)"
    group.add_argument("--vocab-size", type=int, metavar="INT", help=text)
    group.add_argument("--api-key", metavar="KEY", help="the server's key (default: OPENAI_API_KEY)")
    group.add_argument("--extra-body", type=read_object, metavar="JSON", help="further keys of every request")
    group.add_argument("--request-timeout", type=float, default=600.0, metavar="S", help="default: %(default)g")


def _add_load_flags(group: Any) -> None:
    text = "requests per second on average, or inf: all at once; several: a sweep (default: inf)"
    group.add_argument("--request-rate", type=float, nargs="+", metavar="RATE", help=text)
    text = "shape of the gamma distribution of gaps: 1 is Poisson, less is burstier (default: 1)"
    group.add_argument("--burstiness", type=float, metavar="FLOAT", help=text)
    group.add_argument(
        "--use-trace-arrivals", action="store_true", help="send requests when the dataset's trace did, not at a rate"
    )
    text = "the trace's arrivals this many times as fast; several: a sweep (default: 1)"
    group.add_argument("--rate-scale", type=float, nargs="+", metavar="FLOAT", help=text)
    text = "requests under way at most; several: a sweep (default: no limit at a rate, else the rows of the server)"
    group.add_argument("--max-concurrency", type=int, nargs="+", metavar="INT", help=text)
    text = "runs of each load; the report has median, least and most (default: %(default)s)"
    group.add_argument("--num-iters", type=int, default=1, metavar="INT", help=text)
    text = "requests before the first run, outside the clock (default: %(default)s)"
    group.add_argument("--num-warmups", type=int, default=4, metavar="INT", help=text)
    text = "of the load generator (default: one for four cores, at most 8)"
    group.add_argument("--num-processes", type=int, metavar="INT", help=text)
    text = "tiny sizes in place of the defaults: seconds with the demo model, to try the command"
    group.add_argument("--dry-run", action="store_true", help=text)


def _run_serve(command: argparse.ArgumentParser, args: argparse.Namespace) -> int:
    """Runs the command; returns 1 where no request at all succeeded."""
    require_packages("bench serve", LOAD_PACKAGES)
    from jaxserve.tools.bench.load.generator import LoadGenerator
    from jaxserve.tools.bench.serve import ServeBenchmark
    from jaxserve.tools.bench.serve_report import list_clients, list_failures, show_saturation

    is_random = args.dataset_name == "random"
    sizes = {name: size for name, size in DRY_RUN.items() if is_random or not name.startswith("random")}
    args = fill_dry_run(args, command, sizes)
    paths, metrics = read_report_paths(args, "serve"), _read_metrics(args)
    check_plot_flags(args)
    options = read_serve_options(args)
    with LoadGenerator(options.num_processes) as generator:
        points = ServeBenchmark(options, generator).measure()
    _show(args, options, points, metrics)
    figures = {
        "model": options.model.name,
        "max_model_len": options.model.max_model_len,
        "goodput_slo_ms": dict(options.slo.limits),
        "warnings": list_warnings(list_clients(points)),
        "saturation": show_saturation(points),
        "points": [found.asdict() for found in points],
    }
    if args.request_rate is not None:
        args.request_rate = ["inf" if math.isinf(rate) else rate for rate in args.request_rate]  # JSON has no infinity
    environment = describe_environment(has_devices=False)
    report = make_report(args, "serve", environment, figures, failures=list_failures(points), secret=_SECRET)
    finish(report, paths)
    return 0 if any(found.total("completed") for found in points) else 1


def read_serve_options(args: argparse.Namespace) -> ServeOptions:
    """Returns what the flags say of the server and the load; asks the server for its models.

    Raises:
        ConfigError: flags are wrong or contradict each other, or the server is not there.
    """
    from jaxserve.tools.bench.load.servers import find_model, find_rows
    from jaxserve.tools.bench.serve import ServeOptions, make_points

    rates, scales = _read_arrivals(args)
    counts = {"num_iters": 1, "num_warmups": 0} | ({"num_processes": 1} if args.num_processes is not None else {})
    check_counts(args, **counts)
    if args.max_concurrency is not None and min(args.max_concurrency) < 1:
        raise ConfigError("must be at least 1", field="max_concurrency", value=min(args.max_concurrency))
    if not args.request_timeout > 0:
        raise ConfigError("must be above 0", field="request_timeout", value=args.request_timeout)
    base_url, dataset, slo = _read_url(args), read_dataset_options(args), Slo.parse(args.goodput)
    key = args.api_key or read_client_key()
    headers = {"authorization": f"Bearer {key}"} if key else {}
    target = Target.parse(base_url, args.endpoint or ENDPOINTS[args.backend], headers)
    percentiles = _read_percentiles(args)
    model = find_model(base_url, target, args.model)
    args.model = model.name
    tokenizer = _load_tokenizer(args, model)
    wants_rows = scales is None and args.max_concurrency is None and any(map(math.isinf, rates))
    rows = find_rows(target) if wants_rows else None
    return ServeOptions(
        target,
        model,
        dataset,
        is_chat=args.backend == "openai-chat",
        points=make_points(rates, scales, args.max_concurrency, rows),
        slo=slo,
        vocab_size=_find_vocab_size(args, dataset, tokenizer),
        tokenizer=tokenizer,
        burstiness=1.0 if args.burstiness is None else args.burstiness,
        percentiles=percentiles,
        extra_body=args.extra_body or {},
        num_iters=args.num_iters,
        num_warmups=args.num_warmups,
        num_processes=args.num_processes or min(8, max(1, (os.cpu_count() or 1) // 4)),
        timeout=args.request_timeout,
    )


def _read_arrivals(args: argparse.Namespace) -> tuple[list[float], list[float] | None]:
    """Returns the rates, and the scales of the trace's arrivals if these are wanted."""
    if args.use_trace_arrivals:
        for field in ("request_rate", "burstiness"):
            if getattr(args, field) is not None:
                message = "requests come when the trace's did; use --rate-scale to change that"
                raise ConfigError(message, field=field, value=getattr(args, field))
    elif args.rate_scale is not None:
        raise ConfigError("is for --use-trace-arrivals", field="rate_scale", value=args.rate_scale)
    rates, scales = args.request_rate or [math.inf], args.rate_scale or [1.0]
    for field, values in (("request_rate", rates), ("rate_scale", scales)):
        if not all(value > 0 for value in values):
            raise ConfigError("must be above 0", field=field, value=min(values))
    if args.burstiness is not None and (not args.burstiness > 0 or any(map(math.isinf, rates))):
        message = "must be above 0, and needs a finite --request-rate"
        raise ConfigError(message, field="burstiness", value=args.burstiness)
    return rates, scales if args.use_trace_arrivals else None


def _read_url(args: argparse.Namespace) -> str:
    if args.base_url is not None:
        for field in ("host", "port"):
            if getattr(args, field) is not None:
                raise ConfigError("--base-url says it already", field=field, value=getattr(args, field))
        url: str = args.base_url
        return url if "//" in url else f"http://{url}"
    host = args.host or "127.0.0.1"
    return f"http://{f'[{host}]' if ':' in host else host}:{args.port or 8000}"


def _read_metrics(args: argparse.Namespace) -> list[str]:
    names = [name.strip() for name in args.percentile_metrics.split(",") if name.strip()]
    if not names or any(name not in METRICS for name in names):
        message = f"must be some of {','.join(METRICS)}, got {args.percentile_metrics!r}"
        raise ConfigError(message, field="percentile_metrics", value=args.percentile_metrics)
    return names


def _read_percentiles(args: argparse.Namespace) -> tuple[float, ...]:
    try:
        found = tuple(float(word) for word in args.metric_percentiles.split(","))
    except ValueError:
        found = ()
    if not found or not all(0 <= each <= 100 for each in found):
        message = f"must be numbers from 0 to 100 like 50,90,99, got {args.metric_percentiles!r}"
        raise ConfigError(message, field="metric_percentiles", value=args.metric_percentiles)
    return found


def _load_tokenizer(args: argparse.Namespace, model: ServedModel) -> Tokenizer | None:
    """Returns the tokenizer that was asked for, else the model's if it is here."""
    from jaxserve.tokenizers import load_tokenizer

    name = args.tokenizer or next(
        (
            each
            for each in (model.root, model.name)
            if each in (DEMO_MODEL, SMOL_MODEL) or Path(each).is_dir() or is_gguf(each)
        ),
        None,
    )
    if name is None:
        return None
    try:
        return load_tokenizer(find_packaged(name) or name)
    except JaxServeError:
        if args.tokenizer is not None:
            raise
        return None


def _find_vocab_size(args: argparse.Namespace, dataset: DatasetOptions, tokenizer: Tokenizer | None) -> int:
    if dataset.name in _TEXTS:
        if args.vocab_size is not None:
            raise ConfigError(f"{dataset.name} has no random ids", field="vocab_size", value=args.vocab_size)
        return 2
    if args.vocab_size is not None:
        check_counts(args, vocab_size=2)
        return int(args.vocab_size)
    if tokenizer is None:
        message = "random prompts need the model's tokenizer, or --vocab-size; the server does not say either"
        raise ConfigError(message, field="tokenizer")
    return tokenizer.vocab_size


def _show(args: argparse.Namespace, options: ServeOptions, points: list[PointFigures], metrics: list[str]) -> None:
    from rich.console import Console

    from jaxserve.tools.bench import serve_report

    console = Console(highlight=False)
    percentiles = options.percentiles
    if len(points) == 1:
        console.print(serve_report.make_table(points[0], metrics, percentiles))
    else:
        for table in serve_report.make_sweep_tables(points, metrics, percentiles):
            console.print(table)
    counts = serve_report.describe_server(points)
    refusals = serve_report.describe_refusals(points)
    notes = [serve_report.describe_client(points), *(each for each in (counts, refusals) if each is not None)]
    warnings = list_warnings(serve_report.list_clients(points))
    for note in (*notes, *(f"Warning: {warning}." for warning in warnings)):
        console.print(note, markup=False, soft_wrap=True)
    save_pictures(
        args,
        f"{options.model.name} under load",
        serve_report.list_tables(points, metrics, percentiles),
        lambda: [serve_report.draw_latencies(points, percentiles), serve_report.draw_throughput(points)],
        notes=notes + warnings,
        environment=describe_environment(has_devices=False),
        secret=_SECRET,
    )
