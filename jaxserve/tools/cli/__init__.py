"""The command line: `jaxserve COMMAND`. Flags are the configs' fields."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.device_kinds import KNOWN
from jaxserve.errors import JaxServeError
from jaxserve.option_flags import add_flag
from jaxserve.options import list_options
from jaxserve.tools.cli import commands
from jaxserve.tools.cli.bench import add_bench
from jaxserve.tools.cli.build import add_build_flags, build
from jaxserve.tools.cli.convert import add_convert_flags, convert
from jaxserve.tools.cli.flags import Parser, add_command, add_command_options, add_sampling_flags, narrow_compile
from jaxserve.tools.cli.prompts import RULE
from jaxserve.tools.cli.replay import replay
from jaxserve.tools.cli.simulate import add_simulate_flags, add_tune_flags, simulate, tune_buckets

__all__ = ["main"]

_SERVE_EXAMPLES = """\
  jaxserve serve demo
      the model in the package, at http://127.0.0.1:8000/v1
  jaxserve serve Qwen/Qwen3-0.6B --max-model-len 8192 --max-num-seqs 16
      16 users at once, each with 8192 tokens of prompt and answer
  jaxserve serve ./checkpoint --host 0.0.0.0 --api-key SECRET --tensor-parallel-size 2
      for other machines, on two devices"""
_TEMPLATE_HELP = "file with a Jinja template to use in place of the tokenizer's"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Errors that a user can fix are one line on standard error."""
    parser = _make_parser()
    args = parser.parse_args(argv)
    args.argv = list(sys.argv[1:] if argv is None else argv)  # for processes that run the same command
    if args.run is None:
        parser.print_help(sys.stderr)
        return 2
    try:
        status: int | None = args.run(args)
    except JaxServeError as error:
        print(f"jaxserve: {error}", file=sys.stderr)
        return 2
    except KeyboardInterrupt:
        return 130
    return status or 0


def _make_parser() -> argparse.ArgumentParser:
    from jaxserve import __version__
    from jaxserve.server.options import ServerConfig

    parser = Parser(prog="jaxserve", description="Batched inference of language models in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    parser.set_defaults(run=None)
    group = parser.add_subparsers(title="commands", metavar="COMMAND")
    serve = add_command(group, "serve", commands.serve, "answer over HTTP as OpenAI's API does")
    add_command_options(serve, (EngineConfig, ServerConfig))
    narrow_compile(serve)
    serve.formatter_class = argparse.RawDescriptionHelpFormatter
    serve.description = f"{serve.description}\n\nexamples:\n{_SERVE_EXAMPLES}"
    generate = _add_generate(group)
    chat = add_command(group, "chat", commands.chat, "talk to a model; answers stream as they are generated")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    for command, max_tokens in ((generate, 128), (chat, 256)):
        command.add_argument("--chat-template", metavar="FILE", help=_TEMPLATE_HELP)
        add_sampling_flags(command, max_tokens=max_tokens)
        add_command_options(command, (EngineConfig,))
    _add_run_batch(group, ServerConfig)
    plan = add_command(group, "plan", commands.plan, "print the memory plan of a model without loading a weight")
    plan.add_argument("--device", metavar="KIND", help=f"plan for a device that is not here: {KNOWN}")
    add_command_options(plan, (EngineConfig,))
    text = "compile all programs of a model, also for devices that are not here, for serve --bundle"
    add_build_flags(add_command(group, "build", build, text, "[MODEL] -o DIR"))
    text = "quantize a checkpoint as --quantization says, and write it in the format of compressed-tensors"
    add_convert_flags(add_command(group, "convert", convert, text, "[MODEL] -o DIR --quantization SCHEME"))
    text = "print versions, devices, kernels, programs and the compile cache, and what is broken"
    add_command_options(add_command(group, "doctor", commands.doctor, text), (EngineConfig,))
    text = "run a trace of requests through the engine on a virtual clock: times, throughput, devices needed"
    add_simulate_flags(add_command(group, "simulate", simulate, text, "[MODEL] --trace TRACE --device KIND"))
    text = "choose the padded sizes of steps that waste least on a trace, and print them as TOML"
    add_tune_flags(add_command(group, "tune-buckets", tune_buckets, text, "[MODEL] --trace TRACE --device KIND"))
    _add_replay(group)
    add_bench(group)
    text = "compare answers among random other requests with the same answers alone, bit for bit, on this device"
    verify = add_command(group, "verify-determinism", commands.verify_determinism, text)
    help_text = "how many sets of other requests to try (default: 50)"
    verify.add_argument("--neighbourhoods", type=int, default=50, metavar="INT", help=help_text)
    add_command_options(verify, (EngineConfig,))
    return parser


def _add_generate(group: Any) -> argparse.ArgumentParser:
    text = "continue prompts and print the answers"
    generate = add_command(group, "generate", commands.generate, text, "[MODEL] [PROMPT ...]")
    generate.description = f"{generate.description} {RULE}"
    help_text = "default: one prompt a line from standard input"
    generate.add_argument("words", nargs="*", metavar="[MODEL] PROMPT", help=help_text)
    help_text = "LoRA adapter for all prompts: a directory in PEFT's format, or demo:NAME (default: none)"
    generate.add_argument("--lora", metavar="PATH", help=help_text)
    generate.add_argument("--chat", action="store_true", help="send each prompt as a user's message (default: off)")
    return generate


def _add_run_batch(group: Any, config: type) -> None:
    text = "answer a file of requests in OpenAI's batch format"
    command = add_command(group, "run-batch", commands.run_batch, text, "[MODEL] -i FILE -o FILE")
    command.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines to answer")
    command.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers, in the order in which they finish; requests that it already answers are not run again",
    )
    command.add_argument(
        "--max-concurrent", type=int, metavar="INT", help="requests at once (default: 4 for each row of the batch)"
    )
    serving = command.add_argument_group("serving options")
    for _, option in list_options(config):
        if option.name in commands.BATCH_OPTIONS:
            add_flag(serving, option)
    add_command_options(command, (EngineConfig,))
    narrow_compile(command)


def _add_replay(group: Any) -> None:
    text = "run the steps that an engine recorded with --record-steps, and compare every token id"
    command = add_command(group, "replay", replay, text, "FILE")
    command.epilog = "Options are those of the recording. Status 1: a token id differs; 2: it cannot be replayed here."
    command.add_argument("recording", metavar="FILE", help="what --record-steps wrote")
    command.add_argument("--model", metavar="MODEL", help="where the recorded model is here (default: the same path)")
    help_text = "checkpoint of weights that were written while steps were recorded; once for each time, in order"
    command.add_argument("--weights", action="append", default=[], metavar="DIR", help=help_text)
    help_text = "LoRA adapter of the recorded requests; once for each, in any order"
    command.add_argument("--adapter", action="append", default=[], metavar="PATH", help=help_text)
    options = {option.name: option for _, option in list_options(EngineConfig)}
    add_flag(command, options["compilation_cache_dir"])
