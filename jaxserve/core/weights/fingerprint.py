"""Tells checkpoints apart without reading them whole."""

from __future__ import annotations

import hashlib
from pathlib import Path

from jaxserve.core.weights.file_formats import checkpoint_format
from jaxserve.core.weights.orbax import PARAMS_FOLDER
from jaxserve.files import open_regular
from jaxserve.gguf_file import is_gguf, list_parts

_HEAD = 2**20  # bytes at the beginning of a file: the names, shapes and places of a safetensors file's tensors
_SAMPLES = 256  # of each file
_SAMPLE = 4096  # bytes


def fingerprint_weights(path: Path) -> str:
    """Returns a digest of the weights in a checkpoint directory, or in a GGUF file and its parts.

    It is made of names and sizes of files, and of samples of each.

    Equal checkpoints have equal ones wherever they lie. Others differ, unless they differ only between the samples.
    """
    if is_gguf(path):
        files, path = list_parts(path.resolve()), path.resolve().parent
    else:
        is_orbax = checkpoint_format(path) == "orbax"
        files = list((path / PARAMS_FOLDER).rglob("*") if is_orbax else path.glob("*.safetensors"))
    digest = hashlib.sha256()
    for file in sorted(each for each in files if each.is_file()):
        size = file.stat().st_size
        digest.update(f"{file.relative_to(path).as_posix()} {size}\n".encode())
        with open_regular(file) as opened:
            digest.update(opened.read(_HEAD))
            for index in range(_SAMPLES):
                place = (size - _SAMPLE) * index // (_SAMPLES - 1)
                if place >= _HEAD:
                    opened.seek(place)
                    digest.update(opened.read(_SAMPLE))
    return digest.hexdigest()[:16]
