"""The processes that decode images: bombs and decoders that hang cost one of them, and nothing else."""

from __future__ import annotations

import base64
import io
import os
import resource
import signal
from collections.abc import Iterator

import pytest
from PIL import Image

from jaxserve.errors import InvalidRequestError
from jaxserve.media.decode import ImageLimits
from jaxserve.media.processors import ImageProcessor, read_processor
from jaxserve.media.processors.settings import ImageSettings
from jaxserve.media.reader import ImageReader, read_pillow
from jaxserve.media.sources import ImageFile
from jaxserve.workers import WorkerEndedError, WorkerPool, WorkerPoolClosedError
from tests.media.pictures import CHECKPOINTS, draw

PROCESSOR: ImageProcessor = read_processor("qwen3_vl", ImageSettings(CHECKPOINTS["qwen3_vl"][1]))
SMALL_MEMORY = 96 << 20
PICTURE = Image.fromarray(draw(60, 80))


def encode(image: Image.Image, name: str = "PNG", **options: object) -> ImageFile:
    file = io.BytesIO()
    image.save(file, name, **options)
    return ImageFile(file.getvalue(), is_base64=False)


@pytest.fixture(scope="module")
def reader() -> Iterator[ImageReader]:
    made = ImageReader(ImageLimits(), time_limit_s=60.0, max_processes=1, memory_bytes=SMALL_MEMORY)
    yield made
    made.close()


def refuse(reader: ImageReader, data: ImageFile) -> str:
    with pytest.raises(InvalidRequestError) as error:
        reader.read(data, PROCESSOR, "messages[0].content[1]")
    assert error.value.field == "messages[0].content[1]"
    return str(error.value)


def test_an_image_is_what_it_is_in_this_process(reader: ImageReader) -> None:
    file = encode(PICTURE)
    text = ImageFile(base64.b64encode(file.data), is_base64=True)
    found = reader.read(file, PROCESSOR, "part")
    assert reader.read(text, PROCESSOR, "part").digest == found.digest
    here = read_pillow(PICTURE, PROCESSOR, ImageLimits(), "part")
    assert found == here


def test_what_is_wrong_is_told(reader: ImageReader) -> None:
    assert "base64" in refuse(reader, ImageFile(b"!", is_base64=True))
    assert "PNG, JPEG, WebP or GIF" in refuse(reader, ImageFile(b"QUJD", is_base64=True))
    assert "PNG, JPEG, WebP or GIF" in refuse(reader, ImageFile(b"", is_base64=False))
    assert "200" in refuse(reader, encode(Image.new("L", (1, 300))))
    assert "66,000,000 pixels; at most 64,000,000" in refuse(reader, encode(Image.new("1", (8250, 8000))))


@pytest.mark.parametrize(
    ("name", "mode", "options"),
    [("PNG", "RGBA", {"compress_level": 1}), ("GIF", "P", {}), ("WEBP", "RGB", {"method": 0, "quality": 1})],
)
def test_bombs_are_bounded_in_memory(reader: ImageReader, name: str, mode: str, options: dict[str, int]) -> None:
    """Files of kilobytes within the limit of pixels, whose decoding takes hundreds of megabytes."""
    bomb = encode(Image.new(mode, (5000, 5000)), name, **options)
    assert len(bomb.data) < 1 << 20
    before = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    assert "cannot be decoded: " in refuse(reader, bomb)
    assert resource.getrusage(resource.RUSAGE_SELF).ru_maxrss - before < 16 << 10, "KiB, of this process"
    assert reader.read(encode(PICTURE), PROCESSOR, "part").num_tokens == 70


def test_a_decoder_that_hangs_is_killed() -> None:
    stuck = ImageReader(ImageLimits(), time_limit_s=1.0, max_processes=1)
    try:
        stuck.start()
        (process_id,) = stuck.process_ids
        os.kill(process_id, signal.SIGSTOP)
        assert "1 s" in refuse(stuck, encode(PICTURE))
        assert stuck.process_ids != [process_id]
    finally:
        stuck.close()


def test_a_decoder_that_crashes_is_a_fault_of_the_image(monkeypatch: pytest.MonkeyPatch, reader: ImageReader) -> None:
    def end(*_: object, **__: object) -> None:
        raise WorkerEndedError("the decoder of images", -11)

    with monkeypatch.context() as patch:
        patch.setattr(WorkerPool, "ask", end)
        assert "crashes the decoder" in refuse(reader, encode(PICTURE))
    assert reader.read(encode(PICTURE), PROCESSOR, "part").num_tokens == 70


def test_a_closed_reader_says_so() -> None:
    closed = ImageReader(ImageLimits(), time_limit_s=1.0)
    closed.close()
    with pytest.raises(WorkerPoolClosedError):
        closed.read(encode(PICTURE), PROCESSOR, "part")


def test_images_of_pillow_have_the_same_limits() -> None:
    with pytest.raises(InvalidRequestError, match="at most 100"):
        read_pillow(PICTURE, PROCESSOR, ImageLimits(max_pixels=100), "part")
    cut = Image.open(io.BytesIO(encode(PICTURE).data[:-200]))
    with pytest.raises(InvalidRequestError, match="cannot be decoded"):
        read_pillow(cut, PROCESSOR, ImageLimits(), "part")
