"""Names of vLLM's Python API: each is refused with its own sentence, as Python refuses what is missing."""

from __future__ import annotations

import asyncio
import importlib
import importlib.util
import inspect
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

import jaxserve
from jaxserve import LLM, AsyncLLM
from jaxserve.errors import InvalidRequestError
from jaxserve.vllm_names import ARGUMENTS, ATTRIBUTES, MODULES, OBJECTS, check_arguments, refuse_modules

PACKAGE = Path(jaxserve.__file__).parent
SENTENCES = {**MODULES, **OBJECTS, **ATTRIBUTES, **{name: each.instead for name, each in ARGUMENTS.items()}}
IMPORTS = {  # lines of vLLM's examples, with its name changed -> the sentence
    "from jaxserve.utils import FlexibleArgumentParser": MODULES["utils"],
    "from jaxserve.utils.argparse_utils import FlexibleArgumentParser": MODULES["utils"],
    "from jaxserve.v1.metrics.reader import Counter, Gauge": MODULES["v1"],
    "from jaxserve.v1.engine.async_llm import AsyncLLM": MODULES["v1"],
    "import jaxserve.v1.sample.logits_processor": MODULES["v1"],
    "from jaxserve.engine.arg_utils import AsyncEngineArgs": MODULES["engine.arg_utils"],
    "from jaxserve.engine.async_llm_engine import AsyncLLMEngine": MODULES["engine.async_llm_engine"],
    "from jaxserve.distributed import cleanup_dist_env_and_memory": MODULES["distributed"],
    "from jaxserve.distributed.kv_events import KVEventBatch": MODULES["distributed"],
    "from jaxserve.lora.request import LoRARequest": MODULES["lora"],
    "import jaxserve.entrypoints.openai.api_server": MODULES["entrypoints"],
    "from jaxserve import LLMEngine": OBJECTS["LLMEngine"],
    "from jaxserve import LLM, ScoringRequestOutput": OBJECTS["ScoringRequestOutput"],
    "from jaxserve.sampling_params import GuidedDecodingParams": OBJECTS["GuidedDecodingParams"],
}


@pytest.mark.parametrize("line", IMPORTS)
def test_imports_get_a_sentence(line: str) -> None:
    with pytest.raises(ImportError) as caught:
        exec(line, {})
    assert str(caught.value).endswith(f": {IMPORTS[line]}")


def test_a_module_that_nobody_has_is_missing_as_ever() -> None:
    with pytest.raises(ModuleNotFoundError, match=r"^No module named 'jaxserve.utilities'$"):
        importlib.import_module("jaxserve.utilities")
    with pytest.raises(AttributeError, match=r"^module 'jaxserve' has no attribute 'Engines'$"):
        _ = jaxserve.Engines
    assert importlib.util.find_spec("lora") is None, "only names below jaxserve are refused"


def test_a_module_run_as_a_program_gets_the_sentence() -> None:
    command = [sys.executable, "-m", "jaxserve.entrypoints.openai.api_server"]
    run = subprocess.run(command, capture_output=True, text=True, check=False)
    assert run.returncode != 0 and MODULES["entrypoints"] in run.stderr


def test_no_refused_name_exists() -> None:
    for name in MODULES:
        path = PACKAGE.joinpath(*name.split("."))
        assert not path.exists() and not path.with_suffix(".py").exists()
    assert not OBJECTS.keys() & set(jaxserve.__all__)
    for owner in (LLM, AsyncLLM):
        assert not ATTRIBUTES.keys() & set(dir(owner))
    for method in (
        LLM.generate,
        LLM.chat,
        LLM.embed,
        LLM.score,
        LLM.encode,
        LLM.beam_search,
        AsyncLLM.generate,
        AsyncLLM.chat,
    ):
        assert not ARGUMENTS.keys() & inspect.signature(method).parameters.keys()


@pytest.mark.parametrize("name", SENTENCES)
def test_sentences_are_short(name: str) -> None:
    assert 10 < len(SENTENCES[name]) < 115 and SENTENCES[name][-1] != "."


def test_the_finder_is_added_once() -> None:
    before = list(sys.meta_path)
    refuse_modules()
    assert sys.meta_path == before


@pytest.mark.parametrize("owner", [LLM, AsyncLLM])
@pytest.mark.parametrize("name", ATTRIBUTES)
def test_attributes_get_a_sentence(owner: type, name: str) -> None:
    engine = owner.__new__(owner)
    with pytest.raises(AttributeError) as caught:
        getattr(engine, name)
    assert str(caught.value) == f"{owner.__name__!r} object has no attribute {name!r}: {ATTRIBUTES[name]}"
    assert not hasattr(engine, name) and not hasattr(engine, "_ready")


@pytest.mark.parametrize("name", ARGUMENTS)
def test_arguments_that_change_nothing_are_taken(name: str) -> None:
    for value in (None, *(ARGUMENTS[name].harmless or ())):
        check_arguments("LLM.generate", {name: value})
    with pytest.raises(InvalidRequestError) as caught:
        check_arguments("LLM.generate", {name: object()})
    assert str(caught.value) == f"{name}: {ARGUMENTS[name].instead}"


CALLS: dict[str, tuple[Any, ...]] = {
    **dict.fromkeys(("generate", "embed", "classify", "encode"), ("x",)),
    "chat": ([],),
    "score": ("x", "y"),
    "beam_search": ("x", None),
}


@pytest.mark.parametrize("name", CALLS)
def test_methods_check_their_arguments_first(name: str) -> None:
    call = getattr(LLM.__new__(LLM), name)
    with pytest.raises(InvalidRequestError, match=r"^lora_request: must be a LoRARequest"):
        call(*CALLS[name], lora_request=object())
    with pytest.raises(TypeError, match=rf"^LLM.{name}\(\) got an unexpected keyword argument 'temprature'"):
        call(*CALLS[name], temprature=1)


@pytest.mark.parametrize("name", ["generate", "chat"])
def test_streams_check_their_arguments_first(name: str) -> None:
    async def read() -> None:
        await anext(getattr(AsyncLLM.__new__(AsyncLLM), name)("x", lora_request=object()))

    with pytest.raises(InvalidRequestError, match=r"^lora_request: must be a LoRARequest"):
        asyncio.run(read())
