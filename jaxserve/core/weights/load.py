"""Streams a safetensors checkpoint into sharded device arrays, one parameter at a time."""

from __future__ import annotations

import logging
import re
from collections import Counter
from collections.abc import Callable, Collection, Iterator, Mapping
from functools import partial
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.models.base import HostArray, ParamSpec, WeightSource
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights.copies import has_other_copy
from jaxserve.core.weights.finite import has_nonfinite, require_finite
from jaxserve.core.weights.paths import flatten_specs, unflatten
from jaxserve.core.weights.pieces import HostPiece, Piece, count_pieces
from jaxserve.core.weights.place import CastParameter, cast_host, place_host
from jaxserve.core.weights.reader import LOADABLE_DTYPES, Checkpoint, list_names, open_checkpoint
from jaxserve.errors import WeightsError

_log = logging.getLogger(__name__)

Progress = Callable[[int, int], None]  # (bytes done, total bytes), in the dtype of the parameters


def load_safetensors(
    path: Path,
    specs: Any,
    sources: Mapping[str, WeightSource],
    ignored: tuple[str, ...] = (),
    *,
    mesh: Mesh,
    rules: AxisRules,
    progress: Progress | None = None,
    allow_nonfinite: bool = False,
) -> Any:
    """Returns the parameters of the checkpoint at `path` as the canonical tree of `specs`, sharded over `mesh`.

    `sources` maps each dotted path to the tensors that make the parameter; tensors whose whole name matches a pattern
    in `ignored` are not read. F32, BF16 and F16 tensors are cast to the dtype of the spec.

    Host memory: files are mapped and read through the page cache, of several nodes only what their own shards need. In
    addition there are buffers for one parameter at a time, at most twice its bytes; JAX's transfer may stage one more
    copy. On CPU the parameters themselves are in host memory too.

    Raises WeightsError, before anything is on a device, when a file is missing or corrupt, when the checkpoint does not
    hold exactly the expected tensors in the expected shapes and loadable dtypes, when an ignored bias of a module that
    is read is not zero, and when the copy of a tensor differs from it; while loading, when the dtype of the spec cannot
    represent a value and, unless `allow_nonfinite`, for NaN and infinity.
    """
    options = {"progress": progress, "allow_nonfinite": allow_nonfinite}
    whole = stream_pieces(path, specs, sources, ignored, mesh=mesh, rules=rules, whole=True, **options)
    return unflatten(specs, {piece.name: piece.array for piece in whole})


def stream_pieces(
    path: Path,
    specs: Any,
    sources: Mapping[str, WeightSource],
    ignored: tuple[str, ...] = (),
    *,
    mesh: Mesh,
    rules: AxisRules,
    progress: Progress | None = None,
    whole: bool = False,
    allow_nonfinite: bool = False,
    is_shared: bool = False,
) -> Iterator[Piece]:
    """Yields each parameter of `load_safetensors`, ready on its devices; those of experts in pieces (`count_pieces`).

    For callers that build a tree other than the canonical one and must not hold the model twice: devices hold one piece
    beside what the caller keeps, and buffers on the host are for one, at most twice its bytes. Files and tensors are
    checked when the first item is requested.

    Args:
        whole: every parameter is one piece.
        allow_nonfinite: NaN and infinity are taken as they are.
        is_shared: the files hold another model, too, so tensors that are left out are no cause for a warning.
    """
    flat, _ = flatten_specs(specs)
    checkpoint = open_checkpoint(path)
    check_tensors(checkpoint, flat, sources, ignored)
    sources = {name: source.choose(checkpoint.names) for name, source in sources.items()}
    _check_left_out(checkpoint, sources, is_shared=is_shared)
    total, done = sum(spec.num_bytes for spec in flat.values()), 0
    if progress is not None:
        progress(done, total)
    names = list(flat)
    for name, following in zip(names, [*names[1:], None], strict=True):
        spec, source = flat[name], sources[name]
        if following is not None and not mesh.is_multi_process:  # a host of several needs parts of the tensors only
            _for_each(sources[following], checkpoint.prefetch)
        check = None if allow_nonfinite else partial(_require_finite, checkpoint, source)
        value, sharding = _build_host(checkpoint, name, spec, source, check), rules.sharding(mesh, spec.axes)
        axis, count = spec.piece_axis or 0, 1 if whole else count_pieces(spec, mesh=mesh, rules=rules)
        for index in range(count):
            array = place_host(value if count == 1 else HostPiece(value, axis, index, count), sharding)
            array.block_until_ready()  # the transfer may still read the host buffers
            if index == count - 1:
                _for_each(source, checkpoint.release)
            done += spec.num_bytes // count
            if progress is not None:
                progress(done, total)
            yield Piece(name, array, axis, index, count)
            del array  # before the next is made


def check_tensors(
    checkpoint: Checkpoint,
    specs: Mapping[str, ParamSpec],
    sources: Mapping[str, WeightSource],
    ignored: tuple[str, ...] = (),
) -> None:
    """Checks names, shapes and dtypes of all tensors against `specs` and `sources`, both by dotted path.

    Raises WeightsError naming the first few tensors that are missing, unexpected or used by two parameters, or the
    first with a wrong shape or a dtype that cannot be loaded.
    """
    if specs.keys() != sources.keys():
        odd = sorted(specs.keys() ^ sources.keys())
        raise WeightsError(f"parameters and their sources disagree: {list_names(odd)}", field="sources")
    sources = {name: source.choose(checkpoint.names) for name, source in sources.items()}
    wanted = [name for source in sources.values() for name in source.names if not source.part]
    wanted += sorted({name for source in sources.values() for name in source.names if source.part}.difference(wanted))
    doubled = sorted(name for name, count in Counter(wanted).items() if count > 1)
    if doubled:
        raise WeightsError(f"{len(doubled)} tensors are mapped twice: {list_names(doubled)}", field="sources")
    patterns = [re.compile(pattern) for pattern in ignored]
    missing = sorted(set(wanted) - checkpoint.names)
    unmapped = sorted(
        name for name in checkpoint.names.difference(wanted) if not any(pattern.fullmatch(name) for pattern in patterns)
    )
    complaints = []
    if missing:
        complaints.append(f"lacks {len(missing)} of {len(wanted)} tensors: {list_names(missing)}")
    if unmapped:
        complaints.append(f"holds {len(unmapped)} tensors the model has no place for: {list_names(unmapped)}")
    if complaints:
        raise WeightsError("the checkpoint " + ", and ".join(complaints), field=str(checkpoint.path))
    for source in sources.values():
        dtypes = source.dtypes or (tuple(LOADABLE_DTYPES),) * len(source.names)
        for name, shape, loadable in zip(source.names, source.shapes, dtypes, strict=True):
            _check_tensor(checkpoint, name, shape, loadable, exact=source.dtypes is None)
    _require_equal_copies(checkpoint, specs, sources)


def _require_equal_copies(
    checkpoint: Checkpoint, specs: Mapping[str, ParamSpec], sources: Mapping[str, WeightSource]
) -> None:
    """Raises WeightsError for a head that differs from the embedding that it is tied to (`untie_head`)."""
    for parameter, source in sources.items():
        if has_other_copy(checkpoint, source, specs[parameter].dtype):
            message = f"differs from {source.names[0]}, to which the model's config ties it; it is used with "
            raise WeightsError(f"{message}tie_word_embeddings: false in config.json", field=str(source.copy))


def _check_left_out(checkpoint: Checkpoint, sources: Mapping[str, WeightSource], *, is_shared: bool) -> None:
    """Logs the tensors that are not read: those that hold weights as a warning. Of shared files it says nothing.

    Weights have at least two axes, which biases have among experts, and GPTQ's zero points, too.
    """
    used = {name for source in sources.values() for name in source.names}
    left_out = sorted(checkpoint.names - used)
    _require_empty_biases(checkpoint, used, left_out)
    if is_shared:
        return
    no_weights = {source.copy for source in sources.values()}
    no_weights |= {name for name in left_out if name.endswith(("bias", "qzeros")) or len(checkpoint.shape(name)) < 2}
    weights = [name for name in left_out if name not in no_weights]
    others = sorted(set(left_out).difference(weights))
    if weights:
        text = "%d tensors of the checkpoint hold weights that the model does not use: %s"
        _log.warning(text, len(weights), list_names(weights))
    if others:
        _log.info("%d tensors of the checkpoint are not in the language model: %s", len(others), list_names(others))


def _require_empty_biases(checkpoint: Checkpoint, used: Collection[str], left_out: Collection[str]) -> None:
    """Raises WeightsError for a bias that is not read, of a module that is, unless it is all zeros."""
    modules = {name.rpartition(".")[0] for name in used}
    for name in left_out:
        module, _, end = name.rpartition(".")
        if end != "bias" or module not in modules:
            continue
        _check_tensor(checkpoint, name, checkpoint.shape(name), LOADABLE_DTYPES, exact=True)
        if checkpoint.read(name).any():
            raise WeightsError("is not zero, and the model has no bias there", field=name)


def _check_tensor(
    checkpoint: Checkpoint, name: str, shape: tuple[int, ...], loadable: Collection[str], *, exact: bool
) -> None:
    """Raises WeightsError for another shape or dtype; unless `exact`, axes of one at the end do not count."""
    found, dtype = checkpoint.shape(name), checkpoint.dtype_name(name)
    if found != shape and (exact or _strip_ones(found) != _strip_ones(shape)):
        raise WeightsError(f"has shape {found}, the model's config needs {shape}", field=name, value=found)
    if dtype not in loadable:
        known = ", ".join(sorted(loadable))
        raise WeightsError(f"is stored as {dtype}; only {known} can be loaded", field=name, value=dtype)


def _strip_ones(shape: tuple[int, ...]) -> tuple[int, ...]:
    while shape and shape[-1] == 1:
        shape = shape[:-1]
    return shape


def _require_finite(checkpoint: Checkpoint, source: WeightSource, value: np.ndarray) -> None:
    """Raises WeightsError if a part of a parameter has NaN or infinity, naming the tensor that has it."""
    if has_nonfinite(value):
        require_finite(checkpoint, source.names)
        tensors, dtype = " or ".join(source.names), value.dtype
        raise WeightsError(f"holds values beyond the range of {dtype}; use dtype float32", field=tensors)


def _build_host(
    checkpoint: Checkpoint,
    name: str,
    spec: ParamSpec,
    source: WeightSource,
    check: Callable[[np.ndarray], None] | None,
) -> HostArray:
    """Returns one parameter in the shape and dtype of its spec, whose files are read where it is indexed."""
    tensors = [checkpoint.read(tensor) for tensor in source.names]
    if source.dtypes is None and len({tensor.dtype for tensor in tensors}) > 1:  # `build` needs one dtype
        tensors = [
            cast_host(tensor, spec.dtype, name=tensor_name)
            for tensor, tensor_name in zip(tensors, source.names, strict=True)
        ]
    value = source.build(*tensors)
    if value.shape != spec.shape:
        raise WeightsError(f"built as {value.shape}, the model needs {spec.shape}", field=name, value=value.shape)
    dtype, tensor = jnp.dtype(spec.dtype), source.names[0]
    return CastParameter(value, dtype, tensor) if check is None else CastParameter(value, dtype, tensor, check)


def _for_each(source: WeightSource, action: Callable[[str], None]) -> None:
    for name in source.names:
        action(name)
