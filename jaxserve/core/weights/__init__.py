"""Finds checkpoints, checks them, and streams their weights into sharded device arrays."""

from jaxserve.core.weights.checkpoint import download_weights, resolve_checkpoint
from jaxserve.core.weights.copies import untie_head
from jaxserve.core.weights.dummy import make_dummy_params, stream_dummy_params
from jaxserve.core.weights.file_formats import checkpoint_format, refuse_foreign_folder
from jaxserve.core.weights.json_files import read_generation_config, read_hf_config
from jaxserve.core.weights.load import load_safetensors, stream_pieces
from jaxserve.core.weights.orbax import restore_params, save_params, stream_params
from jaxserve.core.weights.pieces import Piece
from jaxserve.core.weights.place import place_parameter
from jaxserve.core.weights.reader import read_tensor_shapes
from jaxserve.core.weights.update import CheckpointUpdate, check_update

__all__ = [
    "CheckpointUpdate",
    "Piece",
    "check_update",
    "checkpoint_format",
    "download_weights",
    "load_safetensors",
    "make_dummy_params",
    "place_parameter",
    "read_generation_config",
    "read_hf_config",
    "read_tensor_shapes",
    "refuse_foreign_folder",
    "resolve_checkpoint",
    "restore_params",
    "save_params",
    "stream_dummy_params",
    "stream_params",
    "stream_pieces",
    "untie_head",
]
