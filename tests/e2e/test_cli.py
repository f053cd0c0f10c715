"""The command line as a newcomer uses it: answers, plans, reports, and errors of one line."""

from __future__ import annotations

import io
import re
import sys
from pathlib import Path

import pytest

from jaxserve.tools.cli import main
from pallas_kernels.cpu import library
from tests.e2e.helpers import DEMO, list_flags

SMALL = list_flags(DEMO)


def test_generate_prints_each_answer(capsys: pytest.CaptureFixture[str]) -> None:
    prompts = ("What is 20 + 30?", "What is a KV cache?")
    assert main(["generate", "--chat", *prompts, "--temperature", "0", "--max-tokens", "60", *SMALL]) == 0
    shown = capsys.readouterr().out
    assert [line for line in shown.splitlines() if line.startswith("---")] == [f"--- {prompt}" for prompt in prompts]
    assert "50" in shown


def test_generate_reads_prompts_from_standard_input(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("Once upon a time\n\n"))
    assert main(["generate", "--max-tokens", "5", "--temperature", "0", *SMALL]) == 0
    assert capsys.readouterr().out.strip()


def test_chat_streams_and_remembers(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stdin", io.StringIO("What is 20 + 30?\nWhat is TTFT?\n"))
    assert main(["chat", "--temperature", "0", *SMALL]) == 0
    answers = capsys.readouterr().out.strip().splitlines()
    assert len(answers) >= 2 and "50" in answers[0]


def test_plan_of_a_preset_without_weights(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--model", "llama-3.1-8b", "--device", "h200"]) == 0
    shown = capsys.readouterr().out
    assert "14.958" in shown and re.search(r"[\d,]+ pages of 64 tokens", shown)


def test_doctor_names_devices_kernels_and_programs(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["doctor", "demo"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    attention = "xla" if library.find_obstacle() else "cpu"
    for word in ("cpu", "jax 0.", f"Attention {attention}", "decode 32", "greedy, random, full, masked"):
        assert word in shown, word


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["plan", "--model", "llama-3.1-8b", "--device", "v5e"], "parameters take"),
        (["plan", "--model", "llama-3.1-8b", "--device", "abacus"], "known are h200"),
        (["generate", "x", "--model", "/nowhere/at/all"], "model"),
        (["generate", "x", "--model", "qwen3-0.6b"], "load_format='dummy'"),
        (["generate", "x", "--page-size", "33"], "power of two"),
        (["generate", "x", "--max-model-len", "100000"], "max_model_len"),
        (["generate", "x", "--config", "/nowhere.toml"], "cannot be read"),
    ],
)
def test_errors_are_one_line_and_exit_2(arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(arguments) == 2
    error = capsys.readouterr().err
    assert message in error and error.startswith("jaxserve: ") and error.count("\n") == 1


@pytest.mark.thorough
def test_a_cache_that_cannot_be_made_is_done_without_unless_it_was_asked_for(
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    arguments = ["generate", "Once", "--max-tokens", "2", "--max-num-seqs", "1", "--max-num-batched-tokens", "33"]
    assert main(arguments) == 0
    assert "compiled programs are not kept" in caplog.text and capsys.readouterr().out.strip()
    assert main([*arguments, "--compilation-cache-dir", str(tmp_path / "file" / "cache")]) == 2
    assert capsys.readouterr().err.startswith("jaxserve: compilation_cache_dir: ")


def test_help_lists_every_option(capsys: pytest.CaptureFixture[str]) -> None:
    from jaxserve.config import EngineConfig
    from jaxserve.options import list_options

    with pytest.raises(SystemExit):
        main(["generate", "--help"])
    shown = capsys.readouterr().out
    for _, option in list_options(EngineConfig):
        assert f"--{option.name.replace('_', '-')}" in shown
