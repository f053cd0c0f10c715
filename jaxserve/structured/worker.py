"""The process that compiles a grammar first, so that a hostile one costs this process and nothing else.

Run as a file, with the standard library and llguidance only. It speaks JSON lines over stdin and stdout: the first line
in is the vocabulary and the limits, answered by {"ready": true}; each further line {"source": ...} is answered by
{"error": null} or {"error": "why"}, with "last": true before it exits to give its memory back.

It ends with its parent: at the end of stdin, when its parent's id changes, and at the latest by the alarm that runs
while it compiles.
"""

from __future__ import annotations

import contextlib
import json
import os
import random
import resource
import select
import signal
import sys
import time
from typing import Any

_POLL_S = 5.0  # how often an idle worker looks whether its parent still lives
_READ_BYTES = 1 << 16
_STACK_BYTES = 2 << 20  # a quarter of what the parent's threads have: what fits here fits there
_NUM_WALKS = 4
_WALK_TOKENS = 24
_MAX_STEP_S = 0.25  # usual masks take below 1 ms, the first ones of a large grammar some tens


class Vocabulary:
    """What llguidance asks of a tokenizer; forced text becomes the longest matching tokens."""

    is_tokenizer_wrapper = True
    bos_token_id = None

    def __init__(self, start: dict[str, Any]) -> None:
        from llguidance import LLTokenizer

        self.tokens = [token.encode("latin-1") for token in start["tokens"]]
        self.special_token_ids = start["special_token_ids"]
        self.eos_token_id = start["eos_token_ids"][0]
        self.not_eos = ~sum(1 << token_id for token_id in start["eos_token_ids"])
        self.special = sum(1 << token_id for token_id in start["special_token_ids"]) & self.not_eos
        self.native = LLTokenizer(self, eos_token=start["eos_token_ids"])

    def __call__(self, text: str) -> list[int]:
        return self.native.greedy_tokenize(text)


class Pipe:
    """JSON lines; the process's own stdout is closed to everybody else, so that nothing can print into it."""

    def __init__(self) -> None:
        self._in, self._out = os.dup(0), os.dup(1)
        os.dup2(2, 1)
        self._parent = os.getppid()
        self._buffer = b""

    def read(self) -> dict[str, Any] | None:
        """Returns the next message, None when the parent is gone."""
        while b"\n" not in self._buffer:
            readable, _, _ = select.select([self._in], [], [], _POLL_S)
            if os.getppid() != self._parent:
                return None
            if readable:
                data = os.read(self._in, _READ_BYTES)
                if not data:
                    return None
                self._buffer += data
        line, self._buffer = self._buffer.split(b"\n", 1)
        return json.loads(line)

    def write(self, message: dict[str, Any]) -> None:
        """Sends a message."""
        data = json.dumps(message).encode() + b"\n"
        while data:
            data = data[os.write(self._out, data) :]


def check(source: str, vocabulary: Vocabulary, limits: dict[str, Any]) -> str | None:
    """Compiles a grammar and walks some way along it; returns what is wrong with it, or None.

    The walks are what a sequence would do: grammars that compile at once can be slow or meet a limit at the first
    tokens. Their time is this process's own, which a busy host does not stretch.
    """
    from llguidance import LLMatcher, LLParserLimits

    matcher = LLMatcher(vocabulary.native, source, log_level=0, limits=LLParserLimits(**limits))
    if matcher.is_error():
        return matcher.get_error()
    chance = random.Random(0)
    for _ in range(_NUM_WALKS):
        walker = matcher.deep_copy()
        for _ in range(_WALK_TOKENS):
            start = time.process_time()
            mask = walker.compute_bitmask()
            if not walker.is_stopped():
                allowed = int.from_bytes(mask, "little") & vocabulary.not_eos
                special = pick_bit(allowed & vocabulary.special, chance)
                if special is not None and walker.validate_tokens([special]) == 0:
                    return "a negation matches special tokens too; intersect it with /(?s:.*)/"
                token_id = pick_bit(allowed, chance)
                if token_id is None or walker.try_consume_tokens([token_id]) == 0:
                    break
            if time.process_time() - start > _MAX_STEP_S:
                return f"takes more than {_MAX_STEP_S:g} s for a token"
            if walker.is_stopped():
                break
        if walker.is_error():
            return walker.get_error()
    return None


def pick_bit(bits: int, chance: random.Random) -> int | None:
    """Returns the number of a random bit that is set, None when none is."""
    if bits == 0:
        return None
    size = bits.bit_length()
    at = chance.randrange(size)
    above = bits >> at  # has its highest bit: the first one at or above the random place is taken
    return at + (above & -above).bit_length() - 1


def limit_memory(extra_bytes: int) -> int:
    """Caps the address space at what it is now plus some bytes; returns what it is now, 0 where that is not known."""
    size = get_address_space()
    if size:
        resource.setrlimit(resource.RLIMIT_AS, (size + extra_bytes, size + extra_bytes))
    return size


def get_address_space() -> int:
    """Returns the bytes of this process's address space, 0 on systems that do not show it."""
    try:
        with open("/proc/self/statm", encoding="ascii") as file:
            return int(file.read().split()[0]) * resource.getpagesize()
    except OSError:
        return 0


def main() -> None:
    """Serves until the parent goes, or until too much memory stays in use."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C in a terminal reaches the whole group; the parent decides
    for limit, value in (("RLIMIT_CORE", 0), ("RLIMIT_FSIZE", 0), ("RLIMIT_STACK", _STACK_BYTES)):
        with contextlib.suppress(ValueError, OSError):  # not every system can lower each of them
            resource.setrlimit(getattr(resource, limit), (value, value))
    pipe = Pipe()
    start = pipe.read()
    if start is None:
        return
    sys.path[:] = start["sys_path"]
    vocabulary = Vocabulary(start)
    check("start: /[a-z]*/", vocabulary, start["limits"])  # one-time allocations belong to the baseline
    baseline = limit_memory(start["memory_bytes"])
    pipe.write({"ready": True})
    while (job := pipe.read()) is not None:
        signal.setitimer(signal.ITIMER_REAL, start["time_limit_s"] + 1.0)  # its default action ends the process
        error = check(job["source"], vocabulary, start["limits"])
        signal.setitimer(signal.ITIMER_REAL, 0.0)
        last = get_address_space() > baseline + start["memory_bytes"] // 4 > 0
        pipe.write({"error": error, "last": last})
        if last:
            return


if __name__ == "__main__":
    main()
