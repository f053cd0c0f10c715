"""Canonical parameters as an Orbax checkpoint: converted once, restored fast onto any mesh.

`path/config.json` is the model's Hugging Face config, `path/params/` the tree. A directory that has `params` is
complete: Orbax writes elsewhere and renames.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import Mesh

from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights.file_formats import PARAMS_FOLDER
from jaxserve.core.weights.finite import is_finite_everywhere, nonfinite_error
from jaxserve.core.weights.paths import flatten_specs, unflatten
from jaxserve.core.weights.place import list_castable
from jaxserve.core.weights.reader import list_names
from jaxserve.errors import WeightsError
from jaxserve.files import require_regular


def save_params(path: Path, params: Any, hf_config: Mapping[str, Any]) -> None:
    """Writes the canonical tree `params` and `hf_config` to the directory `path`, which is created if needed.

    Returns when everything is on disk. Raises WeightsError when `path` already holds parameters or cannot be written.
    """
    import orbax.checkpoint as ocp

    folder = path.resolve() / PARAMS_FOLDER
    if folder.exists():
        raise WeightsError("already exists; choose another directory, or remove it first", field=str(folder))
    try:
        path.mkdir(parents=True, exist_ok=True)
        if jax.process_index() == 0:
            (path / "config.json").write_text(json.dumps(dict(hf_config), indent=2) + "\n", encoding="utf-8")
        with ocp.StandardCheckpointer() as checkpointer:
            checkpointer.save(folder, params)
            checkpointer.wait_until_finished()
    except OSError as error:
        raise WeightsError(f"cannot be written: {error}", field=str(path)) from error


def restore_params(path: Path, specs: Any, *, mesh: Mesh, rules: AxisRules, allow_nonfinite: bool = False) -> Any:
    """Returns the canonical tree of `specs` from the Orbax checkpoint in the directory `path`, sharded over `mesh`.

    The mesh may differ from that of saving; each device reads its own shards. Parameters are cast to the dtype of their
    spec on the way. Raises WeightsError when there is no checkpoint, when its parameters or shapes are not those of
    `specs` (the message names them), when its data is damaged and, unless `allow_nonfinite`, for NaN and infinity.
    """
    streamed = stream_params(path, specs, mesh=mesh, rules=rules, allow_nonfinite=allow_nonfinite)
    return unflatten(specs, dict(streamed))


def stream_params(
    path: Path, specs: Any, *, mesh: Mesh, rules: AxisRules, allow_nonfinite: bool = False
) -> Iterator[tuple[str, jax.Array]]:
    """Yields (dotted path, array) for each parameter of `restore_params`, which are restored layer by layer.

    For callers that build a tree other than the canonical one and must not hold the model twice. Raises what
    `restore_params` does; names and shapes are checked when the first item is requested.
    """
    import orbax.checkpoint as ocp

    folder = path.resolve() / PARAMS_FOLDER
    if not (folder / "_METADATA").exists():
        raise WeightsError("there is no Orbax checkpoint here", field=str(folder))
    _refuse_special_files(folder)
    flat, _ = flatten_specs(specs)
    targets = {
        name: jax.ShapeDtypeStruct(spec.shape, jnp.dtype(spec.dtype), sharding=rules.sharding(mesh, spec.axes))
        for name, spec in flat.items()
    }
    with ocp.PyTreeCheckpointer() as checkpointer:
        found = _read_metadata(checkpointer, folder)
        wider = {name: target for name, target in targets.items() if _has_wider_groups(name, found, target)}
        whole = {name: jax.ShapeDtypeStruct(found[name].shape, each.dtype) for name, each in wider.items()}
        replicated = rules.sharding(mesh, ())
        targets |= {name: each.update(sharding=replicated) for name, each in whole.items()}
        _check_stored(found, targets, str(folder))
        for _, names in itertools.groupby(targets, key=lambda name: name.split(".")[:2]):
            restored = _restore(checkpointer, folder, specs, {name: targets[name] for name in names})
            while restored:
                name, value = restored.popitem()
                if not allow_nonfinite and not is_finite_everywhere(value):
                    raise nonfinite_error(name, str(folder))
                yield name, _repeat_groups(value, wider[name]) if name in wider else value
                del value  # before more is restored


def _restore(
    checkpointer: Any, folder: Path, specs: Any, targets: Mapping[str, jax.ShapeDtypeStruct]
) -> dict[str, jax.Array]:
    """Returns some of the arrays by dotted path."""
    import orbax.checkpoint as ocp

    skipped = dict.fromkeys(flatten_specs(specs)[0], ocp.PLACEHOLDER)
    wanted = unflatten(specs, skipped | targets)
    args = ocp.args.PyTreeRestore(wanted, ocp.checkpoint_utils.construct_restore_args(wanted))
    try:
        restored = flatten_specs(checkpointer.restore(folder, args))[0]
    except Exception as error:  # Orbax has no error type of its own: damaged files raise almost anything
        raise WeightsError(f"damaged checkpoint: {_reason(error)}", field=str(folder)) from error
    return {name: restored[name] for name in targets}


def _has_wider_groups(name: str, found: Mapping[str, Any], target: jax.ShapeDtypeStruct) -> bool:
    """Whether scales or zero points are stored for groups that are cut between the devices of this mesh."""
    if not name.endswith((".scales", ".zeros")) or name not in found:
        return False
    *lead, groups, columns = found[name].shape
    return (*lead, columns) == (*target.shape[:-2], target.shape[-1]) and 1 < groups < target.shape[-2]


def _repeat_groups(value: jax.Array, target: jax.ShapeDtypeStruct) -> jax.Array:
    times = target.shape[-2] // value.shape[-2]
    return jax.device_put(jnp.repeat(value, times, axis=-2), target.sharding)


def _refuse_special_files(folder: Path) -> None:
    """Raises WeightsError for anything but regular files: Orbax would open a FIFO and hang."""
    for path, folders, files in os.walk(folder):
        links = [name for name in folders if (Path(path) / name).is_symlink()]
        if links:
            message = "is a link to a directory, which Orbax does not write; put the directory itself here"
            raise WeightsError(message, field=str(Path(path) / links[0]))
        for name in files:
            file = Path(path) / name
            try:
                require_regular(file)
            except OSError as error:
                raise WeightsError(f"cannot be read: {error.strerror}", field=str(file)) from error


def _read_metadata(checkpointer: Any, folder: Path) -> dict[str, Any]:
    """Returns the stored arrays' metadata (`shape`, `dtype`) by dotted path."""
    try:
        metadata = checkpointer.metadata(folder).item_metadata
    except Exception as error:  # as in `restore_params`; most damage gives None instead
        raise WeightsError(f"damaged checkpoint: {_reason(error)}", field=str(folder)) from error
    if metadata is None:
        raise WeightsError("damaged checkpoint: its index of arrays cannot be read", field=str(folder))
    leaves, _ = jax.tree_util.tree_flatten_with_path(metadata.tree)
    return {jax.tree_util.keystr(path, simple=True, separator="."): leaf for path, leaf in leaves}


def _check_stored(found: Mapping[str, Any], targets: Mapping[str, jax.ShapeDtypeStruct], folder: str) -> None:
    missing, unmapped = sorted(targets.keys() - found.keys()), sorted(found.keys() - targets.keys())
    if missing or unmapped:
        parts = [f"lacks {list_names(missing)}"] * bool(missing)
        parts += [f"holds {list_names(unmapped)}, which the model has no place for"] * bool(unmapped)
        raise WeightsError("the checkpoint " + ", and ".join(parts), field=folder)
    for name, target in targets.items():
        shape, dtype = tuple(found[name].shape), str(found[name].dtype)
        if shape != target.shape:
            raise WeightsError(f"has shape {shape}, the model's config needs {target.shape}", field=name, value=shape)
        known = list_castable(str(target.dtype))
        if dtype not in known:
            raise WeightsError(f"is stored as {dtype}; only {', '.join(known)} can be loaded", field=name, value=dtype)


def _reason(error: Exception) -> str:
    return f"{type(error).__name__}: {(str(error).strip().splitlines() or ['no details'])[0][:200]}"
