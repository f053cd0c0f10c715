"""Options of vLLM and SGLang that have no counterpart here.

A value that would change nothing is accepted; any other is refused with a sentence about that option. None always
means "not set".
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError


@dataclass(frozen=True, slots=True)
class VllmOption:
    """One option of vLLM's engine or server that has no counterpart."""

    harmless: tuple[Any, ...] | None  # values that would change nothing, beside None; None: any value
    instead: str  # the error for other values

    @property
    def is_switch(self) -> bool:
        """Whether its flag takes no value."""
        return bool(self.harmless) and all(isinstance(value, bool) for value in self.harmless or ())

    def takes(self, value: Any) -> bool:
        """Whether the value would change nothing here."""
        return value is None or self.harmless is None or value in self.harmless


_NO_OTHER_SPLIT = "an engine splits heads, ffn and vocabulary only; use tensor_parallel_size"
_NO_EXECUTOR = "a node's devices are run by one process; nnodes is the number of nodes"
_COMPILED = "use compile, which says when programs are compiled, and compilation_cache_dir"
_DRAFTING = "give speculative_config={'method': ..., 'num_speculative_tokens': ...}"
NO_CODE = "a repository's code is never run; the supported models need none"

VLLM_OPTIONS: Mapping[str, VllmOption] = {
    "additional_config": VllmOption(({},), "there is no such dictionary; give options by their own names"),
    "api_server_count": VllmOption((1,), "one process serves HTTP; start several servers and balance between them"),
    "attention_backend": VllmOption((), "use attention_impl, whose names are this engine's"),
    "calculate_kv_scales": VllmOption((False,), "an 8-bit KV cache uses the checkpoint's scales, or none"),
    "code_revision": VllmOption((), NO_CODE),
    "compilation_config": VllmOption(({},), _COMPILED),
    "config_format": VllmOption(("auto", "hf"), "models are read in Hugging Face's format only"),
    "cpu_offload_gb": VllmOption((0,), "weights stay on the device; use more devices by tensor_parallel_size"),
    "decode_context_parallel_size": VllmOption((1,), _NO_OTHER_SPLIT),
    "disable_async_output_proc": VllmOption((False,), "use async_scheduling=False"),
    "disable_cascade_attn": VllmOption((False, True), ""),
    "disable_custom_all_reduce": VllmOption((False, True), ""),
    "disable_frontend_multiprocessing": VllmOption((False, True), ""),
    "disable_hybrid_kv_cache_manager": VllmOption(
        (False,), "windowed layers always free the pages behind their window"
    ),
    "disable_log_requests": VllmOption((False, True), ""),
    "disable_log_stats": VllmOption((False, True), ""),
    "disable_sliding_window": VllmOption((False,), "a model's sliding windows always apply"),
    "distributed_executor_backend": VllmOption(("uni", "mp"), _NO_EXECUTOR),
    "download_dir": VllmOption((), "files are in Hugging Face's cache; set HF_HOME to move it"),
    "enable_chunked_prefill": VllmOption(
        (True,), "prompts are always computed in chunks; max_num_batched_tokens bounds them"
    ),
    "enable_dbo": VllmOption((False,), "batches are not split into overlapping halves"),
    "enable_eplb": VllmOption((False,), "experts stay where they are; enable_expert_parallel spreads them evenly"),
    "enable_log_requests": VllmOption((False,), "texts of requests are never logged"),
    "enable_prompt_embeds": VllmOption((False,), "prompts are text or token ids"),
    "enable_prompt_tokens_details": VllmOption((True,), "usage always reports cached tokens"),
    "enable_sleep_mode": VllmOption((False,), "an engine keeps its memory; end its process to free it"),
    "enforce_eager": VllmOption((False, True), ""),
    "fully_sharded_loras": VllmOption((False,), "of an adapter's two matrices, the one beside a split weight is split"),
    "guided_decoding_backend": VllmOption(("auto", "guidance"), "grammars are llguidance's; leave it out"),
    "hf_config_path": VllmOption((), "put config.json beside the weights"),
    "hf_token": VllmOption((False,), "set HF_TOKEN in the environment"),
    "kv_transfer_config": VllmOption((), "one engine computes both prompts and answers"),
    "logits_processors": VllmOption(([],), "use logits_processor, one function in the compiled sampler"),
    "logprobs_mode": VllmOption(
        ("raw_logprobs",), "log-probabilities are the model's own, before any parameter changes logits"
    ),
    "mamba_cache_dtype": VllmOption(("auto",), "a convolution keeps its inputs in the model's dtype"),
    "max_parallel_loading_workers": VllmOption(None, ""),
    "max_seq_len_to_capture": VllmOption(None, ""),
    "model_impl": VllmOption(("auto",), "models are this engine's own code; see docs/models.md for the families"),
    "model_loader_extra_config": VllmOption(({},), "loading has no further options"),
    "num_speculative_tokens": VllmOption((), _DRAFTING),
    "override_generation_config": VllmOption(({},), "give SamplingParams with each request"),
    "override_pooler_config": VllmOption(({},), "use pooler_config"),
    "pipeline_parallel_size": VllmOption((1,), "layers are not split over devices; use tensor_parallel_size"),
    "prefix_caching_hash_algo": VllmOption(("builtin", "sha256"), "prefixes are hashed with SHA-256; leave it out"),
    "response_role": VllmOption(("assistant",), "answers always have the role assistant"),
    "scheduler_cls": VllmOption((), "there is one scheduler, which follows priorities"),
    "speculative_model": VllmOption((), _DRAFTING),
    "stream_interval": VllmOption((1,), "streams have an event for every step"),
    "structured_outputs_config": VllmOption(({},), "grammars are llguidance's; leave it out"),
    "swap_space": VllmOption((0,), "pages of preempted requests are kept like any others: use kv_offloading_size"),
    "task": VllmOption(
        ("auto", "generate", "embed", "embedding"), "use runner and convert; requests say what they ask for"
    ),
    "tokenizer_mode": VllmOption(("auto", "hf"), "tokenizers are read from tokenizer.json or tokenizer.model"),
    "tokenizer_revision": VllmOption((), "give a directory as tokenizer"),
    "trust_remote_code": VllmOption((False,), NO_CODE),
    "use_tqdm_on_load": VllmOption((True,), "use show_progress"),
    "use_v2_block_manager": VllmOption((True, False), ""),
    "worker_cls": VllmOption(("auto",), "there are no workers: the engine is one process"),
}

# Options of SGLang and of tools around vLLM, and their names here.
OTHER_NAMES: Mapping[str, str] = {
    "chunked_prefill_size": "max_num_batched_tokens",
    "context_length": "max_model_len",
    "ctx_len": "max_model_len",
    "disable_radix_cache": "enable_prefix_caching",
    "kv_cache_size": "kv_cache_memory_bytes",
    "max_prefill_tokens": "max_num_batched_tokens",
    "max_running_requests": "max_num_seqs",
    "max_seq_len": "max_model_len",
    "max_total_tokens": "kv_cache_memory_bytes",
    "mem_fraction_static": "gpu_memory_utilization",
    "model_name_or_path": "model",
    "model_path": "model",
    "random_seed": "seed",
    "tokenizer_path": "tokenizer",
    "tp_size": "tensor_parallel_size",
}

# Fields of vLLM's SamplingParams and BeamSearchParams that are given in another way here.
SAMPLING_ADVICE: Mapping[str, str] = {
    "early_stopping": "use LLM.beam_search with BeamSearchParams",
    "guided_decoding": "use structured_outputs=StructuredOutputsParams(json=..., regex=..., choice=... or grammar=...)",
    "length_penalty": "use LLM.beam_search with BeamSearchParams",
    "logits_processors": "give one logits_processor to LLM or AsyncLLM, and its arguments as extra_args",
    "max_new_tokens": "use max_tokens",
    "use_beam_search": "use LLM.beam_search with BeamSearchParams",
}


def drop_harmless(options: Mapping[str, Any]) -> dict[str, Any]:
    """Returns the options without those of vLLM that have no effect here.

    Raises:
        ConfigError: an option of vLLM has a value that cannot be honoured, or a name is another engine's.
    """
    for name, value in options.items():
        foreign = VLLM_OPTIONS.get(name)
        if foreign is not None and not foreign.takes(value):
            raise ConfigError(foreign.instead, field=name, value=value)
        if foreign is None and name in OTHER_NAMES:
            raise ConfigError(f"not an option; here it is {OTHER_NAMES[name]!r}", field=name, value=value)
    return {name: value for name, value in options.items() if name not in VLLM_OPTIONS}


def list_vllm_flags() -> Iterator[tuple[str, bool]]:
    """Yields (name, whether it is a switch) of each option of vLLM that has no counterpart."""
    for name, foreign in VLLM_OPTIONS.items():
        yield name, foreign.is_switch


def read_vllm_value(text: str) -> Any:
    """Returns the value of a flag: parsed if it is JSON, else the text itself."""
    try:
        return json.loads(text)
    except ValueError:
        return text
