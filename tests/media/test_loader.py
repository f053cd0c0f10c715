"""Images of a request beside each other: their order, their faults, and how many are fetched at once."""

from __future__ import annotations

import asyncio
import gc
import threading
import weakref
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
from jaxserve.workers import WorkerPoolBusyError
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


@pytest.mark.parametrize("is_admitted", [True, False])
def test_errors_do_not_keep_images(make: Made, is_admitted: bool) -> None:
    """Their frames have the images, and must not lead back to them: then only a collection of garbage ends both."""

    def admit(item: MediaItem) -> None:
        if not is_admitted:
            raise InvalidRequestError("too much", field="messages")

    async def run() -> weakref.ref[Exception]:
        try:
            await make().load([data("bad" if is_admitted else "good"), data("bad", 1)], admit=admit)
        except InvalidRequestError as error:
            return weakref.ref(error)
        raise AssertionError("nothing was refused")

    gc.disable()
    try:
        assert asyncio.run(run())() is None
    finally:
        gc.enable()


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


def test_what_is_too_much_ends_the_rest(make: Made) -> None:
    """Images that still wait are not decoded."""
    decoded: list[bytes] = []

    def count(file: ImageFile, processor: ImageProcessor, field: str) -> MediaItem:
        decoded.append(file.data)
        return read(file, processor, field)

    def admit(item: MediaItem) -> None:
        if len(decoded) >= 4:
            raise InvalidRequestError("too many", field="messages")

    loader = make(read=count)
    with pytest.raises(InvalidRequestError, match="too many"):
        asyncio.run(loader.load([data("a", at) for at in range(100)], admit=admit))
    assert len(decoded) <= 6, "two more were under way"


def test_a_request_of_many_images_leaves_turns_to_others(make: Made) -> None:
    order: list[bytes] = []

    def count(file: ImageFile, processor: ImageProcessor, field: str) -> MediaItem:
        order.append(file.data)
        return read(file, processor, field)

    async def run() -> None:
        loader = make(read=count)
        many = asyncio.create_task(loader.load([data("many", at) for at in range(50)]))
        await asyncio.sleep(0)
        await loader.load([data("own")])
        assert order.index(b"own") < 10
        await many

    asyncio.run(run())


def test_nobody_waits_for_ever_for_others_images(make: Made) -> None:
    started, go = threading.Semaphore(0), threading.Event()

    def hang(file: ImageFile, processor: ImageProcessor, field: str) -> MediaItem:
        started.release()
        go.wait()
        return read(file, processor, field)

    async def run() -> None:
        loader = make(read=hang)
        slow = asyncio.create_task(loader.load([data("a"), data("b")]))
        await asyncio.to_thread(lambda: [started.acquire() for _ in range(2)])
        with pytest.raises(WorkerPoolBusyError):
            await loader.load([data("c")], longest_wait=0.01)
        go.set()
        assert [item.digest for item in await slow] == [b"a", b"b"]
        assert (await loader.load([data("c")], longest_wait=10.0))[0].digest == b"c"

    asyncio.run(run())


def test_an_image_that_is_given_twice_is_read_once(make: Made, tmp_path: Path) -> None:
    """Pillow reads an opened file in place, here in two threads."""
    Image.fromarray(draw(800, 900)).save(tmp_path / "a.png")
    image = Image.open(tmp_path / "a.png")
    items = asyncio.run(make().load([ImagePart(f"part[{at}]", None, image) for at in range(8)]))
    assert len({item.digest for item in items}) == 1
