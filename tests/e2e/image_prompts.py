"""What tests of images through whole engines share: tiny models with a tower, and prompts with pictures."""

from __future__ import annotations

import random
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
from PIL import Image

from jaxserve import LLM
from tests.e2e.helpers import CACHE
from tests.media.pictures import draw

TOWERS = Path(__file__).resolve().parents[1] / "goldens" / "towers"
START, END, IMAGE = 78, 79, 80  # the ids around an image, and that of its placeholder
PAGE = 32
# Four rows, and the fewest tokens of a step, so that images are cut.
SIZES: dict[str, Any] = {
    "max_num_seqs": 4,
    "max_num_batched_tokens": 36,
    "precompile_bs_paddings": [4],
    "precompile_token_paddings": [36],
    "page_size": PAGE,
    "max_model_len": 192,
    "num_kv_pages_override": 75,
}
WHOLE: dict[str, Any] = {"max_num_batched_tokens": 192, "precompile_token_paddings": [192]}
# An image of this model has up to 70 tokens, which one step must have room for.
OWN_SIZES: dict[str, dict[str, Any]] = {
    "gemma4": {"max_num_batched_tokens": 80, "precompile_token_paddings": [80], "max_model_len": 320},
}
Prompt = dict[str, Any]


def make_seeing(name: str = "qwen3_vl", **options: Any) -> LLM:
    """A small engine of a golden model that reads images, in float32."""
    defaults = {"dtype": "float32", "skip_tokenizer_init": True, "show_progress": False}
    return LLM(str(TOWERS / name), **(defaults | SIZES | OWN_SIZES.get(name, {}) | CACHE | options))


@dataclass(frozen=True)
class SeenPrompt:
    """A prompt of a golden model, and what transformers makes of it."""

    prompt: Prompt
    logits: np.ndarray  # float32 [T, V] of all its tokens
    greedy: list[int]  # 64 ids


@cache
def load_prompts(name: str) -> dict[str, SeenPrompt]:
    """The prompts of a golden model: text, one, three, first_and_last, two_turns."""
    with np.load(TOWERS / name / "golden.npz") as stored:
        arrays = dict(stored)
    found = {}
    for label in [key.removesuffix("_greedy") for key in arrays if key.endswith("_greedy")]:
        pixels = [arrays[f"pixels_{index}"] for index in arrays[f"{label}_pictures"]]
        prompt = make_prompt(arrays[f"{label}_ids"].tolist(), [Image.fromarray(each) for each in pixels])
        found[label] = SeenPrompt(prompt, arrays[f"{label}_logits"], arrays[f"{label}_greedy"].tolist())
    return found


def make_prompt(ids: Sequence[int], images: Sequence[Image.Image] = (), **more: Any) -> Prompt:
    """A prompt of ids with one placeholder for each image."""
    shown = {"multi_modal_data": {"image": list(images)}} if images else {}
    return {"prompt_token_ids": list(ids), **shown, **more}


def show(*parts: int | Image.Image, seed: int = 0, **more: Any) -> Prompt:
    """A prompt of numbers of text tokens, and of images between them."""
    rng, ids, images = random.Random(seed), [], []
    for part in parts:
        if isinstance(part, int):
            ids += [rng.randrange(3, START) for _ in range(part)]
        else:
            images.append(part)
            ids += [START, IMAGE, END]
    return make_prompt(ids, images, **more)


def picture(height: int, width: int, seed: int = 0) -> Image.Image:
    """A picture of any size, which the processor may have to change; another one for each seed."""
    return Image.fromarray((draw(height, width).astype(int) * (2 * seed + 1) + 29 * seed).astype(np.uint8))


def make_mixed_prompts(count: int, seed: int = 7) -> list[Prompt]:
    """Prompts with at most three images of any sizes, and one in four without."""
    rng = random.Random(seed)
    prompts = []
    for index in range(count):
        parts: list[int | Image.Image] = [rng.randint(1, 20)]
        for _ in range(index % 4):
            height, width = rng.choice([(8, 8), (30, 50), (64, 24), (17, 31), (100, 40), (40, 56)])
            parts += [picture(height, width, rng.randrange(5)), rng.randint(1, 12)]
        prompts.append(show(*parts, seed=index))
    return prompts


def run(llm: LLM, prompts: Sequence[Prompt], params: Any) -> list[Any]:
    """The outputs of prompts that are answered beside each other."""
    return llm.generate(list(prompts), params, use_tqdm=False)


def answer(llm: LLM, prompts: Sequence[Prompt], params: Any) -> list[list[int]]:
    """The ids of their answers."""
    return [output.outputs[0].token_ids for output in run(llm, prompts, params)]
