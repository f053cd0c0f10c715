"""The commands: each takes its parsed flags and returns an exit status, None for 0."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.device_kinds import find_kind
from jaxserve.devices import find_devices
from jaxserve.errors import TokenizerError
from jaxserve.gguf_file import is_gguf
from jaxserve.lora_options import LORA_RANKS
from jaxserve.presets import find_adapter
from jaxserve.tools.cli.flags import read_engine_options, read_flags, read_given_sampling, read_sampling_params
from jaxserve.tools.cli.packages import SERVER_PACKAGES, require_packages
from jaxserve.tools.cli.prompts import split_words

if TYPE_CHECKING:
    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.features.speculation.drafters import DrafterModel

BATCH_OPTIONS = (  # the server's options that matter without a socket
    "served_model_name",
    "lora_modules",
    "chat_template",
    "allow_request_chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "refuse_hosted_tools",
    "reasoning_parser",
)


def serve(args: argparse.Namespace) -> int:
    """`jaxserve serve`; the log explains failures."""
    require_packages("serve", SERVER_PACKAGES)
    from jaxserve.engine.nodes import find_nodes
    from jaxserve.server.headless import serve_headless
    from jaxserve.server.launch import serve as run
    from jaxserve.server.options import ServerConfig

    engine = EngineConfig.from_options(**read_engine_options(args))
    config = ServerConfig.from_options(**read_flags(args, ServerConfig))
    if engine.replicas.data_parallel_size > 1:
        from jaxserve.tools.cluster.replicas import serve_replicas

        return serve_replicas(args.argv, engine, config)
    engine = find_nodes(engine)
    return serve_headless(engine, config) if engine.nodes.headless else run(engine, config)


def generate(args: argparse.Namespace) -> int:
    """`jaxserve generate`; returns 1 when an answer ended with an error."""
    from jaxserve import LLM, LoRARequest

    if not args.words and sys.stdin.isatty():
        print("Type one prompt a line; Ctrl-D ends them.", file=sys.stderr)
    read_given_sampling(args)  # a bad value shows before prompts are typed and a model is loaded
    args.served, prompts = split_words(args.words, args.model, sys.stdin)
    options = read_engine_options(args)
    adapted: dict[str, Any] = {}
    if args.lora is not None:
        adapted["lora_request"] = LoRARequest(Path(args.lora).name or "adapter", 1, args.lora)
        options = {"enable_lora": True, "max_lora_rank": _find_rank(find_adapter(args.lora))} | options
    template = _read_template(args)
    _require_tokenizer(options, needs_template=args.chat and template is None)
    llm = LLM(**options)
    params = read_sampling_params(args, llm.ready.defaults)
    if args.chat:
        messages = [[{"role": "user", "content": prompt}] for prompt in prompts]
        outputs = llm.chat(messages, params, chat_template=template, **adapted)
    else:
        outputs = llm.generate(prompts, params, **adapted)
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompts) > 1:
            print(f"--- {prompt}")
        print(output.outputs[0].text.strip("\n"))
    failures = [output.error for output in outputs if output.error is not None]
    for error in failures:
        print(f"jaxserve: {error}", file=sys.stderr)
    return 1 if failures else 0


def chat(args: argparse.Namespace) -> None:
    """`jaxserve chat`."""
    from jaxserve import AsyncLLM, OutputKind
    from jaxserve.tools.cli.chat import Chat

    read_given_sampling(args)  # a bad value shows before a model is loaded
    options = {"compile": "used"} | read_engine_options(args)  # a user waits for few programs instead of all
    template = _read_template(args)
    _require_tokenizer(options, needs_template=template is None)
    llm = AsyncLLM(**options)
    try:
        params = read_sampling_params(args, llm.defaults).clone(output_kind=OutputKind.DELTA)
        Chat(llm, params, system=args.system, chat_template=template).run()
    finally:
        llm.shutdown()


def run_batch(args: argparse.Namespace) -> int:
    """`jaxserve run-batch`; returns 1 when a line failed."""
    require_packages("run-batch", SERVER_PACKAGES)
    from jaxserve.server.options import ServerConfig
    from jaxserve.server.run_batch import run_batch as run

    engine = EngineConfig.from_options(**read_engine_options(args))
    given = read_flags(args, ServerConfig, BATCH_OPTIONS)
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    summary = run(
        engine,
        ServerConfig.from_options(log_level="warning", access_log=False, **given),
        Path(args.input_file),
        Path(args.output_file),
        max_concurrent=args.max_concurrent,
    )
    print(f"run-batch: {summary}", file=sys.stderr)
    return 1 if summary.num_failed else 0


def plan(args: argparse.Namespace) -> None:
    """`jaxserve plan`."""
    from jaxserve.engine.model_files import locate_model, resolve_model

    config = EngineConfig.from_options(**read_engine_options(args))
    files = locate_model(config.model, need_weights=False)
    from jaxserve.engine.draft_files import locate_drafter
    from jaxserve.engine.memory_report import print_plan  # imports JAX; `locate_model` explains a broken one
    from jaxserve.engine.tower_files import locate_tower

    kind = find_devices()[0].device_kind if args.device is None else find_kind(args.device).name
    model = resolve_model(config, files, kind)
    drafter, tower = locate_drafter(config, files, model), locate_tower(config, files, model)
    parts = None if drafter is None else drafter.model, None if tower is None else tower.config
    print_plan(config, model, args.device, *parts)


def doctor(args: argparse.Namespace) -> int:
    """`jaxserve doctor`; returns 1 when something is broken."""
    from jaxserve.engine.draft_files import locate_drafter
    from jaxserve.engine.model_files import ModelFiles, locate_model, resolve_model
    from jaxserve.engine.tower_files import TowerFiles, locate_tower
    from jaxserve.tools.doctor import FindParts, print_report

    config = EngineConfig.from_options(**read_engine_options(args))

    def locate() -> ModelFiles:
        return locate_model(config.model, need_weights=False)

    def find_drafter(model: DecoderConfig) -> DrafterModel | None:
        drafter = locate_drafter(config, locate(), model)
        return None if drafter is None else drafter.model

    def find_tower(model: DecoderConfig) -> TowerFiles | None:
        return locate_tower(config, locate(), model)

    find = FindParts(lambda device_kind: resolve_model(config, locate(), device_kind), find_drafter, find_tower)
    return 0 if print_report(config, find) else 1


def verify_determinism(args: argparse.Namespace) -> int:
    """`jaxserve verify-determinism`; returns 1 when an answer differed."""
    from jaxserve.tools.cli.determinism import verify

    return 0 if verify(read_engine_options(args), args.neighbourhoods) else 1


def _find_rank(folder: Path) -> int:
    """Returns the least `max_lora_rank` for an adapter; the largest if there is none, which loading then refuses."""
    from jaxserve.features.lora.peft_config import read_peft_config

    rank = read_peft_config(folder).largest_rank
    return next((each for each in LORA_RANKS if each >= rank), LORA_RANKS[-1])


def _read_template(args: argparse.Namespace) -> str | None:
    from jaxserve.server.options import read_chat_template

    return None if args.chat_template is None else read_chat_template(args.chat_template)


def _require_tokenizer(options: dict[str, Any], *, needs_template: bool) -> None:
    """Checks, before anything is compiled, that the model has a tokenizer and, if needed, a chat template.

    Raises:
        TokenizerError: one of them is missing.
        ConfigError: an option is wrong, or there is no such model.
    """
    from jaxserve.engine.model_files import locate_model
    from jaxserve.tokenizers.files import read_metadata

    config = EngineConfig.from_options(**options).model
    if config.skip_tokenizer_init:
        message = "this command takes text, which needs a tokenizer; omit skip_tokenizer_init"
        raise TokenizerError(message, field="skip_tokenizer_init", value=True)
    files = locate_model(config)
    path = files.path if config.tokenizer is None else Path(config.tokenizer)
    if path is None:
        message = f"the preset {config.model!r} has none; give a tokenizer's directory with --tokenizer"
        raise TokenizerError(message, field="tokenizer")
    if needs_template and read_metadata(path if path.is_dir() or is_gguf(path) else path.parent).chat_template is None:
        message = f"the tokenizer in {path} has none; give one with --chat-template FILE"
        raise TokenizerError(message, field="chat_template")
