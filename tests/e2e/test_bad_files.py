"""Checkpoints that are broken: a typed error that names the file or the key, before anything is compiled."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from jaxserve import LLM
from jaxserve.errors import CapacityError, ConfigError, JaxServeError, TokenizerError, WeightsError
from tests.golden_cases import load_case
from tests.programs import PROGRAMS

SHARDED, PLAIN = load_case("llama_gqa").path, load_case("llama_mha").path
SIZES: dict[str, Any] = {  # an error waits for the program that is compiled meanwhile
    "max_model_len": 64,
    "max_num_seqs": 2,
    "max_num_batched_tokens": 64,
    "compilation_cache_dir": str(PROGRAMS),
    "show_progress": False,
}


def truncate(path: Path) -> None:
    weights = path / "model.safetensors"
    weights.write_bytes(weights.read_bytes()[:-100])


def garble_header(path: Path) -> None:
    weights = path / "model.safetensors"
    data = bytearray(weights.read_bytes())
    data[8:40] = b"\xff" * 32
    weights.write_bytes(bytes(data))


def lose_shard(path: Path) -> None:
    sorted(path.glob("model-*.safetensors"))[1].unlink()


def lose_weights(path: Path) -> None:
    (path / "model.safetensors").unlink()


def garble_config(path: Path) -> None:
    (path / "config.json").write_text('{"model_type": "llama", ')


def lose_config(path: Path) -> None:
    (path / "config.json").unlink()


def edit_config(**changes: object) -> Callable[[Path], None]:
    def edit(path: Path) -> None:
        config = json.loads((path / "config.json").read_text())
        (path / "config.json").write_text(json.dumps(config | changes))

    return edit


@pytest.mark.parametrize(
    ("source", "damage", "error", "message"),
    [
        (PLAIN, truncate, WeightsError, "model.safetensors"),
        (PLAIN, garble_header, WeightsError, "model.safetensors"),
        (PLAIN, lose_weights, WeightsError, "safetensors"),
        (SHARDED, lose_shard, WeightsError, "00002"),
        (PLAIN, garble_config, ConfigError, "config.json"),
        (PLAIN, lose_config, ConfigError, "config.json"),
        (PLAIN, edit_config(hidden_act="swoosh"), ConfigError, "hidden_act"),
        (PLAIN, edit_config(model_type="mamba"), ConfigError, "model_type"),
        (PLAIN, edit_config(mystery_norm=True), ConfigError, "mystery_norm"),
        (PLAIN, edit_config(num_attention_heads=-4), ConfigError, "num_attention_heads"),
        (PLAIN, edit_config(vocab_size=500), WeightsError, "embed_tokens"),
        (PLAIN, edit_config(num_hidden_layers=1), WeightsError, "layers.1"),
    ],
)
def test_broken_checkpoints_are_named(
    source: Path, damage: Callable[[Path], None], error: type[JaxServeError], message: str, tmp_path: Path
) -> None:
    path = tmp_path / "model"
    shutil.copytree(source, path)
    damage(path)
    with pytest.raises(error, match=message):
        LLM(str(path), skip_tokenizer_init=True, **SIZES)


def test_missing_and_broken_tokenizers_are_named(tmp_path: Path) -> None:
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LLM(str(PLAIN), show_progress=False, max_model_len=64)
    path = tmp_path / "model"
    shutil.copytree(PLAIN, path)
    (path / "tokenizer.json").write_text('{"model": ')
    with pytest.raises(TokenizerError, match=r"tokenizer\.json"):
        LLM(str(path), show_progress=False, max_model_len=64)


def test_too_little_memory_says_what_would_fit() -> None:
    with pytest.raises(CapacityError, match=r"max_model_len=\d+ \(\d+ pages\) would fit"):
        LLM(str(PLAIN), skip_tokenizer_init=True, show_progress=False, max_model_len=128, kv_cache_memory_bytes=100_000)
    with pytest.raises(ConfigError, match="max_model_len"):
        LLM(str(PLAIN), skip_tokenizer_init=True, show_progress=False, max_model_len=10**6)


def test_unknown_names_say_what_was_tried() -> None:
    with pytest.raises(ConfigError, match="no directory of that name"):
        LLM("nobody/nothing", show_progress=False)
    with pytest.raises(ConfigError, match="is a preset and has no weights"):
        LLM("qwen3-0.6b", show_progress=False)
    with pytest.raises(ConfigError, match="did you mean 'max_num_seqs'"):
        LLM(max_num_seq=3)
