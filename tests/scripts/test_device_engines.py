"""The stages of a device day that run engines, and what they make of traces, answers and far pages."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

from device_stages import demo, engine, smoke, tokens, traces
from device_stages.items import Context, NotHereError
from device_stages.measure import decode_shape
from device_stages.tokens import Answer


@pytest.fixture
def context(tmp_path: Path) -> Context:
    return Context("engine", tmp_path, impl="xla", tiny=True)


def test_pages_may_lie_anywhere_in_the_pool(context: Context) -> None:
    found = smoke.check_far_pages(context, decode_shape(context, 1, 4096))
    assert found["ok"] and found["pool_gb"] == pytest.approx(smoke.TINY_FAR_BYTES / 1e9, rel=0.1)


def test_a_page_id_that_loses_its_high_bits_is_seen(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    make = smoke.make_program

    def make_short(*args: Any) -> tuple[Callable[..., Any], tuple[jax.Array, ...]]:
        run, (pool, q, k, v, table, *meta) = make(*args)
        return (lambda pool, q, k, v, table, *meta: run(pool, q, k, v, table & 7, *meta)), (pool, q, k, v, table, *meta)

    monkeypatch.setattr(smoke, "make_program", make_short)
    found = smoke.check_far_pages(context, decode_shape(context, 1, 4096))
    assert not found["ok"] and "differ from those of the first pages" in found["error"]


def test_answers_may_differ_by_rounding_and_no_more() -> None:
    right = [Answer((5, 6, 7), (-1.0, -2.0, -3.0), (0.5, 0.02, 0.4)), Answer((8, 9), (-1.0, -1.0), (0.3, 0.3))]
    assert tokens.compare(right, right) == {
        "ok": True,
        "largest_logprob_difference": 0.0,
        "tokens": 5,
        "equal_before_first": 5,
        "margins_of_first_differences": {},
    }
    rounded = [replace(right[0], token_ids=(5, 4, 1), logprobs=(-1.01, -2.0, -9.0)), right[1]]
    found = tokens.compare(rounded, right)
    assert found["ok"] and found["equal_before_first"] == 3
    assert found["margins_of_first_differences"] == {"row 0, token 1": 0.02}
    wrong = [right[0], replace(right[1], token_ids=(2, 9))]
    assert "row 1, token 0 has a margin of 0.3" in tokens.compare(wrong, right)["error"]
    far = [right[0], replace(right[1], logprobs=(-1.0, -1.2))]
    assert "differ by 0.2" in tokens.compare(far, right)["error"]
    unknown = [right[0], replace(right[1], logprobs=(-1.0, float("nan")))]
    assert not tokens.compare(unknown, right)["ok"], "NaN never passes"


def test_the_demo_model_gives_its_golden_here(context: Context) -> None:
    found = demo.check_answers(context, "auto")
    assert found["ok"] and found["equal"] == found["answers"] == demo.TINY_QUESTIONS


def test_another_token_of_the_demo_model_is_a_fault(
    context: Context, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    golden = json.loads(demo.GOLDEN.read_text())
    golden[1]["token_ids"][3] += 1
    (tmp_path / "golden.json").write_text(json.dumps(golden))
    monkeypatch.setattr(demo, "GOLDEN", tmp_path / "golden.json")
    found = demo.check_answers(context, "auto")
    assert not found["ok"] and found["error"] == f"other answers: {golden[1]['question']}"


def make_profile(*lines: tuple[str, str, list[tuple[str, int, int]]]) -> Any:
    """Returns a profile of (plane, line, (name, start, nanoseconds) of its events)."""
    planes: dict[str, list[Any]] = {}
    for plane, line, events in lines:
        made = [SimpleNamespace(name=name, start_ns=start, duration_ns=time) for name, start, time in events]
        planes.setdefault(plane, []).append(SimpleNamespace(name=line, events=made))
    return SimpleNamespace(planes=[SimpleNamespace(name=name, lines=found) for name, found in planes.items()])


def test_busy_and_idle_time_are_those_of_all_streams_together() -> None:
    first = [("product", 1000, 500), ("norm", 1500, 200), ("product", 3000, 500)]
    second = [("copy", 1400, 400)]  # beside the others, and 100 ns longer
    host = [("python", 0, 10_000)]
    profile = make_profile(
        ("/device:GPU:0", "Stream #1", first), ("/device:GPU:0", "Stream #2", second), ("/host:CPU", "Stream", host)
    )
    found = traces.describe_trace(profile, 2)
    assert found["busy_us_of_step"] == pytest.approx(0.65) and found["idle_us_of_step"] == pytest.approx(0.6)
    assert found["longest_gaps_us"] == [1.2] and found["kernels_of_step"] == 2
    assert found["us_of_kernels"] == {"product": 0.5, "copy": 0.2, "norm": 0.1} and found["launches"]["product"] == 1
    assert traces.describe_trace(make_profile(("/host:CPU", "Stream", host)), 2) == {}


def test_points_of_an_engine_stand_beside_their_limit(context: Context) -> None:
    items = {item.name: item for item in engine.list_items(context)}
    assert list(items) == ["start", "1 x 64", "2 x 64", "prompts of 64", "trace"]
    start = items["start"].run()
    assert start["ok"] and start["programs"] > 5
    point = items["2 x 64"].run()
    assert point["ms"] > 0 and point["share"] == pytest.approx(point["limit_ms"] / point["ms"])
    prompts = items["prompts of 64"].run()
    assert prompts["tokens_per_second"] == pytest.approx(64e3 / prompts["ms"])
    assert items["trace"].run()["us_of_step"] > 0, "without a device, the host's time alone"


def test_what_does_not_fit_is_said_beforehand(context: Context) -> None:
    engine_here = engine.Engine(context)
    with pytest.raises(NotHereError, match="max_num_seqs"):
        engine.measure_rows(engine_here, 64, 64)
    assert jnp.ones(()).devices(), "and the process goes on"


def test_items_of_an_engine_have_their_predictions(context: Context) -> None:
    items = {item.name: item.predicted for item in engine.list_items(replace(context, tiny=False))}
    assert items["1 x 512"].startswith("5.2 to 5.6 ms") and items["128 x 4096"] == "does not fit an H100"
    assert list(items)[1:4] == ["1 x 512", "32 x 4096", "256 x 512"], "the most important first"
