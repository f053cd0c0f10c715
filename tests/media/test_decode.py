"""Decoding: the RGB that the rule says for each kind of file, and what is refused before its pixels are read."""

from __future__ import annotations

import base64
import builtins
import io
import struct
import subprocess
import sys
import zlib
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from numpy.typing import NDArray
from PIL import Image

from jaxserve.errors import InvalidRequestError, MissingPackageError
from jaxserve.media.decode import FORMATS, ImageLimits, decode, decode_base64, require_pillow
from tests.media.pictures import draw

ROOT = Path(__file__).parents[2]
LIMITS = ImageLimits()
RED, GREEN, BLUE, WHITE = (255, 0, 0), (0, 255, 0), (0, 0, 255), (255, 255, 255)


def save(image: Image.Image, name: str = "PNG", **options: Any) -> bytes:
    file = io.BytesIO()
    image.save(file, name, **options)
    return file.getvalue()


def read(data: bytes, limits: ImageLimits = LIMITS) -> NDArray[np.uint8]:
    image = decode(data, limits, "part")
    assert image.mode == "RGB"
    return np.asarray(image)


def refuse(data: bytes, limits: ImageLimits = LIMITS) -> str:
    with pytest.raises(InvalidRequestError) as error:
        decode(data, limits, "part")
    assert error.value.field == "part"
    return str(error.value)


def make_png(
    width: int, height: int, *, bits: int = 8, colour: int = 0, data: bytes = b"", extra: bytes = b""
) -> bytes:
    """Returns a PNG of any header; `data` are the bytes of its rows."""
    head = struct.pack(">IIBBBBB", width, height, bits, colour, 0, 0, 0)
    chunks = [(b"IHDR", head), *([(b"tRNS", extra)] if extra else []), (b"IDAT", zlib.compress(data)), (b"IEND", b"")]
    parts = [
        struct.pack(">I", len(body)) + kind + body + struct.pack(">I", zlib.crc32(kind + body)) for kind, body in chunks
    ]
    return b"\x89PNG\r\n\x1a\n" + b"".join(parts)


def test_lossless_files_keep_their_values() -> None:
    pixels = draw(13, 17)
    for name, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        np.testing.assert_array_equal(read(save(Image.fromarray(pixels), name, **options)), pixels)


def test_grey_and_palettes_become_colours() -> None:
    values = np.arange(12, dtype=np.uint8).reshape(3, 4) * 20
    np.testing.assert_array_equal(read(save(Image.fromarray(values))), np.repeat(values[..., None], 3, 2))
    palette = Image.fromarray(np.array([[0, 1, 2, 1]], np.uint8), "P")
    palette.putpalette([*RED, *GREEN, *BLUE])
    for name in ("PNG", "GIF"):
        np.testing.assert_array_equal(read(save(palette, name)), [[RED, GREEN, BLUE, GREEN]])
    bits = Image.fromarray(np.array([[0, 255]], np.uint8)).convert("1")
    np.testing.assert_array_equal(read(save(bits)), [[(0, 0, 0), WHITE]])


def test_of_16_bits_the_upper_eight_count() -> None:
    """In grey as in colour. Pillow's `convert` alone makes white of every grey above 255."""
    values = np.array([[0, 255, 256, 0x1234, 65535]], ">u2")
    grey = read(make_png(5, 1, bits=16, data=b"\0" + values.tobytes()))
    np.testing.assert_array_equal(grey[0, :, 0], [0, 0, 1, 0x12, 255])
    colour = read(make_png(5, 1, bits=16, colour=2, data=b"\0" + np.repeat(values, 3).tobytes()))
    np.testing.assert_array_equal(colour, grey)
    clear = read(make_png(5, 1, bits=16, data=b"\0" + values.tobytes(), extra=struct.pack(">H", 0x1234)))
    np.testing.assert_array_equal(clear[0, :, 0], [0, 0, 1, 255, 255])


def test_cmyk_and_grey_jpegs() -> None:
    flat = Image.new("CMYK", (16, 16), (0, 255, 255, 0))
    assert np.abs(read(save(flat, "JPEG", quality=95)).astype(int) - RED).max() <= 3
    assert (read(save(Image.new("L", (8, 8), 77), "JPEG")) == 77).all()


def test_transparency_is_white_below() -> None:
    half = np.array([[(*RED, 255), (*RED, 0), (0, 0, 0, 128)]], np.uint8)
    expected = [[RED, WHITE, (127, 127, 127)]]
    for name, options in (("PNG", {}), ("WEBP", {"lossless": True, "exact": True})):
        np.testing.assert_array_equal(read(save(Image.fromarray(half), name, **options)), expected)
    grey = np.array([[(10, 255), (10, 0)]], np.uint8)
    np.testing.assert_array_equal(read(save(Image.fromarray(grey, "LA"))), [[(10, 10, 10), WHITE]])
    palette = Image.fromarray(np.array([[0, 1]], np.uint8), "P")
    palette.putpalette([*RED, *GREEN])
    for name in ("PNG", "GIF"):
        np.testing.assert_array_equal(read(save(palette, name, transparency=1)), [[RED, WHITE]])


def test_tall_images_are_put_onto_white_in_strips() -> None:
    alpha = np.dstack([draw(1030, 3), draw(1030, 3)[..., 0]])
    image = Image.fromarray(alpha)
    whole = Image.alpha_composite(Image.new("RGBA", image.size, (255,) * 4), image).convert("RGB")
    np.testing.assert_array_equal(read(save(image)), np.asarray(whole))


@pytest.mark.parametrize(
    ("orientation", "expected"),
    [
        (1, "abc def"),
        (2, "cba fed"),
        (3, "fed cba"),
        (4, "def abc"),
        (5, "ad be cf"),
        (6, "da eb fc"),
        (7, "fc eb da"),
        (8, "cf be ad"),
        (9, "abc def"),
    ],
)
def test_images_are_turned_as_their_exif_says(orientation: int, expected: str) -> None:
    names = {letter: 30 * at for at, letter in enumerate("abcdef")}
    image = Image.fromarray(np.array([[names[letter] for letter in row] for row in ("abc", "def")], np.uint8))
    exif = Image.Exif()
    exif[0x0112] = orientation
    rows = [[names[letter] for letter in row] for row in expected.split()]
    for name, options in (("PNG", {}), ("WEBP", {"lossless": True})):
        data = save(image.convert("RGB"), name, exif=exif, **options)
        np.testing.assert_array_equal(read(data)[..., 0], rows)


@pytest.mark.parametrize("name", ["GIF", "WEBP", "PNG"])
def test_of_animations_the_first_frame_counts(name: str) -> None:
    first, second = Image.new("RGB", (4, 4), RED), Image.new("RGB", (4, 4), BLUE)
    options = {"lossless": True} if name == "WEBP" else {}
    data = save(first, name, save_all=True, append_images=[second], **options)
    assert (read(data) == RED).all()


@pytest.mark.parametrize("name", ["BMP", "TIFF", "ICO", "PPM", "TGA"])
def test_other_formats_are_not_even_tried(name: str) -> None:
    assert "PNG, JPEG, WebP or GIF" in refuse(save(Image.new("RGB", (16, 16)), name))
    assert "PNG, JPEG, WebP or GIF" in refuse(b"<svg xmlns='http://www.w3.org/2000/svg'/>")


@pytest.mark.parametrize("name", FORMATS)
def test_cut_files_are_refused(name: str) -> None:
    data = save(Image.fromarray(draw(64, 64)), name)
    for size in (0, 4, 20, len(data) // 2):
        refuse(data[:size])
    assert "decoded" in refuse(data[: len(data) // 2])


def test_a_file_of_random_faults_is_an_image_or_refused() -> None:
    chance = np.random.default_rng(7)
    for name in FORMATS:
        data = np.frombuffer(save(Image.fromarray(draw(24, 24)), name), np.uint8)
        for _ in range(60):
            broken = data.copy()
            broken[chance.integers(0, len(data), 3)] = chance.integers(0, 256, 3)
            try:
                image = decode(broken.tobytes(), ImageLimits(max_pixels=100_000), "part")
            except InvalidRequestError as error:
                assert error.field == "part"
            else:
                assert image.mode == "RGB" and image.width * image.height <= 100_000


def test_limits_are_checked_before_pixels_are_read() -> None:
    """The header alone is there: whoever reads pixels would find the file cut."""
    limits = ImageLimits(max_bytes=1000, max_pixels=100)
    assert "10 x 11 are 110 pixels; at most 100" in refuse(make_png(10, 11), limits)
    assert "1,001 bytes; at most 1,000" in refuse(bytes(1001), limits)
    assert "64,000,000" in refuse(make_png(8001, 8000)) and "64,000,000" in refuse(make_png(60_000, 60_000))
    for size in ((0, 5), (5, 0)):
        refuse(make_png(*size))


def test_base64_is_read_or_refused() -> None:
    data = save(Image.new("RGB", (2, 2), GREEN))
    text = base64.b64encode(data)
    assert decode_base64(text, LIMITS, "part").getpixel((0, 0)) == GREEN
    for wrong in (text[:-3], text + b"!", text[:8] + b" " + text[8:], b"", b"%89PNG", "é".encode() * 8, b"\xff" * 8):
        with pytest.raises(InvalidRequestError) as error:
            decode_base64(wrong, LIMITS, "part")
        assert error.value.field == "part"
    small = ImageLimits(max_bytes=len(data))
    decode_base64(text, small, "part")
    with pytest.raises(InvalidRequestError, match="at most"):
        decode_base64(b"A" * (len(text) + 4), small, "part")


def test_modules_load_nothing_heavy_before_an_image_is_read() -> None:
    names = [path.stem for path in (ROOT / "jaxserve" / "media").glob("*.py") if path.stem != "__init__"]
    code = f"import sys, {', '.join(f'jaxserve.media.{name}' for name in names)}\n"
    code += "print(*{'PIL', 'numpy', 'jax', 'httpx'} & sys.modules.keys())"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True, cwd=ROOT)
    assert len(names) > 9 and done.stdout.strip() == ""


def test_without_pillow_the_error_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    usual = builtins.__import__

    def refuse_pillow(name: str, *args: Any, **kwargs: Any) -> Any:
        if name.startswith("PIL"):
            raise ModuleNotFoundError("No module named 'PIL'")
        return usual(name, *args, **kwargs)

    monkeypatch.setattr(builtins, "__import__", refuse_pillow)
    with pytest.raises(MissingPackageError, match="pip install 'pillow>="):
        require_pillow()


def test_an_old_pillow_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("PIL.__version__", "12.3.0")
    with pytest.raises(MissingPackageError, match=r"Pillow 12\.3\.0 is too old"):
        decode(save(Image.new("RGB", (2, 2))), LIMITS, "part")
