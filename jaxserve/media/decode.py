"""Decodes images with Pillow: formats by name, sizes before pixels, and one rule for the RGB that comes out.

The rule: the first frame; turned as its EXIF says; transparency onto white, as in transformers; then RGB. Of 16 bits
in grey the upper eight count, as in Pillow's 16-bit colour; `convert` would clip them.

What Pillow decodes may be hostile. `worker.py` runs this in a process that can be killed.
"""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import TYPE_CHECKING

from jaxserve.errors import InvalidRequestError, MissingPackageError, shorten

if TYPE_CHECKING:
    from PIL.Image import Image

_LEAST_VERSION = 13
PILLOW = f"pillow>={_LEAST_VERSION}"  # what the extra `images` installs
FORMATS = ("PNG", "JPEG", "WEBP", "GIF")
_STRIP_ROWS = 512  # put onto white at once, since each copy of a large image takes hundreds of megabytes
_WHITE = (255, 255, 255, 255)


@dataclass(frozen=True, slots=True)
class ImageLimits:
    """The largest image that is read."""

    max_bytes: int = 20 << 20
    max_pixels: int = 64_000_000


def require_pillow() -> None:
    """Imports Pillow.

    Raises:
        MissingPackageError: it is not installed, or too old; says what to install.
    """
    try:
        import PIL.Image
    except ImportError as error:
        reason = " ".join(str(error).split())
        message = f"images need Pillow, which cannot be imported ({reason}); pip install '{PILLOW}'"
        raise MissingPackageError(message) from error
    if int(PIL.__version__.partition(".")[0]) < _LEAST_VERSION:
        raise MissingPackageError(f"Pillow {PIL.__version__} is too old for images; pip install '{PILLOW}'")


def decode_base64(data: bytes, limits: ImageLimits, field: str) -> Image:
    """Returns an image of base64 text, as `decode` does of bytes."""
    if len(data) > -(-limits.max_bytes // 3) * 4:
        raise _refuse_bytes(len(data) // 4 * 3, limits, field)
    try:
        decoded = base64.b64decode(data, validate=True)
    except ValueError as error:
        raise InvalidRequestError(f"is not base64: {error}", field=field) from error
    return decode(decoded, limits, field)


def decode(data: bytes, limits: ImageLimits, field: str) -> Image:
    """Returns the image of a file, as RGB.

    Raises:
        InvalidRequestError: it is too large, of an unknown format, or broken; names `field`.
        MissingPackageError: Pillow is not installed.
    """
    require_pillow()
    from PIL import Image, UnidentifiedImageError

    if len(data) > limits.max_bytes:
        raise _refuse_bytes(len(data), limits, field)
    try:
        image = Image.open(io.BytesIO(data), formats=FORMATS)
    except UnidentifiedImageError as error:
        raise InvalidRequestError("is no image of PNG, JPEG, WebP or GIF", field=field) from error
    except Image.DecompressionBombError as error:
        raise InvalidRequestError(f"has more than {limits.max_pixels:,} pixels", field=field) from error
    except Exception as error:  # decoders raise whatever their parsers do
        raise _refuse_broken(error, field) from error
    width, height = image.size
    check_size(height, width, limits, field)
    try:
        return to_rgb(image)
    except Exception as error:
        raise _refuse_broken(error, field) from error


def check_size(height: int, width: int, limits: ImageLimits, field: str) -> None:
    """Raises InvalidRequestError for an image without pixels, or with too many."""
    if height < 1 or width < 1:
        raise InvalidRequestError(f"has no pixels: it is {width} x {height}", field=field)
    if height * width > limits.max_pixels:
        message = f"{width} x {height} are {width * height:,} pixels; at most {limits.max_pixels:,} are read"
        raise InvalidRequestError(message, field=field, value=width * height)


def to_rgb(image: Image) -> Image:
    """Returns an image as RGB by the rule of this file. The image given may change.

    Raises:
        OSError, ValueError, SyntaxError, ...: its file is broken, which shows only now.
    """
    from PIL import Image, ImageOps

    ImageOps.exif_transpose(image, in_place=True)
    if image.mode.startswith("I;16"):
        image = _to_grey(image)
    if "A" not in image.getbands() and image.info.get("transparency") is None:
        return image.convert("RGB")
    rgba, (width, height) = image.convert("RGBA"), image.size
    rgb = Image.new("RGB", image.size)
    for top in range(0, height, _STRIP_ROWS):
        strip = rgba.crop((0, top, width, min(top + _STRIP_ROWS, height)))
        onto = Image.new("RGBA", strip.size, _WHITE)
        onto.alpha_composite(strip)
        rgb.paste(onto.convert("RGB"), (0, top))
    return rgb


def _to_grey(image: Image) -> Image:
    """Returns the upper eight bits of a grey image of 16; the value that means transparent becomes white."""
    import numpy as np
    from PIL import Image

    values = np.asarray(image)
    grey = (values >> 8).astype(np.uint8)
    if (key := image.info.get("transparency")) is not None:
        grey[values == key] = 255
    return Image.fromarray(grey)


def _refuse_bytes(size: int, limits: ImageLimits, field: str) -> InvalidRequestError:
    message = f"has {size:,} bytes; at most {limits.max_bytes:,} are read"
    return InvalidRequestError(message, field=field, value=size)


def _refuse_broken(error: Exception, field: str) -> InvalidRequestError:
    reason = "it takes too much memory" if isinstance(error, MemoryError) else shorten(str(error))
    return InvalidRequestError(f"cannot be decoded: {reason}", field=field)
