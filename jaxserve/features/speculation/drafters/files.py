"""Reads drafters with weights: EAGLE-3 heads, a target's own layers for multi-token prediction, smaller models.

Everything wrong with the files of a drafter is an error about "speculative_config.model", before anything is served.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import Mesh

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.sharding import AxisRules
from jaxserve.core.weights.checkpoint import resolve_checkpoint
from jaxserve.core.weights.copies import untie_head
from jaxserve.core.weights.file_formats import refuse_foreign_folder
from jaxserve.core.weights.json_files import parse_json_object, read_hf_config
from jaxserve.core.weights.load import Progress, check_tensors, stream_pieces
from jaxserve.core.weights.paths import unflatten
from jaxserve.core.weights.place import place_host
from jaxserve.core.weights.reader import INTEGER_DTYPES, SafetensorsCheckpoint, open_checkpoint, read_tensor_shapes
from jaxserve.errors import ConfigError, WeightsError, shorten
from jaxserve.features.speculation.drafters.base import FIELD, DrafterModel, Method, match_groups
from jaxserve.features.speculation.drafters.draft_model import parse_draft_model
from jaxserve.features.speculation.drafters.eagle3 import D2T, T2D
from jaxserve.features.speculation.drafters.eagle3_config import parse_eagle3
from jaxserve.features.speculation.drafters.mtp import parse_mtp
from jaxserve.features.speculation.drafters.tables import (
    drafter_param_specs,
    drafter_weight_sources,
    ignored_drafter_weights,
    list_drafter_params,
)
from jaxserve.files import read_regular

_TOKENIZER_FILES = ("tokenizer.json", "tokenizer.model", "vocab.json")  # the first that both have is compared
_MAX_TOKENIZER_BYTES = 2**28
_MAX_TOKENIZER_VALUES = 20_000_000


def resolve_drafter(model: str, revision: str | None = None) -> Path:
    """Returns the directory of `speculative_config.model`, downloaded if it is a hub id."""
    with name_drafter(model):
        path = resolve_checkpoint(model, revision)
        refuse_foreign_folder(path, need_weights=True)
    return path


def read_drafter(method: Method, path: Path, target: DecoderConfig, *, target_path: Path | None = None) -> DrafterModel:
    """Returns the drafter in the directory `path`, checked against its files' headers and the target.

    `target` has its dtype, `max_model_len` and head layout; expand the result to the mesh by `expand_drafter_heads`.
    For "mtp" `path` is the target's own directory. For "draft_model" the tokenizer is compared with that in
    `target_path`, unless it is None. Raises ConfigError or WeightsError (field "speculative_config.model", or the
    key of speculative_config that is wrong).
    """
    with name_drafter(str(path)):
        raw = read_hf_config(path)
        if method == "eagle3":
            model = parse_eagle3(raw, read_tensor_shapes(path), target)
        elif method == "mtp":
            model = parse_mtp(raw, target)
        else:
            model = parse_draft_model(raw, target)
            model = dataclasses.replace(model, config=untie_head(model.config, path))
            if target_path is not None:
                check_tokenizers(path, target_path)
        match_groups(model, target)
        _check_files(model, path)
    return model


def load_drafter(
    model: DrafterModel,
    path: Path,
    *,
    mesh: Mesh,
    rules: AxisRules,
    progress: Progress | None = None,
    allow_nonfinite: bool = False,
) -> dict[str, Any]:
    """Returns the parameters of the drafter at `path` as the canonical tree of `drafter_param_specs`, over `mesh`.

    Raises WeightsError (field "speculative_config.model") for files that do not fit the model, for a tensor with NaN or
    infinite values unless `allow_nonfinite`, and for a map of the vocabularies that is none.
    """
    specs = drafter_param_specs(model)
    values: dict[str, jax.Array] = {}
    with name_drafter(str(path)):
        _check_files(model, path)
        plain = {key: tree for key, tree in specs.items() if key != D2T}
        sources, ignored = drafter_weight_sources(model), ignored_drafter_weights(model)
        options: dict[str, Any] = {"mesh": mesh, "rules": rules, "progress": progress}
        options |= {"allow_nonfinite": allow_nonfinite, "is_shared": model.method == "mtp"}
        for piece in stream_pieces(path, plain, sources, ignored, whole=True, **options):
            values[piece.name] = piece.array
        if model.maps_vocab:
            offsets = _read_offsets(open_checkpoint(path), model)
            values[f"{D2T}.weight"] = place_host(offsets, rules.sharding(mesh, (None,)))
    loaded: dict[str, Any] = unflatten(specs, values)
    return loaded


def check_tokenizers(path: Path, target_path: Path) -> None:
    """Raises ConfigError unless the tokenizers in two directories give a token the same id.

    Compared are the vocabulary and the added tokens of tokenizer.json, or the bytes of another file. Directories
    without a file in common are not compared.
    """
    for name in _TOKENIZER_FILES:
        files = [folder / name for folder in (path, target_path)]
        if not all(file.is_file() for file in files):
            continue
        first, second = (_read_file(file) for file in files)
        if first != second and (name != "tokenizer.json" or _read_tokens(first) != _read_tokens(second)):
            raise ConfigError(
                f"its {name} is not the target's: the same id would mean another token; give a draft model with the "
                "tokenizer of the target",
                field=FIELD,
                value=str(path),
            )
        return


@contextmanager
def name_drafter(name: str) -> Iterator[None]:
    """Turns errors about a file or a key of a drafter into errors about the option that names it."""
    try:
        yield
    except ConfigError as error:
        if error.field.startswith("speculative_config."):
            raise
        raise ConfigError(f"{name}: {error}", field=FIELD, value=name) from error
    except WeightsError as error:
        raise WeightsError(f"{name}: {error}", field=FIELD, value=name) from error


def _check_files(model: DrafterModel, path: Path) -> None:
    """Checks names, shapes and dtypes of all tensors, from the headers."""
    checkpoint = open_checkpoint(path)
    table = list_drafter_params(model)
    specs = {name: parameter.spec for name, parameter in table.items()}
    check_tensors(checkpoint, specs, drafter_weight_sources(model), ignored_drafter_weights(model))
    if not model.maps_vocab:
        return
    sizes = {D2T: model.draft_vocab_size, T2D: model.config.vocab_size}
    for name, size in sizes.items():
        if name not in checkpoint.names:
            continue
        if checkpoint.shape(name) != (size,) or checkpoint.dtype_name(name) not in INTEGER_DTYPES:
            raise WeightsError(
                f"is {checkpoint.dtype_name(name)} {checkpoint.shape(name)}, not integers of shape ({size},)",
                field=name,
            )


def _read_offsets(checkpoint: SafetensorsCheckpoint, model: DrafterModel) -> np.ndarray:
    """Returns `d2t` int32 [Vd]: what to add to an id of the draft vocabulary. It must name each token once."""
    offsets = checkpoint.read(D2T).astype(np.int64)
    ids = np.arange(len(offsets)) + offsets
    outside = np.flatnonzero((ids < 0) | (ids >= model.config.vocab_size))
    if len(outside):
        raise WeightsError(
            f"maps draft token {outside[0]} to {ids[outside[0]]}, outside the vocabulary of {model.config.vocab_size}",
            field=D2T,
        )
    if len(np.unique(ids)) != len(ids):
        raise WeightsError("maps two draft tokens to one token", field=D2T)
    if T2D in checkpoint.names and not np.array_equal(np.flatnonzero(checkpoint.read(T2D)), np.sort(ids)):
        raise WeightsError(f"names other tokens than {T2D}", field=D2T)
    return offsets.astype(np.int32)


def _read_file(file: Path) -> bytes:
    try:
        return read_regular(file, _MAX_TOKENIZER_BYTES)
    except OSError as error:
        raise ConfigError(f"cannot be read: {error.strerror}", field=str(file)) from error


def _read_tokens(data: bytes) -> Mapping[str, object]:
    """Returns what gives tokens their ids in a tokenizer.json."""
    try:
        content = parse_json_object(data, _MAX_TOKENIZER_VALUES)
    except ValueError as error:
        raise ConfigError(shorten(str(error)), field="tokenizer.json") from error
    model, added = content.get("model"), content.get("added_tokens")
    return {
        "model": {key: model.get(key) for key in ("type", "vocab", "merges")} if isinstance(model, dict) else model,
        "added": [(each.get("id"), each.get("content")) for each in added] if isinstance(added, list) else added,
    }
