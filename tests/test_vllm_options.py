"""vLLM's options without a counterpart: harmless values are taken, others get a sentence of their own."""

from __future__ import annotations

import argparse
from typing import Any

import pytest

import jaxserve
from jaxserve.config import EngineConfig
from jaxserve.engine_args import AsyncEngineArgs, EngineArgs
from jaxserve.errors import ConfigError
from jaxserve.options import list_options
from jaxserve.server.options import ServerConfig
from jaxserve.tools.cli import main
from jaxserve.vllm_options import OTHER_NAMES, VLLM_OPTIONS, list_vllm_flags, read_vllm_value

# A call of vLLM's LLM with its defaults spelled out, as scripts copy them.
DEFAULTS: dict[str, Any] = {
    "tokenizer_mode": "auto",
    "trust_remote_code": False,
    "dtype": "half",
    "quantization": None,
    "revision": None,
    "seed": None,
    "gpu_memory_utilization": 0.5,
    "swap_space": 0,
    "cpu_offload_gb": 0,
    "enforce_eager": False,
    "enable_lora": False,
    "enable_chunked_prefill": True,
    "enable_prefix_caching": None,
    "max_seq_len_to_capture": 8192,
    "disable_custom_all_reduce": False,
    "disable_log_stats": True,
    "kv_cache_dtype": "fp8_e4m3",
    "pipeline_parallel_size": 1,
    "data_parallel_size": 1,
    "distributed_executor_backend": None,
    "speculative_config": None,
    "hf_overrides": None,
    "compilation_config": None,
}


def test_harmless_values_change_nothing() -> None:
    own = {"dtype": "float16", "gpu_memory_utilization": 0.5, "kv_cache_dtype": "fp8"}
    assert EngineConfig.from_options(**DEFAULTS) == EngineConfig.from_options(**own)
    assert AsyncEngineArgs("m", enforce_eager=True).config == EngineConfig.from_options(model="m")
    assert ServerConfig.from_options(port=1, api_server_count=1).listen.port == 1


@pytest.mark.parametrize("name", VLLM_OPTIONS)
def test_other_values_get_a_sentence_of_their_own(name: str) -> None:
    foreign = VLLM_OPTIONS[name]
    EngineConfig.from_options(**{name: None})
    for value in foreign.harmless or ():
        EngineConfig.from_options(**{name: value})
    if foreign.harmless is None or (foreign.is_switch and len(foreign.harmless) == 2):
        assert not foreign.instead, "there is nothing to refuse"
        return
    with pytest.raises(ConfigError) as caught:
        EngineConfig.from_options(**{name: "something else"})
    assert str(caught.value) == f"{name}: {foreign.instead}" and len(str(caught.value)) < 140
    assert foreign.instead[-1] != "."


def test_no_option_is_in_two_places() -> None:
    own = {
        name
        for config in (EngineConfig, ServerConfig)
        for _, option in list_options(config)
        for name in (option.name, *option.metadata["aliases"])
    }
    assert (
        not own & VLLM_OPTIONS.keys() and not own & OTHER_NAMES.keys() and not VLLM_OPTIONS.keys() & OTHER_NAMES.keys()
    )
    assert set(OTHER_NAMES.values()) <= own


@pytest.mark.parametrize(
    ("name", "ours"),
    [
        ("mem_fraction_static", "gpu_memory_utilization"),
        ("tp_size", "tensor_parallel_size"),
        ("context_length", "max_model_len"),
        ("max_running_requests", "max_num_seqs"),
        ("chunked_prefill_size", "max_num_batched_tokens"),
    ],
)
def test_names_of_others_lead_to_ours(name: str, ours: str) -> None:
    with pytest.raises(ConfigError, match=f"^{name}: .*'{ours}'$"):
        EngineConfig.from_options(**{name: 4})


def test_flags_have_kinds_and_values() -> None:
    kinds = dict(list_vllm_flags())
    assert kinds["enforce_eager"] and kinds["trust_remote_code"] and not kinds["swap_space"]
    assert kinds.keys() == VLLM_OPTIONS.keys()
    assert [read_vllm_value(text) for text in ("0", "auto", '{"a": 1}', "null")] == [0, "auto", {"a": 1}, None]


def test_short_flags_and_synonyms_reach_the_command_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["plan", "-tp", "1", "--dtype", "half", "--kv-cache-dtype", "fp8_e4m3"]) == 0
    assert capsys.readouterr().out


def test_an_old_name_leads_to_the_new_one() -> None:
    with pytest.raises(ImportError, match="StructuredOutputsParams"):
        from jaxserve import GuidedDecodingParams  # noqa: F401
    assert all(getattr(jaxserve, name) for name in jaxserve.__all__)


def test_a_scripts_parser_gets_every_option_as_a_flag() -> None:
    parser = EngineArgs.add_cli_args(argparse.ArgumentParser())
    parser.set_defaults(model="demo", task="embed", enforce_eager=True)
    parser.add_argument("--own", default=1)
    args = parser.parse_args(["--max-num-seqs", "4", "-tp", "2", "--no-enable-lora", "--own", "5"])
    found = EngineArgs.from_cli_args(args)
    assert found.config == EngineConfig.from_options(model="demo", max_num_seqs=4, tensor_parallel_size=2)
    del args.own
    assert EngineConfig.from_options(**vars(args)) == found.config, "as `LLM(**vars(args))` does it"
