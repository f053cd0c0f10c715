"""Builds tests/goldens/towers: tiny random models that read images, and what transformers makes of pictures.

Runs in the reference environment (`make reference-env`), never in CI:

    .venv-reference/bin/python scripts/make_tower_goldens.py

All arithmetic is f32 with eager attention. The files are those of a whole model without a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import shutil
import sys
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_encoder_goldens import fill
from PIL import Image
from safetensors.torch import save_file
from transformers import AutoConfig, AutoModelForImageTextToText
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.media.pictures import draw  # noqa: E402

DEFAULT_OUT = ROOT / "tests" / "goldens" / "towers"
PIXELS = ((16, 24), (40, 32), (8, 56), (48, 48))  # heights and widths, which no processor changes
_PROCESSOR = {
    "size": {"longest_edge": 4096, "shortest_edge": 64},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "Qwen2VLImageProcessorFast",
}
_TOWER = {
    "depth": 3,
    "intermediate_size": 56,
    "out_hidden_size": 40,
    "patch_size": 4,
    "spatial_merge_size": 2,
    "temporal_patch_size": 2,
    "num_position_embeddings": 64,
    "deepstack_visual_indexes": [0, 1],
}
_TEXT = {
    "vocab_size": 90,
    "hidden_size": 40,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "pad_token_id": None,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "mrope_section": [3, 3, 2],
        "mrope_interleaved": True,
    },
}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 24}
_IDS = {"image_token_id": 80, "video_token_id": 81, "vision_start_token_id": 78, "vision_end_token_id": 79}
# Heads of 12 are no multiple of what kernels take; those of 16 are.
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": ("qwen3_vl", _TOWER | {"hidden_size": 24, "num_heads": 2}, _TEXT),
    "qwen3_vl_moe": (
        "qwen3_vl_moe",
        _TOWER | {"hidden_size": 32, "num_heads": 2, "depth": 2, "deepstack_visual_indexes": [0]},
        _TEXT | _EXPERTS,
    ),
}
_START, _END, _IMAGE = (_IDS[key] for key in ("vision_start_token_id", "vision_end_token_id", "image_token_id"))
_NUM_GREEDY = 64
# Prompts by name: numbers of text tokens, and pictures by their place in PIXELS as strings.
PROMPTS: dict[str, tuple[int | str, ...]] = {
    "text": (40,),
    "one": (7, "1", 9),
    "three": (3, "0", 5, "1", "2", 4),
    "first_and_last": ("3", 6, "0"),
    "two_turns": (5, "3", 20, "1", 8),
}


def make_ids(parts: tuple[int | str, ...]) -> tuple[list[int], list[int]]:
    """The ids of a prompt with one placeholder for each picture, and its pictures."""
    rng, ids, pictures = np.random.default_rng(len(parts)), [], []
    for part in parts:
        if isinstance(part, int):
            ids += rng.integers(3, 78, part).tolist()
        else:
            pictures.append(int(part))
            ids += [_START, _IMAGE, _END]
    return ids, pictures


@torch.no_grad()
def record_prompts(model: Any) -> dict[str, np.ndarray]:
    """Of each prompt its ids and pictures, the logits f32 [T, V] of all its tokens, and greedy ids.

    Each forward pass computes the whole text, without a cache.
    """
    processor, arrays = Qwen2VLImageProcessorPil(**_PROCESSOR), {}
    for name, parts in PROMPTS.items():
        short, pictures = make_ids(parts)
        counts = iter(PIXELS[index][0] * PIXELS[index][1] // 64 for index in pictures)
        ids = [token for each in short for token in ([each] * next(counts) if each == _IMAGE else [each])]
        images = [Image.fromarray(draw(*PIXELS[index])) for index in pictures]
        made = dict(processor(images=images, return_tensors="pt", do_convert_rgb=True)) if images else {}
        greedy: list[int] = []
        for _ in range(_NUM_GREEDY):
            tokens = torch.tensor([[*ids, *greedy]])
            logits = model(tokens, mm_token_type_ids=(tokens == _IMAGE).int(), use_cache=False, **made).logits[0]
            if not greedy:
                arrays[f"{name}_logits"] = logits.numpy()
            greedy.append(int(logits[-1].argmax()))
        arrays |= {f"{name}_ids": np.array(short), f"{name}_pictures": np.array(pictures, int)}
        arrays |= {f"{name}_greedy": np.array(greedy)}
    return arrays


@torch.no_grad()
def record(tower: Any) -> dict[str, np.ndarray]:
    """Pixels uint8 [height, width, 3] and vectors f32 [M, P, D] of pictures, each computed alone."""
    processor, arrays = Qwen2VLImageProcessorPil(**_PROCESSOR), {}
    for index, size in enumerate(PIXELS):
        pixels = draw(*size)
        made = processor(images=[Image.fromarray(pixels)], return_tensors="pt", do_convert_rgb=True)
        grid = made["image_grid_thw"]
        assert grid.tolist() == [[1, size[0] // 4, size[1] // 4]]
        found = tower(made["pixel_values"], grid)
        vectors = torch.stack([found.pooler_output, *found.deepstack_features], dim=1)
        arrays |= {f"pixels_{index}": pixels, f"vectors_{index}": vectors.numpy()}
    return arrays


def main() -> None:
    """Builds all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the goldens")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name, (model_type, tower_keys, text_keys) in CASES.items():
        folder = arguments.out / name
        shutil.rmtree(folder, ignore_errors=True)
        config = AutoConfig.for_model(model_type, vision_config=tower_keys, text_config=text_keys, **_IDS)
        architecture = {"qwen3_vl": "Qwen3VL", "qwen3_vl_moe": "Qwen3VLMoe"}[model_type]
        config.architectures, config.dtype = [f"{architecture}ForConditionalGeneration"], torch.float32
        config.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(_PROCESSOR, indent=1) + "\n")
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        model = AutoModelForImageTextToText.from_config(config, **options).eval()
        for part in (model.model.visual, model.model.language_model, model.lm_head):
            fill(part)
        with torch.no_grad():
            model.lm_head.weight[_START:] = 0  # no answer has a token of images
        # Published files have matrices of experts as [E, in, out].
        state = model.state_dict().items()
        tensors = {key: (tensor.mT if ".mlp.experts." in key else tensor).contiguous() for key, tensor in state}
        save_file(tensors, folder / "model.safetensors", {"format": "pt"})
        np.savez_compressed(folder / "golden.npz", **record(model.model.visual), **record_prompts(model))
        print(name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), "bytes")
    versions = {module.__name__: module.__version__ for module in (transformers, torch)}
    (arguments.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
