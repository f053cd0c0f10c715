"""Engine options as one value, for scripts written for vLLM."""

from __future__ import annotations

import argparse
from typing import Any

from jaxserve.config import EngineConfig
from jaxserve.model_options import DEMO_MODEL
from jaxserve.option_flags import add_options


class EngineArgs:
    """Options by name: `AsyncLLM.from_engine_args(AsyncEngineArgs(model="..."))`.

    Raises:
        ConfigError: names the option that is unknown or out of range.
    """

    def __init__(self, model: str = DEMO_MODEL, **options: Any) -> None:
        self.options = {"model": str(model), **options}
        self.config = EngineConfig.from_options(**self.options)

    @staticmethod
    def add_cli_args[P: argparse.ArgumentParser](parser: P) -> P:
        """Adds a flag for every option to a script's parser and returns the parser; flags not given read as None."""
        add_options(parser, (EngineConfig,))
        return parser

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> EngineArgs:
        """Returns the options among the arguments that such a parser read, without the script's own."""
        known = argparse.ArgumentParser(add_help=False)
        names = {action.dest for action in cls.add_cli_args(known)._actions}
        given = {name: value for name, value in vars(args).items() if name in names and value is not None}
        return cls(**given)


AsyncEngineArgs = EngineArgs
