"""Small files of images that claim to be huge, or that take much memory, made by hand."""

from __future__ import annotations

import io
import struct
import zlib
from dataclasses import dataclass

from PIL import Image

_EXPANDED = 64 << 20  # bytes that a compressed part of a file becomes


@dataclass(frozen=True)
class Bomb:
    """A file, and the status of an answer to it: 400, or 200 where it has little to do."""

    title: str
    data: bytes
    status: int = 400


def make_png(width: int, height: int, *chunks: tuple[bytes, bytes], pixels: bytes = b"") -> bytes:
    """Returns a PNG of one bit in grey; `chunks` stand between its header and its pixels, which are compressed."""
    header = struct.pack(">IIBBBBB", width, height, 1, 0, 0, 0, 0)
    parts = [(b"IHDR", header), *chunks, (b"IDAT", zlib.compress(pixels, 9)), (b"IEND", b"")]
    made = (struct.pack(">I", len(data)) + kind + data + _checksum(kind + data) for kind, data in parts)
    return b"\x89PNG\r\n\x1a\n" + b"".join(made)


def _checksum(data: bytes) -> bytes:
    return struct.pack(">I", zlib.crc32(data))


def make_gif(width: int, height: int, num_frames: int) -> bytes:
    """Returns a GIF whose frames have one pixel each."""
    head = b"GIF89a" + struct.pack("<HHBBB", width, height, 0x80, 0, 0) + bytes(6)
    frame = b"\x2c" + struct.pack("<HHHHB", 0, 0, 1, 1, 0) + b"\x02\x02\x44\x01\x00"
    return head + frame * num_frames + b"\x3b"


def make_lossless_webp(width: int, height: int) -> bytes:
    """Returns the header of a WebP without pixels."""
    data = b"\x2f" + struct.pack("<I", (width - 1) | (height - 1) << 14) + bytes(9)
    return b"RIFF" + struct.pack("<I", len(data) + 12) + b"WEBPVP8L" + struct.pack("<I", len(data)) + data


def make_webp_canvas(width: int, height: int, num_frames: int) -> bytes:
    """Returns an animated WebP whose frames have one pixel each, on a canvas of any size."""
    still = io.BytesIO()
    Image.new("RGB", (1, 1)).save(still, "WEBP", lossless=True)
    place = bytes(6) + bytes(6) + b"\x01\x00\x00\x00"  # at the corner, one pixel, for a millisecond
    frame = place + still.getvalue()[12:]
    canvas = b"\x02\x00\x00\x00" + (width - 1).to_bytes(3, "little") + (height - 1).to_bytes(3, "little")
    chunks = [(b"VP8X", canvas), (b"ANIM", bytes(6)), *[(b"ANMF", frame)] * num_frames]
    body = b"WEBP"
    for kind, data in chunks:
        body += kind + struct.pack("<I", len(data)) + data + bytes(len(data) % 2)
    return b"RIFF" + struct.pack("<I", len(body)) + body


def make_jpeg(width: int, height: int) -> bytes:
    """Returns the header of a JPEG without pixels."""
    return b"\xff\xd8\xff\xc0" + struct.pack(">HBHHB", 11, 8, height, width, 1) + b"\x01\x11\x00\xff\xd9"


def make_bombs() -> list[Bomb]:
    """Returns one of each kind."""
    packed = zlib.compress(bytes(_EXPANDED), 9)
    return [
        Bomb("a PNG of 60,000 x 60,000", make_png(60_000, 60_000)),
        Bomb("a PNG of 63.9 megapixels", make_png(8000, 7990, pixels=bytes(1001 * 7990)), 200),
        Bomb("a PNG with 64 MiB of text", make_png(8, 8, (b"zTXt", b"a\0\0" + packed), pixels=bytes(16))),
        Bomb("a PNG with 64 MiB of a profile", make_png(8, 8, (b"iCCP", b"a\0\0" + packed), pixels=bytes(16))),
        Bomb("a PNG of 2,147,483,647 frames", make_png(8, 8, (b"acTL", b"\x7f\xff\xff\xff" + bytes(4)))),
        Bomb("a GIF of 65,535 x 65,535", make_gif(65_535, 65_535, 1)),
        Bomb("a GIF of 20,000 frames", make_gif(48, 32, 20_000), 200),
        Bomb("a WebP of 16,383 x 16,383", make_lossless_webp(16_383, 16_383)),
        Bomb("a WebP on a canvas of 16,777,216 x 256", make_webp_canvas(1 << 24, 256, 2)),
        Bomb("a WebP of 5,000 frames", make_webp_canvas(48, 32, 5000), 200),
        Bomb("a JPEG of 65,500 x 65,500", make_jpeg(65_500, 65_500)),
    ]
