"""Finding a checkpoint, and reading the configs beside it. The hub is never asked: it is switched off or replaced."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import huggingface_hub
import pytest
from huggingface_hub import constants, errors

from jaxserve.core.weights import download_weights, read_generation_config, read_hf_config, resolve_checkpoint
from jaxserve.errors import ConfigError


@pytest.fixture
def offline(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Path:
    """The folder of an empty Hugging Face cache, with the network switched off."""
    cache = tmp_path / "cache"
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    return cache


def test_local_directory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert resolve_checkpoint(str(tmp_path)) == tmp_path
    monkeypatch.setenv("HOME", str(tmp_path.parent))
    assert resolve_checkpoint(f"~/{tmp_path.name}") == tmp_path
    monkeypatch.chdir(tmp_path.parent)
    assert resolve_checkpoint(tmp_path.name).samefile(tmp_path)
    with pytest.raises(ConfigError, match="no revisions") as caught:
        resolve_checkpoint(str(tmp_path), "main")
    assert caught.value.field == "revision"


def test_file_instead_of_directory(tmp_path: Path) -> None:
    file = tmp_path / "model.safetensors"
    file.write_bytes(b"")
    with pytest.raises(ConfigError, match="is a file"):
        resolve_checkpoint(str(file))


@pytest.mark.parametrize(
    ("model", "words"),
    [
        ("owner/Llama-3-8B-GGUF", "owner/name:file.gguf"),
        ("owner/llama-gguf:Q4_K_M", "owner/name:file.gguf"),
        ("owner/name/model.GGUF", "does not exist"),
        ("{tmp}/folder.gguf", "is a directory, and GGUF models are files"),
    ],
)
def test_gguf_is_known_by_its_name(model: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    (tmp_path / "folder.gguf").mkdir()
    with pytest.raises(ConfigError, match=words) as caught:
        resolve_checkpoint(model.format(tmp=tmp_path))
    assert caught.value.field == "model"


def test_a_gguf_file_is_a_model(tmp_path: Path) -> None:
    file = tmp_path / "llama-Q4_K_M.gguf"
    file.write_bytes(b"GGUF")
    assert resolve_checkpoint(str(file)) == file
    with pytest.raises(ConfigError, match="has no revisions") as caught:
        resolve_checkpoint(str(file), "main")
    assert caught.value.field == "revision"


def test_all_parts_of_a_gguf_model_come_from_the_hub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[list[str]] = []

    def download(model: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (model, revision, ignore_patterns) == ("owner/name", "v2", [])
        asked.append(allow_patterns)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    names = [f"Q8[0]/model-{part:05d}-of-00002.gguf" for part in (1, 2)]
    with pytest.raises(ConfigError, match="has no file Q8"):
        resolve_checkpoint(f"owner/name:{names[0]}", "v2")
    (tmp_path / "Q8[0]").mkdir()
    for name in names:
        (tmp_path / name).touch()
    assert resolve_checkpoint(f"owner/name:{names[0]}", "v2") == tmp_path / names[0]
    assert asked[1] == [name.replace("[", "[[]") for name in names]


@pytest.mark.parametrize("model", ["", "/no/such/model", "./model", "../model", "~/no-such-model", "a/b/c"])
def test_absent_path_never_asks_the_hub(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(huggingface_hub, "snapshot_download", lambda *_, **__: pytest.fail("asked the hub"))
    with pytest.raises(ConfigError, match=r"HF_HOME.*HF_TOKEN") as caught:
        resolve_checkpoint(model)
    assert caught.value.field == "model"


@pytest.mark.usefixtures("offline")
@pytest.mark.parametrize("model", ["has space", "-lead", "a--b/c", "x" * 200, "owner/name.git", "models\nname"])
def test_neither_path_nor_hub_id(model: str) -> None:
    with pytest.raises(ConfigError, match="not a hub id"):
        resolve_checkpoint(model)


def test_offline_says_what_was_tried(offline: Path) -> None:
    with pytest.raises(ConfigError) as caught:
        resolve_checkpoint("owner/name")
    message = str(caught.value)
    for part in ("no directory of that name", "'owner/name' on the Hugging Face hub", str(offline), "local directory"):
        assert part in message
    assert caught.value.field == "model" and caught.value.value == "owner/name" and "\n" not in message


def test_offline_with_a_cached_snapshot(offline: Path) -> None:
    repository = offline / "models--owner--name"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    (snapshot / "config.json").write_text("{}")
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    assert resolve_checkpoint("owner/name") == snapshot


def hub_error(kind: type, text: str = "no") -> Exception:
    error = kind.__new__(kind)
    Exception.__init__(error, text)
    return error


@pytest.mark.parametrize(
    ("kind", "field", "message"),
    [
        (errors.GatedRepoError, "model", "gated"),
        (errors.RepositoryNotFoundError, "model", "private"),
        (errors.RevisionNotFoundError, "revision", "'v2'"),
        (errors.LocalEntryNotFoundError, "model", "could not be fetched"),
        (ConnectionError, "model", r"\(ConnectionError: no\).*cache"),
        (PermissionError, "model", "could not be fetched"),
    ],
)
def test_hub_errors(monkeypatch: pytest.MonkeyPatch, kind: type, field: str, message: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise hub_error(kind)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_checkpoint("owner/name", "v2")
    assert caught.value.field == field and "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("status", "message"),
    [
        (401, r"\(HTTP 401\).*HF_TOKEN"),
        (403, r"\(HTTP 403\).*HF_TOKEN"),
        (503, r"\(HfHubHTTPError: no\).*HF_HOME"),
    ],
)
def test_hub_answers(monkeypatch: pytest.MonkeyPatch, status: int, message: str) -> None:
    def fail(*_: Any, **__: Any) -> None:
        error = hub_error(errors.HfHubHTTPError)
        error.response = SimpleNamespace(status_code=status)
        raise error

    monkeypatch.setattr(huggingface_hub, "snapshot_download", fail)
    with pytest.raises(ConfigError, match=message) as caught:
        resolve_checkpoint("owner/name")
    assert caught.value.field == "model" and "\n" not in str(caught.value)


@pytest.mark.usefixtures("offline")
def test_misspelt_names_get_the_nearest() -> None:
    for name, nearest in (("dmeo", "demo"), ("qwen3-8", "qwen3-8b"), ("llama3.2-1b", "llama-3.2-1b")):
        with pytest.raises(ConfigError, match=rf"did you mean '{nearest}'\?"):
            resolve_checkpoint(name)
    with pytest.raises(ConfigError, match="no directory of that name, and"):
        resolve_checkpoint("openai/whisper-large-v3")


def test_downloads_no_pickles_and_no_subfolders(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    wanted = [
        "config.json",
        "generation_config.json",
        "model.safetensors",
        "model-00001-of-00002.safetensors",
        "model.safetensors.index.json",
        "tokenizer.json",
        "tokenizer.model",
        "tokenizer_config.json",
        "special_tokens_map.json",
        "chat_template.jinja",
        "preprocessor_config.json",
        "processor_config.json",
        "spiece.model",
        "hf_quant_config.json",
    ]
    unwanted = [
        "pytorch_model.bin",
        "tokenizer.pkl",
        "tokenizer.py",
        "modeling_x.py",
        "consolidated.safetensors",
        "consolidated.00.pth",
        "original/consolidated.00.pth",
        "original/tokenizer.model",
        "onnx/config.json",
        "README.md",
    ]

    def download(model: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        assert (model, revision) == ("owner/name", "v2")
        kept = filter_repo_objects(wanted + unwanted, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        assert sorted(kept) == sorted(wanted)
        return str(tmp_path)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("owner/name", "v2") == tmp_path


def test_the_folders_of_modules_are_downloaded_with_modules_json(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    from huggingface_hub.utils import filter_repo_objects

    snapshot = tmp_path / "abc123"
    snapshot.mkdir()
    (snapshot / "modules.json").write_text("[]")
    root = ["config.json", "modules.json", "sentence_bert_config.json", "config_sentence_transformers.json"]
    folders = ["1_Pooling/config.json", "2_Dense/config.json", "2_Dense/model.safetensors"]
    unwanted = ["2_Dense/pytorch_model.bin", "onnx/config.json", "onnx/model.safetensors", "1_Pooling/run.py"]
    calls = []

    def download(model: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        files = [*root, *folders, *unwanted]
        kept = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        calls.append((revision, *kept))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    resolve_checkpoint("owner/name", "main", need_weights=False)
    assert calls == [("main", *root), ("abc123", *folders)]


def test_weights_are_downloaded_last_and_from_the_same_commit(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    from huggingface_hub.utils import filter_repo_objects

    snapshot = tmp_path / "abc123"
    snapshot.mkdir()
    files = ["config.json", "tokenizer.json", "adapter_config.json", "model.safetensors", "adapter_model.safetensors"]
    calls = []

    def download(model: str, *, revision: str, allow_patterns: list[str], ignore_patterns: list[str]) -> str:
        kept = filter_repo_objects(files, allow_patterns=allow_patterns, ignore_patterns=ignore_patterns)
        calls.append((model, revision, *kept))
        return str(snapshot)

    monkeypatch.setattr(huggingface_hub, "snapshot_download", download)
    assert resolve_checkpoint("owner/name", "main", need_weights=False) == snapshot
    with pytest.raises(ConfigError, match=r"'owner/name' .*model\.safetensors"):
        download_weights("owner/name", snapshot)
    (snapshot / "model.safetensors").write_bytes(b"")
    download_weights("owner/name", snapshot)
    assert calls == [
        ("owner/name", "main", "config.json", "tokenizer.json", "adapter_config.json"),
        ("owner/name", "abc123", "model.safetensors"),
        ("owner/name", "abc123", "model.safetensors"),
    ]


def test_configs(tmp_path: Path) -> None:
    assert read_generation_config(tmp_path) == {}
    for name, read in (("config.json", read_hf_config), ("generation_config.json", read_generation_config)):
        value = {"rope_scaling": {"factor": 2.0}, "text": "ÄΩ", "none": None}
        (tmp_path / name).write_text(json.dumps(value, ensure_ascii=False), encoding="utf-8")
        assert read(tmp_path) == value


def test_modelopt_may_keep_its_settings_beside_config_json(tmp_path: Path) -> None:
    stored = {"quant_algo": "FP8", "kv_cache_quant_algo": "FP8", "exclude_modules": ["lm_head"]}
    (tmp_path / "hf_quant_config.json").write_text(
        json.dumps({"producer": {"name": "modelopt"}, "quantization": stored})
    )
    (tmp_path / "config.json").write_text("{}")
    assert read_hf_config(tmp_path) == {"quantization_config": {"quant_method": "modelopt", **stored}}
    (tmp_path / "config.json").write_text('{"quantization_config": {"quant_method": "fp8"}}')
    assert read_hf_config(tmp_path)["quantization_config"] == {"quant_method": "fp8"}


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (b"", "not JSON"),
        (b'{"a": 1,}', "not JSON: .* line 1 column"),
        (b'{"a": "\xff"}', r"not UTF-8 text \(byte 7\)"),
        (b"[1]", "holds a list"),
        (b"null", "holds a NoneType"),
        (b'{"a": 1, "b": {"c": 1, "c": 2}}', "the key 'c' twice"),
        (b"[" * 200_000, "nested too deeply"),
        (b'{"a": ' + b"1" * 5000 + b"}", "5000 digits"),
    ],
)
@pytest.mark.parametrize("name", ["config.json", "generation_config.json"])
def test_malformed_configs(tmp_path: Path, name: str, text: bytes, message: str) -> None:
    (tmp_path / name).write_bytes(text)
    with pytest.raises(ConfigError, match=message) as caught:
        (read_hf_config if name == "config.json" else read_generation_config)(tmp_path)
    assert caught.value.field == str(tmp_path / name)


def test_absent_and_unreadable_config(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"config\.json") as caught:
        read_hf_config(tmp_path)
    assert caught.value.field == str(tmp_path / "config.json")
    (tmp_path / "config.json").mkdir()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_hf_config(tmp_path)
