"""Options: names, aliases, ranges, defaults by platform, TOML."""

from __future__ import annotations

from pathlib import Path

import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.options import list_options, read_options


def test_flat_options_find_their_section() -> None:
    config = EngineConfig.from_options(model="x", max_num_seqs=7, block_size=64, gpu_memory_utilization=0.5, tp=2)
    assert (config.model.model, config.scheduler.max_num_seqs, config.cache.page_size) == ("x", 7, 64)
    assert (config.cache.device_memory_utilization, config.parallel.tensor_parallel_size) == (0.5, 2)


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"max_num_seq": 4}, "max_num_seq", "'max_num_seqs'"),
        ({"quantization": "fp6"}, "quantization", "^quantization: .*fp8_per_tensor, "),
        ({"quantization_config": {"experts": {}}}, "quantization_config.experts", "linear, moe, ignore"),
        ({"page_size": 32, "block_size": 32}, "block_size", "given twice"),
        ({"page_size": 48}, "page_size", "power of two"),
        ({"page_size": 4}, "page_size", "at least 8"),
        ({"max_num_seqs": 0}, "max_num_seqs", "at least 1"),
        ({"max_num_seqs": True}, "max_num_seqs", "integer"),
        ({"max_model_len": "many"}, "max_model_len", "integer"),
        ({"dtype": "float64"}, "dtype", "bfloat16"),
        ({"load_format": "pickle"}, "load_format", "safetensors"),
        ({"attention_impl": "fastest"}, "attention_impl", "xla"),
        ({"device_memory_utilization": 1.5}, "device_memory_utilization", r"\(0, 1\]"),
        ({"device_memory_utilization": float("nan")}, "device_memory_utilization", r"\(0, 1\]"),
        ({"seed": -1}, "seed", "at least 0"),
        ({"gpu_memory_utilization": 1.5}, "gpu_memory_utilization", r"^gpu_memory_utilization: .*\(0, 1\]"),
        ({"block_size": 48}, "block_size", "^block_size: .*power of two"),
        ({"page_size": 32, "block_size": 32}, "block_size", "page_size"),
        ({"precompile_bs_paddings": "8"}, "precompile_bs_paddings", "integers, got '8'"),
        ({"precompile_bs_paddings": [8, True]}, "precompile_bs_paddings", "integers"),
        ({"precompile_bs_paddings": []}, "precompile_bs_paddings", "at least 1"),
        ({"precompile_bs_paddings": [0, 8]}, "precompile_bs_paddings", "at least 1"),
        ({"precompile_token_paddings": [64, 64]}, "precompile_token_paddings", "ascending sizes"),
    ],
)
def test_refusals_name_the_option(options: dict[str, object], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.from_options(**options)
    assert caught.value.field == field


@pytest.mark.parametrize(
    ("options", "dtype", "kv_cache_dtype"),
    [
        ({"dtype": "half"}, "float16", "auto"),
        ({"dtype": "float", "kv_cache_dtype": "fp8_e4m3"}, "float32", "fp8"),
        ({"dtype": "bfloat16", "kv_cache_dtype": "fp8"}, "bfloat16", "fp8"),
    ],
)
def test_values_have_synonyms(options: dict[str, str], dtype: str, kv_cache_dtype: str) -> None:
    config = EngineConfig.from_options(**options)
    assert (config.model.dtype, config.cache.kv_cache_dtype) == (dtype, kv_cache_dtype)


@pytest.mark.parametrize("platform", ["cpu", "gpu", "tpu"])
def test_platform_defaults_leave_room_for_prompts(platform: str) -> None:
    config = EngineConfig().resolve(platform)
    scheduler = config.scheduler
    assert scheduler.max_num_seqs and scheduler.max_num_batched_tokens and config.cache.page_size
    assert scheduler.max_num_batched_tokens >= scheduler.max_num_seqs + 32
    many = EngineConfig.from_options(max_num_seqs=3000).resolve(platform)
    assert many.scheduler.max_num_batched_tokens == 3032
    with pytest.raises(ConfigError, match=r"max_num_seqs \+ 32 = 132"):
        EngineConfig.from_options(max_num_seqs=100, max_num_batched_tokens=120).resolve(platform)


def test_toml_flat_or_in_tables_and_flags_win(tmp_path: Path) -> None:
    path = tmp_path / "engine.toml"
    path.write_text('max_model_len = 512\n[scheduler]\nmax_num_seqs = 9\n[model]\nmodel = "m"\n')
    config = EngineConfig.from_options(**read_options(path) | {"max_model_len": 256})
    assert (config.model.max_model_len, config.scheduler.max_num_seqs, config.model.model) == (256, 9, "m")
    path.write_text("max_model_len = = 3")
    with pytest.raises(ConfigError, match="cannot be read"):
        read_options(path)
    with pytest.raises(ConfigError, match="cannot be read"):
        read_options(tmp_path / "absent.toml")
    other = tmp_path / "engine.yaml"
    other.write_text("max_model_len: 512\n")
    with pytest.raises(ConfigError, match=r"engine\.yaml.*TOML"):
        read_options(other)


def test_every_option_has_one_name_and_a_help_text() -> None:
    names = [name for _, option in list_options(EngineConfig) for name in (option.name, *option.metadata["aliases"])]
    assert len(names) == len(set(names))
    assert all(option.metadata["help"] for _, option in list_options(EngineConfig))


def test_cache_dir_follows_the_desktop_convention(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", "/somewhere")
    assert EngineConfig().compile.cache_dir == Path("/somewhere/jaxserve/xla")
    assert EngineConfig.from_options(compilation_cache_dir="").compile.cache_dir is None
    assert EngineConfig.from_options(compilation_cache_dir="/c").compile.cache_dir == Path("/c")


def test_without_a_home_there_is_no_cache(monkeypatch: pytest.MonkeyPatch) -> None:
    def find_home() -> Path:
        raise RuntimeError("Could not determine home directory.")  # as for a container's user without a name

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(Path, "home", find_home)
    assert EngineConfig().compile.cache_dir is None


@pytest.mark.parametrize(
    ("options", "field", "message"),
    [
        ({"precompile_bs_paddings": [4, 16]}, "precompile_bs_paddings", "max_num_seqs=32, got 16"),
        ({"precompile_token_paddings": [64, 256]}, "precompile_token_paddings", "max_num_batched_tokens=512, got 256"),
        ({"precompile_token_paddings": [32, 512]}, "precompile_token_paddings", "above 32"),
        (
            {"precompile_bs_paddings": [8, 100], "precompile_token_paddings": [64, 512]},
            "precompile_token_paddings",
            "above 100",
        ),
        ({"precompile_bs_paddings": [8, 32], "deterministic": True}, "precompile_bs_paddings", "determ"),
    ],
)
def test_padded_sizes_must_hold_every_step(options: dict[str, list[int]], field: str, message: str) -> None:
    with pytest.raises(ConfigError, match=message) as caught:
        EngineConfig.from_options(**options).resolve("cpu")
    assert caught.value.field == field


def test_padded_sizes_come_as_lists(tmp_path: Path) -> None:
    (tmp_path / "options.toml").write_text("precompile_bs_paddings = [8, 32]\nprecompile_token_paddings = [64, 512]\n")
    config = EngineConfig.from_options(**read_options(tmp_path / "options.toml")).resolve("cpu").compile
    assert (config.precompile_bs_paddings, config.precompile_token_paddings) == ((8, 32), (64, 512))


def test_a_bucket_is_refused_as_compile_cache() -> None:
    with pytest.raises(ConfigError, match=r"directory, got 'gs://b/c'.*gcsfuse"):
        EngineConfig.from_options(compilation_cache_dir="gs://b/c")
