"""The host KV tier on the real runner: tokens equal those without it, whatever is evicted, loaded or lost."""

from __future__ import annotations

import random
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.errors import CapacityError, ConfigError
from jaxserve.features.host_tier import start as tier_start
from tests.e2e.engines import Engines
from tests.e2e.helpers import MAX_MODEL_LEN, generate_ids, greedy, make_llm, read_weights, run_on_devices

THOROUGH = [pytest.mark.slow, pytest.mark.thorough]

ROOT = Path(__file__).parents[2]
VOCAB = 80
SIZE = 0.002  # GiB


@pytest.fixture(autouse=True)
def accept_any_speed(monkeypatch: pytest.MonkeyPatch) -> None:
    """These models are computed faster than their pages are copied."""
    monkeypatch.setattr(tier_start, "refuse_slow_tier", lambda *_: None)


def make_turns(families: int = 4) -> list[list[int]]:
    """Prompts of growing conversations in a random order; each family shares its beginning."""
    rng = random.Random(3)
    texts = [[rng.randrange(3, VOCAB) for _ in range(MAX_MODEL_LEN - 30)] for _ in range(families)]
    turns = [text[: rng.randint(40, len(text))] for _ in range(4) for text in texts]
    rng.shuffle(turns)
    return turns


def run_turns(llm: LLM) -> list[list[int]]:
    """Three conversations at once, so that the pool is short; then one more, so that others are evicted."""
    turns, found = make_turns(), []
    for start in range(0, len(turns), 4):
        found += generate_ids(llm, turns[start : start + 3], greedy(20))
        found += generate_ids(llm, turns[start + 3 : start + 4], greedy(20))
    return found


def make_tiny(case: str, **options: Any) -> LLM:
    return make_llm(case, page_size=8, **({"num_kv_pages_override": 30, "kv_offloading_size": SIZE} | options))


def run_plain(engines: Engines, case: str) -> list[list[int]]:
    """Tokens without a host tier, a prefix cache or a full pool."""
    return run_turns(engines.get(make_llm, case, enable_prefix_caching=False))


@pytest.mark.parametrize("case", ["llama_gqa", "gemma2", pytest.param("gemma4_text_shared", marks=THOROUGH)])
def test_tokens_equal_those_without_it(case: str, engines: Engines) -> None:
    """Those of Gemma have windows, and so two groups."""
    tokens, llm = run_plain(engines, case), make_tiny(case)
    engine, programs = llm.ready.engine, llm.ready.runner.device.programs
    groups = set(range(1 if case == "llama_gqa" else 2))
    assert set(programs.of_kind("read_pages")) == set(programs.of_kind("write_pages")) == groups, (
        "before the first step"
    )
    assert not engine.runner.counts.steps and not engine.runner.counts.bytes_saved, "the start is not counted"
    assert run_turns(llm) == tokens
    assert run_turns(llm) == tokens, "now with what the first round left on the host"
    counts, pages = engine.scheduler.counts, engine.scheduler.pages
    assert counts.host_hits > 500 and counts.num_preemptions > 0 and pages.host.num_failures == 0
    assert engine.runner.counts.bytes_saved > 0 and engine.runner.counts.bytes_loaded > 0
    assert len(pages.pools) == len(groups)
    pages.check()


def test_failed_copies_are_misses_and_three_end_the_tier(engines: Engines) -> None:
    tokens, llm = run_plain(engines, "llama_gqa"), make_tiny("llama_gqa")
    engine = llm.ready.engine
    (copies,) = engine.runner.features
    slots, tier = copies.slots, engine.scheduler.pages.host
    run_turns(llm)
    copy, lost = slots._copy, []

    def lose(arrays: Any, sharding: Any) -> Any:
        if sharding.memory_kind == "device":
            lost.append(arrays)
            raise RuntimeError("the bus is gone")
        return copy(arrays, sharding)

    slots._copy = lose
    assert run_turns(llm) == tokens and lost
    assert not tier.is_on and tier.num_failures >= 3
    slots._copy = copy
    saved = engine.runner.counts.bytes_saved
    assert run_turns(llm) == tokens and engine.runner.counts.bytes_saved == saved, "it stays off"
    engine.scheduler.pages.check()


def test_new_weights_and_a_lost_device_empty_both_tiers() -> None:
    llm = make_tiny("llama_gqa")
    scheduler = llm.ready.engine.scheduler
    tokens = run_turns(llm)

    def count_cached() -> int:
        return sum(pool.num_cached for pool in (*scheduler.pages.pools, *scheduler.pages.host.pools))

    for lose in (lambda: llm.update_weights(read_weights(llm)), llm.ready.engine.reset):
        assert count_cached() > 30
        lose()
        assert count_cached() == 0
        hits = scheduler.counts.host_hits
        llm.generate([{"prompt_token_ids": make_turns()[0]}], greedy(1), use_tqdm=False)
        assert scheduler.counts.host_hits == hits
        assert run_turns(llm) == tokens


@pytest.mark.thorough
def test_a_recording_with_copies_is_replayed(tmp_path: Path) -> None:
    recording = tmp_path / "steps.jsonl"
    llm = make_tiny("llama_gqa", record_steps=str(recording))
    run_turns(llm)
    assert '"page_loads": [[' in recording.read_text() or '"page_loads":[[' in recording.read_text()
    command = [sys.executable, "-m", "jaxserve", "replay", str(recording)]
    done = subprocess.run(command, capture_output=True, text=True, check=False, cwd=ROOT)
    assert done.returncode == 0, done.stderr
    assert "Equal: every token id" in done.stdout


def test_a_size_beyond_the_machine_is_refused_with_what_fits() -> None:
    with pytest.raises(CapacityError, match=r"kv_offloading_size: 100000 GiB are more .* GiB would fit"):
        make_tiny("llama_gqa", kv_offloading_size=100000)


def test_a_size_below_one_page_is_refused() -> None:
    with pytest.raises(ConfigError, match=r"kv_offloading_size: 1e-09 GiB hold no page: 8 tokens take"):
        make_tiny("llama_gqa", kv_offloading_size=1e-9)


def test_the_tier_needs_the_prefix_cache() -> None:
    with pytest.raises(ConfigError, match="kv_offloading_size: needs enable_prefix_caching"):
        make_tiny("llama_gqa", enable_prefix_caching=False)


TWO_DEVICES = """
import json
from jaxserve.features.host_tier import start as tier_start
tier_start.refuse_slow_tier = lambda *_: None
from tests.e2e.test_host_tier import make_tiny, run_turns
llm = make_tiny("llama_gqa", tensor_parallel_size=2)
tokens = [run_turns(llm), run_turns(llm)]
print(json.dumps([tokens, llm.ready.engine.scheduler.counts.host_hits]))
"""


@pytest.mark.slow
@pytest.mark.thorough
def test_tokens_are_equal_on_two_devices(engines: Engines) -> None:
    found, hits = run_on_devices(2, TWO_DEVICES)
    tokens = run_plain(engines, "llama_gqa")
    assert found == [tokens, tokens] and hits > 500
