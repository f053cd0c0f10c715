"""What strangers try with images over HTTP, in small; `scripts/image_attacks.py` does it to a whole server."""

from __future__ import annotations

import asyncio
import base64
import tracemalloc
from collections.abc import Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from jaxserve.media.fetch import Fetcher
from tests.engine.image_models import make_folder
from tests.media.bombs import Bomb, make_bombs
from tests.media.test_fetch import NAME, Host, Resolver
from tests.server.image_front import PART, TEXT, Front

CHAT = "/v1/chat/completions"
MOST_BYTES = 32 << 20  # that this process may have more at any time; a bomb of 64 megapixels has 192 MB of RGB
BOMBS = make_bombs()


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(make_folder(tmp_path_factory.mktemp("seeing")), options={"allowed_media_domains": [NAME]})
    yield found
    found.close()


@pytest.fixture(autouse=True)
def usual(front: Front) -> Iterator[None]:
    """An ordinary request is the same before and behind an attack."""
    prompts = []
    for _ in range(2):
        front.requests.clear()
        answer = front.chat(TEXT, PART)
        (request,) = front.requests
        assert answer.status_code == 200 and request.images is not None
        prompts.append((answer.json()["choices"], request.prompt_token_ids, request.images.items))
        if len(prompts) == 1:
            yield
    assert prompts[0] == prompts[1]
    assert front.state.images.counts.read_bytes() == 0  # type: ignore[union-attr]


def make_chat(*parts: Any) -> dict[str, Any]:
    return {"messages": [{"role": "user", "content": list(parts)}]}


def make_part(url: str) -> dict[str, Any]:
    return {"type": "image_url", "image_url": {"url": url}}


@pytest.mark.parametrize("bomb", BOMBS, ids=[bomb.title for bomb in BOMBS])
def test_a_bomb_costs_a_process_of_its_own(front: Front, bomb: Bomb) -> None:
    part = make_part(f"data:;base64,{base64.b64encode(bomb.data).decode()}")
    assert len(bomb.data) < 1 << 20
    tracemalloc.start()
    try:
        answer = front.chat(TEXT, part)
        most = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert answer.status_code == bomb.status, answer.text
    assert most < MOST_BYTES
    if bomb.status == 400:
        assert answer.json()["error"]["param"] == "messages[0].content[1]"


def test_of_ten_thousand_parts_the_first_that_is_too_much_is_named(front: Front) -> None:
    answer = front.chat(*[PART] * 10_000)
    assert answer.status_code == 400 and answer.json()["error"]["param"] == "messages[0].content[64]"
    assert not front.requests[1:], "none was decoded for the engine"


def fetch_from(
    front: Front, host: Host, addresses: Sequence[str], monkeypatch: pytest.MonkeyPatch, **options: Any
) -> str:
    """Lets the server fetch from a host here, whose name has these addresses; returns the URL of an image."""
    domains = (f"{NAME}:{host.port}",)
    fetcher = Fetcher(domains, max_bytes=1 << 20, timeout_s=1.0, resolve=Resolver(addresses), **options)
    assert front.state.images is not None
    monkeypatch.setattr(front.state.images._loader._sources, "_fetcher", fetcher)
    return f"http://{NAME}:{host.port}/"


@pytest.mark.parametrize("addresses", [["127.0.0.1"], ["::ffff:127.0.0.1"], ["64:ff9b::7f00:1"], ["8.8.8.8", "::1"]])
def test_a_name_that_leads_inside_is_never_connected(
    front: Front, addresses: list[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    async def run() -> None:
        async with Host() as host:
            url = fetch_from(front, host, addresses, monkeypatch)
            (answer,) = await front.send([(CHAT, make_chat(make_part(url)))])
            assert answer.status_code == 400 and "allowed_media_domains" in answer.json()["error"]["message"]
            assert not host.heads

    asyncio.run(run())


def test_hosts_without_an_end_are_left_while_others_are_answered(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One sends as fast as it can, one a byte now and then."""

    async def send(writer: asyncio.StreamWriter, piece: bytes, pause: float) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        while True:
            writer.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            await writer.drain()
            await asyncio.sleep(pause)

    async def run(front: Front) -> None:
        plain = make_chat(TEXT, PART)
        for piece, pause in ((bytes(1 << 16), 0.0), (b"a", 0.05)):
            async with Host(partial(send, piece=piece, pause=pause)) as host:
                url = fetch_from(front, host, ["127.0.0.1"], monkeypatch, is_allowed_address=bool)
                asked = asyncio.ensure_future(front.send([(CHAT, make_chat(make_part(url)))] * 4))
                others = await front.send([(CHAT, plain)] * 2)
                answers = await asked
            assert [answer.status_code for answer in others] == [200] * 2
            assert [answer.status_code for answer in answers] == [400] * 4
            assert "allowed_media_domains" in answers[0].json()["error"]["message"]

    front = Front(make_folder(tmp_path), options={"allowed_media_domains": [NAME]})
    tracemalloc.start()
    try:
        asyncio.run(run(front))
        assert tracemalloc.get_traced_memory()[1] < MOST_BYTES
    finally:
        tracemalloc.stop()
        front.close()
