"""What the parser takes, refuses and explains."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

import jaxserve
from jaxserve import SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.engine.generation_config import GenerationDefaults
from jaxserve.errors import CapacityError
from jaxserve.server.options import ServerConfig
from jaxserve.tools.cli import _make_parser, commands, main
from jaxserve.tools.cli.flags import add_sampling_flags, read_engine_options, read_flags, read_sampling_params
from tests.test_devices import break_jax


@pytest.mark.parametrize(
    ("arguments", "usage", "message"),
    [
        (["serve", "--prot", "8000"], "jaxserve serve [MODEL]", "there is no flag --prot; did you mean --port?"),
        (["serve", "--prot=8000"], "jaxserve serve [MODEL]", "there is no flag --prot; did you mean --port?"),
        (["generate", "hi", "--tempratur", "0"], "jaxserve generate [MODEL] [PROMPT", "did you mean --temperature?"),
        (["generate", "hi", "--logprobs", "3"], "jaxserve generate [MODEL] [PROMPT", "there is no flag --logprobs"),
        (["generate", "hi", "--n", "3"], "jaxserve generate [MODEL] [PROMPT", "there is no flag --n;"),
        (["bench", "latency", "--out", "3"], "jaxserve bench latency", "there is no flag --out;"),
        (["generate", "hi", "--temp", "0", "you"], "jaxserve generate [MODEL]", "--temp; did you mean --temperature?"),
        (["plan", "demo", "--seed", "1", "--", "more"], "jaxserve plan [MODEL]", "'more' is one argument too many"),
        (["chat", "--zzz"], "jaxserve chat [MODEL]", "there is no flag --zzz; `jaxserve chat --help` lists all"),
        (["plan", "demo", "more"], "jaxserve plan [MODEL]", "'more' is one argument too many"),
        (["run-batch", "demo"], "jaxserve run-batch [MODEL] -i FILE -o FILE", "required: -i"),
        (["doctor", "--seed", "x"], "jaxserve doctor [MODEL]", "invalid int value: 'x'"),
    ],
)
def test_refusals_stand_under_the_commands_own_usage(
    arguments: list[str], usage: str, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit) as caught:
        main(arguments)
    shown = capsys.readouterr().err
    assert caught.value.code == 2 and message in shown
    assert shown.startswith(f"usage: {usage}") and shown.count("\n") == 2


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ("demo --temperature 0 hi", ["demo", "hi"]),
        ("--temperature 0 demo hi", ["demo", "hi"]),
        ("demo --temperature 0 hi --chat there", ["demo", "hi", "there"]),
        ("demo hi --temperature 0", ["demo", "hi"]),
        ("--temperature 0", []),
        ("demo -- --temperature", ["demo", "--temperature"]),
        ("demo --temperature 0 hi -- --chat", ["demo", "hi", "--chat"]),
        ("demo --temperature 0 -5", ["demo", "-5"]),
    ],
)
def test_words_may_stand_before_between_and_behind_flags(arguments: str, words: list[str]) -> None:
    assert _make_parser().parse_args(["generate", *arguments.split()]).words == words


def list_parsers(parser: argparse.ArgumentParser) -> Iterator[argparse.ArgumentParser]:
    yield parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for command in action.choices.values():
                yield from list_parsers(command)


def test_no_command_takes_abbreviated_flags() -> None:
    parsers = list(list_parsers(_make_parser()))
    assert len(parsers) > 15 and not any(parser.allow_abbrev for parser in parsers)


def test_no_command_shows_what_there_is(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 2
    shown = capsys.readouterr().err
    for name in ("serve", "generate", "chat", "run-batch", "plan", "doctor"):
        assert name in shown


def test_help_says_defaults_and_other_names(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = " ".join(capsys.readouterr().out.split())
    assert "plan and dispatch the next step while one runs (default: on)" in shown
    assert "work on token ids only (default: off)" in shown
    assert "(default: 0.9; also --gpu-memory-utilization)" in shown and "also --tp, -tp" in shown
    assert "--gpu-memory-utilization FLOAT" not in shown, "an alias has no paragraph of its own"
    with pytest.raises(SystemExit):
        main(["chat", "--help"])
    assert "longest answer (default: 256)" in capsys.readouterr().out


@pytest.fixture
def served(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """What `jaxserve serve` would start with."""
    import jaxserve.server.launch

    found: list[Any] = []

    def serve(engine: EngineConfig, server: ServerConfig) -> int:
        found.append((engine, server))
        return 3

    monkeypatch.setattr(jaxserve.server.launch, "serve", serve)
    return found


@pytest.mark.parametrize(
    "flags",
    [
        ("some/model", "--served-model-name", "a", "b", "c"),
        ("some/model", "--served-model-name", "a", "b", "--port", "1", "--served-model-name", "c"),
        ("some/model", *(each for name in "abc" for each in ("--served-model-name", name))),
        ("--served-model-name=a", "some/model", "--served-model-name", "b", "c"),
        ("--served-model-name", "a", "b", "c", "--model", "some/model"),
        ("--served-model-name", "a", "b", "c", "--", "some/model"),
    ],
)
def test_a_served_model_takes_several_names(served: list[Any], flags: tuple[str, ...]) -> None:
    assert main(["serve", *flags]) == 3
    engine, server = served[0]
    assert engine.model.model == "some/model" and server.serving.served_model_name == ("a", "b", "c")


def test_a_model_behind_the_names_is_not_taken_for_one(served: list[Any], capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "--served-model-name", "a", "some/model"]) == 2 and not served
    shown = capsys.readouterr().err
    assert "served_model_name: takes every word behind it, so 'some/model' became a name" in shown
    assert main(["serve", "--served-model-name", "a"]) == 3 and served[0][1].serving.served_model_name == ("a",)


def test_flags_and_their_aliases_reach_the_options(served: list[Any]) -> None:
    flags = [
        "-tp",
        "2",
        "--gpu-memory-utilization",
        "0.5",
        "--no-enable-prefix-caching",
        "--api-key=a",
    ]
    assert main(["serve", "some/model", *flags]) == 3, "the server's status is the command's"
    engine, server = served[0]
    assert engine.model.model == "some/model" and engine.parallel.tensor_parallel_size == 2
    assert engine.cache.device_memory_utilization == 0.5 and not engine.cache.enable_prefix_caching
    assert server.access.api_key == ("a",)


def test_flags_of_vllm_are_taken_where_they_change_nothing(
    served: list[Any], capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    harmless = ["--enforce-eager", "--no-enable-lora", "--swap-space", "0", "--disable-log-stats", "--task=generate"]
    assert main(["serve", "demo", *harmless, "--enable-chunked-prefill"]) == 3
    (tmp_path / "vllm.toml").write_text("enable_lora = true")
    assert main(["serve", "demo", "--config", str(tmp_path / "vllm.toml"), "--no-enable-lora"]) == 3
    (tmp_path / "vllm.toml").write_text("fully_sharded_loras = true")
    for arguments in (["--fully-sharded-loras"], ["--config", str(tmp_path / "vllm.toml")]):
        assert main(["serve", "demo", *arguments]) == 2
        assert "fully_sharded_loras: of an adapter's two matrices" in capsys.readouterr().err
    assert main(["generate", "hi", "--cpu-offload-gb", "4"]) == 2
    assert "weights stay on the device" in capsys.readouterr().err and len(served) == 2
    with pytest.raises(SystemExit):
        main(["serve", "demo", "--mem-fraction-static", "0.8"])
    assert "there is no flag --mem-fraction-static; here it is --gpu-memory-utilization" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    assert "--enforce-eager" not in shown and "vLLM's flags" in shown


def test_flags_win_over_a_file_by_whichever_name(served: list[Any], tmp_path: Path) -> None:
    file = tmp_path / "options.toml"
    file.write_text("port = 1\nmax_num_seqs = 3\n[cache]\ngpu_memory_utilization = 0.5\n")
    assert main(["serve", "--config", str(file), "--device-memory-utilization", "0.25"]) == 3
    engine, server = served[0]
    assert engine.cache.device_memory_utilization == 0.25 and engine.scheduler.max_num_seqs == 3
    assert server.listen.port == 1


@pytest.mark.parametrize("flag", ["--speculative-config", "--sc", "-sc"])
def test_a_flag_whose_value_is_a_table(flag: str, served: list[Any], tmp_path: Path) -> None:
    assert main(["serve", "demo", flag, '{"method": "ngram", "num_speculative_tokens": 3}']) == 3
    file = tmp_path / "options.toml"
    file.write_text('[speculative_config]\nmethod = "suffix"\n')
    assert main(["serve", "demo", "--config", str(file)]) == 3
    assert main(["serve", "demo", "--config", str(file), flag, '{"method": "mtp", "num_speculative_tokens": 1}']) == 3
    drafters = [engine.speculation.speculative_config for engine, _ in served]
    assert [each.method for each in drafters] == ["ngram", "suffix", "mtp"]


def test_a_bad_table_is_refused_by_its_key(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["serve", "demo", "-sc", '{"method": "medusa"}']) == 2
    assert "speculative_config.method: must be one of ngram, suffix" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["serve", "demo", "--speculative-config", "ngram"])
    assert "must be a JSON object" in capsys.readouterr().err


def test_an_option_is_blamed_by_the_name_that_was_given(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "--gpu-memory-utilization", "1.5"]) == 2
    assert capsys.readouterr().err.startswith("jaxserve: gpu_memory_utilization: ")
    assert main(["plan", "demo", "--gpu-memory-utilization", "0.5", "--device-memory-utilization", "0.5"]) == 2
    assert "given twice" in capsys.readouterr().err


@pytest.mark.parametrize("command", ["serve", "chat", "plan", "doctor", "generate"])
def test_a_model_named_twice_is_refused(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    arguments = [command, "demo", "--model", "demo"]
    if command != "generate":
        assert main(arguments) == 2
        assert "given twice, also as 'demo'" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["generate", "llama-30m", "hi", "--load-format", "dummy"], "tokenizer: the preset 'llama-30m' has none"),
        (["chat", "llama-30m", "--load-format", "dummy"], "tokenizer: the preset 'llama-30m' has none"),
        (["generate", "demo", "hi", "--skip-tokenizer-init"], "takes text, which needs a tokenizer"),
        (["chat", "--chat-template", "/nowhere.jinja"], "chat_template: cannot be read"),
    ],
)
def test_what_no_text_can_be_made_for_is_known_before_anything_is_built(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxserve, "LLM", None, raising=False)
    monkeypatch.setattr(jaxserve, "AsyncLLM", None, raising=False)
    assert main(arguments) == 2
    assert message in capsys.readouterr().err


def test_messages_without_a_template_are_known_before_as_well(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(jaxserve, "LLM", None, raising=False)
    arguments = ["generate", "--chat", "hi", "--tokenizer", str(tmp_path)]
    assert main(arguments) == 2
    assert f"the tokenizer in {tmp_path} has none; give one with --chat-template" in capsys.readouterr().err


def test_generate_passes_what_it_was_given(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: dict[str, Any] = {}

    class Fake:
        def __init__(self, **options: Any) -> None:
            seen.update(options)

        ready = SimpleNamespace(defaults=GenerationDefaults(SamplingParams()))

        def chat(self, messages: list[Any], params: Any, *, chat_template: str | None) -> list[Any]:
            seen.update(messages=messages, template=chat_template, max_tokens=params.max_tokens)
            failed = CapacityError("does not fit", field="prompt")
            return [SimpleNamespace(outputs=[SimpleNamespace(text="yes")], error=failed) for _ in messages]

    monkeypatch.setattr(jaxserve, "LLM", Fake, raising=False)
    (tmp_path / "t.jinja").write_text("{{ messages }}")
    arguments = ["generate", "demo", "Hello", "--chat", "--chat-template", str(tmp_path / "t.jinja"), "--seed", "7"]
    assert main(arguments) == 1, "an answer ended with an error"
    assert seen == {
        "model": "demo",
        "seed": 7,
        "messages": [[{"role": "user", "content": "Hello"}]],
        "template": "{{ messages }}",
        "max_tokens": 128,
    }
    shown = capsys.readouterr()
    assert shown.out == "yes\n" and shown.err == "jaxserve: prompt: does not fit\n"


def test_a_plan_that_does_not_fit_is_shown_as_far_as_it_goes(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "llama-3.1-8b", "--device", "v5e"]) == 2
    shown = capsys.readouterr()
    assert "14.958" in shown.out and "do not fit" in " ".join(shown.out.split())
    assert "parameters take" in shown.err
    assert main(["plan", "llama-3.1-8b", "--device", "l4"]) == 2
    shown = capsys.readouterr()
    assert "parameters" in shown.out and "max_model_len=" in shown.err and "would fit" in shown.err
    assert main(["plan", "llama-3.1-8b", "--device", "a100"]) == 2
    assert "did you mean a100-80g or a100-40g?" in capsys.readouterr().err


@pytest.mark.parametrize("command", [["generate", "hi"], ["plan", "demo"], ["chat"]])
def test_devices_that_cannot_be_had_are_one_line(
    command: list[str], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    break_jax(monkeypatch, "cuda", AssertionError())
    assert main(command) == 2
    error = capsys.readouterr().err
    assert error.startswith("jaxserve: JAX_PLATFORMS: ") and error.count("\n") == 1


def test_the_package_is_a_command() -> None:
    done = subprocess.run([sys.executable, "-m", "jaxserve", "--version"], capture_output=True, text=True, check=True)
    assert done.stdout == f"jaxserve {jaxserve.__version__}\n"


@pytest.mark.parametrize(("flags", "choice"), [([], "used"), (["--compile", "all"], "all")])
def test_a_chat_compiles_what_it_uses(flags: list[str], choice: str, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(**options: Any) -> Any:
        raise CapacityError(options["compile"], field="compile")

    monkeypatch.setattr(jaxserve, "AsyncLLM", refuse, raising=False)
    seen: list[str] = []
    monkeypatch.setattr("builtins.print", lambda *texts, **_: seen.extend(texts))
    assert main(["chat", "demo", *flags]) == 2 and seen == [f"jaxserve: compile: {choice}"]


@pytest.mark.parametrize(
    ("words", "defaults", "expected"),
    [
        ([], GenerationDefaults(SamplingParams()), (128, 0)),
        ([], GenerationDefaults(SamplingParams(max_tokens=700), 700), (700, 0)),
        ([], GenerationDefaults(SamplingParams(max_tokens=300, min_tokens=300)), (300, 300)),
        (["--max-tokens", "5"], GenerationDefaults(SamplingParams(max_tokens=300, min_tokens=300)), (5, 5)),
    ],
)
def test_answers_are_as_long_as_the_flag_or_the_model_says(
    words: list[str], defaults: GenerationDefaults, expected: tuple[int, int]
) -> None:
    parser = argparse.ArgumentParser()
    add_sampling_flags(parser, max_tokens=128)
    params = read_sampling_params(parser.parse_args(words), defaults)
    assert (params.max_tokens, params.min_tokens) == expected


@pytest.mark.parametrize("command", [["generate", "demo", "hi"], ["chat", "demo"]])
@pytest.mark.parametrize(
    ("flag", "value"), [("temperature", "-1"), ("top-p", "0"), ("top-k", "-7"), ("min-p", "2"), ("max-tokens", "0")]
)
def test_a_bad_sampling_flag_shows_before_a_model_is_read(
    command: list[str], flag: str, value: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(commands, "_require_tokenizer", lambda *_, **__: pytest.fail("the model's files were read"))
    assert main([*command, f"--{flag}", value]) == 2
    assert capsys.readouterr().err.startswith(f"jaxserve: {flag.replace('-', '_')}: ")


@pytest.mark.parametrize("command", [["serve", "demo"], ["run-batch", "demo", "-i", "in", "-o", "out"]])
def test_what_a_server_refuses_is_not_offered(command: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main([*command, "--compile", "used"])
    assert "invalid choice: 'used' (choose from" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main([command[0], "--help"])
    assert "--compile {auto,all} " in " ".join(capsys.readouterr().out.split())


def test_the_help_of_serve_begins_with_examples_that_parse(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        main(["serve", "--help"])
    shown = capsys.readouterr().out
    examples = re.findall(r"^  jaxserve (serve .*)$", shown[: shown.index("options:")], flags=re.M)
    assert len(examples) == 3 and shown.index("examples:") < 150
    for example in examples:
        args = _make_parser().parse_args(example.split())
        EngineConfig.from_options(**read_engine_options(args))
        ServerConfig.from_options(**read_flags(args, ServerConfig))
