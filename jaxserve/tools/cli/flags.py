"""The parser of commands, and the options in their flags."""

from __future__ import annotations

import argparse
import difflib
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING, Any, NoReturn

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.option_flags import add_options, spell_flag
from jaxserve.options import list_options, list_tables, read_options
from jaxserve.sampling_params import SamplingParams
from jaxserve.vllm_options import OTHER_NAMES, VLLM_OPTIONS

if TYPE_CHECKING:
    from jaxserve.engine.generation_config import GenerationDefaults

_SAMPLING_FLAGS: dict[str, tuple[Callable[[str], Any], str]] = {
    "temperature": (float, "0 is greedy"),
    "top_p": (float, "keep the likeliest tokens that make up this share"),
    "top_k": (int, "keep this many of the likeliest tokens; 0: all"),
    "min_p": (float, "drop tokens less likely than this share of the likeliest"),
    "max_tokens": (int, "longest answer"),
}


class Parser(argparse.ArgumentParser):
    """A parser whose commands refuse unknown arguments under their own usage, and suggest the nearest flag.

    Flags are spelled out: by an abbreviation one would reach hidden flags, and another with each new option.
    """

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, allow_abbrev=False, **kwargs)

    def parse_known_args(self, args: Any = None, namespace: Any = None) -> tuple[Any, list[str]]:
        """Parses like the base class, but words may also stand behind flags, and unknown arguments are errors."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown and not self._take_words(found, unknown):
            self._refuse(unknown)
        return found, []

    def _take_words(self, found: argparse.Namespace, unknown: Sequence[str]) -> bool:
        """Adds words behind flags to those in front of them, which the base class alone takes.

        Returns whether that was possible: all are words, and the command takes any number of them.
        """
        taker = next((action for action in self._actions if action.nargs == "*" and not action.option_strings), None)
        end = unknown.index("--") if "--" in unknown else len(unknown)
        if taker is None or any(self._parse_optional(each) is not None for each in unknown[:end]):
            return False
        setattr(found, taker.dest, [*getattr(found, taker.dest), *unknown[:end], *unknown[end + 1 :]])
        return True

    def _refuse(self, unknown: Sequence[str]) -> NoReturn:
        given = [each for each in unknown if each != "--"]
        name = next((each for each in given if each.startswith("-")), None)
        if name is None:
            self.error(f"{given[0]!r} is one argument too many")
        name = name.partition("=")[0]
        ours = [flag for flag, action in self._option_string_actions.items() if action.dest not in VLLM_OPTIONS]
        if (other := OTHER_NAMES.get(name.lstrip("-").replace("-", "_"))) is not None:
            hint = f"here it is {spell_flag(other)}"
        elif near := _find_whole(name, ours) or difflib.get_close_matches(name, ours, n=1):
            hint = f"did you mean {near[0]}?"
        else:
            hint = f"`{self.prog} --help` lists all flags"
        self.error(f"there is no flag {name}; {hint}")


def _find_whole(name: str, flags: Sequence[str]) -> list[str]:
    """Returns the flag of which `name` is the beginning, if there is one only."""
    found = [flag for flag in flags if flag.startswith(name)]
    return found if len(found) == 1 else []


def add_command(
    group: Any,
    name: str,
    run: Callable[[argparse.Namespace], int | None] | None,
    text: str,
    words: str = "[MODEL]",
    *,
    prefix: str = "",
) -> argparse.ArgumentParser:
    """Adds a command to a group of subparsers; `text` is its help, `words` its arguments, `prefix` what is above it."""
    usage = f"jaxserve {prefix}{name} {words} [options]"  # argparse would list every flag above each error
    command: argparse.ArgumentParser = group.add_parser(
        name, help=text, description=f"{text[0].upper()}{text[1:]}.", usage=usage
    )
    command.set_defaults(run=run)
    if words.startswith("[MODEL]") and "PROMPT" not in words:
        command.add_argument("served", nargs="?", metavar="MODEL", help="the same as --model")
    return command


def narrow_compile(command: argparse.ArgumentParser) -> None:
    """Takes "used" from the choices of --compile, for commands that compile every program before they are ready."""
    action = command._option_string_actions["--compile"]
    action.choices = ("auto", "all")
    action.help = "all: every program before requests are answered, none later (default: all)"


def add_command_options(command: argparse.ArgumentParser, configs: Iterable[type]) -> None:
    """Adds --config and the flags of all options of `configs` to a command."""
    command.add_argument("--config", metavar="FILE", help="TOML file of options; flags win over it")
    add_options(command, configs)


def add_sampling_flags(command: argparse.ArgumentParser, *, max_tokens: int) -> None:
    """Adds the flags of the most common sampling parameters."""
    group = command.add_argument_group("sampling", "Defaults are those of the model's generation_config.json.")
    for name, (convert, text) in _SAMPLING_FLAGS.items():
        note = f" (default: {max_tokens})" if name == "max_tokens" else ""
        group.add_argument(spell_flag(name), type=convert, metavar=convert.__name__.upper(), help=text + note)
    group.add_argument("--stop", action="append", metavar="TEXT", help="end an answer before this text; repeatable")
    group.add_argument("--ignore-eos", action="store_true", default=None, help="go on to --max-tokens (default: off)")
    command.set_defaults(default_max_tokens=max_tokens)


def read_flags(args: argparse.Namespace, config: type, names: Iterable[str] | None = None) -> dict[str, Any]:
    """Returns a config's options by the names that were used: from flags, else from the file of --config.

    The file may hold the options of both engine and server.

    Args:
        names: the only options to read; default: all.

    Raises:
        ConfigError: the file cannot be read.
    """
    from jaxserve.server.options import ServerConfig

    called = _list_names(config, names)
    given = {name: value for name in (*called, *VLLM_OPTIONS) if (value := getattr(args, name, None)) is not None}
    if args.config is None:
        return given
    foreign = set(_list_names(ServerConfig if config is EngineConfig else EngineConfig))
    if names is not None:
        foreign |= set(_list_names(config)) - set(called)
    settled = {called.get(name, name) for name in given}
    found = read_options(args.config, list_tables(EngineConfig))
    file = {name: value for name, value in found.items() if name not in foreign}
    return {name: value for name, value in file.items() if called.get(name, name) not in settled} | given


def read_engine_options(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the engine's options from flags, config file and first argument."""
    if args.served is not None:  # the model, given without its flag
        if args.model is not None:
            raise ConfigError(f"given twice, also as {args.served!r}", field="model", value=args.model)
        args.model = args.served
    names = getattr(args, "served_model_name", None) or ()
    if len(names) > 1 and args.model is None and args.config is None:  # the last one may be meant as the model
        message = f"takes every word behind it, so {names[-1]!r} became a name; give the model first, or by --model"
        raise ConfigError(message, field="served_model_name", value=names)
    return read_flags(args, EngineConfig)


def _list_names(config: type, names: Iterable[str] | None = None) -> dict[str, str]:
    """Returns the option that each name and alias stands for."""
    options = [option for _, option in list_options(config) if names is None or option.name in names]
    return {name: option.name for option in options for name in (option.name, *option.metadata["aliases"])}


def read_given_sampling(args: argparse.Namespace) -> dict[str, Any]:
    """Returns the sampling parameters among the flags; InvalidRequestError names a bad value."""
    names = (*_SAMPLING_FLAGS, "stop", "ignore_eos")
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    SamplingParams(**given)
    return given


def read_sampling_params(args: argparse.Namespace, defaults: GenerationDefaults) -> SamplingParams:
    """Returns the model's defaults, changed by the flags; InvalidRequestError names a bad value.

    The longest answer is that of --max-tokens, else of the model, else of the command.
    """
    given = read_given_sampling(args)
    least = defaults.params.min_tokens
    if "max_tokens" in given:  # may be less than the model's min_tokens
        given["min_tokens"] = min(least, max(0, given["max_tokens"]))
    else:
        given["max_tokens"] = defaults.max_tokens or max(args.default_max_tokens, least)
    return defaults.params.clone(**given)
