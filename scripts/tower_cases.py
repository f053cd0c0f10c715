"""The tiny models of scripts/make_tower_goldens.py: their configs, their processors, and how their towers are run."""

from __future__ import annotations

import sys
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil
from transformers.models.gemma4.image_processing_pil_gemma4 import Gemma4ImageProcessorPil
from transformers.models.pixtral.image_processing_pil_pixtral import PixtralImageProcessorPil
from transformers.models.qwen2_vl.image_processing_pil_qwen2_vl import Qwen2VLImageProcessorPil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

from tests.media.pictures import draw  # noqa: E402

_QWEN_PROCESSOR = {
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
_SHARED = {"shared_expert_intermediate_size": 24}
_IDS = {"image_token_id": 80, "video_token_id": 81, "vision_start_token_id": 78, "vision_end_token_id": 79}
# Layers with a state beside attention, of whose heads a half rotates.
_HYBRID_TEXT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_hidden_layers": 3,
    "layer_types": ["linear_attention", "full_attention", "linear_attention"],
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "linear_key_head_dim": 8,
    "linear_value_head_dim": 8,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "rope_parameters": {
        "rope_type": "default",
        "rope_theta": 10000.0,
        "partial_rotary_factor": 0.5,
        "mrope_section": [2, 1, 1],
        "mrope_interleaved": True,
    },
}
_PLAIN_TOWER = {"hidden_size": 32, "num_heads": 2, "depth": 2, "out_hidden_size": 32}
_GEMMA_PROCESSOR = {
    "size": {"height": 84, "width": 84},
    "image_seq_length": 9,
    "image_mean": [0.5] * 3,
    "image_std": [0.5] * 3,
    "image_processor_type": "Gemma3ImageProcessorFast",
}
# The window is smaller than an image, so each layer of the two kinds masks it in another way.
_GEMMA_TEXT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "query_pre_attn_scalar": 16,
    "max_position_embeddings": 256,
    "eos_token_id": 2,
    "sliding_window": 6,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
}
_GEMMA_TOWER = {
    "hidden_size": 24,
    "image_size": 84,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 14,
    "vision_use_head": False,
}
_GEMMA_IDS = {"boi_token_index": 78, "eoi_token_index": 79, "image_token_index": 80, "mm_tokens_per_image": 9}
_GEMMA4_PROCESSOR = {
    "max_soft_tokens": 70,
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "do_normalize": False,
    "image_processor_type": "Gemma4ImageProcessor",
}
# Layers have inputs of their own, whose rows are those of padding where images are.
_GEMMA4_TEXT = {
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "global_head_dim": 16,
    "max_position_embeddings": 512,
    "eos_token_id": 2,
    "pad_token_id": 0,
    "sliding_window": 24,
    "layer_types": ["sliding_attention", "sliding_attention", "full_attention"],
    "use_bidirectional_attention": "vision",
    "hidden_size_per_layer_input": 8,
    "vocab_size_per_layer_input": 90,
}
_GEMMA4_TOWER = {
    "hidden_size": 32,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "num_hidden_layers": 2,
    "patch_size": 2,
    "pooling_kernel_size": 2,
    "position_embedding_size": 140,
    "use_clipped_linears": True,
    "standardize": True,
}
_GEMMA4_IDS = {"boi_token_id": 78, "eoi_token_id": 79, "image_token_id": 80, "audio_config": None}
# A tokenizer has the ids at the ends of rows.
_PIXTRAL_IDS = {"image_token_index": 80, "vision_feature_layer": -1, "tie_word_embeddings": False}
_PIXTRAL_SPECIAL = {"[IMG]": 80, "[IMG_BREAK]": 81, "[IMG_END]": 82}
_PIXTRAL_PROCESSOR = {
    "size": {"longest_edge": 64},
    "patch_size": {"height": 4, "width": 4},
    "image_mean": [0.48145466, 0.4578275, 0.40821073],
    "image_std": [0.26862954, 0.26130258, 0.27577711],
    "image_processor_type": "PixtralImageProcessorFast",
}
_PIXTRAL_TOWER = {
    "model_type": "pixtral",
    "hidden_size": 32,
    "hidden_act": "silu",
    "image_size": 64,
    "intermediate_size": 40,
    "num_attention_heads": 2,
    "num_hidden_layers": 2,
    "patch_size": 4,
}
_MISTRAL_TEXT = {
    "model_type": "mistral",
    "vocab_size": 90,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 16,
    "max_position_embeddings": 256,
    "rms_norm_eps": 1e-4,
    "sliding_window": None,
    "eos_token_id": 2,
}
START, END, IMAGE = 78, 79, 80


@dataclass(frozen=True)
class Case:
    """A tiny model. `pixels` are the heights and widths of its pictures, which its processor does not change."""

    architecture: str
    vision: dict[str, Any]
    text: dict[str, Any]
    keys: dict[str, Any]  # of config.json beside the two
    settings: dict[str, Any]  # of preprocessor_config.json
    processor: Callable[..., Any]
    run_tower: Callable[[Any, dict[str, Any]], torch.Tensor]  # [M, P, D]
    modules: tuple[str, ...]  # of the model, which have weights
    token_types: str | None = None  # the model's argument that says which tokens are of images
    pixels: tuple[tuple[int, int], ...] = ((16, 24), (40, 32), (8, 56), (48, 48))
    scales: tuple[tuple[str, float], ...] = ()  # of the text's weights by names: else answers repeat one token
    step: int = 0  # each picture is cut so many pixels to the right of the one before, where all have one size
    around: dict[str, Any] | None = None  # processor_config.json
    special: dict[str, int] | None = None  # tokens of the tokenizer, which other cases have none of

    def list_ids(self, made: dict[str, Any]) -> list[list[int]]:
        """The ids in place of each picture's placeholder."""
        if "image_grid_thw" in made:
            return [[IMAGE] * (int(grid.prod()) // 4) for grid in made["image_grid_thw"]]
        if "image_position_ids" in made:
            edge = self.settings["pooling_kernel_size"]
            counts = ((places >= 0).all(dim=-1).sum() for places in made["image_position_ids"])
            return [[IMAGE] * (int(count) // edge**2) for count in counts]
        if self.special is None or self.around is None:
            return [[IMAGE] * self.settings.get("image_seq_length", 0)] * len(made.get("pixel_values", ()))
        _, row_end, end = self.special.values()
        edge = self.around["patch_size"] * self.around.get("spatial_merge_size", 1)
        sizes = (size // edge for size in made.get("image_sizes", ()))
        return [[*(([IMAGE] * int(columns) + [row_end]) * int(rows))[:-1], end] for rows, columns in sizes]

    def draw(self, index: int) -> np.ndarray:
        """A picture [height, width, 3] uint8."""
        (height, width), left = self.pixels[index], self.step * index
        return draw(height, left + width)[:, left:]


def run_qwen(model: Any, made: dict[str, Any]) -> torch.Tensor:
    found = model.model.visual(made["pixel_values"], made["image_grid_thw"])
    return torch.stack([found.pooler_output, *getattr(found, "deepstack_features", ())], dim=1)


def run_gemma(model: Any, made: dict[str, Any]) -> torch.Tensor:
    return model.get_image_features(made["pixel_values"], return_dict=True).pooler_output.transpose(0, 1)


def run_gemma4(model: Any, made: dict[str, Any]) -> torch.Tensor:
    return model.get_image_features(**made, return_dict=True).pooler_output[0][:, None]


def run_pixtral(model: Any, made: dict[str, Any]) -> torch.Tensor:
    return model.model.get_image_features(**made, return_dict=True).pooler_output[0][:, None]


def make_qwen(architecture: str, vision: dict[str, Any], text: dict[str, Any]) -> Case:
    modules = ("model.visual", "model.language_model", "lm_head")
    types = "mm_token_type_ids"
    kind = Qwen2VLImageProcessorPil
    tower = _TOWER | vision
    if "layer_types" in text:
        del tower["deepstack_visual_indexes"]
    return Case(architecture, tower, text, _IDS, _QWEN_PROCESSOR, kind, run_qwen, modules, types)


def make_pixtral(
    architecture: str, text: dict[str, Any], keys: dict[str, Any], merge_size: int, pixels: tuple[tuple[int, int], ...]
) -> Case:
    modules = ("model.vision_tower", "model.multi_modal_projector", "model.language_model", "lm_head")
    return Case(
        architecture,
        _PIXTRAL_TOWER,
        text,
        _PIXTRAL_IDS | keys,
        _PIXTRAL_PROCESSOR,
        PixtralImageProcessorPil,
        run_pixtral,
        modules,
        around={"patch_size": 4, "spatial_merge_size": merge_size, "image_token": "[IMG]"},
        special=_PIXTRAL_SPECIAL,
        pixels=pixels,
    )


# Heads of 12 are no multiple of what kernels take; those of 16 are.
CASES: dict[str, Case] = {
    "qwen3_vl": make_qwen("Qwen3VL", {"hidden_size": 24, "num_heads": 2}, _TEXT),
    "qwen3_vl_moe": make_qwen(
        "Qwen3VLMoe",
        {"hidden_size": 32, "num_heads": 2, "depth": 2, "deepstack_visual_indexes": [0]},
        _TEXT | _EXPERTS,
    ),
    "qwen3_5": make_qwen("Qwen3_5", _PLAIN_TOWER, _HYBRID_TEXT),
    "qwen3_5_moe": make_qwen("Qwen3_5Moe", _PLAIN_TOWER | {"depth": 1}, _HYBRID_TEXT | _EXPERTS | _SHARED),
    "gemma3": Case(
        "Gemma3",
        _GEMMA_TOWER,
        _GEMMA_TEXT,
        _GEMMA_IDS,
        _GEMMA_PROCESSOR,
        Gemma3ImageProcessorPil,
        run_gemma,
        ("model.vision_tower", "model.multi_modal_projector", "model.language_model"),
        "token_type_ids",
        ((84, 84),) * 4,
        scales=(("embed_tokens", 0.3), ("q_norm", 3.0)),
        step=5,
    ),
    "gemma4": Case(
        "Gemma4",
        _GEMMA4_TOWER,
        _GEMMA4_TEXT,
        _GEMMA4_IDS,
        _GEMMA4_PROCESSOR,
        Gemma4ImageProcessorPil,
        run_gemma4,
        ("model.vision_tower", "model.embed_vision", "model.language_model"),
        "mm_token_type_ids",
        ((28, 40), (32, 32), (20, 52), (12, 92)),
        scales=(("post_", 0.3), ("embed_tokens.", 0.05), ("q_norm", 2.0)),  # `post_`: else roundings grow
    ),
    "mistral3": make_pixtral("Mistral3", _MISTRAL_TEXT, {}, 2, ((16, 24), (40, 32), (8, 56), (48, 48))),
    "llava": make_pixtral(
        "Llava",
        _MISTRAL_TEXT | {"num_hidden_layers": 1},
        {"vision_feature_select_strategy": "full"},
        1,
        ((8, 12), (20, 16), (4, 28), (24, 24)),
    ),
}
