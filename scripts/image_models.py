"""Published models that read images, for the compile gate: config.json, and how images are made into patches.

Keys that change no program are left out. Another model is another entry of `IMAGE_MODELS`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

from jaxserve.core.models.base import DecoderConfig
from jaxserve.core.models.tower import TowerConfig
from jaxserve.core.runtime.tower import fit_tower
from jaxserve.families.towers import TOWERS, parse_tower
from jaxserve.media.processors import read_processor
from jaxserve.media.processors.settings import ImageSettings
from jaxserve.presets import load_preset


@dataclass(frozen=True)
class ImageModel:
    """A published model that reads images.

    `patches` are those of a step's images: the most by default, then those of other programs of the tower.
    `processor` is preprocessor_config.json, `around` the settings of processor_config.json around it.
    """

    patches: tuple[int, ...]
    model_type: str
    text: Mapping[str, Any]
    vision: Mapping[str, Any]
    processor: Mapping[str, Any]
    around: Mapping[str, Any] = field(default_factory=dict)
    keys: Mapping[str, Any] = field(default_factory=dict)  # of config.json, beside these
    impl: str | None = None  # of its attention, where the device's kernels cannot do the text model's heads

    @property
    def config(self) -> dict[str, Any]:
        """Its config.json."""
        parts = {"text_config": dict(self.text), "vision_config": dict(self.vision)}
        return {"model_type": self.model_type, **self.keys, **parts}

    @property
    def num_layers(self) -> int:
        """Layers of its tower."""
        return self.vision[self._depth]

    @property
    def _depth(self) -> str:
        return "depth" if "depth" in self.vision else "num_hidden_layers"

    def make_tower(self, text: DecoderConfig, num_devices: int, num_layers: int | None = None) -> TowerConfig:
        """Returns the tower of an engine with the text model, with all layers, or a few, of which the first is deep."""
        vision = dict(self.vision)
        if num_layers not in (None, self.num_layers):
            vision[self._depth] = num_layers
            if "deepstack_visual_indexes" in vision:
                vision["deepstack_visual_indexes"] = [0]
        processor = read_processor(TOWERS[text.family].processor, ImageSettings(self.processor, self.around))
        shape, most = processor.shape, self.patches[0]
        processor = replace(processor, shape=shape.limit_patches(min(shape.most_patches, most)))
        tower = parse_tower(self.config | {"vision_config": vision}, text, processor)
        return replace(fit_tower(tower, num_devices), max_patches=most)


_HALF = {"image_mean": [0.5, 0.5, 0.5], "image_std": [0.5, 0.5, 0.5]}
_PIXTRAL = {
    "model_type": "pixtral",
    "hidden_size": 1024,
    "intermediate_size": 4096,
    "num_hidden_layers": 24,
    "num_attention_heads": 16,
    "head_dim": 64,
    "hidden_act": "silu",
    "rope_theta": 10000.0,
}
_MISTRAL = {
    "model_type": "mistral",
    "hidden_size": 5120,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "rms_norm_eps": 1e-05,
    "sliding_window": None,
    "vocab_size": 131072,
}

IMAGE_MODELS: Mapping[str, ImageModel] = {
    "qwen3-vl-8b": ImageModel(
        patches=(16384, 4096),
        model_type="qwen3_vl",
        text=(load_preset("qwen3-8b") or {})
        | {
            "model_type": "qwen3_vl_text",
            "max_position_embeddings": 262144,
            "rope_theta": 5000000,
            "rope_scaling": {"rope_type": "default", "mrope_section": [24, 20, 20], "mrope_interleaved": True},
        },
        vision={
            "deepstack_visual_indexes": [8, 16, 24],
            "depth": 27,
            "hidden_act": "gelu_pytorch_tanh",
            "hidden_size": 1152,
            "in_channels": 3,
            "intermediate_size": 4304,
            "model_type": "qwen3_vl",
            "num_heads": 16,
            "num_position_embeddings": 2304,
            "out_hidden_size": 4096,
            "patch_size": 16,
            "spatial_merge_size": 2,
            "temporal_patch_size": 2,
        },
        processor={
            "size": {"longest_edge": 16777216, "shortest_edge": 65536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_HALF,
        },
    ),
    "gemma-3-27b": ImageModel(
        patches=(4096,),
        model_type="gemma3",
        text={
            "model_type": "gemma3_text",
            "head_dim": 128,
            "hidden_size": 5376,
            "intermediate_size": 21504,
            "layer_types": [f"{'sliding' if (index + 1) % 6 else 'full'}_attention" for index in range(62)],
            "num_attention_heads": 32,
            "num_hidden_layers": 62,
            "num_key_value_heads": 16,
            "query_pre_attn_scalar": 168,
            "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
            "sliding_window": 1024,
            "torch_dtype": "bfloat16",
        },
        vision={
            "model_type": "siglip_vision_model",
            "hidden_size": 1152,
            "image_size": 896,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "patch_size": 14,
            "vision_use_head": False,
        },
        processor={"size": {"height": 896, "width": 896}, "image_seq_length": 256, **_HALF},
    ),
    "gemma-4-31b": ImageModel(
        patches=(2520,),
        model_type="gemma4",
        text={
            "model_type": "gemma4_text",
            "attention_k_eq_v": True,
            "final_logit_softcapping": 30.0,
            "global_head_dim": 512,
            "head_dim": 256,
            "hidden_size": 5376,
            "hidden_size_per_layer_input": 0,
            "intermediate_size": 21504,
            "layer_types": [f"{'sliding' if (index + 1) % 6 else 'full'}_attention" for index in range(60)],
            "max_position_embeddings": 262144,
            "num_attention_heads": 32,
            "num_global_key_value_heads": 4,
            "num_hidden_layers": 60,
            "num_key_value_heads": 16,
            "sliding_window": 1024,
            "torch_dtype": "bfloat16",
            "use_bidirectional_attention": "vision",
            "vocab_size": 262144,
        },
        vision={
            "model_type": "gemma4_vision",
            "head_dim": 72,
            "hidden_size": 1152,
            "intermediate_size": 4304,
            "num_attention_heads": 16,
            "num_hidden_layers": 27,
            "num_key_value_heads": 16,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "position_embedding_size": 10240,
            "rope_parameters": {"rope_theta": 100.0, "rope_type": "default"},
            "standardize": True,
        },
        processor={"max_soft_tokens": 280, "patch_size": 16, "pooling_kernel_size": 3, "do_normalize": False},
        impl="xla",
    ),
    "pixtral-12b": ImageModel(
        patches=(4096,),
        model_type="llava",
        text=_MISTRAL | {"intermediate_size": 14336, "max_position_embeddings": 1024000, "rope_theta": 1000000000.0},
        vision=_PIXTRAL | {"image_size": 1024, "patch_size": 16},
        processor={"size": {"longest_edge": 1024}, "patch_size": {"height": 16, "width": 16}},
        keys={"torch_dtype": "bfloat16", "vision_feature_layer": -1, "vision_feature_select_strategy": "full"},
    ),
    "mistral-small-3.1-24b": ImageModel(
        patches=(12160,),  # of an image, 12,100
        model_type="mistral3",
        text=_MISTRAL | {"intermediate_size": 32768, "max_position_embeddings": 131072, "rope_theta": 1000000000.0},
        vision=_PIXTRAL | {"image_size": 1540, "patch_size": 14},
        processor={"size": {"longest_edge": 1540}, "patch_size": 14},
        around={"patch_size": 14, "spatial_merge_size": 2},
        keys={"torch_dtype": "bfloat16", "spatial_merge_size": 2, "vision_feature_layer": -1},
    ),
}
"""By short names, the one that CI compiles first."""
