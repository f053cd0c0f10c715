"""Finds checkpoints that hold an output head of their own, although their config ties it to the embedding."""

from __future__ import annotations

import dataclasses
import logging
from pathlib import Path

import numpy as np

from jaxserve.core.models.base import DecoderConfig, WeightSource
from jaxserve.core.weights.file_formats import checkpoint_format, has_weights
from jaxserve.core.weights.place import cast_host
from jaxserve.core.weights.reader import LOADABLE_DTYPES, Checkpoint, open_checkpoint
from jaxserve.errors import WeightsError
from jaxserve.families.registry import describe_files, list_params

_log = logging.getLogger(__name__)
_CHUNK = 2**24  # numbers compared at once


def untie_head(model: DecoderConfig, path: Path) -> DecoderConfig:
    """Returns the model, untied if the checkpoint at `path` has a head of other numbers than the embedding.

    A folder without weights says nothing. Raises WeightsError for files that are damaged, and for a head of another
    shape.
    """
    if not model.embedding.tied or not has_weights(path) or checkpoint_format(path) == "orbax":
        return model
    checkpoint, embed = open_checkpoint(path), list_params(describe_files(model))["embed.weight"]
    if not has_other_copy(checkpoint, embed.source, embed.spec.dtype):
        return model
    name, own = embed.source.copy, embed.source.names[0]
    _log.warning("the config ties the head to the embedding, but %s differs from %s: the head is used", name, own)
    return dataclasses.replace(model, embedding=dataclasses.replace(model.embedding, tied=False))


def has_other_copy(checkpoint: Checkpoint, source: WeightSource, dtype: str) -> bool:
    """Whether files have a copy of a parameter that becomes other numbers in `dtype`, or is quantized.

    Raises WeightsError for a copy of another shape.
    """
    name, own = source.copy, source.names[0]
    if name is None or not {name, own} <= checkpoint.names:
        return False
    if checkpoint.shape(name) != source.shapes[0]:
        found = checkpoint.shape(name)
        message = f"has shape {found}, the config ties it to {own} of shape {source.shapes[0]}"
        raise WeightsError(message, field=name, value=found)
    if not {checkpoint.dtype_name(name), checkpoint.dtype_name(own)} <= LOADABLE_DTYPES.keys():
        return True
    rows = max(1, _CHUNK // source.shapes[0][1])
    tensors = {each: checkpoint.read(each) for each in (own, name)}
    for first in range(0, source.shapes[0][0], rows):
        kept, copy = (
            cast_host(tensor[first : first + rows], dtype, name=each).view(np.uint8) for each, tensor in tensors.items()
        )
        if not np.array_equal(kept, copy):
            return True
    return False
