"""The images of requests, loaded on the event loop before prompts are rendered."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, final

from starlette.requests import Request

from jaxserve.engine.images import ImageInput
from jaxserve.errors import InvalidRequestError
from jaxserve.media.items import MediaItem
from jaxserve.media.options import ImageOptions
from jaxserve.media.parts import ImagePart, take_images
from jaxserve.server.budget import ByteBudget
from jaxserve.server.errors import ApiError
from jaxserve.server.metrics import ImageCounts
from jaxserve.server.request_context import get_context
from jaxserve.tokenizers.messages import require_readable_parts
from jaxserve.workers import WorkerPoolBusyError, WorkerPoolClosedError

_RETRY_AFTER = 1  # seconds; what holds the processes ends within the time limit of an image


class NewImagesError(Exception):
    """A request needs images that are not loaded yet."""

    def __init__(self, parts: Sequence[ImagePart], options: Mapping[str, Any] | None) -> None:
        super().__init__("images must be loaded")
        self.parts, self.options = parts, options


@final
class ServedImages:
    """Loads the images of requests, within a budget of bytes. One event loop may use it."""

    def __init__(self, images: ImageInput, budget: ByteBudget) -> None:
        """Starts one process that decodes images.

        Raises:
            WorkerStartError: it cannot be started.
        """
        self._input, self._budget = images, budget
        images.start()
        self._loader = images.make_loader()
        self.counts = ImageCounts(lambda: budget.held)

    @property
    def options(self) -> ImageOptions:
        """How the engine reads images."""
        return self._input.options

    def check_options(self, options: Mapping[str, Any] | None) -> None:
        """Raises InvalidRequestError for `mm_processor_kwargs` that are unknown or out of range."""
        self._input.check_options(options)

    def expand(self, ids: Sequence[int], items: Sequence[MediaItem]) -> list[int]:
        """Returns a prompt's ids with all placeholders of its images."""
        return self._input.locate(ids, items)[0]

    async def load(self, http: Request, new: NewImagesError, longest_wait: float | None = None) -> list[MediaItem]:
        """Returns the items of a request's images, whose bytes count in the budget until its answer has ended.

        Args:
            longest_wait: seconds that an image may wait for a process; None: no limit.

        Raises:
            InvalidRequestError: names the part of an image that is refused, or the option.
            ApiError: 429 when others' images hold the budget or all processes; 503 at shutdown.
        """
        context = get_context(http.scope)
        share = context.image_share = context.image_share or self._budget.open()
        num_bytes = 0

        def hold(item: MediaItem) -> None:
            nonlocal num_bytes
            num_bytes += len(item.patches)
            share.grow(num_bytes)

        admit: Callable[[MediaItem], None] = self._input.limit_tokens(hold)
        try:
            items = await self._loader.load(new.parts, new.options, admit=admit, longest_wait=longest_wait)
        except WorkerPoolBusyError:
            message = "Images of other requests are being decoded; try again."
            raise ApiError(429, message, code="images_busy", headers={"Retry-After": str(_RETRY_AFTER)}) from None
        except WorkerPoolClosedError:
            raise ApiError(503, "The server is shutting down.", code="server_draining") from None
        self.counts.num_images += len(items)
        self.counts.num_patches += sum(item.num_patches for item in items)
        return items

    def close(self) -> None:
        """Ends the processes. Requests that need one end with an ApiError 503. A second call does nothing."""
        self._loader.close()
        self._input.close()


def read_images(
    images: ServedImages | None,
    messages: Sequence[Mapping[str, Any]],
    options: Mapping[str, Any] | None = None,
) -> tuple[Sequence[Mapping[str, Any]], list[ImagePart]]:
    """Returns messages without the data of their images, as `take_images` of media/parts.py does, and the images.

    Args:
        images: those of the server; None if its model is served for text.
        options: the body's `mm_processor_kwargs`.

    Raises:
        InvalidRequestError: the model is served for text and there are images, or options for them; or one of these is
            malformed; or there is video, sound or a file.
    """
    found: list[ImagePart] = []
    if images is not None:
        images.check_options(options)
        messages, found = take_images(messages, images.options.num_images)
    elif options:
        raise InvalidRequestError("is not read here: the model is served for text", field="mm_processor_kwargs")
    require_readable_parts(messages, reads_images=images is not None)
    return messages, found
