"""A user's function between the model's logits and the choice of a token."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from jaxserve.errors import ConfigError

MAX_ARGUMENTS = 4


@dataclass(frozen=True, slots=True)
class LogitsProcessor:
    """A function on logits, given when an engine is built and compiled into its sample programs.

    `function(logits, arguments)` takes one row's logits [V] float32, after penalties and before temperature, and the
    request's arguments by name, each a float32 scalar; it returns the logits to choose from. It must be a pure JAX
    function: it is traced once per program. It runs for requests that give `SamplingParams.extra_args`, which must name
    all of `arguments`.

    Raises:
        ConfigError: `function` is not callable, or there are too many arguments or equal ones.
    """

    function: Callable[[Any, Mapping[str, Any]], Any]
    arguments: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        object.__setattr__(self, "arguments", tuple(self.arguments))
        if not callable(self.function):
            raise ConfigError("function must be callable", field="logits_processor", value=self.function)
        if len(self.arguments) > MAX_ARGUMENTS or len(set(self.arguments)) < len(self.arguments):
            message = f"arguments must be at most {MAX_ARGUMENTS} different names, got {self.arguments}"
            raise ConfigError(message, field="logits_processor", value=self.arguments)
