"""Makes items of the images of requests: their files, and then what a process decodes of these."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any, final

from jaxserve.media.decode import ImageLimits
from jaxserve.media.items import MediaItem
from jaxserve.media.parts import ImagePart
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.reader import read_pillow
from jaxserve.media.sources import ImageFile, MediaSources

Read = Callable[[ImageFile, ImageProcessor, str], MediaItem]


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
        self._fetched = asyncio.Semaphore(num_fetched)

    async def load(self, parts: Sequence[ImagePart], options: Mapping[str, Any] | None = None) -> list[MediaItem]:
        """Returns the items of a request's images, in their order.

        Args:
            options: the request's `mm_processor_kwargs`.

        Raises:
            InvalidRequestError: the options, or the first image that is wrong; names the part and the limit.
            WorkerPoolBusyError, WorkerPoolClosedError, WorkerStartError: as `ImageReader.read`.
        """
        processor = self._processor.with_options(options or {})
        found = await asyncio.gather(*(self._load(part, processor) for part in parts), return_exceptions=True)
        items: list[MediaItem] = []
        for each in found:
            if isinstance(each, BaseException):
                raise each
            items.append(each)
        return items

    def close(self) -> None:
        """Takes no more work; what is under way ends with the reader."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    async def _load(self, part: ImagePart, processor: ImageProcessor) -> MediaItem:
        processor = processor.with_detail(part.detail)
        if part.url is None:
            return await self._run(read_pillow, part.image, processor, self._limits, part.field)
        if not part.is_remote:
            return await self._run(self._read, await self._sources.load(part), processor, part.field)
        async with self._fetched:
            return await self._run(self._read, await self._sources.load(part), processor, part.field)

    async def _run(self, function: Callable[..., MediaItem], *args: Any) -> MediaItem:
        return await asyncio.get_running_loop().run_in_executor(self._threads, function, *args)
