"""Weights: checkpoints found, checked, and streamed into sharded device arrays."""

from jaxserve.weights.checkpoint import checkpoint_format, resolve_checkpoint
from jaxserve.weights.dummy import make_dummy_params
from jaxserve.weights.json_files import read_generation_config, read_hf_config
from jaxserve.weights.load import load_safetensors, stream_safetensors
from jaxserve.weights.orbax import restore_params, save_params
from jaxserve.weights.place import place_parameter
from jaxserve.weights.reader import read_tensor_shapes
from jaxserve.weights.update import check_update

__all__ = [
    "check_update",
    "checkpoint_format",
    "load_safetensors",
    "make_dummy_params",
    "place_parameter",
    "read_generation_config",
    "read_hf_config",
    "read_tensor_shapes",
    "resolve_checkpoint",
    "restore_params",
    "save_params",
    "stream_safetensors",
]
