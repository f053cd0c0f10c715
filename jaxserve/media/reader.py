"""Decodes images of strangers in processes that can be killed."""

from __future__ import annotations

from dataclasses import asdict
from pathlib import Path
from threading import Lock
from typing import TYPE_CHECKING, Any, final

from jaxserve.errors import InvalidRequestError
from jaxserve.media.decode import ImageLimits, check_size, require_pillow, to_rgb
from jaxserve.media.items import MediaItem
from jaxserve.media.processors import ImageProcessor
from jaxserve.media.sources import ImageFile
from jaxserve.workers import Worker, WorkerEndedError, WorkerPool, WorkerPoolBusyError, WorkerTimeoutError

if TYPE_CHECKING:
    from PIL.Image import Image

MEMORY_BYTES = 1536 << 20  # address space for an image; a WebP of 64 megapixels with transparency takes 1.2 GiB
MAX_PROCESSES = 2
_WAIT_S = 60.0  # for a process; callers that have as many threads as there are processes do not wait
_PROGRAM = Path(__file__).with_name("worker.py")
_LOADING = Lock()  # Pillow reads the file of an opened image in place, and a caller may give one image twice


@final
class ImageReader:
    """A few processes that decode images, started on demand. Safe to use from several threads."""

    def __init__(
        self,
        limits: ImageLimits,
        *,
        time_limit_s: float,
        max_processes: int = MAX_PROCESSES,
        memory_bytes: int = MEMORY_BYTES,
    ) -> None:
        """Starts nothing.

        Args:
            limits: of an image.
            time_limit_s: seconds for one image, without the wait for a process.
            max_processes: images decoded at once; others wait.
            memory_bytes: address space that decoding an image may take.

        Raises:
            MissingPackageError: Pillow is not installed.
        """
        require_pillow()
        self._limits, self._time_limit_s, self._memory_bytes = limits, time_limit_s, memory_bytes
        self._pool = WorkerPool(self._make_worker, max_processes)

    def start(self) -> None:
        """Starts one process; WorkerStartError if it cannot be started."""
        self._pool.start(self._time_limit_s)

    def read(self, file: ImageFile, processor: ImageProcessor, field: str) -> MediaItem:
        """Returns the item of a file.

        The digest is made here: what decides which pages are shared must not come from a process that a stranger's
        file may have taken over.

        Raises:
            InvalidRequestError: the image is broken, too large, or takes too long; names `field`.
            WorkerPoolBusyError: others' images kept all processes at work; nothing is wrong with this one.
            WorkerPoolClosedError: `close` was called.
            WorkerStartError: no process could be started.
        """
        job = {
            "attachment": file.data,
            "is_base64": file.is_base64,
            "field": field,
            "processor": processor.describe(),
            "limits": asdict(self._limits),
        }
        try:
            reply = self._pool.ask(job, wait_s=_WAIT_S, limit_s=self._time_limit_s)
        except WorkerPoolBusyError:
            raise
        except WorkerTimeoutError as error:
            message = f"cannot be decoded in {self._time_limit_s:g} s"
            raise InvalidRequestError(message, field=field) from error
        except WorkerEndedError as error:
            message = f"cannot be decoded: it takes more than {self._memory_bytes >> 20} MiB, or crashes the decoder"
            raise InvalidRequestError(message, field=field) from error
        return processor.make_item(_read_pixels(reply))

    def close(self) -> None:
        """Ends the processes; threads that wait for an image get WorkerPoolClosedError. A second call does nothing."""
        self._pool.close()

    @property
    def process_ids(self) -> list[int]:
        """The ids of the running processes."""
        return self._pool.process_ids

    def _make_worker(self) -> Worker:
        return Worker(
            _PROGRAM,
            dict,
            name="the decoder of images",
            time_limit_s=self._time_limit_s,
            memory_bytes=self._memory_bytes,
        )


def read_pillow(image: Image, processor: ImageProcessor, limits: ImageLimits, field: str) -> MediaItem:
    """Returns the item of an image that the caller's own program opened, decoded in this process.

    Raises:
        InvalidRequestError: it is too large, or broken; names `field`.
    """
    check_size(image.height, image.width, limits, field)
    try:
        with _LOADING:
            image.load()
        rgb = to_rgb(image.copy())
    except (OSError, SyntaxError, ValueError) as error:  # a file that was opened, but is read only now
        raise InvalidRequestError(f"cannot be decoded: {error}", field=field) from error
    return processor.make_item(processor.resize(rgb, field))


def _read_pixels(reply: dict[str, Any]) -> Any:
    """Returns the pixels of a reply, uint8 [height, width, 3]; InvalidRequestError if it has an error."""
    import numpy as np

    if "error" in reply:
        raise InvalidRequestError(reply["error"], field=reply["field"])
    return np.frombuffer(reply["attachment"], np.uint8).reshape(*reply["shape"], 3)
