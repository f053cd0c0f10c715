"""The bytes of an image: from a data URL, or from a host or folder that the operator allowed."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import final
from urllib.parse import unquote, urlsplit

from jaxserve.errors import ConfigError, InvalidRequestError, shorten
from jaxserve.files import read_regular
from jaxserve.media.decode import ImageLimits
from jaxserve.media.fetch import Fetcher
from jaxserve.media.parts import ImagePart

_MOST_HEAD = 256  # characters of a data URL in front of its data
_MOST_URL = 8192  # characters of any other


@dataclass(frozen=True, slots=True)
class SourceOptions:
    """What the operator allows beside data URLs, by vLLM's names."""

    allowed_media_domains: tuple[str, ...] = ()  # hosts; with a port where it is not the scheme's
    allowed_local_media_path: str = ""  # a folder; "": none


@dataclass(frozen=True, slots=True)
class ImageFile:
    """The file of an image as it came; nothing of it is checked but its size."""

    data: bytes = field(repr=False)
    is_base64: bool  # as data URLs have it; the process that decodes the image reads that, too


@final
class MediaSources:
    """Reads images of requests."""

    def __init__(self, options: SourceOptions, limits: ImageLimits, fetcher: Fetcher | None = None) -> None:
        """Opens nothing.

        Args:
            limits: of an image.
            fetcher: replaces the one that these limits and options make, for tests.

        Raises:
            ConfigError: the folder is none.
        """
        self._limits = limits
        self._folder = _find_folder(options.allowed_local_media_path)
        self._fetcher = fetcher or Fetcher(options.allowed_media_domains, max_bytes=limits.max_bytes)

    async def load(self, part: ImagePart) -> ImageFile:
        """Returns the file of an image that a host has, or as `read`."""
        if part.is_remote and part.url is not None and len(part.url) <= _MOST_URL:
            return ImageFile(await self._fetcher.fetch(part.url, part.field), is_base64=False)
        return self.read(part)

    def read(self, part: ImagePart) -> ImageFile:
        """Returns the file of an image that comes with the request, or that a folder has.

        Raises:
            InvalidRequestError: its source is not allowed, or does not give it; names the part and the option.
        """
        assert part.url is not None, "an image of Pillow has no source"
        scheme = part.url[:8].partition(":")[0].lower()
        if scheme == "data":
            return _read_data(part.url, self._limits, part.field)
        if len(part.url) > _MOST_URL:
            message = f"a URL may have {_MOST_URL:,} characters, got {len(part.url):,}; longer ones must be data"
            raise InvalidRequestError(message, field=part.field)
        if scheme == "file":
            return ImageFile(self._read_file(part.url, part.field), is_base64=False)
        message = f"must be a URL of data, http, https or file, got {shorten(part.url)}"
        raise InvalidRequestError(message, field=part.field)

    def _read_file(self, url: str, field: str) -> bytes:
        """Returns a file below the folder; where it leads, links included, is what counts."""
        refusal = InvalidRequestError("is no readable file below allowed_local_media_path", field=field)
        if self._folder is None:
            message = "files are not read here (allowed_local_media_path); send the image as data"
            raise InvalidRequestError(message, field=field)
        try:
            parts = urlsplit(url)
            if parts.netloc not in ("", "localhost") or parts.query or parts.fragment:
                raise refusal
            path = Path(unquote(parts.path)).resolve()  # a null byte is a ValueError
            if not path.is_relative_to(self._folder):
                raise refusal
            return read_regular(path, self._limits.max_bytes)
        except (OSError, ValueError) as error:  # one message for all: it must not say what else there is
            raise refusal from error


def _find_folder(given: str) -> Path | None:
    if not given:
        return None
    folder = Path(given).resolve()
    if not folder.is_dir():
        raise ConfigError("must be a folder", field="allowed_local_media_path", value=given)
    return folder


def _read_data(url: str, limits: ImageLimits, field: str) -> ImageFile:
    head, comma, _ = url[:_MOST_HEAD].partition(",")
    if not comma or not head.lower().endswith(";base64"):
        message = f"must begin with data:image/...;base64, and got {shorten(head)}"
        raise InvalidRequestError(message, field=field)
    most = -(-limits.max_bytes // 3) * 4
    size = len(url) - len(head) - 1
    if size > most:
        message = f"has {size // 4 * 3:,} bytes; at most {limits.max_bytes:,} are read"
        raise InvalidRequestError(message, field=field, value=size)
    return ImageFile(url[len(head) + 1 :].encode("utf-8", "surrogatepass"), is_base64=True)
