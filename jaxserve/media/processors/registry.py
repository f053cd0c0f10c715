"""The table of families that read images."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from jaxserve.media.processors.gemma3 import Gemma3Shape, read_gemma3
from jaxserve.media.processors.gemma4 import Gemma4Shape, read_gemma4
from jaxserve.media.processors.pixtral import PixtralShape, read_pixtral
from jaxserve.media.processors.processor import ImageProcessor, ImageShape, PixelForm
from jaxserve.media.processors.qwen3_vl import Qwen3VLShape, read_qwen3_vl
from jaxserve.media.processors.settings import ImageSettings

_SHAPES: Mapping[str, type[ImageShape]] = {
    shape.family: shape for shape in (Qwen3VLShape, Gemma3Shape, Gemma4Shape, PixtralShape)
}
_READERS = {"qwen3_vl": read_qwen3_vl, "gemma3": read_gemma3, "gemma4": read_gemma4, "pixtral": read_pixtral}
FAMILIES = tuple(_READERS)


def read_processor(family: str, settings: ImageSettings) -> ImageProcessor:
    """Returns the processor of a checkpoint.

    Raises:
        ConfigError: a setting is unknown, or has no value that is supported.
    """
    processor = _READERS[family](settings)
    settings.end()
    return processor


def load_processor(described: Mapping[str, Any]) -> ImageProcessor:
    """Returns the processor that `ImageProcessor.describe` described."""
    form = {name: tuple(value) if isinstance(value, list) else value for name, value in described["form"].items()}
    return ImageProcessor(PixelForm(**form), _SHAPES[described["family"]](**described["shape"]))
