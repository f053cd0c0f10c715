"""Participants take turns, and one that fails costs nobody else's figures."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import bench_compare
from comparison import Agreement, Comparison, Outcome, Participant, compare, find_difference, make_environment
from comparison_report import list_failures, list_notes, make_rows, summarize
from peers.process import PeerError, PeerProcess

from jaxserve.errors import ConfigError
from jaxserve.tools.bench.datasets import BenchRequest
from tests.programs import PROGRAMS
from tests.scripts.test_bench_dry_runs import read_figures

pytestmark = pytest.mark.thorough


ROOT = Path(__file__).parents[2]
FAKE = Path(__file__).with_name("fake_peer.py")
REQUESTS = [BenchRequest((1,) * length, None, length, output) for length, output in ((3, 4), (5, 2), (130, 6))]


def make(timeout: float = 60.0, num_iters: int = 2) -> Comparison:
    return Comparison("/model", REQUESTS, "float32", 2, 1, True, num_iters=num_iters, timeout=timeout)


def fake(how: str = "", **more: str) -> Participant:
    options = ", ".join([f"how={how}", *(f"{name}={value}" for name, value in more.items())])
    return Participant.parse_peer(f"{FAKE}={sys.executable}: {options}")


def run(*participants: Participant, timeout: float = 60.0) -> tuple[list[Outcome], dict]:
    comparison = make(timeout)
    outcomes = compare(comparison, participants)
    return outcomes, summarize(comparison, outcomes)


def test_turns_ratios_and_agreement() -> None:
    outcomes, figures = run(fake(), fake("differs", seconds="0.03"), fake("counts"))
    first, second, third = figures["participants"]
    assert figures["compared_with"] == first["name"] == "fake_peer how="
    assert all(len(outcome.seconds) == 2 for outcome in outcomes) and list_failures(outcomes) == []
    assert first["num_output_tokens"] == 12 and first["ratio"].values == pytest.approx((1.0, 1.0))
    assert first["output_tokens_per_second"].values[0] == pytest.approx(12 / outcomes[0].seconds[0])
    assert first["tokens_per_second"].values[0] == pytest.approx((12 + 138) / outcomes[0].seconds[0])
    assert second["ratio"].values[1] == pytest.approx(outcomes[0].seconds[1] / outcomes[1].seconds[1])
    assert second["agreement"] == {
        "num_equal": 2, "num_compared": 3, "first_difference": 3, "median_difference": 3,
    }  # fmt: skip
    assert third["agreement"] is None and third["num_output_tokens"] == 12
    assert (first["dtype"], first["threads"], first["library"]) == ("float32", 1, "fake 1.0")
    assert len(make_rows(figures)) == 3
    assert "differ do so from token 3" in list_notes(figures)[1]


def test_the_pace_of_the_cpu() -> None:
    comparison = make()
    pace, other = compare(comparison, [Participant.of_pace(), fake()])
    figures = summarize(comparison, [other], pace)
    expected = [pace.facts["operations"] / each for each in pace.seconds]
    assert figures["compared_with"] == "fake_peer how=" and len(figures["participants"]) == 1
    assert figures["cpu_flops_per_second"].values == pytest.approx(expected) and min(expected) > 1e8
    least, most = (f"{each(expected) / 1e9:,.0f}" for each in (min, max))
    note, _ = list_notes(figures)
    assert note.endswith(f" GFLOP/s in float32 products of XLA, {least} to {most}.")
    assert (
        summarize(comparison, [other], Outcome(Participant.of_pace(), skipped="no jax"))["cpu_flops_per_second"] is None
    )


@pytest.mark.parametrize(
    ("how", "words"),
    [
        ("missing", "not installed: No module named 'fast_engine'"),
        ("load", "ValueError: cannot read the model"),
        ("exit", "its process ended"),
        ("fail", "RuntimeError: out of memory"),
        ("few", "1 answers to 3 requests"),
    ],
)
def test_one_that_fails_is_skipped_by_name(how: str, words: str) -> None:
    outcomes, figures = run(fake(how), fake())
    bad, good = figures["participants"]
    assert words in bad["skipped"] and "ratio" not in bad
    assert good["skipped"] is None and figures["compared_with"] == good["name"], "the first that ran is compared with"
    assert list_failures(outcomes) == [] and "skipped: " in list_notes(figures)[0]


def test_one_that_hangs_is_given_up_and_ended() -> None:
    start = time.monotonic()
    outcomes, _ = run(fake("hang"), fake(), timeout=3.0)
    assert outcomes[0].skipped == "no answer within 3 s of a run" and outcomes[1].is_measured
    assert time.monotonic() - start < 40


def test_an_interpreter_that_is_not_there() -> None:
    (outcome,), figures = run(Participant.parse_peer("vllm=/none/python"))
    assert "cannot be started" in str(outcome.skipped) and figures["compared_with"] is None
    assert list_failures([outcome]) == ["no participant ran in every round"]


@pytest.mark.skipif(sys.platform != "linux", reason="asks Linux what became of a process")
@pytest.mark.parametrize("number", [signal.SIGKILL, pytest.param(signal.SIGTERM, marks=pytest.mark.thorough)])
def test_a_comparison_that_is_ended_leaves_nobody_behind(tmp_path: Path, number: int) -> None:
    """Nor a participant that is stopped, which would stay for ever."""
    pids = tmp_path / "pids"
    command = [sys.executable, "scripts/bench_compare.py", "--num-prompts", "2", "--num-iters", "1"]
    command += ["--with", "jaxserve: dtype=nonsense", "--peer", f"{FAKE}={sys.executable}: pids={pids}"]
    command += ["--peer", f"{FAKE}={sys.executable}: pids={pids}, how=hang"]
    process = subprocess.Popen(command, cwd=ROOT, stdout=subprocess.DEVNULL)
    deadline = time.monotonic() + 120
    while (not pids.exists() or len(pids.read_text().split()) < 2) and time.monotonic() < deadline:
        time.sleep(0.05)
    found = [int(pid) for pid in pids.read_text().split()]
    process.send_signal(number)
    process.wait(60)
    while any(Path(f"/proc/{pid}").exists() for pid in found) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert len(found) == 2 and not [pid for pid in found if Path(f"/proc/{pid}").exists()]


def test_a_program_compiled_inside_the_clock_is_a_failure() -> None:
    outcomes, _ = run(fake("compiles"))
    assert list_failures(outcomes) == [
        "fake_peer how=compiles: 4 programs were compiled inside the clock; its time is not that of serving"
    ]


def test_a_stopped_participant_does_not_run() -> None:
    """So that threads which spin or poll take nothing from the one whose turn it is."""
    participant = fake()
    process = PeerProcess(participant.command, make_environment(participant, 1), 20.0)
    try:
        process.load(make().make_job(participant))
        process.stop()
        process._timeout = 0.5
        with pytest.raises(PeerError, match="no answer"):
            process.run()
        process.resume()
        process._timeout = 20.0
        assert process._lines.get(timeout=20), "it goes on where it was"
    finally:
        process.close()


def test_jobs_have_what_participants_need() -> None:
    comparison = make()
    job = comparison.make_job(Participant.of_jaxserve("a", {"dtype": "bfloat16", "max_decode_steps": 4}))
    assert job["dtype"] == "bfloat16" and job["options"] == {"max_decode_steps": 4}
    assert job["max_model_len"] == 256 and job["rows"] == 2 and len(job["requests"]) == 3
    assert job["requests"][0] == {"prompt_token_ids": [1, 1, 1], "max_tokens": 4}


def test_peers_do_not_see_our_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", "/ours")
    assert "/ours" not in make_environment(fake(), 2)["PYTHONPATH"]
    own = make_environment(Participant.of_jaxserve("a", {}), 2)
    assert "/ours" in own["PYTHONPATH"] and own["OMP_NUM_THREADS"] == "2"
    monkeypatch.setenv("VLLM_CPU_KVCACHE_SPACE", "9")
    assert make_environment(fake(), 2)["VLLM_CPU_KVCACHE_SPACE"] == "9"


def test_names_and_options() -> None:
    found = Participant.parse_variant("steps: max-decode-steps=4, compile=used", {"compile": "all", "seed": 1})
    assert found.name == "steps" and found.options == {"max_decode_steps": 4, "compile": "used", "seed": 1}
    found = Participant.parse_peer("openvino_genai=/p/python: model=/x, kv_cache_precision=u8, dtype=bfloat16")
    assert found.name == "openvino_genai bfloat16 kv_cache_precision=u8" and found.dtype == "bfloat16"
    assert found.command[0] == "/p/python" and found.command[1].endswith("openvino_peer.py")
    assert Participant.parse_peer("transformers_continuous").options == {"continuous": True}
    assert Participant.parse_peer("openai: base_url=http://127.0.0.1:1").options["base_url"] == "http://127.0.0.1:1"


@pytest.mark.parametrize("text", ["steps", "steps:", ": a=1", "steps: a"])
def test_malformed_variants(text: str) -> None:
    with pytest.raises(ConfigError, match=r"^with: "):
        Participant.parse_variant(text, {})


def test_an_unknown_peer_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^peer: .*'tgi'.*transformers_static, .*FILE\.py"):
        Participant.parse_peer("tgi")


def test_keys_come_from_the_environment(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    participant = Participant.parse_peer("openai: base_url=http://127.0.0.1:1")
    assert participant.options["api_key"] == "secret" and "secret" not in participant.name
    figures = summarize(make(), [Outcome(participant, skipped="away")])
    assert "secret" not in json.dumps(figures)
    with pytest.raises(ConfigError, match="OPENAI_API_KEY") as caught:
        Participant.parse_peer("openai: api_key=other")
    assert "other" not in str(caught.value)


def test_differences() -> None:
    assert find_difference([1, 2, 3], [1, 9, 3]) == 1 and find_difference([1], [1, 2]) == 1
    agreement = Agreement.of([[1], [2, 2], [3, 4], 5], [[1], [2, 3], [9, 4], [5]])
    assert agreement == Agreement(1, 3, 0, 1)
    assert Agreement.of([1, 2], [[1], [2]]) is None


@pytest.mark.slow
@pytest.mark.thorough
def test_through_the_command_line(tmp_path: Path) -> None:
    """The demo model, a variant of jaxserve that must answer the same, and peers that are skipped or differ."""
    cache = f"compilation_cache_dir={PROGRAMS}"
    flags = ["--with", f"jaxserve: {cache}", "--with", f"by twos: max_decode_steps=2, {cache}"]
    flags += ["--peer", "vllm=/none/python", "--peer", f"{FAKE}={sys.executable}"]
    figures = read_figures(tmp_path, "bench_compare", *flags, shown="vllm: skipped: cannot be started")
    first, second, vllm, other = figures["participants"]
    assert [each["name"] for each in (first, second, vllm, other)] == ["jaxserve", "by twos", "vllm", "fake_peer"]
    assert second["agreement"]["num_equal"] == second["agreement"]["num_compared"] == 4
    assert other["agreement"]["num_equal"] == 0 and other["agreement"]["first_difference"] == 0
    assert "cannot be started" in vllm["skipped"] and first["num_output_tokens"] == 24
    assert len(first["output_tokens_per_second"]["values"]) == 2


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (("--model", "/none"), "model: /none has no config.json"),
        (("--rows", "0"), "rows: must be at least 1, got 0"),
        (("--threads", "9999"), "threads: this process may use"),
        (("--peer", "tgi"), "peer: there is no peer 'tgi'"),
        (("--with", "a: b=1", "--with", "a: b=2"), "with: two participants are named 'a'"),
        (("--peer-timeout", "0"), "peer_timeout: must be above 0"),
    ],
)
def test_bad_input_is_named(
    flags: tuple[str, ...], words: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["bench_compare.py", *flags])
    with pytest.raises(SystemExit, match="2"):
        bench_compare.main()
    assert f"error: {words}" in capsys.readouterr().err.splitlines()[-1]
