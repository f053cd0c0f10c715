"""Recordings of engines on the fake device: what is written, and what a replay makes of it."""

from __future__ import annotations

import contextlib
import json
import os
import random
import stat
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from jaxserve.core.pages import PageGroup, PageManager
from jaxserve.core.runtime.plan_codec import MaskDecoder
from jaxserve.core.runtime.tee import TeeRunner
from jaxserve.core.scheduler import Scheduler, SchedulerLimits
from jaxserve.core.scheduler.sequence import MASK_LATE, NON_FINITE
from jaxserve.engine.engine import Engine
from jaxserve.errors import ConfigError, RecordingError
from jaxserve.features.recording.recording import Recording, RecordingFile, refuse_target
from jaxserve.features.recording.replay import RecordingReader, Replay, ReplaySummary
from jaxserve.request import Request, Task
from jaxserve.sampling_params import SamplingParams
from jaxserve.scheduler_options import SchedulerOptions
from tests.engine.test_grammars import Grammar
from tests.examples import scale_examples
from tests.fake_device import FakeDevice

VOCAB, PAGE_SIZE, MAX_MODEL_LEN = 1009, 8, 64
GROUPS = [PageGroup(24), PageGroup(24, 20)]
LIMITS = SchedulerLimits(
    max_num_seqs=5,
    max_num_batched_tokens=48,
    max_model_len=MAX_MODEL_LEN,
    max_prefix_updates=30,
    loop_rows=5,
    options=SchedulerOptions(max_decode_steps=3),
)
HEADER = {"recording": 1}


def make_device() -> FakeDevice:
    device = FakeDevice(GROUPS, page_size=PAGE_SIZE, vocab_size=VOCAB)
    device.wants_edges = False
    device.draw_length = lambda width: 1 + len(device.plans) % 3  # not always what was planned
    device.poison_rows = {3}
    return device


def make_engine(path: Path) -> tuple[Engine, FakeDevice]:
    """An engine whose pools are too small for its rows, so that it preempts."""
    device = make_device()
    runner = TeeRunner(device, Recording(RecordingFile(path, HEADER), lambda: repr(device.weights)))
    pages = PageManager(GROUPS, page_size=PAGE_SIZE, max_chunk=48, enable_prefix_caching=True)
    engine = Engine(Scheduler(LIMITS, pages), runner, vocab_size=VOCAB)
    engine._grammars._mask_timeout = 0.0  # some masks are late, by chance
    return engine, device


def replay(path: Path, updates: Callable[[int], Any] = lambda index: None) -> tuple[ReplaySummary, RecordingReader]:
    device, reader = make_device(), RecordingReader(path)

    def update(index: int) -> str:
        device.write_params(updates(index))
        return repr(device.weights)

    run = Replay(device, MaskDecoder(-(-VOCAB // 32)), update, lambda load, digest: None)
    for _ in run.run(reader.lines()):
        pass
    reader.close()
    return run.summary, reader


def write_lines(path: Path, lines: list[dict[str, Any]]) -> None:
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def read_lines(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def draw_requests(draw: random.Random) -> Iterator[Request]:
    count = 0
    while True:
        count += 1
        prompt = [7 * i % VOCAB for i in range(draw.randint(0, 24))]
        prompt += [draw.randrange(VOCAB) for _ in range(draw.randint(1, 16))]
        kind = draw.choice(["plain", "plain", "embeds", "grammar", "jumps", "penalty"])
        grammar = {"grammar": Grammar(), "jumps": Grammar(forced={2: [5, 6, 7]})}.get(kind)
        params = SamplingParams(
            max_tokens=draw.randint(1, 30),
            n=draw.choice([1, 1, 2]) if kind != "embeds" else 1,
            frequency_penalty=0.5 if kind == "penalty" else 0.0,
            logprobs=draw.choice([None, 1]) if kind == "plain" else None,
            seed=draw.randrange(2**63),
        )
        task = Task.POOL if kind == "embeds" else Task.GENERATE
        options = {"grammar": grammar, "task": task, "priority": draw.choice([0, 0, 3])}
        yield Request(f"r{count}", tuple(prompt), params, **options)


def run_random(path: Path, *, num_steps: int, seed: int) -> tuple[Engine, FakeDevice]:
    """Adds, aborts, faults, interrupts and new weights between steps, by chance."""
    engine, device = make_engine(path)
    draw = random.Random(seed)
    requests, num_updates = draw_requests(draw), 0
    while len(device.plans) < num_steps:
        chance = draw.random()
        fewest = 6 if len(device.plans) // 50 % 2 else 2  # sometimes some wait, sometimes nobody
        if len(engine._requests) < fewest or chance < 0.05:
            engine.add_request(next(requests))
        elif chance < 0.07:
            engine.abort_request(draw.choice(sorted(engine._requests)))
        elif chance < 0.09:
            device.fail_next = RuntimeError("struck")
        elif chance < 0.095:
            engine.reset()
        elif chance < 0.1:
            engine.drain()
            engine.runner.write_params({"w": num_updates})
            engine.scheduler.requeue_running()
            num_updates += 1
        engine.step()
    return engine, device


@pytest.mark.slow
@pytest.mark.thorough
def test_ten_thousand_random_steps_are_replayed_equal(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine, _ = run_random(path, num_steps=10_000, seed=1)
    summary, reader = replay(path, lambda index: {"w": index})
    assert summary.difference is None and not reader.is_cut
    assert summary.num_steps >= 10_000 and summary.num_ids > summary.num_compared > 9_000
    assert summary.num_failed > 20 and summary.num_resets > summary.num_failed and summary.num_updates > 5
    assert engine.scheduler.counts.num_preemptions > 100
    lines = read_lines(path)
    assert any(line["plan"].get("width", 1) > 1 for line in lines if line.get("call") == "start")
    ids = {token_id for line in lines if line.get("call") == "result" for token_id in line["ids"]}
    assert {NON_FINITE, MASK_LATE} <= ids
    assert reader.num_bytes_read == reader.size


def run_some(path: Path, num_steps: int = 40) -> None:
    run_random(path, num_steps=num_steps, seed=3)


def change_line(path: Path, call: str, change: Callable[[dict[str, Any]], Any]) -> dict[str, Any]:
    """Changes the middle one of the lines with a call; returns it as it was."""
    lines = read_lines(path)
    where = [index for index, line in enumerate(lines) if line.get("call") == call]
    middle = where[len(where) // 2]
    old = json.loads(json.dumps(lines[middle]))
    change(lines[middle])
    write_lines(path, lines)
    return old


def test_the_first_different_id_is_found(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine, _ = make_engine(path)
    for index in range(3):
        engine.add_request(Request(f"r{index}", (index, 5), SamplingParams(max_tokens=20)))
    while engine.has_unfinished:
        engine.step()
    assert replay(path)[0].difference is None
    old = change_line(path, "result", lambda line: line["ids"].__setitem__(-1, line["ids"][-1] + 1))
    summary, _ = replay(path)
    found = summary.difference
    assert found is not None and found.step_id == old["step"] and found.num_rows == 1
    assert (found.row, found.ticket) == (2, 2)
    assert (found.recorded, found.replayed) == (old["ids"][-1] + 1, old["ids"][-1])
    assert summary.num_compared == old["step"] + 1, "later steps are not compared"


def test_a_token_lost_in_the_replay_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine, _ = make_engine(path)
    engine.add_request(Request("a", tuple(range(30)), SamplingParams(max_tokens=10)))
    while engine.has_unfinished:
        engine.step()

    def lengthen(line: dict[str, Any]) -> None:
        line["ids"].append(5)
        line["counts"] = [len(line["ids"])]

    change_line(path, "result", lengthen)
    found = replay(path)[0].difference
    assert found is not None and (found.recorded, found.replayed) == (5, None) and found.index > 0


def record_one(path: Path, num_prompt: int, max_tokens: int) -> list[dict[str, Any]]:
    """Records one request; returns the lines."""
    engine, _ = make_engine(path)
    engine.add_request(Request("a", tuple(range(num_prompt)), SamplingParams(max_tokens=max_tokens)))
    while engine.has_unfinished:
        engine.step()
    return read_lines(path)


def test_a_page_that_goes_elsewhere_is_a_difference(tmp_path: Path) -> None:
    """Nothing but the plan decides what the device reads."""
    path = tmp_path / "steps.jsonl"
    lines = record_one(path, 30, 30)
    chunks = [line for line in lines if line.get("call") == "start" and line["plan"].get("chunks")]
    chunks[0]["plan"]["chunks"][0]["token_ids"][3] += 1
    write_lines(path, lines)
    assert replay(path)[0].difference is not None


def test_ids_of_rows_that_do_not_sample_mean_nothing_but_their_sentinels_do(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    lines = record_one(path, 60, 3)
    first = next(line for line in lines if line.get("call") == "result")
    for token_id, is_equal in ((first["ids"][0] + 1, True), (NON_FINITE, False)):
        first["ids"] = [token_id]
        write_lines(path, lines)
        assert (replay(path)[0].difference is None) == is_equal


def test_a_step_that_fails_only_in_the_replay_is_a_difference(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    run_some(path)
    device = make_device()
    device.fail_next = RuntimeError("lost")
    run = Replay(device, MaskDecoder(-(-VOCAB // 32)), lambda index: "", lambda load, digest: None)
    list(run.run(RecordingReader(path).lines()))
    assert run.summary.difference is not None and run.summary.difference.error == "RuntimeError: lost"


class BadStart(FakeDevice):
    def start(self, plan: Any) -> Any:
        if len(self.plans) == 3:
            self.plans.append(plan)
            raise RuntimeError("not taken")
        return super().start(plan)


def test_faults_are_recorded_where_they_appear(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine, device = make_engine(path)
    device.__class__ = BadStart
    engine.add_request(Request("a", tuple(range(20)), SamplingParams(max_tokens=20)))
    for _ in range(4):
        outputs = engine.step()
    assert outputs[-1].error is not None
    engine.add_request(Request("b", tuple(range(20)), SamplingParams(max_tokens=20)))
    engine.step()
    device.fail_next = RuntimeError("struck")
    while engine.has_unfinished:
        engine.step()
    lines = read_lines(path)
    failed = [index for index, line in enumerate(lines) if line.get("call") == "failed"]
    assert [lines[index]["error"] for index in failed] == ["RuntimeError: not taken", "RuntimeError: struck"]
    assert "reset" in [line.get("call") for line in lines[failed[0] : failed[1]]]
    assert lines[-1]["call"] == "reset"
    summary, _ = replay(path)
    assert summary.difference is None and summary.num_failed == summary.num_resets == 2


def test_other_weights_and_missing_ones_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    engine, _ = make_engine(path)
    engine.add_request(Request("a", (1, 2), SamplingParams(max_tokens=20)))
    engine.step()
    engine.drain()
    engine.runner.write_params({"w": 1.5})
    engine.scheduler.requeue_running()
    while engine.has_unfinished:
        engine.step()
    assert replay(path, lambda index: {"w": 1.5})[0].num_updates == 1
    with pytest.raises(RecordingError, match="weights: update 1 wrote other weights") as refused:
        replay(path, lambda index: {"w": 2})
    assert refused.value.field == "weights"


@pytest.mark.parametrize("num_bytes", [1, 2, 9, 30])
def test_a_cut_last_line_is_left_out(tmp_path: Path, num_bytes: int) -> None:
    path = tmp_path / "steps.jsonl"
    run_some(path)
    whole, _ = replay(path, lambda index: {"w": index})
    data = path.read_bytes()
    path.write_bytes(data[: len(data) - num_bytes])
    cut, reader = replay(path, lambda index: {"w": index})
    assert reader.is_cut and cut.difference is None
    assert whole.num_compared - 2 <= cut.num_compared <= whole.num_compared
    path.write_bytes(b"".join(data.splitlines(keepends=True)[:-2]))
    assert not replay(path, lambda index: {"w": index})[1].is_cut, "whole lines, though a step has no result"


@pytest.mark.parametrize(
    ("line", "message"),
    [
        ("{", "line 5 is not JSON"),
        ("[]", "line 5 is not an object"),
        ("{}", "line 5 is malformed: KeyError"),
        ('{"call": "stop"}', "there is no call 'stop'"),
        ('{"call": "sample", "step": 999}', "KeyError"),
        ('{"call": "start", "plan": {"step_id": "x"}}', "must be int, got str"),
        (
            '{"call": "start", "plan": {"new_rows": [{"params": {"n": -1}}]}}',
            "malformed: InvalidRequestError",
        ),
        ("gASVJAAAAAAAAACMBXBvc2l4lIwGc3lzdGVtlJOUjAl0b3VjaCAvdG1wlIWUUpQu", "line 5 is not JSON"),
    ],
)
def test_malformed_lines_are_named(tmp_path: Path, line: str, message: str) -> None:
    path = tmp_path / "steps.jsonl"
    run_some(path)
    lines = path.read_text().splitlines()
    path.write_text("\n".join([*lines[:4], line, *lines[4:]]) + "\n")
    with pytest.raises(RecordingError, match=message) as refused:
        replay(path)
    assert refused.value.field == "recording"


@pytest.fixture(scope="module")
def short(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A recording with each kind of call."""
    path = tmp_path_factory.mktemp("short") / "steps.jsonl"
    engine, device = make_engine(path)
    for name, grammar in (("a", None), ("b", Grammar(forced={2: [5, 6, 7]}))):
        engine.add_request(
            Request(name, (1, 2, 3), SamplingParams(max_tokens=8, frequency_penalty=1.0), grammar=grammar)
        )
    for _ in range(4):
        engine.step()
    engine.drain()
    engine.runner.write_params({"w": 0})
    engine.scheduler.requeue_running()
    device.fail_next = RuntimeError("struck")
    while engine.has_unfinished:
        engine.step()
    assert {line["call"] for line in read_lines(path)[1:]} == {
        "start",
        "sample",
        "result",
        "failed",
        "reset",
        "weights",
    }
    return path


JSON = st.recursive(
    st.none() | st.booleans() | st.integers(-2, 40) | st.integers() | st.floats(allow_nan=False) | st.text(max_size=4),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=4), inner, max_size=2),
    max_leaves=4,
)


@settings(max_examples=scale_examples(300), deadline=None)
@given(st.data())
def test_whatever_a_line_holds_it_is_refused_or_run(
    short: Path, tmp_path_factory: pytest.TempPathFactory, data: st.DataObject
) -> None:
    """A value somewhere is replaced by another, or left out."""
    lines = read_lines(short)
    at: Any = lines[data.draw(st.integers(1, len(lines) - 1))]
    while True:
        keys = sorted(at) if isinstance(at, dict) else list(range(len(at)))
        key = data.draw(st.sampled_from(keys))
        if isinstance(at[key], dict | list) and at[key] and data.draw(st.booleans()):
            at = at[key]
            continue
        if data.draw(st.booleans()):
            at[key] = data.draw(JSON)
        else:
            del at[key]
        break
    path = tmp_path_factory.mktemp("changed") / "steps.jsonl"
    write_lines(path, lines)
    with contextlib.suppress(RecordingError):
        replay(path, lambda index: {"w": index})


def test_deep_nesting_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    path.write_text('{"recording": 1}\n' + "[" * 200_000 + "\n")
    with pytest.raises(RecordingError, match="line 2 is not JSON"):
        replay(path)


def test_files_without_a_header_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "steps.jsonl"
    for content in (b"", b"{}\n", b"[1]\n", b"\x80\x04\x95.\n", b'{"recording": 1'):
        path.write_bytes(content)
        with pytest.raises(RecordingError, match="does not begin with the header"):
            RecordingReader(path)
    os.mkfifo(tmp_path / "fifo")
    for name, message in (("none", "No such file"), (".", "a directory"), ("fifo", "a FIFO")):
        with pytest.raises(RecordingError, match=message):
            RecordingReader(tmp_path / name)


def test_only_the_owner_may_read_a_recording_from_its_first_byte(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path, modes = tmp_path / "steps.jsonl", []
    write = os.write

    def look(descriptor: int, data: Any) -> int:
        modes.append(stat.S_IMODE(os.fstat(descriptor).st_mode))
        return write(descriptor, data)

    monkeypatch.setattr(os, "write", look)
    old = os.umask(0)
    try:
        RecordingFile(path, HEADER).write({"call": "reset"})
    finally:
        os.umask(old)
    assert modes == [0o600, 0o600] and stat.S_IMODE(path.stat().st_mode) == 0o600


def test_nothing_is_overwritten(tmp_path: Path) -> None:
    path, link = tmp_path / "steps.jsonl", tmp_path / "link"
    path.write_text("mine")
    link.symlink_to(tmp_path / "elsewhere")
    for target in (path, link):
        with pytest.raises(ConfigError, match=r"record_steps: .* exists, and no recording is overwritten"):
            refuse_target(target)
        with pytest.raises(ConfigError, match=r"record_steps: .* cannot be made"):
            RecordingFile(target, HEADER)
    assert path.read_text() == "mine" and not (tmp_path / "elsewhere").exists()
    with pytest.raises(ConfigError, match="is not a directory that this user may write to"):
        refuse_target(tmp_path / "missing" / "steps.jsonl")
    refuse_target(tmp_path / "new")


def test_a_full_disk_ends_the_recording_and_not_the_engine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "steps.jsonl"
    engine, _ = make_engine(path)
    room, write = 1200, os.write

    def fill(descriptor: int, data: Any) -> int:
        nonlocal room
        if not room:
            raise OSError(28, "No space left on device")
        taken = write(descriptor, data[: min(room, 50)])  # parts, as a kernel may
        room -= taken
        return taken

    monkeypatch.setattr(os, "write", fill)
    engine.add_request(Request("a", (1, 2), SamplingParams(max_tokens=40)))
    outputs = []
    while engine.has_unfinished:
        outputs += engine.step()
    assert outputs[-1].outputs[0].finish_reason == "length"
    assert [record.getMessage().partition(" is recorded")[0] for record in caplog.records] == [
        "record_steps: nothing more"
    ]
    monkeypatch.undo()
    summary, reader = replay(path)
    assert reader.is_cut and summary.difference is None and summary.num_compared > 2
