"""A device day: whatever its stages do to their processes, every other result is kept, and nothing is run twice."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[2] / "scripts"))

import device_day
from device_stages import child, plan, results
from device_stages.clocks import ClockLog
from device_stages.plan import Stage
from device_stages.report import make_report

pytestmark = pytest.mark.thorough

ROOT = Path(__file__).parents[2]
LATER = 600.0  # seconds: never in a test
MAX_FILES = 8  # that a call may leave

# Stages whose second item does something to its process. Every run of an item is noted in a file.
FAKE = """
import os, pathlib, signal, sys, time
from device_stages.items import Item, NotHereError
NAME, WHAT = {name!r}, {what!r}
def fault(context):
    if WHAT == "aborts":
        print("an unhappy runtime", file=sys.stderr, flush=True)
        os.abort()
    if WHAT == "is killed":
        os.kill(os.getpid(), signal.SIGKILL)
    if WHAT == "hangs":
        signal.signal(signal.SIGTERM, signal.SIG_IGN)
        pathlib.Path(__file__).with_suffix(".pid").write_text(str(os.getpid()))
        time.sleep(600)
    if WHAT == "raises":
        raise RuntimeError("not this way")
    if WHAT == "is missing":
        raise NotHereError("no such tool")
    return {{"impl": context.impl, "value": float("nan")}}
def note(item, run):
    def noted():
        with open(pathlib.Path(__file__).with_suffix(".runs"), "a") as file:
            file.write(item + "\\n")
        return run()
    return Item(item, noted)
def list_items(context):
    if WHAT == "dies first":
        os.abort()
    yield note("first", lambda: {{"value": 1.5}})
    if WHAT == "dies ahead" and not context.careful:
        os.abort()
    yield note("second", lambda: fault(context))
    yield note("third", lambda: {{"careful": context.careful}})
"""


@pytest.fixture
def day(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> device_day.Day:
    """A call without end on a device that answers."""
    monkeypatch.setattr(child, "_ASK", "")
    monkeypatch.setattr(child, "_ASKING", Stage("asking", "", LATER, LATER))
    for folder in ("fakes", "out"):
        (tmp_path / folder).mkdir()
    environment = device_day.make_environment(dry_run=False)
    environment["PYTHONPATH"] = os.pathsep.join([str(tmp_path / "fakes"), environment["PYTHONPATH"]])
    request = child.Request(tmp_path / "out" / "results.jsonl", tmp_path / "out" / "log.txt", environment)
    return device_day.Day(request, time.monotonic() + LATER, tmp_path / "out")


def make_stage(tmp_path: Path, what: str, item_seconds: float = LATER, **options: bool) -> Stage:
    name = what.replace(" ", "_")
    (tmp_path / "fakes" / f"fake_{name}.py").write_text(FAKE.format(name=name, what=what))
    return Stage(name, "a fake", LATER, item_seconds, module=f"fake_{name}", **options)


def list_runs(tmp_path: Path, stage: Stage) -> list[str]:
    path = tmp_path / "fakes" / f"{stage.module}.runs"
    return path.read_text().split() if path.exists() else []


def list_ends(lines: Sequence[results.Line], stage: Stage) -> list[str]:
    return [line["how"] for line in lines if line["stage"] == stage.name and line["event"] == "end"]


def test_a_child_that_dies_or_hangs_loses_what_it_was_at_and_no_more(tmp_path: Path, day: device_day.Day) -> None:
    faulty = [make_stage(tmp_path, what) for what in ("aborts", "is killed")]
    faulty.append(make_stage(tmp_path, "hangs", item_seconds=0.5))
    stages = [make_stage(tmp_path, "works"), *faulty, make_stage(tmp_path, "works after all")]
    device_day.run_day(stages, day)

    text = day.request.results.read_text()
    assert text.endswith("\n") and all(json.loads(line)["stage"] for line in text.splitlines())
    lines = results.read_lines(day.request.results)
    for stage in stages:
        found = {line["item"]: line for line in results.results_of(lines, stage.name)}
        assert list(found) == ["first", "second", "third"] == list_runs(tmp_path, stage), stage.name
        assert found["first"]["ok"] is found["third"]["ok"] is True and found["first"]["value"] == 1.5
        assert found["second"]["event"] == ("lost" if stage in faulty else "result")
        assert list_ends(lines, stage) == ["done"]
    lost = {line["stage"]: line for line in lines if line["event"] == "lost"}
    assert lost["aborts"]["how"] == "died of SIGABRT" and "an unhappy runtime" in lost["aborts"]["stderr"]
    assert lost["is_killed"]["how"] == "died of SIGKILL" and lost["hangs"]["how"] == "killed after 0.5 s"
    pid = int((tmp_path / "fakes" / "fake_hangs.pid").read_text())
    with pytest.raises(ProcessLookupError):
        os.kill(pid, 0)
    files = [path.name for path in day.folder.iterdir()]
    assert sorted(files) == ["log.txt", "report.md", "results.jsonl"]


def test_errors_and_what_is_not_here_are_results(tmp_path: Path, day: device_day.Day) -> None:
    stages = [make_stage(tmp_path, "raises"), make_stage(tmp_path, "is missing")]
    device_day.run_day(stages, day)
    lines = results.read_lines(day.request.results)
    raised, missing = (results.results_of(lines, stage.name)[1] for stage in stages)
    assert raised["ok"] is False and raised["error"] == "RuntimeError: not this way"
    assert missing["ok"] is None and missing["error"] == "no such tool"
    page = "\n".join(make_report(lines))
    assert "| second | WRONG |" in page and "| second | not here |" in page and "not this way" in page


def test_resuming_repeats_nothing(tmp_path: Path, day: device_day.Day) -> None:
    stages = [make_stage(tmp_path, "works"), make_stage(tmp_path, "aborts")]
    device_day.run_day(stages, day)
    text = day.request.results.read_text()
    device_day.run_day(stages, day)
    assert day.request.results.read_text() == text
    assert all(list_runs(tmp_path, stage) == ["first", "second", "third"] for stage in stages)


def test_a_day_that_was_cut_off_goes_on_behind_its_last_whole_line(tmp_path: Path, day: device_day.Day) -> None:
    stage = make_stage(tmp_path, "works")
    cut = [
        {"stage": "works", "event": "start"},
        {"stage": "works", "event": "begin", "item": "first"},
        {"stage": "works", "event": "result", "item": "first", "ok": True, "seconds": 1.0},
        {"stage": "works", "event": "begin", "item": "second"},
    ]
    text = "".join(f"{json.dumps(line)}\n" for line in cut) + '{"stage": "works", "event": "resu'
    day.request.results.write_text(text)
    device_day.run_day([stage], day)
    assert list_runs(tmp_path, stage) == ["second", "third"]
    assert day.request.results.read_text().startswith(text + "\n"), "the torn line stays on a line of its own"
    lines = results.read_lines(day.request.results)
    assert [line["item"] for line in results.results_of(lines, "works")] == ["first", "second", "third"]
    assert results.is_done(lines, "works")


def test_results_can_be_carried_to_another_folder(tmp_path: Path) -> None:
    earlier = tmp_path / "earlier"
    earlier.mkdir()
    (earlier / device_day.RESULTS).write_text("kept\n")
    for resume in (earlier, earlier / device_day.RESULTS):
        assert device_day.prepare_results(tmp_path / "new", resume).read_text() == "kept\n"
    assert device_day.prepare_results(earlier, earlier).read_text() == "kept\n"
    assert not device_day.prepare_results(tmp_path / "new", None).exists(), "a new day begins with nothing"


def test_a_stage_that_cannot_start_ends_at_once(tmp_path: Path, day: device_day.Day) -> None:
    stage = make_stage(tmp_path, "dies first")
    device_day.run_day([stage, make_stage(tmp_path, "works")], day)
    lines = results.read_lines(day.request.results)
    assert list_ends(lines, stage) == ["died of SIGABRT"] and not results.is_done(lines, stage.name)
    assert results.is_done(lines, "works")


def test_what_was_prepared_ahead_is_not_blamed_on_the_item_at_hand(tmp_path: Path, day: device_day.Day) -> None:
    stage = make_stage(tmp_path, "dies ahead", prepares_ahead=True)
    device_day.run_day([stage], day)
    lines = results.read_lines(day.request.results)
    assert not [line for line in lines if line["event"] == "lost"]
    assert list_runs(tmp_path, stage) == ["first", "second", "third"]
    assert results.results_of(lines, stage.name)[2]["careful"] is True


def test_a_device_that_takes_every_process_is_given_up(
    tmp_path: Path, day: device_day.Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(child, "MAX_LOSSES", 1)
    stage = make_stage(tmp_path, "aborts")
    device_day.run_day([stage], day)
    assert list_runs(tmp_path, stage) == ["first", "second"]
    assert list_ends(results.read_lines(day.request.results), stage) == ["1 items took their process with them"]


def test_the_time_of_a_stage_and_of_the_day_are_kept(
    tmp_path: Path, day: device_day.Day, monkeypatch: pytest.MonkeyPatch
) -> None:
    hanging, hangs = make_stage(tmp_path, "hangs"), tmp_path / "fakes" / "fake_hangs.pid"
    now = time.monotonic
    monkeypatch.setattr(child.time, "monotonic", lambda: now() + (2 * LATER if hangs.exists() else 0))
    how = child.run_stage(hanging, day.request, LATER)
    monkeypatch.undo()
    lines = results.read_lines(day.request.results)
    assert how == "killed at the end of its time"
    assert [line["event"] for line in lines if line.get("item") == "second"] == ["begin", "cut"], "it may be run again"

    later = make_stage(tmp_path, "works")
    device_day.run_day([later], device_day.Day(day.request, time.monotonic(), day.folder))
    lines = results.read_lines(day.request.results)
    assert not list_runs(tmp_path, later) and lines[-1] == {"stage": "works", "event": "skip", "why": "no time left"}
    page = "\n".join(make_report(lines))
    assert "Not measured: second (killed at the end of its time)." in page and "Not run: no time left." in page


def test_a_lost_device_ends_the_day(
    tmp_path: Path, day: device_day.Day, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(child, "_ASK", "import time; time.sleep(600)")
    monkeypatch.setattr(child, "_ASKING", Stage("asking", "", 0.5, 0.5))
    hurt, later = make_stage(tmp_path, "aborts"), make_stage(tmp_path, "works")
    device_day.run_day([make_stage(tmp_path, "is missing"), hurt, later], day)
    assert capsys.readouterr().out.splitlines()[-1] == "device lost"
    assert results.read_lines(day.request.results)[-1]["why"] == "device lost"
    assert list_runs(tmp_path, hurt) and not list_runs(tmp_path, later)


def test_items_are_not_begun_behind_their_time(tmp_path: Path, day: device_day.Day) -> None:
    stage = make_stage(tmp_path, "works")
    command = [sys.executable, str(ROOT / "scripts" / "device_stage.py"), stage.name, "--module", stage.path]
    command += ["--results", str(day.request.results), "--seconds", "0"]
    subprocess.run(command, env=dict(day.request.environment), check=True, timeout=60)
    assert not list_runs(tmp_path, stage)
    assert [line["event"] for line in results.read_lines(day.request.results)] == ["skip"] * 3


@pytest.mark.parametrize(
    ("event", "impl"),
    [
        ({"event": "result", "ok": True}, None),
        ({"event": "result", "ok": None, "error": "no GPU"}, None),
        ({"event": "result", "ok": False, "error": "20 of 20 repeats differ"}, "xla"),
        ({"event": "lost", "how": "died of SIGABRT", "stderr": ""}, "xla"),
        ({"event": "end", "how": "ended with 1"}, "xla"),
    ],
)
def test_a_failed_smoke_test_has_the_xla_path_measured(
    tmp_path: Path, day: device_day.Day, event: results.Line, impl: str | None
) -> None:
    results.append_line(day.request.results, {"stage": "smoke", "item": "decode", "seconds": 1.0, **event})
    measured, checked = make_stage(tmp_path, "works", measures=True), make_stage(tmp_path, "works too")
    device_day.run_day([measured, checked], day)
    lines = results.read_lines(day.request.results)
    found = [results.results_of(lines, stage.name)[1]["impl"] for stage in (measured, checked)]
    assert found == [impl, None], "cases are checked all the same: what is wrong is to be found"


def test_a_parent_that_is_ended_takes_its_children_along(tmp_path: Path, day: device_day.Day) -> None:
    stage = make_stage(tmp_path, "hangs")
    code = (
        "import sys; sys.path.insert(0, 'scripts')\n"
        "from pathlib import Path\n"
        "from device_stages.child import Request, run_stage\n"
        "from device_stages.plan import Stage\n"
        "import os\n"
        f"stage = Stage({stage.name!r}, '', 600, 600, module={stage.module!r})\n"
        f"results, log = Path({str(day.request.results)!r}), Path({str(day.request.log)!r})\n"
        "run_stage(stage, Request(results, log, os.environ), 600)\n"
    )
    parent = subprocess.Popen([sys.executable, "-c", code], cwd=ROOT, env=dict(day.request.environment))
    noted = tmp_path / "fakes" / f"{stage.module}.pid"
    while not (noted.exists() and noted.read_text()) and parent.poll() is None:
        time.sleep(0.05)
    parent.kill()
    parent.wait()
    status = Path("/proc", noted.read_text(), "status")
    deadline = time.monotonic() + 60
    while status.exists() and "State:\tZ" not in status.read_text() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not status.exists() or "State:\tZ" in status.read_text()


def test_stages_are_chosen_by_name_and_group(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert device_day.choose_stages([], dry_run=False) == list(plan.FIRST)
    names = [stage.name for stage in device_day.choose_stages(["second", "probe"], dry_run=False)]
    assert names == ["probe", "kernels", "ablation", "engine_8", "engine_early", "tuning", "peers", "sanitizer"]
    paths = {stage.path for stage in device_day.choose_stages([], dry_run=True)}
    assert paths == {stage.path for stage in plan.STAGES.values()}, "a dry run leaves no code out"
    monkeypatch.setattr(sys, "argv", ["device_day.py", "--stage", "nonsense"])
    with pytest.raises(SystemExit):
        device_day.main()
    assert "'nonsense'" in capsys.readouterr().err


def test_the_first_call_fits_its_ten_minutes() -> None:
    assert device_day.SECONDS <= 580
    assert sum(stage.seconds for stage in plan.SECOND) <= device_day.SECONDS
    assert all(stage.item_seconds <= stage.seconds - 5 for stage in plan.STAGES.values())


def test_clocks_are_those_of_the_time_that_was_measured() -> None:
    log = ClockLog()
    log.add(1.0, "not a sample")
    for when, clock in ((1.0, 345), (2.0, 1980), (2.1, 1965), (3.0, 345)):
        log.add(when, f"{clock}, 3201, 500.5, 40")
    seen = log.summarize(1.9, 2.2)
    assert seen["sm_mhz"] == 1972.5 and seen["sm_mhz_range"] == [1965, 1980] and seen["watts"] == 500.5
    assert log.summarize(2.05, 2.06)["clock_samples"] == 1, "the nearest, where none lies between"
    assert log.summarize(90.0, 91.0) == {} == ClockLog().summarize(0, 1)


def test_a_report_is_written_from_results_alone(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    line = {"stage": "timing", "item": "decode 32 x 4096", "event": "result", "ok": True, "seconds": 3.25}
    us = {"median": 190.04, "min": 188.0, "p90": 195.5, "repeats": 12}
    clocks = {"sm_mhz": 1980.0, "watts": 512.0}
    figures = {"us": us, "tb_per_s": 2.825, "share": 0.66, "share_of": "the copy", "clocks": clocks}
    results.append_line(tmp_path / device_day.RESULTS, {**line, **figures})
    monkeypatch.setattr(sys, "argv", ["device_day.py", "--out", str(tmp_path), "--report", str(tmp_path / "page.md")])
    assert device_day.main() == 0
    (row,) = [text for text in (tmp_path / "page.md").read_text().splitlines() if "decode" in text]
    assert "190.0 us (188.0 to 195.5, 12 repeats), 66% of the copy, 1980 MHz, 512 W, tb per s 2.825" in row


@pytest.mark.slow
@pytest.mark.thorough
@pytest.mark.timeout(900)
def test_a_dry_run_goes_through_all_of_it(tmp_path: Path) -> None:
    command = [sys.executable, "scripts/device_day.py", "--dry-run", "--out", str(tmp_path / "out")]
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-3000:]
    lines = results.read_lines(tmp_path / "out" / device_day.RESULTS)
    for stage in device_day.choose_stages([], dry_run=True):
        assert results.is_done(lines, stage.name) and results.results_of(lines, stage.name), stage.name
    files = [path.name for path in (tmp_path / "out").iterdir()]
    assert len(files) <= MAX_FILES and not any(" " in name for name in files)
    again = subprocess.run([*command, "--resume"], cwd=ROOT, capture_output=True, text=True, check=False)
    assert again.returncode == 0, again.stdout + again.stderr
    assert results.read_lines(tmp_path / "out" / device_day.RESULTS) == lines
