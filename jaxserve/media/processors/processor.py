"""What all image processors share: resizing, floating point, and the item that is made of an image."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal, Protocol, Self

from jaxserve.errors import InvalidRequestError
from jaxserve.media.items import Grid, MediaItem, digest_image

if TYPE_CHECKING:
    import numpy as np
    from numpy.typing import NDArray
    from PIL.Image import Image

Detail = Literal["auto", "low", "high", "original"]
DETAILS: tuple[Detail, ...] = ("auto", "low", "high", "original")
LOW_EDGE = 512  # `detail: low` allows the pixels of a square with such edges, as OpenAI's models do


class ImageShape(Protocol):
    """The part of a processor that a family decides. It is a frozen dataclass of JSON values."""

    family: ClassVar[str]

    @property
    def patch_size(self) -> int:
        """The pixels of a patch on each side."""

    @property
    def most_patches(self) -> int:
        """The patches that no image has more of."""

    @property
    def most_tokens(self) -> int:
        """The placeholders of an image with so many patches."""

    @property
    def least_patches(self) -> int:
        """The least that `limit_patches` takes: smaller images would be worth little, or the family has one size."""

    def limit_patches(self, most: int) -> Self:
        """Returns the shape whose images have at most so many patches, at least `least_patches`."""

    def choose_size(self, height: int, width: int, field: str) -> tuple[int, int]:
        """Returns the height and width that an image is resized to; InvalidRequestError if it has no such size."""

    def find_grid(self, height: int, width: int) -> Grid:
        """Returns the patches of an image of a chosen size."""

    def count_tokens(self, grid: Grid) -> int:
        """Returns the number of placeholder tokens."""

    def cut(self, pixels: NDArray[np.uint8]) -> NDArray[np.uint8]:
        """Returns [3, height, width] as patches [rows x columns, values of a patch], in the tower's order."""

    def enlarge(self) -> Self:
        """Returns the shape of the largest images that the family knows, which a server's options may choose from."""

    def with_options(self, options: Mapping[str, Any], field: str) -> Self:
        """Returns the shape with a request's `mm_processor_kwargs`, which may only make images smaller.

        Raises:
            InvalidRequestError: an option is unknown or out of range; names `field` and the option.
        """

    def with_detail(self, detail: Detail) -> Self:
        """Returns the shape for a detail; all but "low" are the shape itself."""


@dataclass(frozen=True, slots=True)
class PixelForm:
    """The resampling filter, and the numbers by which bytes become floating point."""

    resample: int  # Pillow's number: 2 bilinear, 3 bicubic
    rescale_factor: float
    mean: tuple[float, ...] | None  # None: only rescaled
    std: tuple[float, ...] | None

    def make_table(self) -> NDArray[np.float32]:
        """Returns [3, 256]: the float32 of each byte of red, green and blue.

        The product with `rescale_factor` is rounded from float64, the rest is float32, as in transformers.
        """
        import numpy as np

        scaled = (np.arange(256, dtype=np.float64) * self.rescale_factor).astype(np.float32)
        if self.mean is None or self.std is None:
            return np.broadcast_to(scaled, (3, 256))
        mean, std = (np.array(values, np.float32)[:, None] for values in (self.mean, self.std))
        return (scaled - mean) / std


@dataclass(frozen=True, slots=True)
class ImageProcessor:
    """Makes of an RGB image what a family's tower takes, with the bits of transformers' processors on Pillow."""

    form: PixelForm
    shape: ImageShape

    @property
    def family(self) -> str:
        """The name of the family, a key of `FAMILIES`."""
        return self.shape.family

    def resize(self, image: Image, field: str) -> NDArray[np.uint8]:
        """Returns the pixels [height, width, 3] of an RGB image in the size that the family chooses.

        Raises:
            InvalidRequestError: the family has no size for it; names `field`.
        """
        import numpy as np
        from PIL import Image as images

        height, width = self.shape.choose_size(image.height, image.width, field)
        return np.asarray(image.resize((width, height), resample=images.Resampling(self.form.resample)))

    def make_item(self, pixels: NDArray[np.uint8]) -> MediaItem:
        """Returns the item of pixels that `resize` made."""
        import numpy as np

        height, width, _ = pixels.shape
        grid = self.shape.find_grid(height, width)
        digest = digest_image(pixels, self.family, self.describe())
        patches = self.shape.cut(np.moveaxis(pixels, -1, 0))
        return MediaItem(digest, patches.tobytes(), grid, self.shape.count_tokens(grid))

    def list_colours(self) -> NDArray[np.uint8]:
        """Returns the colour of each value of a patch, 0 to 2: red, green, blue."""
        import numpy as np

        height, width = self.shape.choose_size(64, 64, "image")
        return self.shape.cut(np.broadcast_to(np.arange(3, dtype=np.uint8)[:, None, None], (3, height, width)))[0]

    def make_floats(self, item: MediaItem) -> NDArray[np.float32]:
        """Returns the numbers that a tower computes with: [N, values of a patch]."""
        import numpy as np

        patches = np.frombuffer(item.patches, np.uint8).reshape(item.num_patches, -1)
        return self.form.make_table()[self.list_colours(), patches]

    def enlarge(self) -> ImageProcessor:
        """Returns the processor of the largest images, as `ImageShape.enlarge`."""
        return replace(self, shape=self.shape.enlarge())

    def with_options(self, options: Mapping[str, Any], field: str = "mm_processor_kwargs") -> ImageProcessor:
        """Returns the processor with a request's options, as `ImageShape.with_options`."""
        return replace(self, shape=self.shape.with_options(options, field))

    def with_detail(self, detail: Detail) -> ImageProcessor:
        """Returns the processor for an image's `detail`."""
        return replace(self, shape=self.shape.with_detail(detail))

    def describe(self) -> dict[str, Any]:
        """Returns the processor as JSON, of which `load_processor` makes an equal one."""
        return {"family": self.family, "form": asdict(self.form), "shape": asdict(self.shape)}  # type: ignore[call-overload]


def read_limits(options: Mapping[str, Any], most: Mapping[str, int], field: str, *, least: int = 1) -> dict[str, int]:
    """Returns a request's options as whole numbers from `least` to the server's own value of each, `most`.

    Raises:
        InvalidRequestError: one is unknown or out of range.
    """
    for name, value in options.items():
        if name not in most:
            raise InvalidRequestError(
                f"is unknown for this model; {', '.join(most)} are known", field=f"{field}.{name}"
            )
        if not isinstance(value, int) or isinstance(value, bool) or not least <= value <= most[name]:
            message = f"must be a whole number from {least} to {most[name]}, the server's own, got {value!r}"
            raise InvalidRequestError(message, field=f"{field}.{name}", value=value)
    return dict(options)
