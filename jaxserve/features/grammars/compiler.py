"""Turns constraints into grammars: checked in another process, compiled, and cached for later requests."""

from __future__ import annotations

import math
import os
import threading
import time
from collections import OrderedDict
from concurrent.futures import Future
from dataclasses import dataclass
from pathlib import Path
from typing import final

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars.automaton import make_automaton
from jaxserve.features.grammars.checker import WORKER, Checker
from jaxserve.features.grammars.errors import MatcherError, shorten_message
from jaxserve.features.grammars.limits import choose_limits
from jaxserve.features.grammars.matcher import Matcher
from jaxserve.features.grammars.shards import LIMITS, GrammarShards
from jaxserve.features.grammars.source import make_source
from jaxserve.features.grammars.vocabulary import Vocabulary, import_llguidance
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer

TIME_LIMIT_S = 5.0
MEMORY_BYTES = 512 << 20  # address space of the worker beyond its size without a grammar
MAX_GRAMMARS = 128
MAX_CACHE_BYTES = 8 << 20  # total size of the cached constraints' texts
_UNCERTAIN_S = 30.0  # how long to cache a refusal that a busy host may have caused
_MAX_SHARDS = 8
_SMALL_KINDS = ("choice", "regex")  # may be small enough for an automaton; other kinds have free text


@final
class Grammar:
    """A compiled constraint over one vocabulary. Safe to use from several threads."""

    def __init__(self, params: StructuredOutputsParams, source: str, vocabulary: Vocabulary, num_shards: int) -> None:
        self.params, self.vocabulary = params, vocabulary
        self._shards = GrammarShards(source, vocabulary, num_shards, choose_limits(params))
        self._num_matchers = 0
        self._lock = threading.Lock()
        self.automaton = make_automaton(Matcher(self._shards, 0)) if params.kind in _SMALL_KINDS else None

    def new_matcher(self) -> Matcher:
        """Returns a matcher at the start of the output; matchers use shards in turn."""
        with self._lock:
            shard = self._num_matchers % self._shards.count
            self._num_matchers += 1
        return Matcher(self._shards, shard)


@dataclass(frozen=True, slots=True)
class _Refusal:
    message: str
    expires: float  # monotonic seconds


@final
class GrammarCompiler:
    """Compiles constraints for one vocabulary and caches results and refusals. Safe to use from several threads.

    `compile` takes milliseconds for usual constraints and up to twice the time limit for hostile ones: call it from a
    thread that may wait, never from the engine's loop. Threads with the same constraint wait for one result.
    """

    def __init__(
        self,
        tokenizer: Tokenizer,
        *,
        vocab_size: int | None = None,
        time_limit_s: float = TIME_LIMIT_S,
        memory_bytes: int = MEMORY_BYTES,
        max_grammars: int = MAX_GRAMMARS,
        num_shards: int | None = None,
        worker: Path = WORKER,
    ) -> None:
        """The first `compile` or `warm_up` imports llguidance and starts the worker.

        Args:
            tokenizer: the model's tokenizer.
            vocab_size: columns of the model's logits and bits of a mask; None: the tokenizer's size.
            time_limit_s: seconds for the compilation of one grammar in the worker.
            memory_bytes: address space of the worker for it.
            max_grammars: cached grammars and refusals.
            num_shards: threads that can compute masks of one grammar at once; None: one per core, at most 8.
            worker: the program of the worker process.
        """
        self._tokenizer = tokenizer
        self.vocab_size = tokenizer.vocab_size if vocab_size is None else vocab_size
        self._time_limit_s = time_limit_s
        self._memory_bytes = memory_bytes
        self._max_grammars = max_grammars
        self._num_shards = num_shards or min(os.cpu_count() or 1, _MAX_SHARDS)
        self._worker = worker
        self._checker: Checker | None = None
        self._vocabulary: Vocabulary | None = None
        self._start_lock = threading.Lock()
        self._lock = threading.Lock()  # guards what follows
        self._results: OrderedDict[str, Grammar | _Refusal] = OrderedDict()
        self._num_bytes = 0
        self._running: dict[str, Future[Grammar | _Refusal]] = {}

    def find(self, params: StructuredOutputsParams) -> Grammar | None:
        """Returns the grammar of a constraint if it is cached; an InvalidRequestError that is cached is raised."""
        with self._lock:
            result = self._look_up(params.key)
        return None if result is None else _read(params, result)

    def compile(self, params: StructuredOutputsParams) -> Grammar:
        """Returns the grammar of a constraint.

        Raises:
            InvalidRequestError: the constraint is malformed, not supported by llguidance, or takes too much time or
                memory; or llguidance is not installed.
            CheckerError: the worker process cannot be started.
        """
        key = params.key
        with self._lock:
            result = self._look_up(key)
            running = self._running.get(key)
            if result is None and running is None:
                mine: Future[Grammar | _Refusal] = Future()
                self._running[key] = mine
        if result is None and running is not None:
            result = running.result()
        elif result is None:
            result = self._compile_once(params, key, mine)
        return _read(params, result)

    def warm_up(self) -> None:
        """Builds the vocabulary and starts the worker, so that the first request does not wait for them.

        Raises:
            InvalidRequestError: llguidance is not installed, or the tokenizer cannot be used with it.
            CheckerError: the worker process cannot be started.
        """
        self._get_checker().start()

    def close(self) -> None:
        """Ends the worker process; a later `compile` starts another one."""
        if self._checker is not None:
            self._checker.close()

    def _compile_once(
        self, params: StructuredOutputsParams, key: str, future: Future[Grammar | _Refusal]
    ) -> Grammar | _Refusal:
        try:
            result = self._compile(params)
        except BaseException as error:
            with self._lock:
                del self._running[key]
            future.set_exception(error)
            raise
        with self._lock:
            del self._running[key]
            self._store(key, result)
        future.set_result(result)
        return result

    def _compile(self, params: StructuredOutputsParams) -> Grammar | _Refusal:
        checker = self._get_checker()
        assert self._vocabulary is not None, "made with the checker"
        source = make_source(params, self._tokenizer)
        verdict = checker.check(source)
        if verdict.error is not None:
            expires = math.inf if verdict.is_certain else time.monotonic() + _UNCERTAIN_S
            return _Refusal(shorten_message(verdict.error), expires)
        try:
            return Grammar(params, source, self._vocabulary, self._num_shards)
        except MatcherError as error:
            return _Refusal(str(error), math.inf)

    def _get_checker(self) -> Checker:
        with self._start_lock:
            if self._checker is None:
                import_llguidance()
                self._vocabulary = Vocabulary(self._tokenizer, self.vocab_size)
                self._checker = Checker(
                    self._vocabulary,
                    limits=LIMITS,
                    time_limit_s=self._time_limit_s,
                    memory_bytes=self._memory_bytes,
                    worker=self._worker,
                )
            return self._checker

    def _look_up(self, key: str) -> Grammar | _Refusal | None:
        result = self._results.get(key)
        if isinstance(result, _Refusal) and result.expires < time.monotonic():
            self._remove(key)
            return None
        if result is not None:
            self._results.move_to_end(key)
        return result

    def _store(self, key: str, result: Grammar | _Refusal) -> None:
        self._results[key] = result
        self._num_bytes += len(key)
        while len(self._results) > self._max_grammars or self._num_bytes > MAX_CACHE_BYTES:
            self._remove(next(iter(self._results)))

    def _remove(self, key: str) -> None:
        del self._results[key]
        self._num_bytes -= len(key)


def _read(params: StructuredOutputsParams, result: Grammar | _Refusal) -> Grammar:
    if isinstance(result, _Refusal):
        value = getattr(params, params.kind)
        raise InvalidRequestError(result.message, field=f"structured_outputs.{params.kind}", value=value)
    return result
