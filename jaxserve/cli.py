"""The command line: `jaxserve serve | generate | chat | run-batch | plan | doctor`. Flags are the configs' fields."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import Field
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError, JaxServeError
from jaxserve.options import list_options, read_options
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    from jaxserve import AsyncLLM

_BATCH_OPTIONS = (  # of the server that matter without a socket
    "served_model_name",
    "chat_template",
    "allow_request_chat_template",
    "default_chat_template_kwargs",
    "enable_auto_tool_choice",
    "tool_call_parser",
    "reasoning_parser",
)
_SAMPLING_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "keep the likeliest tokens that make up this share"),
    "top_k": (int, "keep this many of the likeliest tokens; 0: all"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "max_tokens": (int, "longest answer"),
}


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns the exit status. Errors that a user can mend are one line on standard error."""
    parser = _make_parser()
    args = parser.parse_args(argv)
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

    parser = argparse.ArgumentParser(prog="jaxserve", description="Batched inference of language models in JAX.")
    parser.add_argument("--version", action="version", version=f"jaxserve {__version__}")
    commands = parser.add_subparsers(title="commands", required=True, metavar="COMMAND")
    serve = _add_command(commands, "serve", _serve, "answer over HTTP as OpenAI's API does", with_server=True)
    serve.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    generate = _add_command(commands, "generate", _generate, "continue prompts and print the answers")
    generate.add_argument("prompts", nargs="*", metavar="PROMPT", help="default: one prompt a line from standard input")
    generate.add_argument("--chat", action="store_true", help="send each prompt as a user's message")
    chat = _add_command(commands, "chat", _chat, "talk to a model; answers stream as they are generated")
    chat.add_argument("--system", metavar="TEXT", help="the system message")
    for command in (generate, chat):
        _add_sampling_flags(command)
    _add_batch_flags(
        _add_command(commands, "run-batch", _run_batch, "answer a file of requests in OpenAI's batch format")
    )
    plan = _add_command(commands, "plan", _plan, "print the memory plan of a model without loading a weight")
    plan.add_argument("--device", metavar="KIND", help="plan for a device that is not here: h200, h100, v5e, ...")
    _add_command(commands, "doctor", _doctor, "print devices, versions, kernels and the programs that would compile")
    return parser


def _add_command(
    commands: Any, name: str, run: Callable[[argparse.Namespace], int | None], text: str, *, with_server: bool = False
) -> argparse.ArgumentParser:
    command = commands.add_parser(name, help=text, description=f"{text[0].upper()}{text[1:]}.")
    command.set_defaults(run=run)
    command.add_argument("--config", metavar="FILE", help="TOML file of options; flags win over it")
    sections: dict[str, Any] = {}
    for section, option in _list_flags(with_server):
        if section not in sections:
            sections[section] = command.add_argument_group(f"{section} options")
        _add_flag(sections[section], option)
    return command


def _list_flags(with_server: bool) -> Iterator[tuple[str, Field[Any]]]:
    yield from list_options(EngineConfig)
    if with_server:
        from jaxserve.server.options import ServerConfig

        yield from list_options(ServerConfig)


def _add_flag(group: Any, option: Field[Any]) -> None:
    names = [f"--{name.replace('_', '-')}" for name in (option.name, *option.metadata["aliases"])]
    text, choices = option.metadata["help"], option.metadata["choices"]
    kind = str(option.type).removesuffix(" | None")
    if kind == "bool":
        group.add_argument(*names, dest=option.name, action=argparse.BooleanOptionalAction, default=None, help=text)
        return
    if kind.startswith("tuple"):
        group.add_argument(*names, dest=option.name, action="append", default=None, metavar="TEXT", help=text)
        return
    convert = {"int": int, "float": float, "str": str}[kind]
    if option.default is not None and str(option.default) and "default:" not in text:
        text = f"{text} (default: {option.default})"
    metavar = None if choices else kind.upper()
    group.add_argument(
        *names, dest=option.name, type=convert, choices=choices or None, metavar=metavar, help=text.replace("%", "%%")
    )


def _add_sampling_flags(command: argparse.ArgumentParser) -> None:
    group = command.add_argument_group("sampling")
    for name, (convert, text) in _SAMPLING_FLAGS.items():
        group.add_argument(f"--{name.replace('_', '-')}", type=convert, metavar=convert.__name__.upper(), help=text)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on to --max-tokens")


def _add_batch_flags(command: argparse.ArgumentParser) -> None:
    from jaxserve.server.options import ServerConfig

    command.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    command.add_argument("-i", "--input-file", required=True, metavar="FILE", help="JSON lines to answer")
    command.add_argument(
        "-o",
        "--output-file",
        required=True,
        metavar="FILE",
        help="answers, in the order in which they are finished; what it holds already is not asked again",
    )
    command.add_argument(
        "--max-concurrent", type=int, metavar="INT", help="requests at once (default: 4 for each row of the batch)"
    )
    group = command.add_argument_group("serving options")
    for _, option in list_options(ServerConfig):
        if option.name in _BATCH_OPTIONS:
            _add_flag(group, option)


def _read_flags(args: argparse.Namespace, config: type) -> dict[str, Any]:
    """Returns what the flags say of a config's options, and the file where they say nothing.

    A file may hold the options of the engine and of the server: each command takes its own.
    """
    from jaxserve.server.options import ServerConfig

    names = [option.name for _, option in list_options(config)]
    given = {name: value for name in names if (value := getattr(args, name, None)) is not None}
    if args.config is None:
        return given
    others = ServerConfig if config is EngineConfig else EngineConfig
    foreign = {name for _, option in list_options(others) for name in (option.name, *option.metadata["aliases"])}
    return {name: value for name, value in read_options(args.config).items() if name not in foreign} | given


def _engine_options(args: argparse.Namespace) -> dict[str, Any]:
    return _read_flags(args, EngineConfig)


def _sampling_params(args: argparse.Namespace, base: SamplingParams, **defaults: Any) -> SamplingParams:
    from dataclasses import replace

    names = (*_SAMPLING_FLAGS, "stop", "ignore_eos")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    return replace(base, **(defaults | given))


def _serve(args: argparse.Namespace) -> None:
    from jaxserve.server.launch import serve
    from jaxserve.server.options import ServerConfig

    _take_model(args)
    serve(
        EngineConfig.from_options(**_read_flags(args, EngineConfig)),
        ServerConfig.from_options(**_read_flags(args, ServerConfig)),
    )


def _take_model(args: argparse.Namespace) -> None:
    """Lets a model be named without its flag."""
    if args.served is not None:
        if args.model is not None:
            raise ConfigError(f"given twice, also as {args.served!r}", field="model", value=args.model)
        args.model = args.served


def _run_batch(args: argparse.Namespace) -> int:
    from pathlib import Path

    from jaxserve.server.batch import run_batch
    from jaxserve.server.options import ServerConfig

    _take_model(args)
    given = {name: getattr(args, name) for name in _BATCH_OPTIONS if getattr(args, name) is not None}
    given = {name: tuple(value) if isinstance(value, list) else value for name, value in given.items()}
    if args.config is not None:
        given = {name: value for name, value in read_options(args.config).items() if name in _BATCH_OPTIONS} | given
    summary = run_batch(
        EngineConfig.from_options(**_engine_options(args)),
        ServerConfig.from_options(log_level="warning", access_log=False, **given),
        Path(args.input_file),
        Path(args.output_file),
        max_concurrent=args.max_concurrent,
    )
    print(f"run-batch: {summary}", file=sys.stderr)
    return 1 if summary.num_failed else 0


def _generate(args: argparse.Namespace) -> None:
    from jaxserve import LLM

    prompts = args.prompts or [line.rstrip("\n") for line in sys.stdin if line.strip()]
    llm = LLM(**_engine_options(args))
    params = _sampling_params(args, llm.get_default_sampling_params(), max_tokens=128)
    if args.chat:
        outputs = llm.chat([[{"role": "user", "content": prompt}] for prompt in prompts], params)
    else:
        outputs = llm.generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        if len(prompts) > 1:
            print(f"--- {prompt}")
        print(output.outputs[0].text.strip("\n"))


def _chat(args: argparse.Namespace) -> None:
    import asyncio

    from jaxserve import AsyncLLM, OutputKind

    llm = AsyncLLM(**_engine_options(args))
    params = _sampling_params(args, llm.get_default_sampling_params(), max_tokens=256, output_kind=OutputKind.DELTA)
    history = [{"role": "system", "content": args.system}] if args.system else []
    with asyncio.Runner() as runner:
        try:
            while (text := _ask()) is not None:  # outside of the loop, which would keep Ctrl-C from ending the wait
                history.append({"role": "user", "content": text})
                history.append({"role": "assistant", "content": runner.run(_answer(llm, history, params))})
        finally:
            llm.shutdown()


async def _answer(llm: AsyncLLM, history: list[dict[str, str]], params: SamplingParams) -> str:
    """Prints the answer to a conversation as it is generated, and returns it."""
    answer = ""
    async for output in llm.chat(history, params):
        answer += output.outputs[0].text
        print(output.outputs[0].text, end="", flush=True)
    print()
    return answer


def _ask() -> str | None:
    """Reads the user's next message; None at the end of input."""
    try:
        while not (text := input("you> " if sys.stdin.isatty() else "").strip()):
            pass
    except EOFError:
        return None
    return text


def _plan(args: argparse.Namespace) -> None:
    from jaxserve.engine.build import locate_model, resolve_model
    from jaxserve.runtime.doctor import print_plan

    config = EngineConfig.from_options(**_engine_options(args))
    print_plan(config, resolve_model(config, locate_model(config.model, need_weights=False)), args.device)


def _doctor(args: argparse.Namespace) -> None:
    from jaxserve.engine.build import locate_model, resolve_model
    from jaxserve.runtime.doctor import print_report

    config = EngineConfig.from_options(**_engine_options(args))
    print_report(config, resolve_model(config, locate_model(config.model, need_weights=False)))


if __name__ == "__main__":
    sys.exit(main())
