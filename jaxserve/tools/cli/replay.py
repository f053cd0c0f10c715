"""`jaxserve replay`: runs a recording of steps again, and compares what they give."""

from __future__ import annotations

import argparse
import dataclasses
from collections.abc import Callable, Mapping
from contextlib import closing
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.devices import load_jax
from jaxserve.errors import RecordingError, shorten

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.engine.built import BuiltRunner
    from jaxserve.engine.model_files import ModelFiles
    from jaxserve.features.recording.replay import Difference, RecordingReader, ReplaySummary

_NO_TOKEN = {None: "none", -1: "none: logits not finite", -2: "none: all forbidden", -3: "none: mask late"}


def replay(args: argparse.Namespace) -> int:
    """`jaxserve replay`; returns 1 when a token id differs."""
    load_jax()
    from jaxserve.core.runtime.plan_codec import MaskDecoder
    from jaxserve.engine.progress import show_progress
    from jaxserve.features.recording.replay import RecordingReader, Replay

    reader = RecordingReader(Path(args.recording))
    config = _read_config(reader.header, args)
    built = _build(reader.header, config)
    masks = MaskDecoder(num_words=-(-built.shapes.model.vocab_size // 32))
    update = _make_update(reader.header, config, built, args.weights)
    run = Replay(built.runner, masks, update, _read_adapters(built, args.adapter))
    is_whole = False
    try:
        with closing(reader), show_progress("Replaying steps", unit="bytes") as report:
            for _ in run.run(reader.lines()):
                report(reader.num_bytes_read, reader.size, f"step {run.summary.num_steps}")
        is_whole = True
    finally:  # also of a part: what follows may not be there to be run
        _print_summary(reader, run.summary, args.recording, is_whole=is_whole)
    if not run.summary.num_compared and run.summary.difference is None:
        raise RecordingError("no step in it has a result, so nothing was compared", field="recording")
    return 0 if run.summary.difference is None else 1


def _read_config(header: Mapping[str, Any], args: argparse.Namespace) -> EngineConfig:
    """Returns the recorded options, changed by the flags; RecordingError if the recording is not of this host's kind.

    Programs are compiled when a step first needs them: they are the same.
    """
    from jaxserve.core.runtime.identity import describe_host

    _refuse_other(header, describe_host())
    recorded = header.get("options")
    sizes = isinstance(header.get("num_pages"), list) and isinstance(header.get("num_snapshots"), int)
    if not isinstance(recorded, Mapping) or not sizes:
        raise RecordingError("the header lacks options, num_pages or num_snapshots", field="recording")
    flags = {name: getattr(args, name) for name in ("model", "compilation_cache_dir")}
    given = {name: value for name, value in flags.items() if value is not None}
    fixed = {"compile": "used", "generation_config": "vllm", "attention_impl": _find_attention(header)}
    return EngineConfig.from_options(**{**recorded, **fixed, **given})


def _find_attention(header: Mapping[str, Any]) -> Any:
    """Returns the attention that was chosen, as a self-test at the start decides what "auto" is.

    It is "auto" where a CPU has portable attention beside products of the library: "xla" leaves that out for all.
    """
    chosen, model = header.get("attention"), header.get("model")
    has_library = isinstance(model, Mapping) and (model.get("few_rows") or model.get("packed"))
    return "auto" if chosen == "xla" and has_library else chosen


def _build(header: Mapping[str, Any], config: EngineConfig) -> BuiltRunner:
    """Returns a runner like the recorded one; RecordingError names what differs, early if it can."""
    from jaxserve.core.runtime.identity import describe_engine, describe_mesh, describe_model, digest_params
    from jaxserve.core.sharding import make_mesh
    from jaxserve.engine.build import build_runner
    from jaxserve.engine.cache_dir import make_cache_dir
    from jaxserve.engine.model_files import locate_model
    from jaxserve.engine.progress import choose_announce, show_progress

    config = make_cache_dir(config)
    files = locate_model(config.model)
    mesh = make_mesh(config.parallel.tensor_parallel_size)
    _refuse_other(header, describe_mesh(mesh) | describe_model(_shape_model(config, files)))
    announce, pages = choose_announce(True), header["num_pages"]
    sizes = {"num_pages": pages, "num_snapshots": header["num_snapshots"]}
    built = build_runner(config, files, progress=show_progress, announce=announce, **sizes)
    all_params = built.runner.all_params
    here = describe_engine(built.shapes, built.plan, built.mesh, all_params, digest_params(all_params))
    _refuse_other(header, {name: value for name, value in here.items() if name != "options"})
    return built


def _shape_model(config: EngineConfig, files: ModelFiles) -> DecoderConfig:
    """Returns the model with the choices for the device here, as a recording describes it."""
    import jax

    from jaxserve.engine.model_files import resolve_model
    from jaxserve.features.choose import make_shapes

    device = jax.local_devices()[0]
    model = resolve_model(config, files, device.device_kind)
    return make_shapes(config, model, device.platform, device.device_kind).model


def _refuse_other(header: Mapping[str, Any], here: Mapping[str, Any]) -> None:
    from jaxserve.core.runtime.identity import find_difference

    found = find_difference(header, here)
    if found is not None:
        name, recorded, value = found
        message = f"the recording is of {shorten(recorded)}, and here it is {shorten(value)}"
        raise RecordingError(message, field=name, value=recorded)


def _make_update(
    header: Mapping[str, Any], config: EngineConfig, built: BuiltRunner, checkpoints: list[str]
) -> Callable[[int], str]:
    """Returns the function that puts the n-th checkpoint in place of the weights and returns their digest."""
    from jaxserve.core.runtime.identity import describe_model, digest_params
    from jaxserve.engine.model_files import load_params, locate_model

    def update(index: int) -> str:
        if index >= len(checkpoints):
            message = (
                f"after {index} of its updates the recording goes on with new weights, which it does not hold; give "
                "their checkpoint with --weights DIR, once for each update in their order"
            )
            raise RecordingError(message, field="weights")
        load_format = "auto" if config.model.load_format == "dummy" else config.model.load_format
        model = dataclasses.replace(config.model, model=checkpoints[index], load_format=load_format)
        updated = dataclasses.replace(config, model=model)
        files = locate_model(model)
        _refuse_other(header, describe_model(_shape_model(updated, files)))
        built.runner.params = None  # freed first: there may be no room for two
        built.runner.params = load_params(updated, files, built.shapes, built.mesh)
        return digest_params(built.runner.all_params)

    return update


def _read_adapters(built: BuiltRunner, paths: list[str]) -> Callable[[int, str], None]:
    """Returns the function that has the adapter with a digest ready for plans, by the number of its load."""
    from jaxserve.features.choose import find_adapters
    from jaxserve.features.lora.store import digest_copy

    store, copies = find_adapters(built.shapes), dict[str, Any]()
    if store is None and paths:
        raise RecordingError("the recorded engine had no adapters; leave it out", field="adapter", value=paths[0])
    for path in paths if store is not None else ():
        copy = store.read(path)
        copies[digest_copy(copy)] = copy

    def load(generation: int, digest: str) -> None:
        if store is None or digest not in copies:
            message = (
                f"load {generation} is of an adapter with the digest {shorten(digest)}, which the recording does not "
                f"hold; give its directory with --adapter PATH, once for each (here: {', '.join(copies) or 'none'})"
            )
            raise RecordingError(message, field="adapter", value=digest)
        store.keep(generation, copies[digest])

    return load


def _print_summary(reader: RecordingReader, summary: ReplaySummary, path: str, *, is_whole: bool) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(title=f"Replay of {escape(path)}", show_header=False)
    table.add_column()
    table.add_column(justify="right")
    counts = {
        "steps": summary.num_steps,
        "steps compared": summary.num_compared,
        "token ids compared": summary.num_ids,
        "steps that failed when recorded": summary.num_failed,
        "resets": summary.num_resets,
        "new weights": summary.num_updates,
        "loads of adapters": summary.num_loads,
    }
    for name, count in counts.items():
        table.add_row(name, f"{count:,}")
    console = Console(highlight=False)
    console.print(table)
    if reader.is_cut:
        console.print("The last line of the recording is cut; it was left out.")
    if summary.difference is not None:
        console.print(f"[bold red]Different[/]: {escape(_describe(summary.difference))}")
    elif summary.num_compared:
        console.print(f"[bold green]Equal[/]{'' if is_whole else ' so far'}: every token id that was compared.")


def _describe(found: Difference) -> str:
    if found.row is None:
        return f"step {found.step_id} failed here, and not when it was recorded: {found.error}"
    old, new = (_NO_TOKEN.get(token_id, token_id) for token_id in (found.recorded, found.replayed))
    place = f"step {found.step_id}, row {found.row}, ticket {found.ticket}, id {found.index} of its run"
    others = f"; {found.num_rows} rows of this step differ" if found.num_rows > 1 else ""
    return f"{place}: {old} in the recording, {new} here{others}. Later steps were not run."
