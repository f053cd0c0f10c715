from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from jaxserve.features.grammars import GrammarCompiler
from jaxserve.presets import demo_model_dir
from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.features.grammars.tiny import TinyTokenizer
from tests.tokenizers import builders


@pytest.fixture(scope="session")
def demo() -> Tokenizer:
    return load_tokenizer(demo_model_dir())


@pytest.fixture(scope="session")
def compiler(demo: Tokenizer) -> Iterator[GrammarCompiler]:
    """Over the demo model's vocabulary."""
    made = GrammarCompiler(demo)
    yield made
    made.close()


@pytest.fixture(scope="session")
def tiny_compiler() -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TinyTokenizer())
    yield made
    made.close()


@pytest.fixture(scope="session")
def kinds(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, GrammarCompiler]]:
    """One compiler for each kind of tokenizer file."""
    made = {}
    for make in (builders.make_llama3, builders.make_llama2, builders.make_sentencepiece):
        directory: Path = tmp_path_factory.mktemp(make.__name__)
        make(directory)
        made[make.__name__] = GrammarCompiler(load_tokenizer(directory))
    yield made
    for compiler in made.values():
        compiler.close()
