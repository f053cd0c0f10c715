"""Names of vLLM's Python API that have no counterpart here: each is refused with a sentence that says what to use."""

from __future__ import annotations

import sys
from collections.abc import Mapping, Sequence
from importlib.machinery import ModuleSpec
from types import ModuleType
from typing import Any, NoReturn

from jaxserve.errors import InvalidRequestError
from jaxserve.vllm_options import NO_CODE, VllmOption

_NO_SLEEP = "an engine keeps its memory; end its process to free it"
_NO_PROFILER = "use jax.profiler.trace around the calls"
_NO_WORKERS = "there are no workers: the engine is one process, and ready has its parts"
_ADAPTERS = "an adapter is read when a request first names it; ready.adapters reads it anew and removes it"
_ENGINES = "use LLM, or AsyncLLM for streams: from jaxserve import LLM, AsyncLLM"

# Modules below jaxserve.
MODULES: Mapping[str, str] = {
    "assets": "open images with Pillow",
    "beam_search": "from jaxserve import BeamSearchParams",
    "compilation": "use the options compile and compilation_cache_dir",
    "distributed": "an engine runs its own devices and nodes; use tensor_parallel_size and nnodes",
    "engine.arg_utils": "from jaxserve import AsyncEngineArgs, EngineArgs",
    "engine.async_llm_engine": "from jaxserve import AsyncLLMEngine",
    "engine.llm_engine": _ENGINES,
    "entrypoints": "from jaxserve import LLM; the server is the command jaxserve serve",
    "envs": "options are arguments of LLM and flags of the commands, not variables of the environment",
    "inputs": "from jaxserve import TextPrompt, TokensPrompt",
    "logger": "use the module logging of the standard library",
    "lora": "from jaxserve import LoRARequest",
    "model_executor": NO_CODE,
    "multimodal": "give images of Pillow in messages, or in multi_modal_data of a prompt",
    "outputs": "from jaxserve import RequestOutput, EmbeddingOutput, ScoringOutput, ClassificationOutput",
    "platforms": "use jax.devices, or the command jaxserve doctor",
    "plugins": NO_CODE,
    "transformers_utils": "use LLM.get_tokenizer",
    "utils": "FlexibleArgumentParser is argparse.ArgumentParser with EngineArgs.add_cli_args; no other helper exists",
    "v1": "from jaxserve import Counter, Gauge, Metric, Vector; there is one engine: LLM and AsyncLLM",
    "worker": _NO_WORKERS,
}

# Names that vLLM's package or its modules have.
OBJECTS: Mapping[str, str] = {
    "ClassificationRequestOutput": "here it is ClassificationOutput; import that one",
    "EmbeddingRequestOutput": "here it is EmbeddingOutput; import that one",
    "GuidedDecodingParams": "it is vLLM's old name of StructuredOutputsParams; import that one",
    "LLMEngine": _ENGINES,
    "ModelRegistry": NO_CODE,
    "PoolingRequestOutput": "here it is PoolingOutput; import that one",
    "PromptType": "prompts are text, TextPrompt, TokensPrompt or lists of token ids",
    "ScoringRequestOutput": "here it is ScoringOutput; import that one",
    "initialize_ray_cluster": "a cluster of Ray is described in docs/clusters.md",
}

# Attributes of vLLM's LLM and AsyncLLM.
ATTRIBUTES: Mapping[str, str] = {
    "add_lora": _ADAPTERS,
    "add_request": "use generate, or AsyncLLM.generate for streams",
    "apply_model": _NO_WORKERS,
    "collective_rpc": _NO_WORKERS,
    "engine": "use ready, which has the engine's parts",
    "get_model_config": "use ready.shapes.model",
    "is_sleeping": _NO_SLEEP,
    "list_loras": _ADAPTERS,
    "llm_engine": "use ready, which has the engine's parts; get_metrics and get_tokenizer are methods",
    "model_config": "use ready.shapes.model",
    "remove_lora": _ADAPTERS,
    "reset_mm_cache": "items of images live as long as their requests; reset_prefix_cache drops all pages",
    "reward": "use encode with pooling_task='classify'",
    "set_tokenizer": "give a directory as the option tokenizer",
    "sleep": _NO_SLEEP,
    "start_profile": _NO_PROFILER,
    "stop_profile": _NO_PROFILER,
    "vllm_config": "use ready.shapes.config",
    "wake_up": _NO_SLEEP,
}

# Arguments of vLLM's methods, with the values that change nothing here.
ARGUMENTS: Mapping[str, VllmOption] = {
    "chat_template_content_format": VllmOption(("auto", "string"), "templates get the text of a message as one string"),
    "data_parallel_rank": VllmOption((0,), "an LLM is one engine; start several, and choose among them"),
    "mm_processor_kwargs": VllmOption(({},), "give it to chat, or inside a prompt with multi_modal_data"),
    "prompt_adapter_request": VllmOption((), "prompt adapters are not supported"),
    "tokenization_kwargs": VllmOption(({},), "use truncate_prompt_tokens, of SamplingParams and of embed"),
    "trace_headers": VllmOption(({},), "a server reads traceparent from its requests' headers"),
}


class ModuleRefusal:
    """A finder of modules that finds none: it refuses vLLM's, after all other finders have been asked."""

    @staticmethod
    def find_spec(name: str, path: Sequence[str] | None = None, target: ModuleType | None = None) -> ModuleSpec | None:
        """Raises ModuleNotFoundError for a name in `MODULES`; returns None for any other."""
        del path, target
        advice = MODULES.get(name.removeprefix("jaxserve.")) if name.startswith("jaxserve.") else None
        if advice is not None:
            raise ModuleNotFoundError(f"No module named {name!r}: {advice}", name=name)
        return None


def refuse_modules() -> None:
    """Adds `ModuleRefusal` to Python's finders, once."""
    if ModuleRefusal not in sys.meta_path:
        sys.meta_path.append(ModuleRefusal)


def find_no_object(module: str, name: str) -> Exception:
    """Returns the error for a name that a module lacks: ImportError with a sentence for vLLM's, else AttributeError.

    Of an AttributeError, `from module import name` would not show the sentence.
    """
    if name in OBJECTS:
        return ImportError(f"cannot import name {name!r} from {module!r}: {OBJECTS[name]}", name=module)
    return AttributeError(f"module {module!r} has no attribute {name!r}")


def refuse_attribute(owner: object, name: str) -> NoReturn:
    """Raises AttributeError for an attribute that `owner` lacks, with a sentence for vLLM's; a `__getattr__`."""
    advice = f": {ATTRIBUTES[name]}" if name in ATTRIBUTES else ""
    raise AttributeError(f"{type(owner).__name__!r} object has no attribute {name!r}{advice}", name=name, obj=owner)


def check_arguments(method: str, given: Mapping[str, Any]) -> None:
    """Checks the arguments of a call that its method does not have.

    Raises:
        InvalidRequestError: one of vLLM's has a value that cannot be honoured.
        TypeError: no engine has such an argument.
    """
    for name, value in given.items():
        if name not in ARGUMENTS:
            raise TypeError(f"{method}() got an unexpected keyword argument {name!r}")
        if not ARGUMENTS[name].takes(value):
            raise InvalidRequestError(ARGUMENTS[name].instead, field=name, value=value)
