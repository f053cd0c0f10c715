from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.tokenizers import Tokenizer, load_tokenizer
from tests.tokenizers import builders


@pytest.fixture(scope="session")
def llama3(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama3")
    builders.make_llama3(directory)
    return directory


@pytest.fixture(scope="session")
def llama2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("llama2")
    builders.make_llama2(directory)
    return directory


@pytest.fixture(scope="session")
def sentencepiece_dir(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("sentencepiece")
    builders.make_sentencepiece(directory, control_symbols=["<|im_start|>", "<|im_end|>"])
    builders.write_json(
        directory / "tokenizer_config.json", {"eos_token": "<|im_end|>", "chat_template": builders.CHAT_TEMPLATE}
    )
    return directory


@pytest.fixture(scope="session")
def tokenizers(llama3: Path, llama2: Path, sentencepiece_dir: Path) -> dict[str, Tokenizer]:
    """One of each kind: byte-level, byte fallback in tokenizer.json, sentencepiece."""
    return {path.name.rstrip("0"): load_tokenizer(path) for path in (llama3, llama2, sentencepiece_dir)}
