"""Images of a request beside each other: their order, their faults, and how many are fetched at once."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from jaxserve.errors import InvalidRequestError
from jaxserve.media.decode import ImageLimits
from jaxserve.media.fetch import Fetcher
from jaxserve.media.items import MediaItem
from jaxserve.media.loader import ImageLoader
from jaxserve.media.parts import ImagePart
from jaxserve.media.processors import ImageProcessor, read_processor
from jaxserve.media.processors.settings import ImageSettings
from jaxserve.media.sources import ImageFile, MediaSources, SourceOptions
from tests.media.pictures import CHECKPOINTS, draw
from tests.media.test_fetch import GOOD, NAME, Host, Resolver

PROCESSOR = read_processor("qwen3_vl", ImageSettings(CHECKPOINTS["qwen3_vl"][1]))
LIMITS = ImageLimits()
Made = Callable[..., ImageLoader]


def read(file: ImageFile, processor: ImageProcessor, field: str) -> MediaItem:
    """Stands for the reader: the item's tokens are the file's bytes, its grid has the processor's limit."""
    if file.data == b"bad":
        raise InvalidRequestError("is bad", field=field)
    grid = (1, 1, processor.shape.max_pixels)  # type: ignore[attr-defined]
    return MediaItem(file.data, b"", grid, len(file.data))


@pytest.fixture
def make() -> Iterator[Made]:
    made: list[ImageLoader] = []

    def make(fetcher: Fetcher | None = None, read: Any = read, **options: Any) -> ImageLoader:
        sources = MediaSources(SourceOptions(), LIMITS, fetcher)
        made.append(ImageLoader(sources, read, PROCESSOR, LIMITS, num_threads=2, **options))
        return made[-1]

    yield make
    for loader in made:
        loader.close()


def data(text: str, at: int = 0, **options: Any) -> ImagePart:
    return ImagePart(f"messages[0].content[{at}]", f"data:;base64,{text}", **options)


def test_items_are_in_the_order_of_the_parts(make: Made) -> None:
    pillow = ImagePart("messages[0].content[2]", None, Image.fromarray(draw(60, 80)))
    items = asyncio.run(make().load([data("a" * 4), data("b", detail="low"), pillow, data("c")]))
    assert [item.digest for item in items[:2]] == [b"aaaa", b"b"] and items[3].digest == b"c"
    assert [item.grid[2] for item in items[:2]] == [1_048_576, 512 * 512], "each part has its own detail"
    assert items[2].num_tokens == 70
    assert asyncio.run(make().load([])) == []


def test_options_are_those_of_all_images(make: Made) -> None:
    loader = make()
    (item,) = asyncio.run(loader.load([data("a")], {"max_pixels": 4096}))
    assert item.grid[2] == 4096
    with pytest.raises(InvalidRequestError, match=r"mm_processor_kwargs\.fps"):
        asyncio.run(loader.load([data("a")], {"fps": 1}))


def test_the_first_part_that_is_wrong_is_named(make: Made) -> None:
    with pytest.raises(InvalidRequestError) as error:
        asyncio.run(make().load([data("a"), ImagePart("messages[0].content[1]", "ftp://x"), data("bad", 2)]))
    assert error.value.field == "messages[0].content[1]"
    with pytest.raises(InvalidRequestError) as error:
        asyncio.run(make().load([data("a"), data("bad", 1), data("b", 2)]))
    assert error.value.field == "messages[0].content[1]"


def test_files_are_not_read_by_default(make: Made, tmp_path: Path) -> None:
    (tmp_path / "a").write_bytes(b"a")
    with pytest.raises(InvalidRequestError, match="allowed_local_media_path"):
        asyncio.run(make().load([ImagePart("part", f"file://{tmp_path}/a")]))


def test_few_are_fetched_at_once_and_own_data_does_not_wait_for_them(make: Made) -> None:
    busy, most = 0, 0
    full, go = asyncio.Event(), asyncio.Event()

    async def answer(writer: asyncio.StreamWriter) -> None:
        nonlocal busy, most
        busy += 1
        most = max(most, busy)
        if busy == 2:
            full.set()
        await go.wait()
        busy -= 1
        writer.write(GOOD)
        await writer.drain()

    async def run() -> None:
        async with Host(answer) as host:
            fetcher = Fetcher(
                (f"{NAME}:{host.port}",),
                max_bytes=64,
                timeout_s=60.0,
                resolve=Resolver(["127.0.0.1"]),
                is_allowed_address=bool,
            )
            loader = make(fetcher, num_fetched=2)
            remote = [ImagePart("part", f"http://{NAME}:{host.port}/") for _ in range(6)]
            fetching = asyncio.create_task(loader.load(remote))
            await full.wait()
            assert (await loader.load([data("a")]))[0].digest == b"a"
            go.set()
            assert [item.digest for item in await fetching] == [b"a picture"] * 6
            assert most == 2

    asyncio.run(run())
