"""`jaxserve simulate` and `jaxserve tune-buckets`, as users call them."""

from __future__ import annotations

import json
import random
import re
import tomllib
from pathlib import Path
from xml.etree import ElementTree

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.tools.cli import main
from jaxserve.tools.simulation.calibration import Calibration, write_calibration
from jaxserve.tools.simulation.report import Targets
from jaxserve.tools.simulation.study import Study, sweep
from jaxserve.tools.simulation.traces import TraceRequest

MODEL = ["llama-3.1-8b", "--device", "h100"]


@pytest.fixture
def trace(tmp_path: Path) -> str:
    """Forty requests within ten seconds, in Mooncake's form."""
    rng, lines = random.Random(0), []
    for number in range(40):
        line = {"timestamp": 250 * number, "input_length": 1500, "output_length": rng.randint(5, 60)}
        lines.append(json.dumps(line | {"hash_ids": [number % 4, 100 + number, 200 + number]}))
    (tmp_path / "trace.jsonl").write_text("\n".join(lines))
    return str(tmp_path / "trace.jsonl")


def test_simulate_prints_a_table_and_writes_figures_and_plots(
    trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    json_path, html_path = tmp_path / "out.json", tmp_path / "out.html"
    files = ["--json", str(json_path), "--html", str(html_path)]
    assert main(["simulate", *MODEL, "--trace", trace, "--slo-ttft-ms", "500", "--slo-tpot-ms", "50", *files]) == 0
    shown = capsys.readouterr().out
    assert re.search(r"within TTFT <= 500 ms and TPOT <= 50 ms\s+│\s+100.00%", shown)
    assert re.search(r"devices needed\s+│\s+1 ", shown) and "Not calibrated" in shown.replace("\n", " ")
    (run,) = json.loads(json_path.read_text())["runs"]
    assert run["num_requests"] == 40 and run["prefix_hit_rate"] == pytest.approx(36 * 512 / (40 * 1500), rel=0.01)
    assert 0 < run["ttft_ms"]["p50"] <= run["ttft_ms"]["p99"] < 500 and run["goodput"] == run["request_rate"]
    page = html_path.read_text()
    assert "http" not in page.replace("http://www.w3.org/2000/svg", ""), "the page needs nothing else"
    plots = re.findall(r"<svg.*?</svg>", page, flags=re.S)
    assert len(plots) == 5 and all(len(list(ElementTree.fromstring(plot).iter())) > 10 for plot in plots)


def test_a_sweep_has_one_row_for_each_value(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["simulate", *MODEL, "--trace", trace, "--sweep", "max-num-seqs=1,64", "--json", "-"]) == 0
    one, many = json.loads(capsys.readouterr().out)["runs"]
    assert (one["label"], many["label"]) == ("max_num_seqs=1", "max_num_seqs=64")
    assert one["ttft_ms"]["p99"] > 2 * many["ttft_ms"]["p99"] and one["slo_share"] is None
    assert main(["simulate", *MODEL, "--trace", trace, "--sweep", "router=prefix,round-robin", "--replicas", "4"]) == 0
    rows = [line.split()[0] for line in capsys.readouterr().out.splitlines() if "%" in line and "prefix" in line]
    assert "prefix" in rows


def test_a_calibrated_cpu_can_be_simulated(trace: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_calibration(tmp_path / "c.json", Calibration("cpu", "cpu", 2e10, 1e12, 1e-3, 1e-5, worst_error=0.07))
    flags = ["qwen2.5-0.5b", "--max-model-len", "2048", "--calibration", str(tmp_path / "c.json")]
    assert main(["simulate", *flags, "--trace", trace, "--max-requests", "5"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "20 GB/s, 1 TFLOP/s, 1000 us a step and 10.00 us a row, measured; the fit is within 7%" in shown


def test_tune_buckets_prints_options(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["tune-buckets", *MODEL, "--trace", trace, "--max-programs", "12", "--max-num-seqs", "32"]) == 0
    options = tomllib.loads(capsys.readouterr().out)
    config = EngineConfig.from_options(**options, max_num_seqs=32).resolve("gpu")
    assert config.compile.precompile_bs_paddings is not None and config.compile.precompile_token_paddings is not None


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (["--max-requests", "0"], "max_requests: must be at least 1"),
        (["--replicas", "0"], "replicas: must be above 0"),
        (["--rate-scale", "0"], "rate_scale: must be above 0"),
        (["--slo-ttft-ms", "-1"], "slo_ttft_ms: must be above 0"),
        (["--slo-share", "2"], r"slo_share: must be in (0, 1]"),
        (["--sweep", "max_num_seqs"], "sweep: must be option=value,value"),
        (["--sweep", "max_seqs=1"], "sweep: 'max_seqs' is not an option; known: "),
        (["--sweep", "max_num_seqs=1,x"], "sweep: max_num_seqs cannot be 'x'"),
        (["--sweep", "router=best"], "router: must be one of prefix, least-loaded, round-robin"),
        (["--sweep", "max_num_seqs=8,0"], "max_num_seqs: must be an integer of at least 1"),
        (["--device", "h2"], "device: 'h2' is not known; did you mean h200"),
        (["--calibration", "none.json"], "calibration: none.json cannot be read"),
        (["--max-model-len", "3000000"], "max_model_len: 3000000 is outside"),
        (["--record-steps", "x"], "record_steps: a simulation has no steps to replay"),
        (["--speculative-config", '{"method": "suffix"}'], "speculative_config: a simulation knows no text"),
        (["--html", "no/such/folder.html"], "html: no/such is not a folder"),
    ],
)
def test_what_is_wrong_is_one_line(
    flags: list[str], message: str, trace: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["simulate", *MODEL, "--trace", trace, "--max-requests", "2", *flags]) == 2
    assert f"jaxserve: {message}" in capsys.readouterr().err


def test_a_deterministic_engine_is_simulated_and_not_tuned(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--trace", trace, "--deterministic", "--max-requests", "10"]
    assert main(["simulate", *flags, "--json", "-"]) == 0
    (run,) = json.loads(capsys.readouterr().out)["runs"]
    assert run["num_requests"] == 10 and run["num_refused"] == 0 and run["padding_share"] > 0.5
    assert main(["tune-buckets", *flags]) == 2
    assert "deterministic: has one size of rows" in capsys.readouterr().err


def test_a_host_tier_finds_what_the_device_has_no_pages_for(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    flags = [*MODEL, "--trace", trace, "--num-kv-pages-override", "60", "--max-model-len", "2048", "--json", "-"]
    hits = []
    for more in ([], ["--kv-offloading-size", "4"]):
        assert main(["simulate", *flags, "--max-num-seqs", "1", *more]) == 0
        (run,) = json.loads(capsys.readouterr().out)["runs"]
        hits.append((run["prefix_hit_rate"], run["host_hit_rate"]))
    (without, none), (with_host, from_host) = hits
    assert none == 0 and 0 < from_host <= with_host and with_host > without


def test_a_padded_size_is_no_value_of_a_sweep() -> None:
    with pytest.raises(ConfigError, match="precompile_bs_paddings is a list"):
        sweep(Study([TraceRequest(0, 1, 1)], {}), "precompile_bs_paddings=1,2")


def test_the_devices_needed_are_the_fewest_that_suffice() -> None:
    """Bursts of long prompts: one device is too slow, and so is one less than what is found."""
    trace = [TraceRequest(5.0 * burst, 4000, 2) for burst in range(3) for _ in range(40)]
    study = Study(trace, {"model": "llama-3.1-8b"}, "h100", router="least-loaded", targets=Targets(800), slo_share=0.95)
    summary, _ = study.run()
    needed = summary.num_devices_needed
    assert summary.slo_share is not None and summary.slo_share < 0.5 and needed is not None and needed > 2
    for count, suffices in ((needed, True), (needed - 1, False)):
        spec, _, _ = study.plan()
        run = study._simulate(spec, count, lambda done: None)
        assert run is not None
        assert (sum(map(study.targets.are_met, run.timelines)) >= 0.95 * len(trace)) == suffices


def test_lists_of_integers_are_flags(trace: str, capsys: pytest.CaptureFixture[str]) -> None:
    sizes = ["--precompile-bs-paddings", "16,256", "--precompile-token-paddings", "512,2048"]
    assert main(["simulate", *MODEL, "--trace", trace, "--max-requests", "2", *sizes]) == 0
    capsys.readouterr()
    with pytest.raises(SystemExit):
        main(["simulate", *MODEL, "--trace", trace, "--precompile-bs-paddings", "16,x"])
    assert "must be integers like 8,16,32, got '16,x'" in capsys.readouterr().err
