"""A model's files: where they are, what its config says, and its weights on the devices."""

from __future__ import annotations

import dataclasses
import itertools
import logging
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.devices import load_jax
from jaxserve.engine.generation_config import find_generation_config
from jaxserve.engine.pooling import add_answers, choose_pooling
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.errors import ConfigError, shorten
from jaxserve.model_options import ModelOptions
from jaxserve.presets import find_packaged, load_preset

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.runtime.shapes import Shapes
    from jaxserve.core.weights import CheckpointUpdate
    from jaxserve.core.weights.sentence_transformers import SentenceModules
    from jaxserve.tokenizers import Tokenizer

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class ModelFiles:
    """A model's files: their directory, or the GGUF file. `path` is None for a preset, which has none.

    `hub_id` is the repository whose weights may still have to be downloaded to `path`; None for a local directory.
    """

    path: Path | None
    hf_config: dict[str, Any]
    generation_config: dict[str, Any]
    hub_id: str | None = None
    modules: SentenceModules | None = None  # how embeddings are made, where the files say so

    def find_weights(self) -> Path:
        """Returns the directory with the weights, downloaded if missing. `path` must not be None."""
        from jaxserve.core.weights import download_weights

        assert self.path is not None  # locate_model allows presets with dummy weights only
        if self.hub_id is not None:
            download_weights(self.hub_id, self.path)
        return self.path


def locate_model(options: ModelOptions, *, need_weights: bool = True) -> ModelFiles:
    """Returns the files of the model that the options name: of a package, a preset, a directory, a file or a model id.

    Raises:
        ConfigError: there is no such model, its kind or format is not supported, or it is a preset and weights were
            asked for.
        DeviceError: the installation of JAX is broken.
    """
    load_jax()
    from jaxserve.core.models.hf_config import override_config
    from jaxserve.core.weights import read_hf_config, refuse_foreign_folder, resolve_checkpoint
    from jaxserve.core.weights.cross_encoder import add_activation, check_texts, is_cross_encoder
    from jaxserve.core.weights.sentence_transformers import read_modules
    from jaxserve.families.registry import find_family

    try:
        Path(options.model).exists()
    except OSError as error:  # longer than a name may be
        message = f"is neither a path nor a model id ({error.strerror})"
        raise ConfigError(message, field="model", value=shorten(options.model)) from error
    preset = load_preset(options.model)
    if preset is not None and not Path(options.model).is_dir():
        if need_weights and options.load_format != "dummy":
            message = f"{options.model!r} is a preset and has no weights; add load_format='dummy', or give a checkpoint"
            raise ConfigError(message, field="load_format", value=options.load_format)
        preset = override_config(preset, options.hf_overrides or {})
        return ModelFiles(None, preset, find_generation_config(options, None))
    packaged = find_packaged(options.model)
    path = packaged or resolve_checkpoint(options.model, options.revision, need_weights=False)
    is_here = packaged is not None or not path.is_dir() or Path(options.model).expanduser().is_dir()
    hub_id = None if is_here else options.model
    refuse_foreign_folder(path, need_weights=hub_id is None and options.load_format != "dummy")
    hf_config = override_config(read_hf_config(path), options.hf_overrides or {})
    find_family(hf_config)
    is_classifier = is_cross_encoder(path, hf_config)
    modules = None if is_classifier else read_modules(path)
    if is_classifier:
        check_texts(path)
    if is_classifier or (modules is not None and modules.logit_score is not None):
        hf_config = add_activation(hf_config, path)
    return ModelFiles(path, hf_config, find_generation_config(options, path), hub_id, modules)


def read_model(options: ModelOptions, files: ModelFiles, device_kind: str = "") -> DecoderConfig:
    """Returns the model's config in its final dtype and quantization; arguments and ConfigError as `resolve_model`."""
    from jaxserve.families.registry import describe_files, list_params, parse_config
    from jaxserve.features.quantization.schemes import choose_schemes, require_matches

    model = choose_schemes(parse_config(files.hf_config), options.quantization, options.quantization_config)
    if options.quantization_config is not None:
        require_matches(list_params(describe_files(model)), options.quantization_config.ignore)
    dtype = _choose_dtype(model, device_kind) if options.dtype == "auto" else options.dtype
    return model if dtype == model.dtype else dataclasses.replace(model, dtype=dtype)


def _choose_dtype(model: DecoderConfig, device_kind: str) -> str:
    """Returns the checkpoint's dtype, or on a GPU that would emulate it the one that the model can have there."""
    from jaxserve.families.registry import FAMILIES
    from pallas_kernels.backends import emulates_bfloat16

    if model.dtype != "bfloat16" or not emulates_bfloat16(device_kind):
        return model.dtype
    fits = FAMILIES[model.family].fits_float16
    dtype = "float16" if fits else "float32"
    reason = "" if fits else f"; {model.family} needs more range than float16 has"
    _log.warning("dtype: %s in place of bfloat16, which %s emulates%s", dtype, device_kind, reason)
    return dtype


def resolve_model(
    config: EngineConfig, files: ModelFiles, device_kind: str = "", *, download: bool = False
) -> DecoderConfig:
    """Returns the model's config in its final dtype, length and head layout.

    Args:
        device_kind: JAX's name of the device that will run it, which may want another dtype than the checkpoint's.
        download: weights that are not here yet may be downloaded. Without it a model of the hub has the head that its
            config says.

    Raises:
        ConfigError: names the option or the config.json key that cannot work.
        WeightsError: files with a head beside the embedding are damaged, or the two have different shapes.
    """
    from jaxserve.core.models.decoder import fit_devices
    from jaxserve.core.weights import untie_head

    model = choose_pooling(read_model(config.model, files, device_kind), config.pooling, files.modules, files.hf_config)
    model = add_answers(model, files.hf_config, partial(load_model_tokenizer, config.model, files))
    max_model_len = config.model.max_model_len
    model = model.with_max_model_len(_choose_length(config, files, model) if max_model_len is None else max_model_len)
    if config.cache.kv_cache_dtype == "fp8":
        model = _add_kv_scales(config, files, model)
    parallel = config.parallel
    if parallel.enable_expert_parallel and not model.has_experts:
        message = f"{model.family} has no experts; leave it out"
        raise ConfigError(message, field="enable_expert_parallel", value=True)
    model = _set_state_dtype(model, config.cache.mamba_ssm_cache_dtype)
    model = fit_devices(model, parallel.tensor_parallel_size, expert_parallel=parallel.enable_expert_parallel)
    is_here = download or files.hub_id is None
    if not model.embedding.tied or files.path is None or config.model.load_format == "dummy" or not is_here:
        return model
    return untie_head(model, files.find_weights())


def _set_state_dtype(model: DecoderConfig, dtype: str) -> DecoderConfig:
    """Returns the model's config with recurrent states of the dtype that the option names."""
    from jaxserve.core.layers.gated_delta import GatedDeltaConfig
    from jaxserve.core.layers.mamba2 import Mamba2Config

    if dtype == "auto":
        return model
    kinds = (GatedDeltaConfig, Mamba2Config)
    if not any(isinstance(kind.mixer, kinds) for kind in model.layers):
        kept = "last inputs only" if model.states else "no recurrent state"
        message = f"{model.family} keeps {kept}; leave it out"
        raise ConfigError(message, field="mamba_ssm_cache_dtype", value=dtype)
    return model.change_mixers(kinds, partial(dataclasses.replace, state_dtype=dtype))


def _choose_length(config: EngineConfig, files: ModelFiles, model: DecoderConfig) -> int:
    """Returns the longest text where `max_model_len` is not given."""
    limits = [model.default_max_model_len]
    if files.modules is not None and files.modules.max_seq_length is not None and not model.generates:
        limits.append(files.modules.max_seq_length)
    if model.reads_whole and config.scheduler.max_num_batched_tokens is not None:
        limits.append(config.scheduler.max_num_batched_tokens)
    return min(limits)


def _add_kv_scales(config: EngineConfig, files: ModelFiles, model: DecoderConfig) -> DecoderConfig:
    """Returns the model's config with the checkpoint's scales for an fp8 cache, if it has any."""
    from jaxserve.core.weights import checkpoint_format, read_tensor_shapes
    from jaxserve.families.registry import find_kv_scales

    scales = None
    if files.path is not None and config.model.load_format != "dummy" and checkpoint_format(files.path) != "orbax":
        scales = find_kv_scales(model, read_tensor_shapes(files.find_weights()))
    if scales is None:
        _log.warning(
            "kv_cache_dtype is fp8 and the checkpoint has no scales for it: keys and values are stored unscaled, and "
            "those beyond 448 are cut off"
        )
    return model.change_attention(lambda attention: dataclasses.replace(attention, kv_scales=scales))


def load_model_tokenizer(options: ModelOptions, files: ModelFiles) -> Tokenizer | None:
    """Returns the tokenizer; None with `skip_tokenizer_init`, or for a preset without `tokenizer`."""
    from jaxserve.tokenizers import load_tokenizer

    if options.skip_tokenizer_init:
        return None
    if options.tokenizer is not None:
        return load_tokenizer(options.tokenizer)
    if files.path is None:
        return None
    return load_tokenizer(files.path, lowercases=files.modules is not None and files.modules.lowercases)


def load_params(
    config: EngineConfig,
    files: ModelFiles,
    shapes: Shapes,
    mesh: Mesh,
    *,
    progress: ShowProgress = hide_progress,
    has_tower: bool = False,
) -> Any:
    """Returns the parameters as run-time arrays on the devices of `mesh`, loaded or, with "dummy", random.

    Args:
        has_tower: the other tensors of the files are loaded, too, so no warning names them.
    """
    from jaxserve.core.layers.stack import stack_specs
    from jaxserve.core.runtime.converter import WeightConverter
    from jaxserve.core.runtime.params import fill_params
    from jaxserve.core.sharding import DEFAULT_RULES
    from jaxserve.core.weights import (
        Piece,
        checkpoint_format,
        make_dummy_params,
        stream_dummy_params,
        stream_params,
        stream_pieces,
    )
    from jaxserve.families.registry import describe_files, ignored_weights, param_specs, weight_sources

    specs = param_specs(shapes.model)
    if config.model.load_format == "dummy" and not shapes.model.packed:
        specs = stack_specs(specs, shapes.stack_mode)
        return make_dummy_params(specs, mesh=mesh, rules=DEFAULT_RULES, seed=config.model.seed)
    stored, converter = describe_files(shapes.model), WeightConverter(shapes.model, mesh, DEFAULT_RULES)
    fill = partial(fill_params, stack_specs(specs, shapes.stack_mode), mesh=mesh, rules=DEFAULT_RULES)
    if config.model.load_format == "dummy":  # the numbers of an engine that packs nothing
        whole = param_specs(dataclasses.replace(shapes.model, packed=False))
        made = stream_dummy_params(whole, mesh=mesh, rules=DEFAULT_RULES, seed=config.model.seed)
        return fill(itertools.starmap(Piece, made), converter)
    path, load_format = files.find_weights(), config.model.load_format
    if (checkpoint_format(path) if load_format == "auto" else load_format) == "orbax":
        allow = config.model.allow_nonfinite
        restored = stream_params(path, param_specs(stored), mesh=mesh, rules=DEFAULT_RULES, allow_nonfinite=allow)
        return fill(itertools.starmap(Piece, restored), converter)
    with progress("Loading weights", unit="bytes") as report:
        pieces = stream_pieces(
            path,
            param_specs(stored),
            weight_sources(stored),
            ignored_weights(stored),
            mesh=mesh,
            rules=DEFAULT_RULES,
            progress=report,
            allow_nonfinite=config.model.allow_nonfinite,
            is_shared=has_tower or not stored.generates,  # then the others may be heads for other tasks
        )
        return fill(pieces, converter)


def open_update(path: str | Path, shapes: Shapes, mesh: Mesh) -> CheckpointUpdate:
    """Returns new weights for a model from the checkpoint directory `path`; WeightsError if it does not hold them."""
    from jaxserve.core.sharding import DEFAULT_RULES
    from jaxserve.core.weights import CheckpointUpdate, resolve_checkpoint
    from jaxserve.families.registry import describe_files, ignored_weights, param_specs, weight_sources

    model = describe_files(shapes.model)
    update = CheckpointUpdate(
        resolve_checkpoint(str(path), None),
        param_specs(model),
        weight_sources(model),
        ignored_weights(model),
        mesh,
        DEFAULT_RULES,
        shapes.config.model.allow_nonfinite,
    )
    update.check()
    return update
