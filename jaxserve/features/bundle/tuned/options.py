"""The compiler's options for a GPU that is not here: the tiles and kernels of products that were measured on one, or
XLA's estimates.

`data/<device kind>.txtpb` is made on the device (`docs/bundles.md` says how); a new file needs nothing else.
"""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

from jaxserve.features.bundle.tuned.results import read_results, write_results
from pallas_kernels.targets import Target

DATA = Path(__file__).parent / "data"
# Without this XLA takes the first tiles that compile, where it cannot measure: 8 x 16, and nothing in flight.
_ESTIMATE = {"xla_gpu_experimental_cost_model_gemm_tiling_default": True}


def find_results(device_kind: str, directory: Path = DATA) -> Path | None:
    """Returns the file of what was measured on a kind of device, by JAX's name for it; None if there is none."""
    path = directory / f"{device_kind}.txtpb"
    return path if path.is_file() else None


@contextmanager
def tuned_options(target: Target, directory: Path = DATA) -> Iterator[dict[str, Any]]:
    """Yields options that every program for a target must be compiled with, inside the context; none for a TPU.

    What was measured counts for products of the same shapes, and XLA estimates the others. XLA loads results once in a
    process, when the first program is compiled: a second context adds none.

    Raises:
        ValueError: the target's file cannot be read, or has results of a device of another kind.
    """
    path = find_results(target.device_kind, directory)
    if target.platform != "gpu" or path is None:
        yield dict(_ESTIMATE) if target.platform == "gpu" else {}
        return
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder, path.name)
        file.write_text(adapt_results(path.read_text(), target))
        # XLA's newer format has the computations' hashes in place of their texts.
        loading = {"xla_gpu_load_autotune_results_from": str(file), "xla_gpu_use_new_autotune_cache_format": False}
        yield _ESTIMATE | loading


def adapt_results(text: str, target: Target) -> str:
    """Returns the text of a file for a target's compiler.

    The figures of a device differ a little from those that the target is described by: in clocks, memory and the
    version of cuDNN. XLA would ignore such results.

    Raises:
        ValueError: it is no such file, or of a device with another number of cores or compute capability.
    """
    results, device = read_results(text), target.tuning_key
    assert device is not None
    for each in results:
        if each.device.split(", ")[:2] != device.split(", ")[:2]:
            raise ValueError(f"results for {target.name} are of another device: {each.device}, not {device}")
    return write_results(replace(each, device=device) for each in results)
