"""`jaxserve build`: compiles an engine's programs now, and elsewhere, so that `serve --bundle` compiles none."""

from __future__ import annotations

import argparse
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.device_kinds import KNOWN_TARGETS, find_target
from jaxserve.tools.cli.flags import add_command_options, read_engine_options

if TYPE_CHECKING:
    from jaxserve.features.bundle.manifest import Manifest

_MIB = 2**20


def add_build_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `build`."""
    command.add_argument(
        "--device",
        metavar="KIND",
        help=f"it need not be here: {KNOWN_TARGETS}, a slice like v5e-16, or cpu (default: this machine's devices)",
    )
    command.add_argument(
        "--allow-untuned",
        action="store_true",
        help="for a GPU that is not here: estimate products' tiles if none were measured on its kind",
    )
    command.add_argument("-o", "--output", required=True, metavar="DIR", help="the new directory")
    add_command_options(command, (EngineConfig,))


def build(args: argparse.Namespace) -> None:
    """`jaxserve build`."""
    from jaxserve.engine.bundle import build_bundle
    from jaxserve.engine.model_files import locate_model
    from jaxserve.engine.progress import show_progress

    config, start = EngineConfig.from_options(**read_engine_options(args)), time.monotonic()
    device = None if args.device is None else find_target(args.device)
    files = locate_model(config.model, need_weights=False)
    options = {"allow_untuned": args.allow_untuned, "progress": show_progress}
    manifest = build_bundle(config, files, Path(args.output), device, **options)
    _print_summary(manifest, args, time.monotonic() - start)


def _print_summary(manifest: Manifest, args: argparse.Namespace, seconds: float) -> None:
    from rich.console import Console
    from rich.table import Table

    facts: dict[str, Any] = dict(manifest.facts)
    size = sum(file.size for file in manifest.programs.values())
    table = Table(title=f"Bundle {args.output}", show_header=False)
    table.add_row("programs", f"{len(manifest.programs)}, {size / _MIB:,.1f} MiB, in {seconds:.1f} s")
    table.add_row("devices", f"{facts['mesh']['tensor']} x {facts['device']}")
    table.add_row("attention", facts["attention"])
    table.add_row("KV pages", ", ".join(f"{pages:,}" for pages in manifest.num_pages))
    versions = ("jaxserve", "jax", "jaxlib")
    table.add_row(
        "for", ", ".join([*(f"{name} {facts[name]}" for name in versions), *filter(None, [facts["compiler"]])])
    )
    console = Console(highlight=False)
    console.print(table)
    console.print("Start with the same options and --bundle; a bundle is code, so keep it where only you can write.")
