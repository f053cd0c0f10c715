"""What an engine chooses on devices that have no kernels of their own, told by the devices' names."""

from __future__ import annotations

import logging
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.engine.model_files import ModelFiles, resolve_model
from jaxserve.features.choose import make_shapes
from jaxserve.presets import load_preset

TURING, VOLTA, AMPERE, AMD = "Tesla T4", "Tesla V100-SXM2-16GB", "NVIDIA A10G", "AMD Instinct MI300X"


def choose(platform: str, kind: str, preset: str = "qwen3-0.6b", **options: Any) -> Shapes:
    hf_config = dict(load_preset(preset) or {}) | {"num_hidden_layers": 2}
    for name in ("layer_types", "mlp_layer_types"):
        if name in hf_config:
            hf_config[name] = hf_config[name][:2]
    config = EngineConfig.from_options(model=preset, load_format="dummy", **options)
    model = resolve_model(config, ModelFiles(None, hf_config, {}), kind)
    return make_shapes(config, model, platform, kind)


@pytest.mark.parametrize(
    ("kind", "preset", "options", "dtype"),
    [
        (TURING, "qwen3-0.6b", {}, "float16"),
        (VOLTA, "qwen3-0.6b", {}, "float16"),
        (TURING, "qwen3-0.6b", {"dtype": "bfloat16"}, "bfloat16"),
        (TURING, "gemma-2-2b", {}, "float32"),
        (TURING, "gemma-2-2b", {"dtype": "float16"}, "float16"),
        (TURING, "gemma-3-1b", {}, "float32"),
        (TURING, "glm-4-9b-0414", {}, "float32"),
        (AMPERE, "qwen3-0.6b", {}, "bfloat16"),
        (AMD, "qwen3-0.6b", {}, "bfloat16"),
        ("", "qwen3-0.6b", {}, "bfloat16"),
    ],
)
def test_the_default_dtype_is_one_that_the_device_multiplies(
    kind: str, preset: str, options: dict[str, Any], dtype: str, caplog: pytest.LogCaptureFixture
) -> None:
    with caplog.at_level(logging.WARNING):
        shapes = choose("gpu", kind, preset, **options)
    assert shapes.model.dtype == dtype and {spec.dtype for spec in shapes.specs} == {dtype}
    is_changed = "dtype" not in options and dtype != "bfloat16"
    assert (f"dtype: {dtype} in place of bfloat16, which {kind} emulates" in caplog.text) == is_changed


@pytest.mark.parametrize("platform", ["gpu", "rocm"])
@pytest.mark.parametrize("options", [{}, {"preset": "qwen3-30b-a3b"}, {"quantization": "int8_per_channel_weight_only"}])
def test_an_amd_gpu_has_portable_kernels(platform: str, options: dict[str, Any]) -> None:
    shapes = choose(platform, AMD, **options)
    assert shapes.impl == "xla" and shapes.fell_back and AMD in shapes.impl_reason
    assert shapes.experts is None or shapes.experts.impl == "xla"
    assert shapes.platform == "gpu" and shapes.model.products.impl == "xla"


@pytest.mark.parametrize("kind", [TURING, VOLTA])
def test_older_gpus_have_portable_attention(kind: str) -> None:
    shapes = choose("gpu", kind)
    assert shapes.impl == "xla" and shapes.fell_back and kind in shapes.impl_reason
