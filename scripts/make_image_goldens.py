"""Builds tests/goldens/images.json: what transformers' image processors on Pillow make of pictures, and positions.

Runs in the reference environment (`make reference-env`), never in CI:

    .venv-reference/bin/python scripts/make_image_goldens.py
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import PIL
import torch
import transformers
from PIL import Image
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil
from transformers.models.qwen3_vl.modeling_qwen3_vl import Qwen3VLModel
from transformers.vision_utils import get_vision_interpolation_indices_and_weights, get_vision_position_ids

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.media.pictures import CHECKPOINTS, SIZES, draw  # noqa: E402

DEFAULT_OUT = ROOT / "tests" / "goldens" / "images.json"
_CLASSES = {
    "qwen3_vl": Qwen2VLImageProcessorPil,
    "gemma3": Gemma3ImageProcessorPil,
    "gemma4": Gemma4ImageProcessorPil,
    "pixtral": PixtralImageProcessorPil,
}
# Prompts: numbers of text tokens, and grids of images between them.
_PROMPTS: tuple[list[int | tuple[int, int, int]], ...] = (
    [5],
    [3, (1, 4, 4), 2],
    [(1, 2, 6), 4],
    [1, (1, 6, 2)],
    [2, (1, 4, 2), 1, (1, 2, 8), 1, (1, 8, 4), 3],
    [1, (1, 2, 2), 1, (1, 2, 2)],
)
_GRIDS = ((1, 2, 2), (1, 2, 6), (1, 14, 20), (1, 48, 48), (1, 96, 94), (1, 2, 250), (2, 4, 6))
_SIDE, _MERGE = 48, 2


def cut(values: np.ndarray, patch: int) -> np.ndarray:
    """Returns [3, height, width] as patches, row by row, as the weights of a convolution have them."""
    channels, height, width = values.shape
    tiles = values.reshape(channels, height // patch, patch, width // patch, patch)
    return tiles.transpose(1, 3, 0, 2, 4).reshape(-1, channels * patch * patch)


def process(family: str, given: dict[str, Any], around: dict[str, Any], pixels: np.ndarray) -> list[Any]:
    """Returns the grid, the number of tokens and half the digest of the patches of a picture."""
    config = {name: value for name, value in given.items() if value is not None}
    processor = _CLASSES[family](**config)
    options = {"do_convert_rgb": True}
    if family == "pixtral":
        patch, merge = around.get("patch_size", 16), around.get("spatial_merge_size", 1)
        options["patch_size"] = patch * merge
    made = processor(images=[Image.fromarray(pixels)], return_tensors="np", **options)
    values = made["pixel_values"]
    if family == "qwen3_vl":
        grid, patches = made["image_grid_thw"][0].tolist(), values
        tokens = int(np.prod(grid)) // processor.merge_size**2
    elif family == "gemma4":
        tokens = int(made["num_soft_tokens_per_image"][0])
        places = made["image_position_ids"][0]
        patches = values[0][places[:, 0] >= 0]
        grid = [1, int(places[:, 1].max()) + 1, int(places[:, 0].max()) + 1]
    else:
        patch, merge = (14, 0) if family == "gemma3" else (patch, merge)
        patches = cut(values[0], patch)
        grid = [1, values.shape[2] // patch, values.shape[3] // patch]
        tokens = 256 if family == "gemma3" else int(np.prod(grid)) // merge**2
    return [grid, tokens, digest(patches, "<f4")]


def find_positions(prompt: list[int | tuple[int, int, int]]) -> dict[str, Any]:
    """Returns Qwen3-VL's positions of a prompt."""
    kinds: list[int] = []
    grids = [part for part in prompt if not isinstance(part, int)]
    for part in prompt:
        kinds += [0] * part if isinstance(part, int) else [1] * (part[0] * part[1] * part[2] // 4)
    model = SimpleNamespace(
        config=SimpleNamespace(vision_config=SimpleNamespace(spatial_merge_size=2)),
        get_vision_position_ids=lambda *args, **kwargs: Qwen3VLModel.get_vision_position_ids(None, *args, **kwargs),
    )
    ids = torch.zeros((1, len(kinds)), dtype=torch.long)
    grid = torch.tensor(grids) if grids else None
    positions, delta = Qwen3VLModel.get_rope_index(model, ids, torch.tensor([kinds]), grid)
    return {"prompt": prompt, "positions": positions[:, 0].tolist(), "delta": int(delta[0, 0])}


def digest(array: np.ndarray, dtype: str) -> str:
    """Returns half the digest of an array's bytes."""
    return hashlib.sha256(np.ascontiguousarray(array, dtype=dtype).tobytes()).hexdigest()[:32]


def find_patches(grid: tuple[int, int, int]) -> dict[str, Any]:
    """Returns the digests of the places of patches, of the table's cells around them, and of the cells' weights."""
    tensor = torch.tensor([grid])
    places = get_vision_position_ids(tensor, _MERGE).numpy()
    indices, weights = get_vision_interpolation_indices_and_weights(
        tensor, _SIDE, align_corners=True, spatial_merge_size=_MERGE
    )
    found = [digest(places, "<i4"), digest(indices.numpy(), "<i4"), digest(weights.numpy(), "<f4")]
    return {"grid": grid, "found": found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT)
    out = parser.parse_args().out
    images = {}
    for height, width in SIZES:
        pixels = draw(height, width)
        found = {name: process(*checkpoint, pixels) for name, checkpoint in CHECKPOINTS.items()}
        images[f"{height}x{width}"] = found
    lines = {
        "versions": json.dumps({"transformers": transformers.__version__, "pillow": PIL.__version__}),
        "positions": "[" + ",\n".join(map(json.dumps, map(find_positions, _PROMPTS))) + "]",
        "patches": "[" + ",\n".join(map(json.dumps, map(find_patches, _GRIDS))) + "]",
        "images": "{" + ",\n".join(f"{json.dumps(name)}: {json.dumps(found)}" for name, found in images.items()) + "}",
    }
    out.write_text("{" + ",\n".join(f"{json.dumps(name)}: {text}" for name, text in lines.items()) + "}\n")


if __name__ == "__main__":
    main()
