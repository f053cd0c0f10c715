"""Builds tests/goldens/towers: tiny random models that read images, and what transformers makes of pictures.

Runs in the reference environment (`make reference-env`), never in CI:

    .venv-reference/bin/python scripts/make_tower_goldens.py

All arithmetic is f32 with eager attention. The files are those of a whole model; only those whose tokens
are known to it alone have a tokenizer.
"""

from __future__ import annotations

import argparse
import json
import math
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import torch
import transformers
from make_encoder_goldens import fill
from PIL import Image
from safetensors.torch import save_file
from tower_cases import CASES, END, IMAGE, ROOT, START, Case
from transformers import AutoConfig, AutoModelForImageTextToText

DEFAULT_OUT = ROOT / "tests" / "goldens" / "towers"
_NUM_GREEDY = 64
# Prompts by name: numbers of text tokens, and pictures by their place in `Case.pixels` as strings.
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
            ids += [START, IMAGE, END]
    return ids, pictures


@torch.no_grad()
def record_prompts(case: Case, model: Any) -> dict[str, np.ndarray]:
    """Of each prompt its ids and pictures, the logits f32 [T, V] of all its tokens, and greedy ids.

    Each forward pass computes the whole text, without a cache.
    """
    arrays: dict[str, np.ndarray] = {}
    for name, parts in PROMPTS.items():
        short, pictures = make_ids(parts)
        made = process(case, [case.draw(index) for index in pictures]) if pictures else {}
        shown = iter(case.list_ids(made))
        ids = [token for each in short for token in (next(shown) if each == IMAGE else [each])]
        greedy: list[int] = []
        for _ in range(_NUM_GREEDY):
            tokens = torch.tensor([[*ids, *greedy]])
            types = {} if case.token_types is None else {case.token_types: (tokens == IMAGE).int()}
            logits = model(tokens, use_cache=False, **types, **made).logits[0]
            if not greedy:
                arrays[f"{name}_logits"] = logits.numpy()
            greedy.append(int(logits[-1].argmax()))
        arrays |= {f"{name}_ids": np.array(short), f"{name}_pictures": np.array(pictures, int)}
        arrays |= {f"{name}_greedy": np.array(greedy)}
    return arrays


_ARGUMENTS = ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")


def process(case: Case, pictures: list[np.ndarray]) -> dict[str, Any]:
    """The model's arguments for pictures."""
    images = [Image.fromarray(picture) for picture in pictures]
    made = dict(case.processor(**case.settings)(images=images, return_tensors="pt", do_convert_rgb=True))
    return {
        name: made[name]
        for name in ("pixel_values", "image_grid_thw", "image_sizes", "image_position_ids")
        if name in made
    }


@torch.no_grad()
def record(case: Case, model: Any) -> dict[str, np.ndarray]:
    """Pixels uint8 [height, width, 3] and vectors f32 [M, P, D] of pictures, each computed alone."""
    arrays = {}
    for index, size in enumerate(case.pixels):
        pixels = case.draw(index)
        made = process(case, [pixels])
        if "image_grid_thw" in made:
            assert made["image_grid_thw"].tolist() == [[1, size[0] // 4, size[1] // 4]]
        if "image_sizes" in made:
            assert made["image_sizes"].tolist() == [list(size)]
        arrays |= {f"pixels_{index}": pixels, f"vectors_{index}": case.run_tower(model, made).numpy()}
    return arrays


_PUBLISHED = {
    "model.language_model.": "language_model.model.",
    "model.multi_modal_projector.": "multi_modal_projector.",
    "model.vision_tower.": "vision_tower.",
    "lm_head.": "language_model.lm_head.",
}
# The head of these two is their table of embeddings.
_RENAMED = {"gemma3": _PUBLISHED | {"model.vision_tower.": "vision_tower.vision_model.", "lm_head.": ""}}
_RENAMED["gemma4"] = {"model.": "model."}
_RENAMED |= {"mistral3": _PUBLISHED, "llava": _PUBLISHED}


def publish(model: Any) -> dict[str, torch.Tensor]:
    """The tensors under the names that published checkpoints have."""
    tensors = {key: tensor.contiguous() for key, tensor in model.state_dict().items()}
    renamed = _RENAMED.get(model.config.model_type)
    if renamed is None:
        turned = ".experts." if model.config.model_type == "qwen3_vl_moe" else None  # they are published as [in, out]
        return {key: each.mT.contiguous() if turned and turned in key else each for key, each in tensors.items()}
    changes = [(key, *each) for key in tensors for each in renamed.items() if key.startswith(each[0]) and each[1]]
    return {key.replace(old, new, 1): tensors[key] for key, old, new in changes}


def fill_buffers(model: Any) -> None:
    """Fills what towers hold beside weights: bounds of products that cut some numbers, and what standardizes vectors.

    Bounds of what goes in are equal where products share it, as in published files.
    """
    generator = torch.Generator().manual_seed(0)
    for name, buffer in model.named_buffers():
        leaf = name.rpartition(".")[2]
        if leaf in ("std_bias", "std_scale"):
            buffer.copy_(torch.rand(buffer.shape, generator=generator) + 0.5)
        if leaf in ("input_min", "input_max", "output_min", "output_max"):
            most = 1.5 if leaf.startswith("input") else 0.5 + 0.5 * torch.rand((), generator=generator)
            buffer.copy_(most * (-1.1 if leaf.endswith("min") else 1.0))


def write_tokenizer(path: Path, special: dict[str, int]) -> None:
    """Writes a tokenizer of single letters with special tokens."""
    flags = {"special": True, "single_word": False, "lstrip": False, "rstrip": False, "normalized": False}
    added = [{"id": token_id, "content": text, **flags} for text, token_id in special.items()]
    vocab = {chr(ord("0") + token_id): token_id for token_id in range(min(special.values()))}
    path.write_text(json.dumps({"added_tokens": added, "model": {"type": "BPE", "vocab": vocab, "merges": []}}) + "\n")


def main() -> None:
    """Builds all cases."""
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--out", type=Path, default=DEFAULT_OUT, help="folder of the goldens")
    parser.add_argument("--case", choices=CASES, help="only this one")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    for name in CASES if arguments.case is None else [arguments.case]:
        case, folder = CASES[name], arguments.out / name
        shutil.rmtree(folder, ignore_errors=True)
        config = AutoConfig.for_model(name, vision_config=case.vision, text_config=case.text, **case.keys)
        config.architectures, config.dtype = [f"{case.architecture}ForConditionalGeneration"], torch.float32
        config.save_pretrained(folder)
        (folder / "preprocessor_config.json").write_text(json.dumps(case.settings, indent=1) + "\n")
        if case.around is not None:
            (folder / "processor_config.json").write_text(json.dumps(case.around, indent=1) + "\n")
        if case.special is not None:
            write_tokenizer(folder / "tokenizer.json", case.special)
        options = {"attn_implementation": "eager", "dtype": torch.float32}
        model = AutoModelForImageTextToText.from_config(config, **options).eval()
        for part in case.modules:
            fill(model.get_submodule(part))
        fill_buffers(model.model)
        with torch.no_grad():
            for key, parameter in model.model.language_model.named_parameters():
                parameter.mul_(math.prod(scale for part, scale in case.scales if part in key))
                if key.endswith("A_log"):
                    parameter.sub_(2.0)  # states that last for some tokens
            model.lm_head.weight[START:] = 0  # no answer has a token of images
        save_file(publish(model), folder / "model.safetensors", {"format": "pt"})
        np.savez_compressed(folder / "golden.npz", **record(case, model), **record_prompts(case, model))
        print(name, sum(file.stat().st_size for file in folder.rglob("*") if file.is_file()), "bytes")
    versions = {module.__name__: module.__version__ for module in (transformers, torch)}
    (arguments.out / "versions.json").write_text(json.dumps(versions, indent=1) + "\n")


if __name__ == "__main__":
    main()
