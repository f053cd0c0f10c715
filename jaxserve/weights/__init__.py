"""Finds checkpoints, checks them, and streams their weights into sharded device arrays."""

from jaxserve.weights.checkpoint import download_weights, resolve_checkpoint
from jaxserve.weights.copies import untie_head
from jaxserve.weights.dummy import make_dummy_params
from jaxserve.weights.formats import checkpoint_format, refuse_foreign_folder
from jaxserve.weights.json_files import read_generation_config, read_hf_config
from jaxserve.weights.load import load_safetensors, stream_pieces
from jaxserve.weights.orbax import restore_params, save_params, stream_params
from jaxserve.weights.pieces import Piece
from jaxserve.weights.place import place_parameter
from jaxserve.weights.reader import read_tensor_shapes
from jaxserve.weights.update import CheckpointUpdate, check_update

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
    "stream_params",
    "stream_pieces",
    "untie_head",
]
