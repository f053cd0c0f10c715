"""The benchmark of the server runs to its end, counts every event, and writes what it prints."""

from __future__ import annotations

import asyncio
import json
import random
import sys
from pathlib import Path
from types import ModuleType

import pytest

from tests.scripts.test_bench_dry_runs import ROOT, run_script


@pytest.fixture
def load(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import bench_server_load

    return bench_server_load


def test_events_are_counted_however_they_are_cut(load: ModuleType) -> None:
    head = b"HTTP/1.1 200 OK\r\nx-request-id: 0\r\n\r\n"
    events = [f"data: {'x' * size}\n\n".encode() for size in (1, 15, 40, 7)]
    answer = head + b"".join(b"%x\r\n%s\r\n" % (len(event), event) for event in events) + b"0\r\n\r\n"

    async def count(pieces: list[bytes]) -> tuple[int, int]:
        wave = load.Wave(0, [b""])
        wave.records = True
        stream = load.Stream(wave, b"")
        wave.streams = [stream]
        for piece in pieces:
            stream.data_received(piece)
        stream.connection_lost(None)
        await wave.finish()
        return stream.num_events, len(wave.gaps)

    rng = random.Random(0)
    for _ in range(200):
        cuts = sorted(rng.sample(range(1, len(answer)), rng.randrange(8)))
        pieces = [answer[start:stop] for start, stop in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
        num_events, num_gaps = asyncio.run(count(pieces))
        assert num_events == len(events) and num_gaps < len(events)


@pytest.mark.parametrize("answer", [b"HTTP/1.1 429 Too Many Requests\r\n\r\n", b"HTTP/1.1 200 OK\r\n\r\n5\r\ndata:"])
def test_refused_and_cut_streams_are_no_figures(load: ModuleType, answer: bytes) -> None:
    async def receive() -> None:
        wave = load.Wave(0, [b""])
        stream = load.Stream(wave, b"")
        stream.data_received(answer)
        stream.connection_lost(None)
        await wave.finish()

    with pytest.raises(RuntimeError, match="refused or cut short"):
        asyncio.run(receive())


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the CPU clocks of another process")
def test_bench_server(tmp_path: Path) -> None:
    output = run_script("bench_server.py", "--profile", "--json", str(tmp_path / "found.json"))
    for text in (
        "Server CPU per streamed chunk",
        "TTFT p99",
        "Serving tax",
        "event loop: microseconds",
        "cores of this",
    ):
        assert text in output, text
    found = json.loads((tmp_path / "found.json").read_text())
    assert [line["streams"] for line in found["streams"]] == [1, 8]
    for line in found["streams"]:
        assert line["ended"] == 0 and line["chunks"] > 0
        assert 0 < line["event_loop_us_per_chunk"] < line["cpu_us_per_chunk"]
        assert 0 < line["ttft"][0] <= line["ttft"][2] and 0 < line["itl"][0] <= line["itl"][2]
        assert line["profile"]["jaxserve-engine"]["seconds"] > 0
    assert found["tax"]["tax"] < 1 and found["tax"]["http_tokens_per_second"] > 0
