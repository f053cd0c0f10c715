"""The image processors of families: the size that an image is given, and the patches that it is cut into."""

from __future__ import annotations

from jaxserve.media.processors.processor import Detail, ImageProcessor, PixelForm
from jaxserve.media.processors.registry import FAMILIES, load_processor, read_processor

__all__ = ["FAMILIES", "Detail", "ImageProcessor", "PixelForm", "load_processor", "read_processor"]
