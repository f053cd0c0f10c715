"""Names for page contents: a chained hash over everything that a page's KV depends on."""

from __future__ import annotations

import hashlib
import itertools
import secrets
import struct
from bisect import bisect_right
from collections.abc import Sequence

from jaxserve.media.items import MediaSpan

# Random per process, so that clients cannot predict or precompute page keys.
_PROCESS_KEY = secrets.token_bytes(32)


def root_key(salt: str) -> bytes:
    """Returns the parent key (32 bytes) of a sequence's first page. Different salts share no pages."""
    return hashlib.blake2b(salt.encode("utf-8", "surrogatepass"), digest_size=32, key=_PROCESS_KEY).digest()


def extend_keys(
    keys: list[bytes],
    token_ids: Sequence[int],
    *,
    page_size: int,
    num_pages: int,
    salt: str,
    images: Sequence[MediaSpan] = (),
) -> None:
    """Appends the keys of full pages to `keys` until it holds `num_pages` of them.

    A key covers the page's tokens, the images that they are placeholders of and, through its parent, all tokens before
    them and the salt.
    """
    parent = keys[-1] if keys else root_key(salt)
    for page in range(len(keys), num_pages):
        tokens = struct.pack(f"{page_size}q", *token_ids[page * page_size : (page + 1) * page_size])
        shown = _name_images(images, page * page_size, (page + 1) * page_size)
        parent = hashlib.blake2b(parent + tokens + shown, digest_size=32, key=_PROCESS_KEY).digest()
        keys.append(parent)


def _name_images(images: Sequence[MediaSpan], start: int, end: int) -> bytes:
    """Returns the images in tokens [start, end): for each its place and its digest."""
    first = bisect_right(images, start, key=lambda span: span.end)
    shown = itertools.takewhile(lambda span: span.start < end, images[first:])
    return b"".join(struct.pack("q", span.start - start) + span.digest for span in shown)
