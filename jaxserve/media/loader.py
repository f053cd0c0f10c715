"""Makes items of the images of requests: their files, and then what a process decodes of these."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import asynccontextmanager
from typing import Any, final

from jaxserve.media.decode import ImageLimits
from jaxserve.media.items import MediaItem
from jaxserve.media.parts import ImagePart
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.reader import read_pillow
from jaxserve.media.sources import ImageFile, MediaSources
from jaxserve.workers import WorkerPoolBusyError

Read = Callable[[ImageFile, ImageProcessor, str], MediaItem]
Admit = Callable[[MediaItem], None]  # raises if an item more is too much


@final
class ImageLoader:
    """Loads images beside each other. Its coroutines belong to one event loop."""

    def __init__(
        self,
        sources: MediaSources,
        read: Read,
        processor: ImageProcessor,
        limits: ImageLimits,
        *,
        num_threads: int,
        num_fetched: int = 8,
    ) -> None:
        """Starts nothing.

        Args:
            read: `ImageReader.read`, or what stands for it in tests; it is called in threads.
            processor: of the model.
            limits: of images that are Pillow's already.
            num_threads: one for each process of the reader, so that nothing waits there.
            num_fetched: images of hosts that are fetched, wait or are decoded at once. They are bytes that no request
                has brought, so nothing else bounds them; images that requests bring do not wait for slow hosts.
        """
        self._sources, self._read, self._processor, self._limits = sources, read, processor, limits
        self._threads = ThreadPoolExecutor(num_threads, "jaxserve-images")
        self._num_threads, self._turns = num_threads, asyncio.Semaphore(num_threads)
        self._fetched = asyncio.Semaphore(num_fetched)

    async def load(
        self,
        parts: Sequence[ImagePart],
        options: Mapping[str, Any] | None = None,
        *,
        admit: Admit = lambda item: None,
        longest_wait: float | None = None,
    ) -> list[MediaItem]:
        """Returns the items of a request's images, in their order.

        Args:
            options: the request's `mm_processor_kwargs`.
            admit: called with each item as it comes; if it raises, the images that wait are not decoded.
            longest_wait: seconds that an image may wait for a thread; None: no limit.

        Raises:
            InvalidRequestError: the options, or the first image that is wrong; names the part and the limit.
            WorkerPoolBusyError: others' images kept all threads at work; nothing is wrong with these.
            WorkerPoolClosedError, WorkerStartError: as `ImageReader.read`.
        """
        processor = self._processor.with_options(options or {})
        few = asyncio.Semaphore(self._num_threads)  # a request with many images leaves turns to others
        refusals: list[Exception] = []

        async def decode(part: ImagePart, file: ImageFile | None) -> MediaItem:
            async with few, self._take_turn(longest_wait):
                if refusals:
                    raise refusals[0]
                item = await self._decode(part, file, processor.with_detail(part.detail))
                try:
                    admit(item)
                except Exception as error:
                    refusals.append(error)
                    raise
                return item

        async def load(part: ImagePart) -> MediaItem:
            if not part.is_remote:
                return await decode(part, None)
            async with self._fetched:
                return await decode(part, await self._sources.load(part))

        found = await asyncio.gather(*map(load, parts), return_exceptions=True)
        failed = [*refusals, *(each for each in found if isinstance(each, BaseException))]
        if not failed:
            return [each for each in found if not isinstance(each, BaseException)]
        try:
            raise failed[0]
        finally:  # errors would lead back to themselves, and hold the images' data until garbage is collected
            refusals.clear()
            del found, failed

    def close(self) -> None:
        """Takes no more work; what is under way ends with the reader."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _decode(self, part: ImagePart, file: ImageFile | None, processor: ImageProcessor) -> MediaItem:
        """Returns an image's item; only now its file is read, if it comes with the request: few are in memory."""
        if part.url is None:
            return await self._run(read_pillow, part.image, processor, self._limits, part.field)
        return await self._run(self._read_file, part, file, processor)

    def _read_file(self, part: ImagePart, file: ImageFile | None, processor: ImageProcessor) -> MediaItem:
        return self._read(file or self._sources.read(part), processor, part.field)

    async def _run(self, function: Callable[..., MediaItem], *args: Any) -> MediaItem:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)

    @asynccontextmanager
    async def _take_turn(self, longest_wait: float | None) -> AsyncIterator[None]:
        """Holds one of the threads. Requests get turns in the order in which they ask."""
        try:
            async with asyncio.timeout(longest_wait):
                await self._turns.acquire()
        except TimeoutError:
            raise WorkerPoolBusyError("other images kept all threads at work") from None
        try:
            yield
        finally:
            self._turns.release()
