"""`jaxserve convert`: writes a checkpoint, quantized or from GGUF, for jaxserve, vLLM and transformers."""

from __future__ import annotations

import argparse
from pathlib import Path

from jaxserve.config import EngineConfig
from jaxserve.option_flags import add_flag
from jaxserve.options import list_options
from jaxserve.tools.cli.flags import read_engine_options

_OPTIONS = ("model", "revision", "dtype", "quantization", "quantization_config", "allow_nonfinite")


def add_convert_flags(command: argparse.ArgumentParser) -> None:
    """Adds the flags of `convert`."""
    command.add_argument("-o", "--output", required=True, metavar="DIR", help="the new directory")
    command.set_defaults(config=None)  # the few options that matter have no file
    for _, option in list_options(EngineConfig):
        if option.name in _OPTIONS:
            add_flag(command, option)


def convert(args: argparse.Namespace) -> None:
    """`jaxserve convert`."""
    from jaxserve.core.runtime.memory import format_bytes
    from jaxserve.engine.model_files import locate_model
    from jaxserve.engine.progress import show_progress
    from jaxserve.tools.convert import convert_checkpoint

    options = EngineConfig.from_options(**read_engine_options(args)).model
    written = convert_checkpoint(options, locate_model(options), Path(args.output), progress=show_progress)
    before, after = format_bytes(written.num_bytes_read), format_bytes(written.num_bytes)
    done = f"{written.num_matrices:,} matrices quantized; " if written.num_matrices else ""
    print(f"{args.output}: {done}weights of {before} became {after}")
