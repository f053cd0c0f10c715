"""Data of images over HTTP is gone when it is no longer needed, without a collection of garbage."""

from __future__ import annotations

import base64
import gc
import json
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import pytest

from tests.engine.image_models import make_folder
from tests.server.image_front import DATA, PART, Front, to_block, to_input

LONG = 4 << 20  # bytes of an image; what a request holds otherwise is a small part of this
LONG_DATA = base64.b64encode(base64.b64decode(DATA) + bytes(LONG)).decode()
PATHS = {"/v1/chat/completions": PART, "/v1/responses": to_input(), "/v1/messages": to_block()}


@pytest.fixture(scope="module")
def front(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Front]:
    found = Front(make_folder(tmp_path_factory.mktemp("seeing")))
    yield found
    found.close()


def write_long(path: str, data: str, **more: Any) -> bytes:
    """Returns a body whose image has `LONG` bytes; decoders ignore what is behind an image."""
    turns = [{"role": "user", "content": [PATHS[path]]}]
    body = {"input": turns} if path == "/v1/responses" else {"messages": turns, "max_tokens": 2}
    return json.dumps({**body, **more}).replace(DATA, data).encode()


@contextmanager
def watch_memory() -> Iterator[Callable[[], int]]:
    """Yields a function that returns by how many bytes memory has grown. Meanwhile no garbage is collected.

    It waits a while for less than `LONG`, since threads drop what they returned when they get to run.
    """

    def measure() -> int:
        deadline = time.monotonic() + 10
        while (growth := tracemalloc.get_traced_memory()[0] - before) > LONG // 2 and time.monotonic() < deadline:
            time.sleep(0.01)
        return growth

    gc.collect()
    gc.disable()
    tracemalloc.start()
    before = tracemalloc.get_traced_memory()[0]
    try:
        yield measure
    finally:
        tracemalloc.stop()
        gc.enable()


@pytest.mark.parametrize("path", PATHS)
def test_a_long_answer_holds_no_data_of_images(front: Front, path: str) -> None:
    """Hundreds of clients may read theirs at once, and their bodies no longer count."""
    content = write_long(path, LONG_DATA, stream=True)
    assert front.ask(path, content).status_code == 200  # all that is made once
    grown: list[int] = []
    llm: Any = front.state.llm
    stream = llm.stream
    with watch_memory() as measure:
        llm.stream = lambda *args, **more: grown.append(measure()) or stream(*args, **more)  # type: ignore[func-returns-value]
        try:
            assert front.ask(path, content).status_code == 200
        finally:
            llm.stream = stream
    assert len(grown) == 1 and grown[0] < LONG // 2


@pytest.mark.parametrize("path", PATHS)
@pytest.mark.parametrize(
    ("data", "more"), [(f"{'A' * LONG}", {}), (f"*{'A' * LONG}", {}), (None, {"top_p": 2}), (None, {"fps": 2})]
)
def test_a_refusal_leaves_no_data_of_images(front: Front, path: str, data: str | None, more: dict[str, Any]) -> None:
    """Errors have frames, and these what bodies became, until the last of both is gone."""
    content = write_long(path, data or LONG_DATA, **more)
    assert front.ask(path, content).status_code == 400
    with watch_memory() as measure:
        assert front.ask(path, content).status_code == 400
        assert measure() < LONG // 2
