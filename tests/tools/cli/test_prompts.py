"""Which words are the model: a rule that must not surprise."""

from __future__ import annotations

import io
from pathlib import Path

import pytest

from jaxserve.errors import ConfigError
from jaxserve.tools.cli.prompts import looks_like_model, split_words


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.mark.parametrize("word", ["demo", "llama-3.1-8b", "Qwen/Qwen3-0.6B", "./x", "/a/b", "~/m", "a.gguf"])
def test_words_that_can_be_models(word: str) -> None:
    assert looks_like_model(word)


@pytest.mark.parametrize("word", ["Hello", "Once upon a time", "and / or", "a/b c", "Is 1/2 + 1/2 = 1?", "", "//"])
def test_words_that_cannot(word: str) -> None:
    assert not looks_like_model(word)


@pytest.mark.parametrize("word", ["a" * 256, "word " * 1000, "a/" * 3000, "a\0b", "\ud800"])
def test_a_prompt_that_no_path_can_be_is_a_prompt(word: str) -> None:
    assert not looks_like_model(word)
    assert split_words([word], None, io.StringIO()) == (None, [word])


def test_a_folder_that_may_not_be_read_is_no_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(path: Path) -> bool:
        raise PermissionError(path)

    monkeypatch.setattr(Path, "is_file", refuse)
    assert not looks_like_model(str(tmp_path.name))


def test_a_directory_is_a_model_where_it_holds_one(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    for name in ("docs", "model"):
        (tmp_path / name).mkdir()
    (tmp_path / "model" / "config.json").touch()
    assert looks_like_model("model") and not looks_like_model("docs")


@pytest.mark.parametrize(
    ("words", "model", "lines", "found"),
    [
        (["demo", "Hello"], None, "", ("demo", ["Hello"])),
        (["demo", "Hello", "demo"], None, "", ("demo", ["Hello", "demo"])),
        (["Qwen/Qwen3-0.6B", "Hello"], None, "", ("Qwen/Qwen3-0.6B", ["Hello"])),
        (["demo"], None, "Hello\n\nBye\n", ("demo", ["Hello", "Bye"])),
        (["demo"], None, "", (None, ["demo"])),
        (["demo", "Hello"], "llama-30m", "", (None, ["demo", "Hello"])),
        (["Hello", "demo"], None, "unread", (None, ["Hello", "demo"])),
        (["Hello"], None, "unread", (None, ["Hello"])),
        ([], None, "Hello\n  \nBye", (None, ["Hello", "Bye"])),
        ([], "demo", "Hello", (None, ["Hello"])),
    ],
)
def test_the_first_word_is_the_model_where_prompts_follow(
    words: list[str], model: str | None, lines: str, found: tuple[str | None, list[str]]
) -> None:
    assert split_words(words, model, io.StringIO(lines)) == found


def test_a_terminal_is_not_read_behind_a_word() -> None:
    assert split_words(["demo"], None, Terminal("Hello")) == (None, ["demo"])
    assert split_words([], None, Terminal("Hello\n")) == (None, ["Hello"])


def test_no_prompt_at_all_is_said() -> None:
    with pytest.raises(ConfigError, match=r"^prompts: "):
        split_words([], None, io.StringIO("\n"))
