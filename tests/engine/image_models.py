"""A model's tokenizer and image processor without the model: prompts with images become requests."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import tokenizers as library
from PIL import Image

from jaxserve.config import EngineConfig
from jaxserve.engine.images import ImageInput, choose_images
from jaxserve.engine.model_files import ModelFiles
from jaxserve.engine.prompts import RequestFactory
from jaxserve.media.prompt import ImageTokens
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers import builders

SPECIAL = ("<|vision_start|>", "<|vision_end|>", "<|image_pad|>")
MARKED = "<|vision_start|><|image_pad|><|vision_end|>"
CONTEXT = 512
# Patches of 4 pixels in blocks of 2 x 2: an image has 4 to 64 tokens.
SETTINGS = {
    "size": {"shortest_edge": 4 * 64, "longest_edge": 64 * 64},
    "patch_size": 4,
    "temporal_patch_size": 2,
    "merge_size": 2,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
}
# As templates of Qwen3-VL are: content is one string, or parts.
TEMPLATE = """{%- if tools -%}<tools>{{ tools | tojson }}</tools>{%- endif -%}
{%- for message in messages -%}<|im_start|>{{ message.role }}
{% if message.content is string %}{{ message.content }}{%- else -%}{%- for part in message.content -%}
{%- if part.type == 'image' -%}<|vision_start|><|image_pad|><|vision_end|>{%- else -%}{{ part.text }}{%- endif -%}
{%- endfor -%}{%- endif -%}
{%- for call in message.tool_calls or [] -%}<tool_call>{{ call.function | tojson }}</tool_call>{%- endfor -%}<|im_end|>
{% endfor -%}{%- if add_generation_prompt -%}<|im_start|>assistant
{% endif -%}"""


def make_folder(folder: Path, **settings: Any) -> Path:
    """Writes the tokenizer and the processor's settings of a checkpoint."""
    builders.make_byte_level(folder)
    made = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    made.add_special_tokens(list(SPECIAL))
    made.save(str(folder / "tokenizer.json"))
    builders.write_json(folder / "tokenizer_config.json", {"chat_template": TEMPLATE, "eos_token": "<|im_end|>"})
    (folder / "preprocessor_config.json").write_text(json.dumps({**SETTINGS, **settings}))
    return folder


def make_tower(tokenizer: Tokenizer | None) -> Any:
    """What the host reads of a family's `Tower`."""
    place = 3 if tokenizer is None else tokenizer.special_tokens["<|image_pad|>"]
    tokens = ImageTokens(mark="<|image_pad|>", placeholder="<|image_pad|>", placeholder_id=place)
    return SimpleNamespace(processor="qwen3_vl", tokens=lambda config: tokens)


def make_files(folder: Path | None, **config: Any) -> ModelFiles:
    return ModelFiles(folder, {"model_type": "seeing", "vision_config": {}, **config}, {})


def make_model(context: int = CONTEXT, **changes: Any) -> Any:
    return SimpleNamespace(family="seeing", generates=True, max_model_len=context, **changes)


def make_images(folder: Path, tokenizer: Tokenizer, context: int = CONTEXT, **options: Any) -> ImageInput:
    config = EngineConfig.from_options(**options)
    chosen = choose_images(config, make_files(folder), make_model(context), {"seeing": make_tower(tokenizer)})
    assert chosen is not None
    return ImageInput(chosen, config, context)


def make_factory(folder: Path, **options: Any) -> RequestFactory:
    tokenizer = load_tokenizer(folder)
    images = make_images(folder, tokenizer, **options)
    sizes = {"vocab_size": 400, "eos_token_ids": (), "seed": 0, "max_model_len": CONTEXT, "max_logprobs": 5}
    return RequestFactory(tokenizer, images=images, **sizes)


def draw(height: int = 32, width: int = 48, value: int = 90) -> Image.Image:
    pixels = np.full((height, width, 3), value, np.uint8)
    pixels[: height // 2] //= 2
    return Image.fromarray(pixels)


_TINY = Path(__file__).parents[1] / "goldens" / "towers" / "qwen3_vl"


def make_checkpoint(folder: Path, *, context: int = 1024) -> Path:
    """Writes a whole tiny Qwen3-VL but for its weights, which `load_format="dummy"` makes, and returns the folder."""
    make_folder(folder)
    ids = library.Tokenizer.from_file(str(folder / "tokenizer.json"))
    config = json.loads((_TINY / "config.json").read_text())
    names = ("vision_start_token_id", "vision_end_token_id", "image_token_id")
    config |= {name: ids.token_to_id(token) for name, token in zip(names, SPECIAL, strict=True)}
    config["text_config"] |= {
        "vocab_size": -(-ids.get_vocab_size() // 8) * 8,
        "eos_token_id": ids.token_to_id("<|im_end|>"),
        "max_position_embeddings": context,
    }
    builders.write_json(folder / "config.json", config)
    return folder
