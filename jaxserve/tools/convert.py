"""Writes a checkpoint again in safetensors: quantized, as compressed-tensors does, or as a GGUF file has it."""

from __future__ import annotations

import functools
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from jaxserve.engine.model_files import ModelFiles
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.errors import ConfigError
from jaxserve.gguf_file import is_gguf
from jaxserve.model_options import ModelOptions

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.models.matrix_formats import MatrixFormat
    from jaxserve.core.weights.reader import Checkpoint

_WEIGHT = ".weight"


@dataclass(frozen=True)
class Written:
    """What was written: how many matrices were quantized, and the bytes of all tensors before and after."""

    num_matrices: int
    num_bytes_read: int
    num_bytes: int


def convert_checkpoint(
    options: ModelOptions, files: ModelFiles, folder: Path, *, progress: ShowProgress = hide_progress
) -> Written:
    """Writes the model's checkpoint to `folder`, quantized as `options` would quantize it while it is read.

    Matrices are quantized one at a time, on the first device. Other tensors are copied as they are, those that a GGUF
    file has in other types than safetensors in the model's dtype. GGUF files need no scheme.

    Raises:
        ConfigError: no scheme is given, or it does not fit the model or its files.
        WeightsError: the files do not fit the model, or `folder` has weights already or cannot be written.
    """
    from jaxserve.core.weights.checkpoint import copy_companions
    from jaxserve.core.weights.load import check_tensors
    from jaxserve.core.weights.paths import flatten_specs
    from jaxserve.core.weights.reader import open_checkpoint
    from jaxserve.core.weights.write import refuse_target, write_checkpoint
    from jaxserve.families.registry import describe_files, ignored_weights, param_specs, weight_sources
    from jaxserve.features.quantization.compressed import describe_quantization
    from jaxserve.tokenizers import load_tokenizer
    from jaxserve.tokenizers.gguf import write_gguf_tokenizer

    refuse_target(folder)
    model = _choose_model(options, files)
    path, stored = files.find_weights(), describe_files(model)
    checkpoint = open_checkpoint(path)
    if is_gguf(path):
        load_tokenizer(path)  # whose faults are told before anything is written
    check_tensors(checkpoint, flatten_specs(param_specs(stored))[0], weight_sources(stored), ignored_weights(stored))
    matrices = _find_matrices(model, checkpoint)
    hf_config = {**files.hf_config, "dtype": model.dtype} if is_gguf(path) else dict(files.hf_config)
    if matrices and model.quantization is not None:
        left_out = _list_left_out(stored, checkpoint, matrices)
        hf_config["quantization_config"] = describe_quantization(model.quantization, left_out)
    with progress("Writing weights", unit="bytes") as report:
        written = write_checkpoint(
            folder,
            _quantize_all(checkpoint, matrices, model.dtype, report, allow_nonfinite=options.allow_nonfinite),
            hf_config,
        )
    if is_gguf(path):
        write_gguf_tokenizer(path, folder)
    else:
        copy_companions(path, folder)
    return Written(len(matrices), sum(checkpoint.count_bytes(name) for name in checkpoint.names), written)


def _choose_model(options: ModelOptions, files: ModelFiles) -> DecoderConfig:
    from jaxserve.engine.model_files import read_model

    model = read_model(options, files)
    if files.path is not None and is_gguf(files.path):
        return model
    if model.quantization is None:
        message = "names no scheme, so there is nothing to convert; for example fp8_per_channel"
        raise ConfigError(message, field="quantization", value=options.quantization)
    if not model.quantization.while_loading:
        message = f"the checkpoint is quantized already, with {model.quantization.method}"
        raise ConfigError(message, field="quantization", value=options.quantization)
    return model


def _find_matrices(model: DecoderConfig, checkpoint: Checkpoint) -> dict[str, MatrixFormat]:
    """Returns the format of each tensor that is quantized."""
    from jaxserve.families.registry import describe_files, list_schemes, weight_sources
    from jaxserve.features.quantization.compressed import require_fit

    sources, found = weight_sources(describe_files(model)), {}
    for name, (_, form) in list_schemes(model).items():
        source = sources[name].choose(checkpoint.names)
        for tensor, shape in zip(source.names, source.shapes, strict=True):
            if not tensor.endswith(_WEIGHT) or len(shape) != 2:
                message = f"{tensor} holds several matrices, for which compressed-tensors has no form; leave it out "
                message += "with quantization_config.ignore, or give files with one tensor for each"
                raise ConfigError(message, field="quantization", value=form.dtype)
            require_fit(form, tensor.removesuffix(_WEIGHT), shape[1])
            found[tensor] = form
    return found


def _list_left_out(stored: DecoderConfig, checkpoint: Checkpoint, matrices: Mapping[str, MatrixFormat]) -> list[str]:
    """Returns the modules of all other matrices but embeddings."""
    from jaxserve.families.registry import weight_sources

    embeddings = weight_sources(stored)["embed.weight"].names
    others = checkpoint.names.difference(matrices, embeddings)
    return [
        name.removesuffix(_WEIGHT) for name in others if name.endswith(_WEIGHT) and len(checkpoint.shape(name)) == 2
    ]


def _quantize_all(
    checkpoint: Checkpoint,
    matrices: Mapping[str, MatrixFormat],
    dtype: str,
    report: Any,
    *,
    allow_nonfinite: bool,
) -> Iterator[tuple[str, np.ndarray]]:
    from jaxserve.core.weights.finite import require_finite
    from jaxserve.core.weights.place import cast_host
    from jaxserve.features.quantization.compressed import pack_matrix

    done, total = 0, sum(checkpoint.count_bytes(name) for name in checkpoint.names)
    for name in sorted(checkpoint.names):
        if not allow_nonfinite and name in matrices:
            require_finite(checkpoint, [name])
        tensor, form = checkpoint.read(name), matrices.get(name)
        if form is None:
            is_other = is_gguf(checkpoint.path) and checkpoint.dtype_name(name) == "F32"
            yield name, cast_host(np.asarray(tensor), dtype, name=name) if is_other else tensor
        else:
            module = name.removesuffix(_WEIGHT)
            for part, array in pack_matrix(form, *_quantize(tensor, form, dtype)).items():
                yield f"{module}.{part}", array
        checkpoint.release(name)
        done += checkpoint.count_bytes(name)
        report(done, total)


def _quantize(matrix: np.ndarray, form: MatrixFormat, dtype: str) -> tuple[np.ndarray, np.ndarray]:
    """Returns the values [in, out] and the scales [G, out] of a matrix [out, in]."""
    import jax

    from jaxserve.features.quantization.table import count_groups

    program = _compile(form, count_groups(form, matrix.shape[1]), dtype)
    made = program(np.ascontiguousarray(matrix))
    return jax.device_get((made.values, made.scales))


@functools.cache
def _compile(form: MatrixFormat, groups: int, dtype: str) -> Any:
    import jax

    from pallas_kernels import quantize

    def program(matrix: jax.Array) -> Any:
        rounded = matrix.astype(dtype).T  # as an engine reads it
        return quantize(rounded, form.dtype, form.block, groups, scale_dtype=form.scale_dtype)

    return jax.jit(program)
