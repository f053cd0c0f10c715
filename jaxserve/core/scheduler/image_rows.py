"""The rows of the device's pool of image vectors: which image each row belongs to, and which chunks read which rows."""

from __future__ import annotations

from jaxserve.core.scheduler.limits import SchedulerLimits
from jaxserve.core.scheduler.running import Batch
from jaxserve.core.scheduler.sequence import Sequence
from jaxserve.core.scheduler.step_plan import ChunkImages, ImageWrite
from jaxserve.media.items import MediaItem


class ImageRows:
    """The rows, and the images that have some, by digest.

    Images stay until others need their rows, so one that comes again is not computed again. A row can be written anew
    once the last chunk that reads it is planned, as the device keeps the order of calls. So only two kinds of images
    stay for certain: those of the step that is planned, and those that a running sequence has computed in part.
    """

    def __init__(self, limits: SchedulerLimits, batch: Batch) -> None:
        self._limits, self._batch = limits, batch
        self.forget()

    def forget(self) -> None:
        """Forgets all images: the device has lost them."""
        self._free = list(range(self._limits.max_image_rows))
        self._rows: dict[bytes, tuple[int, ...]] = {}  # by digest, least recently used first
        self._writes: list[ImageWrite] = []  # since the last plan
        self._used: set[bytes] = set()  # by the step that is planned

    def find_end(self, sequence: Sequence, start: int, end: int, most: int) -> int:
        """Returns where tokens from `start` on must end, if they shall end at `end`.

        This is in front of the first image that has no rows and cannot get any in this step. The others have them from
        now on. Where no chunk may cut an image, it is behind the image in which `end` is, if that is at most `most`, or
        else in front of it.
        """
        images = sequence.request.images
        if images is None or start == end:
            return end
        for item, span in zip(images.items, images.spans, strict=True):
            if span.start >= end or span.end <= start:
                continue
            is_cut = end < span.end and self._limits.whole_image_tokens > 0
            if (is_cut and span.end > most) or not self._hold(item):
                return max(start, span.start)
            if is_cut:
                return span.end
        return end

    def locate(self, sequence: Sequence, start: int, end: int) -> ChunkImages | None:
        """Returns what the program of tokens [start, end) must know of images, for which `find_end` found rows.

        None: it needs nothing, as all images lie in front of them.
        """
        images = sequence.request.images
        if images is None or start >= images.spans[-1].end:
            return None
        first, last = images.places.searchsorted((start, end)).tolist()
        rows: list[int] = []
        behind = 0
        for item in images.items:
            before, behind = behind, behind + item.num_tokens
            if before < last and behind > first:
                rows += self._rows[item.digest][max(first - before, 0) : last - before]
        shifts: tuple[int, ...] = ()
        if images.shifts is not None:
            moved = images.shifts[:, start:end].tolist()  # behind the last image there are none
            shifts = tuple([number for axis in moved for number in (*axis, *[0] * (end - start - len(axis)))])
        return ChunkImages(tuple((images.places[first:last] - start).tolist()), tuple(rows), shifts)

    def count_held(self, sequence: Sequence, start: int) -> int:
        """Returns how many images have rows, of those that end behind `start`."""
        images = sequence.request.images
        return 0 if images is None else sum(span.end > start and span.digest in self._rows for span in images.spans)

    def take_writes(self) -> tuple[ImageWrite, ...]:
        """Returns the images that the planned step computes; the next one has room for others."""
        writes = tuple(self._writes)
        self._writes.clear()
        self._used.clear()
        return writes

    def _hold(self, item: MediaItem) -> bool:
        """Whether an image has rows, perhaps after others have lost theirs."""
        rows = self._rows.pop(item.digest, None)
        if rows is None:
            if not (self._has_time(item) and self._make_room(item.num_tokens)):
                return False
            rows = tuple([self._free.pop() for _ in range(item.num_tokens)])
            self._writes.append(ImageWrite(item, rows))
        self._rows[item.digest] = rows
        self._used.add(item.digest)
        return True

    def _has_time(self, item: MediaItem) -> bool:
        """Whether this step can compute one more image."""
        patches = item.num_patches + sum([write.item.num_patches for write in self._writes])
        return patches <= self._limits.max_num_batched_patches and len(self._writes) < self._limits.max_step_images

    def _make_room(self, count: int) -> bool:
        """Whether so many rows are free, once images that need not stay have lost theirs."""
        if len(self._free) < count:
            kept = self._used | self._list_started()
            for digest in [each for each in self._rows if each not in kept]:
                self._free += self._rows.pop(digest)
                if len(self._free) >= count:
                    break
        return len(self._free) >= count

    def _list_started(self) -> set[bytes]:
        """Returns the images of which running sequences have computed a part."""
        return {
            span.digest
            for sequence in self._batch.prefilling
            if sequence.request.images is not None
            for span in sequence.request.images.spans
            if span.start < sequence.num_computed_tokens < span.end
        }
