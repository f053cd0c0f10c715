"""The errors that users can meet, one class for each thing they would have to change.

Each message names the field, the value that was refused and what would work. `field` and `value` are also attributes,
so that a server can answer with `param=` without parsing text.
"""

from __future__ import annotations

import reprlib

_MAX_ECHO = 100  # characters of a caller's value that an error repeats


class _Echo(reprlib.Repr):
    def repr_int(self, x: int, level: int) -> str:
        """Names the size instead where Python refuses to print the digits."""
        return super().repr_int(x, level) if x.bit_length() < 4096 else f"an integer of {x.bit_length()} bits"


_REPR = _Echo()
_REPR.maxlist = _REPR.maxtuple = _REPR.maxdict = _REPR.maxset = _MAX_ECHO // 2  # more could not be shown
_REPR.maxstring = _REPR.maxlong = _REPR.maxother = 2 * _MAX_ECHO


class JaxServeError(Exception):
    """Base of all errors that jaxserve raises on purpose."""


class _FieldError(JaxServeError, ValueError):
    """An error about one named value."""

    def __init__(self, message: str, *, field: str, value: object = None) -> None:
        super().__init__(f"{field}: {message}")
        self.field = field
        self.value = value


class InvalidRequestError(_FieldError):
    """A request cannot be served as asked: a bad parameter, an empty or too long prompt, an unknown token id."""


class ConfigError(_FieldError):
    """An engine option or a model's `config.json` is malformed, unknown or contradicts another."""


class RecordingError(_FieldError):
    """A recording of steps is malformed, or not one of this version, model or mesh."""


class WeightsError(_FieldError):
    """A checkpoint is missing, truncated, or does not hold exactly the tensors that the model needs."""


class TokenizerError(_FieldError):
    """Tokenizer files or a chat template are missing or malformed."""


class CapacityError(_FieldError):
    """The device's memory cannot hold what was asked for; the message says what would fit."""


class DeviceError(_FieldError):
    """JAX, its plugin or a driver provides no devices; `advice` says what to do."""

    def __init__(self, reason: str, advice: str, *, field: str, value: object = None) -> None:
        super().__init__(f"{reason}; {advice}", field=field, value=value)
        self.reason = reason
        self.advice = advice


class ClusterError(_FieldError):
    """The nodes of one engine differ in what must be equal, or one of them is missing, silent or gone."""


class MissingPackageError(JaxServeError, ImportError):
    """A package that a command needs cannot be imported; the message says what to install."""


class MissingProgramError(JaxServeError, RuntimeError):
    """A step needs a program that was not compiled at the start: a fault of jaxserve, never of the caller."""


class DeviceStepError(JaxServeError, RuntimeError):
    """The device failed while running a step; the requests of that step end with `finish_reason="error"`."""


class EngineStoppedError(JaxServeError, RuntimeError):
    """The engine failed on the host and serves no more requests; the message carries the cause."""


class QueueFullError(JaxServeError, RuntimeError):
    """The queue is full, or the wait in it too long; the request was not queued, and can be tried again later.

    `limit`, and what reaches it now, `queued`: sequences, prompt tokens, or seconds of waiting.
    """

    def __init__(self, message: str, *, limit: float, queued: float) -> None:
        super().__init__(message)
        self.limit = limit
        self.queued = queued


class DeadlineError(JaxServeError, RuntimeError):
    """A request's deadline has passed; it ends with what it has so far."""


class NonFiniteLogitsError(JaxServeError, ArithmeticError):
    """The model produced NaN or infinite logits for one row; only that request ends."""


class NoTokenLeftError(_FieldError):
    """A request's constraints (allowed tokens, biases, bad words, a grammar) together forbid every token; it ends."""


class GrammarError(_FieldError):
    """A request's grammar hit a limit during generation; the request ends with what it has so far."""


def is_failure(error: BaseException) -> bool:
    """Whether this is an `Exception`, or a panic in a Rust library, which pyo3 derives from BaseException.

    False for what ends work on purpose: an interrupt, an exit, a cancelled task.
    """
    return isinstance(error, Exception) or type(error).__name__ == "PanicException"


def shorten(value: object) -> str:
    """Returns at most 100 characters of `repr(value)`, without reading the rest of a long value."""
    text = repr(value[: _MAX_ECHO + 1]) if isinstance(value, str | bytes) else _REPR.repr(value)
    return text if len(text) <= _MAX_ECHO else text[: _MAX_ECHO - 3] + "..."
