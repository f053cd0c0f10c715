"""`jaxserve run-batch`: every line is answered once, whatever is in the file and whenever the process is killed."""

from __future__ import annotations

import asyncio
import json
import os
import random
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from jaxserve.config import EngineConfig
from jaxserve.engine.async_engine import AsyncLLM
from jaxserve.errors import ConfigError, EngineStoppedError
from jaxserve.server import run_batch as batch_module
from jaxserve.server.batch_files import MAX_LINE, BatchLine, BatchOutput, read_lines, scan_input
from jaxserve.server.options import ServerConfig
from jaxserve.server.run_batch import BatchSummary, run_batch
from jaxserve.tools.cli import main
from tests.e2e.helpers import PROGRAMS

ROOT = Path(__file__).parents[2]
SMALL = {  # as the servers of the other tests have it, so that all programs are compiled once
    "max_num_seqs": 8,
    "max_num_batched_tokens": 128,
    "max_model_len": 1024,
    "precompile_bs_paddings": [8],
    "precompile_token_paddings": [128],
    "compilation_cache_dir": str(PROGRAMS),
}
FLAGS = [text for name, value in SMALL.items() for text in (f"--{name.replace('_', '-')}", str(value).strip("[]"))]


def make_line(custom_id: str, url: str = "/v1/completions", method: str = "POST", **body: Any) -> dict[str, Any]:
    return {"custom_id": custom_id, "method": method, "url": url, "body": body}


def write_lines(path: Path, lines: list[Any]) -> Path:
    path.write_text("".join((line if isinstance(line, str) else json.dumps(line)) + "\n" for line in lines))
    return path


def read_answers(path: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in path.read_text().splitlines()]


def write_answer(custom_id: str | None, status: int = 200, answer_id: str = "batch_req_x") -> str:
    response = {"status_code": status, "request_id": "r", "body": {}}
    answer = {"id": answer_id, "custom_id": custom_id, "response": response, "error": None}
    return json.dumps(answer, separators=(",", ":"))


@pytest.fixture(scope="module")
def answered(tmp_path_factory: pytest.TempPathFactory) -> tuple[int, dict[str | None, dict[str, Any]], Path, Path]:
    """The exit status and the answers of one run over good lines and bad ones."""
    folder = tmp_path_factory.mktemp("batch")
    question = [{"role": "user", "content": "What is 20 + 30?"}]
    source = write_lines(
        folder / "in.jsonl",
        [
            make_line("chat", "/v1/chat/completions", messages=question, temperature=0, max_tokens=40),
            make_line("text", prompt="Once", max_tokens=3, echo=True, ignore_eos=True, service_tier="flex"),
            "",
            make_line("vector", "/v1/embeddings", input="Once", dimensions=256),
            make_line("response", "/v1/responses", input="Hi", max_output_tokens=5),
            make_line("ranks", "/v1/rerank", query="Once", documents=["Twice", "Once"]),
            make_line("wrong value", prompt="Once", max_tokens=-1),
            make_line("wrong model", prompt="Once", model="another"),
            make_line("stream", prompt="Once", stream=True),
            make_line("no body") | {"body": None},
            make_line("url", "/v1/files", prompt="Once"),
            make_line("method", method="GET", prompt="Once"),
            "no JSON",
            "[" * 100_000,
        ],
    )
    target = folder / "out.jsonl"
    status = main(["run-batch", "-i", str(source), "-o", str(target), "demo", *FLAGS])
    answers = read_answers(target)
    assert len(answers) == 13
    return status, {answer["custom_id"] or answer["id"]: answer for answer in answers}, source, target


def test_all_endpoints_answer(answered: Any) -> None:
    answers = answered[1]
    bodies = {}
    for name in ("chat", "text", "vector", "response", "ranks"):
        answer = answers[name]
        assert set(answer) == {"id", "custom_id", "response", "error"} and answer["id"].startswith("batch_req_")
        assert answer["error"] is None and answer["response"]["status_code"] == 200
        assert answer["response"]["request_id"]
        bodies[name] = answer["response"]["body"]
    assert "50" in bodies["chat"]["choices"][0]["message"]["content"]
    assert bodies["text"]["choices"][0]["text"].startswith("Once") and bodies["text"]["usage"]["completion_tokens"] == 3
    assert bodies["text"]["service_tier"] == "flex" and "service_tier" not in bodies["chat"]
    assert len(bodies["vector"]["data"][0]["embedding"]) == 256
    assert bodies["response"]["object"] == "response"
    assert [each["index"] for each in bodies["ranks"]["results"]] == [1, 0]


def test_refusals_of_the_server_are_answers(answered: Any) -> None:
    for name, status, param in (("wrong value", 400, "max_tokens"), ("wrong model", 404, "model")):
        answer = answered[1][name]
        assert answer["error"] is None and answer["response"]["status_code"] == status
        assert answer["response"]["body"]["error"]["param"] == param


@pytest.mark.parametrize(
    ("name", "code"),
    [
        ("stream", "streaming_unsupported"),
        ("no body", "invalid_body"),
        ("url", "invalid_url"),
        ("method", "invalid_method"),
        ("batch_req_line_13", "invalid_json"),
        ("batch_req_line_14", "invalid_json"),
    ],
)
def test_bad_lines_become_errors(answered: Any, name: str, code: str) -> None:
    answer = answered[1][name]
    assert answer["response"] is None and answer["error"]["code"] == code and answer["error"]["message"]


def test_failures_are_the_exit_status(answered: Any, capsys: pytest.CaptureFixture[str]) -> None:
    status, _, source, target = answered
    assert status == 1
    before = target.read_bytes()
    assert main(["run-batch", "-i", str(source), "-o", str(target)]) == 1, "what failed before still counts"
    assert "13 lines answered, 13 of them in earlier runs; 8 failed" in capsys.readouterr().err
    assert target.read_bytes() == before


def test_same_custom_id_twice_is_refused_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    source = write_lines(tmp_path / "in", [make_line("a"), make_line("b"), make_line("a")])
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out")]) == 2
    assert "lines 1 and 3 have the same custom_id 'a'" in capsys.readouterr().err
    assert not (tmp_path / "out").exists()


def test_input_is_not_overwritten(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in", [make_line("a")])
    before = source.read_bytes()
    assert main(["run-batch", "-i", str(source), "-o", str(source)]) == 2
    assert "is the input file" in capsys.readouterr().err and source.read_bytes() == before


def test_options_that_could_not_be_kept_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    source = write_lines(tmp_path / "in", [make_line("a")])
    for name in ("max-num-queued-reqs", "max-num-queued-tokens", "max-concurrent"):
        assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), f"--{name}", "0"]) == 2
        assert name.replace("-", "_") in capsys.readouterr().err
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "out"), "--max-num-queued-reqs", "9"]) == 2
    assert "max_concurrent bounds a batch" in capsys.readouterr().err and not (tmp_path / "out").exists()


def test_missing_files_are_named(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["run-batch", "-i", str(tmp_path / "none"), "-o", str(tmp_path / "out")]) == 2
    assert "input_file" in capsys.readouterr().err
    source = write_lines(tmp_path / "in", [make_line("a")])
    assert main(["run-batch", "-i", str(source), "-o", str(tmp_path / "none" / "out")]) == 2
    assert "output_file" in capsys.readouterr().err


def test_lines_of_all_kinds_are_read(tmp_path: Path) -> None:
    path = tmp_path / "in"
    good = json.dumps(make_line("é\ud800", prompt="x")).encode()
    long = b'{"custom_id":"' + b"x" * (2 * MAX_LINE) + b'"}\n'
    path.write_bytes(b"\xef\xbb\xbf" + good + b"\n" + long + b" \t\r\n\xff\n7\n{}\n" + good.replace(b"\\u00e9", b"e"))
    lines = list(read_lines(path))
    assert [line.number for line in lines] == [1, 2, 4, 5, 6, 7]
    assert lines[0].custom_id == "é\ud800" and lines[-1].body == {"prompt": "x"}
    codes = [line.error.code for line in lines if line.error]
    assert codes == ["line_too_long", "invalid_json", "missing_custom_id", "missing_custom_id"]
    assert len(scan_input(path)) == 6


def test_torn_line_is_removed_and_asked_again(tmp_path: Path) -> None:
    target = tmp_path / "out"
    whole = write_answer("a") + "\n" + write_answer("b", 400) + "\n"
    for cut in range(len(write_answer("c"))):
        target.write_text(whole + write_answer("c")[:cut])
        output = BatchOutput(target, {"id:a": 1, "id:b": 2, "id:c": 3})
        output.close()
        assert target.read_text() == whole
        assert output.recorded.keys == {"id:a", "id:b"} and output.recorded.num_failed == 1


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (write_answer("z") + "\n", "'z'"),
        (write_answer("a") + "\n" + write_answer("a") + "\n", "'a' a second time"),
        (write_answer(None, answer_id="batch_req_line_9") + "\n", "'batch_req_line_9'"),
        ("my diary\n", "line 1"),
        ("my diary", "line 1"),
        ('{"id":"batch_req_1","custom_id":"a","response":7}\n', "line 1"),
        (write_answer("a")[:-3] + "\n" + write_answer("b") + "\n", "line 1"),
    ],
)
def test_files_of_others_are_left_alone(tmp_path: Path, content: str, message: str) -> None:
    target = tmp_path / "out"
    target.write_text(content)
    with pytest.raises(ConfigError, match=message):
        BatchOutput(target, {"id:a": 1, "id:b": 2})
    assert target.read_text() == content


def test_two_runs_do_not_share_an_output(tmp_path: Path) -> None:
    first = BatchOutput(tmp_path / "out", {})
    with pytest.raises(ConfigError, match="another run is writing it"):
        BatchOutput(tmp_path / "out", {})
    first.close()
    BatchOutput(tmp_path / "out", {}).close()


class BusyApp:
    """An application that has no room for a request twice before it answers."""

    def __init__(self) -> None:
        self.num_running = self.most_running = self.num_refused = 0
        self.tries: dict[str, int] = {}

    async def __call__(self, scope: Any, receive: Any, send: Any) -> None:
        self.num_running += 1
        self.most_running = max(self.most_running, self.num_running)
        message = await receive()
        name = json.loads(message["body"])["prompt"]
        self.tries[name] = self.tries.get(name, 0) + 1
        await asyncio.sleep(0.001)
        self.num_running -= 1
        status = 429 if self.tries[name] < 3 else 200
        self.num_refused += status == 429
        await send({"type": "http.response.start", "status": status, "headers": [(b"x-request-id", b"r")]})
        await send({"type": "http.response.body", "body": b'{"retry": true}' if status == 429 else b'{"ok": true}'})


def test_refused_for_want_of_room_is_asked_again_and_input_is_read_as_needed(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    app, num_read, most_ahead = BusyApp(), 0, 0
    source = write_lines(tmp_path / "in", [make_line(f"{at}", prompt=f"{at}") for at in range(40)])
    numbers = scan_input(source)
    output = BatchOutput(tmp_path / "out", numbers)

    def watched(path: Path) -> Iterator[BatchLine]:
        nonlocal num_read, most_ahead
        for line in read_lines(path):
            num_read += 1
            most_ahead = max(most_ahead, num_read - sum(tries == 3 for tries in app.tries.values()))
            yield line

    monkeypatch.setattr(batch_module, "make_app", lambda state: app)
    monkeypatch.setattr(batch_module, "read_lines", watched)
    batch = batch_module._Batch(SimpleNamespace(llm=None), output, len(numbers))  # type: ignore[arg-type]
    asyncio.run(batch.run(source, 5, lambda done, total, note="": None))
    output.close()
    answers = read_answers(tmp_path / "out")
    assert sorted(int(answer["custom_id"]) for answer in answers) == list(range(40))
    assert all(answer["response"]["body"] == {"ok": True} for answer in answers)
    assert app.num_refused == 80 and app.most_running == 5 and most_ahead <= 5


def test_fault_of_the_engine_is_nobodys_answer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = write_lines(tmp_path / "in", [make_line(f"{at}", prompt="Once", max_tokens=4) for at in range(12)])
    build = AsyncLLM.from_config

    def build_faulty(*args: Any, **options: Any) -> AsyncLLM:
        llm = build(*args, **options)
        engine, step, num_finished = llm.ready.engine, llm.ready.engine.step, 0

        def failing() -> Any:
            nonlocal num_finished
            if num_finished >= 4:
                raise RuntimeError("a fault of ours")
            outputs = step()
            num_finished += sum(output.finished for output in outputs)
            return outputs

        engine.step = failing  # type: ignore[method-assign]
        return llm

    def run() -> BatchSummary:
        engine, server = EngineConfig.from_options(model="demo", **SMALL), ServerConfig.from_options(access_log=False)
        return run_batch(engine, server, source, tmp_path / "out", shows_progress=False)

    monkeypatch.setattr(AsyncLLM, "from_config", build_faulty)
    with pytest.raises(EngineStoppedError):
        run()
    num_before = len(read_answers(tmp_path / "out"))
    assert num_before < 12 and all(each["response"]["status_code"] == 200 for each in read_answers(tmp_path / "out"))
    monkeypatch.setattr(AsyncLLM, "from_config", build)
    assert run() == BatchSummary(12, 0, num_before)
    assert sorted(int(answer["custom_id"]) for answer in read_answers(tmp_path / "out")) == list(range(12))


@pytest.mark.slow
@pytest.mark.parametrize("num_kills", [3, pytest.param(6, marks=pytest.mark.thorough)])
def test_killed_at_any_moment_no_line_is_lost_or_doubled(tmp_path: Path, num_kills: int) -> None:
    rng, count = random.Random(5), 400
    lines: list[Any] = [make_line(f"{at}", prompt=f"{at}:", max_tokens=8, echo=True) for at in range(count)]
    lines[7], lines[300] = "no JSON", make_line("300", prompt="300:", stream=True)
    source, target = write_lines(tmp_path / "in", lines), tmp_path / "out"
    command = [
        sys.executable,
        "-m",
        "jaxserve",
        "run-batch",
        "-i",
        str(source),
        "-o",
        str(target),
        "demo",
        *FLAGS,
    ]
    sizes = []
    for _ in range(num_kills):
        kill_at = rng.randrange(1_000, 20_000) + (target.stat().st_size if target.exists() else 0)
        process = subprocess.Popen(command, cwd=ROOT, stderr=subprocess.DEVNULL)
        while process.poll() is None and not (target.exists() and target.stat().st_size > kill_at):
            time.sleep(0.001)
        process.kill()
        process.wait()
        sizes.append(target.stat().st_size)
        if rng.random() < 0.5:  # what a loss of power may do to it
            os.truncate(target, max(0, sizes[-1] - rng.randrange(1, 300)))
    assert len(set(sizes)) > 2, "the runs were killed while they wrote"
    num_before = len([line for line in target.read_text().splitlines(keepends=True) if line.endswith("\n")])
    assert 0 < num_before < count
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 1 and f"{count} lines answered, {num_before} of them in earlier runs; 2 failed" in (
        done.stderr
    )
    answers = {answer["custom_id"] or answer["id"]: answer for answer in read_answers(target)}
    assert len(answers) == len(read_answers(target)) == count
    assert answers["batch_req_line_8"]["error"] and answers["300"]["error"]
    for at in set(range(count)) - {7, 300}:
        (choice,) = answers[f"{at}"]["response"]["body"]["choices"]
        assert choice["text"].startswith(f"{at}:")
