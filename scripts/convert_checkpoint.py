"""Converts a Hugging Face checkpoint to an Orbax one, which restores onto any mesh without fusing or transposing.

The destination holds config.json, the parameters (folder `params`) and the tokenizer's files, and is used like the
source: `LLM("DESTINATION")`. Give --tensor-parallel-size if the model does not fit on one device.
"""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from rich.console import Console

from jaxserve.errors import ConfigError, JaxServeError

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig


def main(argv: Sequence[str] | None = None) -> int:
    """Converts; returns 0 when the destination is complete, else 1 with the reason on standard error."""
    arguments = _parse_arguments(argv)
    console = Console(stderr=True)
    try:
        convert(
            arguments.source, arguments.destination, arguments.revision, arguments.dtype, arguments.tensor_parallel_size
        )
    except JaxServeError as error:
        console.print(f"error: {error}", markup=False, highlight=False, soft_wrap=True)
        return 1
    console.print(f"Written to {arguments.destination}", markup=False, highlight=False, soft_wrap=True)
    return 0


def convert(source: str, destination: Path, revision: str | None, dtype: str, tensor_parallel_size: int) -> None:
    """Reads `source` (a directory or hub id) over a mesh of that many devices and writes `destination`.

    Raises ConfigError or WeightsError naming what cannot be read, converted or written.
    """
    from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
    from jaxserve.core.weights import load_safetensors, read_hf_config, resolve_checkpoint, save_params
    from jaxserve.core.weights.checkpoint import copy_companions
    from jaxserve.engine.progress import show_progress
    from jaxserve.families.registry import ignored_weights, param_specs, weight_sources

    path = resolve_checkpoint(source, revision)
    hf_config = read_hf_config(path)
    if dtype != "auto":
        hf_config = {**hf_config, "dtype": dtype}
    mesh = make_mesh(tensor_parallel_size)
    model = parse_model(hf_config, tensor_parallel_size)
    with show_progress("Loading weights", unit="bytes") as report:
        params = load_safetensors(
            path,
            param_specs(model),
            weight_sources(model),
            ignored_weights(model),
            mesh=mesh,
            rules=DEFAULT_RULES,
            progress=report,
        )
    save_params(destination, params, hf_config)
    copy_companions(path, destination)


def parse_model(hf_config: dict[str, Any], tensor_parallel_size: int) -> DecoderConfig:
    """Returns the model on a mesh of this size; ConfigError when KV heads would have to be stored more than once."""
    from jaxserve.core.models.decoder import fit_devices
    from jaxserve.families.registry import parse_config

    model = parse_config(hf_config)
    expanded = fit_devices(model, tensor_parallel_size)
    pairs = zip(model.attentions, expanded.attentions, strict=True)
    heads = {one.num_kv_heads for one, wide in pairs if one.latent is None and one != wide}
    if heads:
        message = f"{tensor_parallel_size} devices would store copies of {min(heads)} KV heads; use fewer"
        raise ConfigError(message, field="tensor_parallel_size", value=tensor_parallel_size)
    return expanded


def _parse_arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("source", help="directory with config.json and *.safetensors, or Hugging Face hub id")
    parser.add_argument("destination", type=Path, help="directory to write; created if it does not exist")
    parser.add_argument("--revision", help="branch, tag or commit of a hub id")
    parser.add_argument(
        "--dtype",
        choices=("auto", "float32", "bfloat16", "float16"),
        default="auto",
        help="dtype to convert to; auto: the one config.json names (%(default)s)",
    )
    parser.add_argument("--tensor-parallel-size", type=int, default=1, help="devices to load over (%(default)s)")
    return parser.parse_args(argv)


if __name__ == "__main__":
    sys.exit(main())
