"""A follower makes rank 0's calls: the same plans and masks, in the same order, on the fake device."""

from __future__ import annotations

import contextlib
import queue
import random
import re
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from jaxserve.core.pages import PageManager
from jaxserve.core.runtime.tee import TeeRunner
from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.engine import Engine
from jaxserve.errors import ClusterError, WeightsError
from jaxserve.features.multinode.follower import Follower
from jaxserve.features.multinode.leader import Followers
from jaxserve.request import Request
from jaxserve.sampling_params import SamplingParams
from tests.fake_device import FakeFuture
from tests.features.multinode.groups import Losses, join
from tests.features.recording.test_recording import GROUPS, LIMITS, PAGE_SIZE, VOCAB, draw_requests, make_device


class Journal:
    """A device that keeps what it was told, in order."""

    def __init__(self) -> None:
        self.device, self.calls = make_device(), []  # type: ignore[var-annotated]
        self.loads: set[int] = set()  # generations of adapters that are kept
        self.is_read = threading.Event()  # the adapter that is slow
        self.counts, self.num_programs, self.num_compiles = self.device.counts, 0, 0

    def load(self, generation: int, path: str) -> str:
        if path == "slow":
            assert self.is_read.wait(20)
        if path == "missing":
            raise WeightsError("there is no such directory", field="adapter_config.json")
        self.loads.add(generation)
        return f"digest of {path}"

    def start(self, plan: Any) -> Any:
        self.calls.append(plan)
        started = self.device.start(plan)
        return SimpleNamespace(sample=lambda mask=None: self._sample(plan.step_id, started, mask))

    def _sample(self, step_id: int, started: Any, mask: Any) -> FakeFuture:
        self.calls.append((step_id, None if mask is None else np.asarray(mask).tolist()))
        return started.sample(mask)  # type: ignore[no-any-return]

    def reset(self) -> None:
        self.calls.append("reset")
        self.device.reset()

    def warm_thread(self) -> None:
        self.calls.append("warm")

    def write_params(self, updates: Any) -> None:
        self.calls.append(str(updates.path))


@contextmanager
def pair(**options: Any) -> Iterator[tuple[Engine, Followers, list[Journal], Follower, Losses]]:
    """Yields rank 0's engine and its other host, which runs on a thread."""
    journals = [Journal(), Journal()]
    with join(2, **options) as (leader, (group,), losses):
        followers = Followers(leader)
        pages = PageManager(GROUPS, page_size=PAGE_SIZE, max_chunk=48, enable_prefix_caching=True)
        engine = Engine(Scheduler(LIMITS, pages), TeeRunner(journals[0], followers), vocab_size=VOCAB)  # type: ignore[arg-type]
        engine._grammars._mask_timeout = 0.0  # some masks are late, by chance
        additions: queue.SimpleQueue[Any] = queue.SimpleQueue()
        additions.put(lambda: journals[1].calls.append("programs"))
        follower = Follower(
            group,
            journals[1],  # type: ignore[arg-type]
            num_mask_words=-(-VOCAB // 32),
            open_update=lambda path: SimpleNamespace(path=path),  # type: ignore[arg-type, return-value]
            digest_params=lambda: journals[1].calls.append("digest"),
            load_adapter=journals[1].load,
            drop_adapter=journals[1].loads.discard,
            additions=additions,
        )
        running = threading.Thread(target=run_quietly, args=(follower,))
        running.start()
        yield engine, followers, journals, follower, losses
        followers._group.stop(lambda: None)
        running.join(20)
        assert not running.is_alive()


def run_quietly(follower: Follower) -> None:
    """What a test is about is told by losses; after one, calls go on for a moment."""
    with contextlib.suppress(ClusterError, KeyError, AssertionError):
        follower.run()


@pytest.mark.parametrize("seed", range(3))
def test_random_calls_are_made_alike(seed: int) -> None:
    draw = random.Random(seed)
    with pair() as (engine, followers, journals, follower, losses):
        requests = draw_requests(draw)
        engine.runner.warm_thread()
        while len(journals[0].device.plans) < 400:
            chance = draw.random()
            if len(engine._requests) < 4 or chance < 0.05:
                engine.add_request(next(requests))
            elif chance < 0.07:
                engine.abort_request(draw.choice(sorted(engine._requests)))
            elif chance < 0.09:
                engine.reset()
            elif chance < 0.1:
                engine.drain()
                engine.runner.write_params(SimpleNamespace(path=Path("/new") / str(chance)))  # type: ignore[arg-type]
                engine.scheduler.requeue_running()
            engine.step()
        engine.reset()  # once at least, whatever was drawn
        engine.abort_all()
        engine.drain()
        followers.add_programs(lambda: journals[0].calls.append("programs"))
        followers.digest_params()
        journals[0].calls.append("digest")
    assert losses.empty()
    assert journals[1].calls == journals[0].calls
    assert {"warm", "programs", "reset", "digest"} <= {call for call in journals[0].calls if isinstance(call, str)}
    assert any(isinstance(call, tuple) and call[1] is not None for call in journals[0].calls)
    assert follower.num_steps == len(journals[0].device.plans)
    assert not followers._started, "every step was answered"


def run_one(engine: Engine) -> None:
    engine.add_request(Request("a", (5, 6, 7), SamplingParams(max_tokens=8)))
    while engine.has_unfinished:
        engine.step()


def test_a_step_that_fails_there_ends_all() -> None:
    with pair() as (engine, _, journals, _, losses):
        journals[1].device.fail_next = RuntimeError("struck")
        run_one(engine)
        told = dict(losses.get(timeout=10) for _ in range(2))
        assert str(told[0]) == "rank 1: failed: rank 1: step 0 failed: struck"
        assert str(told[1]) == "rank 1: step 0 failed: struck"


def test_a_step_that_fails_here_ends_all() -> None:
    with pair() as (engine, _, journals, _, losses):
        journals[0].device.fail_next = RuntimeError("struck")
        run_one(engine)
        told = dict(losses.get(timeout=10) for _ in range(2))
        assert re.fullmatch(r"rank 0: step \d failed: .*", str(told[0]))
        assert str(told[1]) == f"rank 0: failed: {told[0]}"


def test_a_step_that_never_ends_there_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    ended = threading.Event()
    stuck = SimpleNamespace(wait=lambda: ended.wait(20))  # the node's other threads live
    with pair(step_timeout=1.0) as (engine, _, journals, _, losses):
        monkeypatch.setattr(journals[1].device, "start", lambda plan: SimpleNamespace(sample=lambda mask: stuck))
        run_one(engine)
        told = dict(losses.get(timeout=10) for _ in range(2))
        assert str(told[0]) == "rank 1: has not answered step 0 for 1 s"
        ended.set()


def test_an_adapter_is_read_by_all_or_held_by_none() -> None:
    with pair() as (engine, followers, journals, _, losses):
        followers.load_adapter(1, "good", "digest of good")
        with pytest.raises(WeightsError, match=r"rank 1: adapter_config.json: there is no such directory"):
            followers.load_adapter(2, "missing", "digest of missing")
        with pytest.raises(WeightsError, match=r"rank 1: has other files at other than rank 0"):
            followers.load_adapter(3, "other", "digest of rank 0's")
        followers.drop_adapter(1)
        followers.load_adapter(4, "good", "digest of good")
        run_one(engine)
        assert journals[1].loads == {4}
    assert losses.empty()


def test_steps_go_on_while_another_node_reads_an_adapter() -> None:
    with pair() as (engine, followers, journals, follower, losses):
        loading = threading.Thread(target=followers.load_adapter, args=(1, "slow", "digest of slow"))
        loading.start()
        run_one(engine)
        engine.drain()
        deadline = time.monotonic() + 20
        while follower.num_steps < len(journals[0].device.plans) and time.monotonic() < deadline:
            time.sleep(0.01)
        assert loading.is_alive() and follower.num_steps == len(journals[0].device.plans) > 0
        journals[1].is_read.set()
        loading.join(20)
        assert journals[1].loads == {1} and not loading.is_alive()
    assert losses.empty()


def test_who_waits_for_an_adapter_hears_of_the_end() -> None:
    with pair() as (_, followers, journals, _, _):
        failures: queue.SimpleQueue[ClusterError] = queue.SimpleQueue()

        def load() -> None:
            try:
                followers.load_adapter(1, "slow", "digest of slow")
            except ClusterError as error:
                failures.put(error)

        threading.Thread(target=load, daemon=True).start()
        followers._group.lose(ClusterError("is gone", field="rank 1"))
        assert str(failures.get(timeout=20)) == "nnodes: the group has ended"
        journals[1].is_read.set()


def test_a_malformed_call_is_refused() -> None:
    with join(2) as (leader, (group,), _):
        follower = Follower(
            group,
            Journal(),  # type: ignore[arg-type]
            num_mask_words=1,
            open_update=lambda path: {},
            digest_params=lambda: None,
            load_adapter=lambda generation, path: "",
            drop_adapter=lambda generation: None,
            additions=queue.SimpleQueue(),
        )
        leader.send({"call": "run", "code": "1"})
        with pytest.raises(ClusterError, match=r"rank 0: sent a malformed call: .*there is no call"):
            follower.run()
