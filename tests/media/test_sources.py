"""Sources: data URLs, and files below the folder that the operator allowed."""

from __future__ import annotations

import asyncio
import os
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError, InvalidRequestError
from jaxserve.media.decode import ImageLimits
from jaxserve.media.parts import ImagePart
from jaxserve.media.sources import ImageFile, MediaSources, SourceOptions

LIMITS = ImageLimits(max_bytes=30)


def load(url: str, **options: object) -> ImageFile:
    async def run() -> ImageFile:
        sources = MediaSources(SourceOptions(**options), LIMITS)  # type: ignore[arg-type]
        return await sources.load(ImagePart("part", url))

    return asyncio.run(run())


def refuse(url: str, **options: object) -> str:
    with pytest.raises(InvalidRequestError) as error:
        load(url, **options)
    assert error.value.field == "part"
    return str(error.value)


@pytest.mark.parametrize("head", ["data:image/png;base64,", "data:;base64,", "DATA:image/webp;name=a;BASE64,"])
def test_data_urls_give_their_text(head: str) -> None:
    assert load(f"{head}QUJD") == ImageFile(b"QUJD", is_base64=True)


@pytest.mark.parametrize(
    "url", ["data:image/png,QUJD", "data:image/png;base64", "data:", f"data:image/{'p' * 300};base64,QUJD"]
)
def test_other_data_urls_are_refused(url: str) -> None:
    assert "base64" in refuse(url)


def test_data_that_is_no_text_of_bytes_is_left_to_the_decoder() -> None:
    assert load("data:;base64,é\ud800").data == b"\xc3\xa9\xed\xa0\x80"


def test_large_data_is_refused_unread() -> None:
    assert load("data:;base64," + "A" * 40).data == b"A" * 40
    assert "at most 30" in refuse("data:;base64," + "A" * 44)


@pytest.mark.parametrize("url", ["", "x", "ftp://a/b", "javascript:1", "blob:x", "/etc/passwd", "\0"])
def test_other_schemes_are_refused(url: str) -> None:
    assert "data, http, https or file" in refuse(url)


def test_hosts_and_files_are_refused_by_default() -> None:
    assert "allowed_media_domains" in refuse("https://a.test/b.png")
    assert "allowed_local_media_path" in refuse("file:///etc/passwd")
    assert "8,192" in refuse("https://a.test/" + "b" * 9000)


def test_files_are_read_below_the_folder_only(tmp_path: Path) -> None:
    folder, outside = tmp_path / "in", tmp_path / "in-not"
    folder.mkdir(), outside.mkdir()
    (folder / "a b.png").write_bytes(b"inside")
    (folder / "large.png").write_bytes(bytes(31))
    (outside / "a.png").write_bytes(b"outside")
    (folder / "out").symlink_to(outside)
    (folder / "in.png").symlink_to(folder / "a b.png")
    os.mkfifo(folder / "fifo")
    options = {"allowed_local_media_path": str(folder)}
    assert load(f"file://{folder}/a%20b.png", **options) == ImageFile(b"inside", is_base64=False)
    assert load(f"file://localhost{folder}/in.png", **options).data == b"inside"
    texts = {
        refuse(f"file://{path}", **options)
        for path in (
            *(f"{outside}/a.png", f"{folder}/../in-not/a.png", f"{folder}/out/a.png", f"{folder}/%2e%2e/in-not/a.png"),
            *(
                f"{folder}/none.png",
                str(folder),
                f"{folder}/fifo",
                f"{folder}/large.png",
                "/dev/zero",
                "/proc/self/mem",
            ),
            *(f"host.test{folder}/in.png", f"{folder}/in.png?a", f"{folder}/a%00.png", "in.png", "[", ""),
        )
    }
    assert len(texts) == 1, "the error does not tell a file that is missing from one that is elsewhere"


def test_the_folder_must_be_one(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="allowed_local_media_path"):
        load("data:;base64,", allowed_local_media_path=str(tmp_path / "none"))
