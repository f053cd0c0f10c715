"""Pictures by a formula, in any size, and the processors of published checkpoints. numpy only: a script shares it."""

from __future__ import annotations

from typing import Any

import numpy as np
from numpy.typing import NDArray

_HALF, _CLIP = (
    [0.5] * 3,
    {
        "image_mean": [0.48145466, 0.4578275, 0.40821073],
        "image_std": [0.26862954, 0.26130258, 0.27577711],
    },
)
_STEPS = {"do_resize": True, "do_rescale": True, "do_normalize": True, "do_convert_rgb": True}

# Name -> family, preprocessor_config.json, and the settings of processor_config.json around it. Values are published
# ones but for the limits of pixels, which are small: the largest images take long.
CHECKPOINTS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "qwen3_vl": (
        "qwen3_vl",
        {
            "size": {"longest_edge": 1_048_576, "shortest_edge": 65_536},
            "patch_size": 16,
            "temporal_patch_size": 2,
            "merge_size": 2,
            "image_mean": _HALF,
            "image_std": _HALF,
            "processor_class": "Qwen3VLProcessor",
            "image_processor_type": "Qwen2VLImageProcessorFast",
        },
        {},
    ),
    "qwen3_vl_old_keys": (
        "qwen3_vl",
        {
            "min_pixels": 3136,
            "max_pixels": 501_760,
            "patch_size": 14,
            "temporal_patch_size": 2,
            "merge_size": 2,
            **_CLIP,
        },
        {},
    ),
    "gemma3": (
        "gemma3",
        {
            **_STEPS,
            "do_convert_rgb": None,
            "do_pan_and_scan": None,
            "image_mean": _HALF,
            "image_std": _HALF,
            "image_seq_length": 256,
            "resample": 2,
            "rescale_factor": 0.00392156862745098,
            "size": {"height": 896, "width": 896},
        },
        {},
    ),
    "gemma4": (
        "gemma4",
        {
            **_STEPS,
            "do_normalize": False,
            "max_soft_tokens": 280,
            "patch_size": 16,
            "pooling_kernel_size": 3,
            "resample": 3,
            "rescale_factor": 1 / 255,
            "image_mean": [0.0] * 3,
            "image_std": [1.0] * 3,
        },
        {},
    ),
    "gemma4_few": ("gemma4", {**_STEPS, "do_normalize": False, "max_soft_tokens": 70}, {}),
    "pixtral": (
        "pixtral",
        {**_STEPS, **_CLIP, "patch_size": {"height": 16, "width": 16}, "size": {"longest_edge": 1024}, "resample": 3},
        {},
    ),
    "mistral3": (
        "pixtral",
        {**_STEPS, **_CLIP, "patch_size": 14, "size": {"longest_edge": 1540}, "resample": 3},
        {"patch_size": 14, "spatial_merge_size": 2, "image_token": "[IMG]"},
    ),
}
SIZES = (  # height, width
    *((1, 1), (1, 2), (2, 1), (3, 3), (1, 64), (64, 1), (16, 16), (17, 31), (28, 28), (32, 32), (33, 32), (31, 97)),
    *((48, 48), (30, 150), (150, 30), (56, 56), (56, 57), (100, 100), (112, 224), (127, 255), (200, 1), (1, 200)),
    *((224, 224), (240, 320), (320, 240), (256, 256), (257, 255), (300, 1000), (333, 500), (384, 384), (480, 640)),
    *((448, 449), (640, 480), (599, 601), (720, 405), (768, 1024), (896, 896), (30, 4000), (4000, 30), (1080, 1920)),
)


def draw(height: int, width: int) -> NDArray[np.uint8]:
    """Returns [height, width, 3]: slopes, edges and noise, by integers alone."""
    y, x, colour = (np.arange(size, dtype=np.int32) for size in (height, width, 3))
    y, x = y[:, None, None], x[:, None]
    slopes = y * 3 + x * 2 + colour * 61
    edges = ((y // 9 + x // 13) % 2) * 120
    noise = ((y * 7919 + x * 10472 + colour * 12997) % 65521 * 31) % 97
    return ((slopes + edges + noise) % 256).astype(np.uint8)
