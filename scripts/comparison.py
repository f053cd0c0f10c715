"""The same requests through several engines, which take turns: what takes part, how it is run, what it did."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from peers.process import PeerError, PeerProcess

from jaxserve.config import read_client_key, read_environment
from jaxserve.engine.progress import show_progress
from jaxserve.errors import ConfigError, shorten
from jaxserve.tools.bench.datasets import BenchRequest

JAXSERVE = "jaxserve"
_PROGRAMS = Path(__file__).with_name("peers")
_OURS = str(_PROGRAMS / "jaxserve_peer.py")
PEERS: dict[str, tuple[str, dict[str, Any]]] = {  # name -> program and options
    "transformers_static": ("transformers_peer.py", {}),
    "transformers_continuous": ("transformers_peer.py", {"continuous": True}),
    "vllm": ("vllm_peer.py", {}),
    "openvino_genai": ("openvino_peer.py", {}),
    "llama_cpp": ("llama_cpp_peer.py", {}),
    "openai": ("openai_peer.py", {}),
}
_THREAD_VARIABLES = ("OMP_NUM_THREADS", "MKL_NUM_THREADS", "OPENBLAS_NUM_THREADS")
_VARIABLES = {  # of peers, unless the user has set them
    "VLLM_CPU_KVCACHE_SPACE": "2",  # GiB
    "VLLM_CPU_NUM_OF_RESERVED_CPU": "0",  # by default it leaves one core alone
    "VLLM_LOGGING_LEVEL": "WARNING",
    "VLLM_NO_USAGE_STATS": "1",
    "TOKENIZERS_PARALLELISM": "false",
}


@dataclass(frozen=True)
class Participant:
    """One engine with its settings.

    Attributes:
        name: for people; different for all participants.
        command: the program, and the interpreter that has its library.
        options: the program's own.
        dtype: in place of the comparison's; None: that one.
    """

    name: str
    command: tuple[str, ...]
    options: Mapping[str, Any] = field(default_factory=dict)
    dtype: str | None = None

    @classmethod
    def of_jaxserve(cls, name: str, options: Mapping[str, Any]) -> Participant:
        """Returns jaxserve with these options of its engine."""
        rest = dict(options)
        dtype = rest.pop("dtype", None)
        return cls(name, (sys.executable, _OURS), rest, dtype)

    @classmethod
    def of_pace(cls) -> Participant:
        """Returns the one that only measures the CPU's pace, which other work, or a host's other guests, may halve."""
        return cls("pace", (sys.executable, str(_PROGRAMS / "pace.py")))

    @classmethod
    def parse_variant(cls, text: str, options: Mapping[str, Any]) -> Participant:
        """Returns jaxserve with options, of a text like "name: max_decode_steps=4, dtype=bfloat16"; it wins over
        `options`."""
        name, colon, rest = text.partition(":")
        if not name.strip() or not colon or not rest.strip():
            message = f'must be like "name: max_decode_steps=4, dtype=bfloat16", got {shorten(text)}'
            raise ConfigError(message, field="with", value=text)
        return cls.of_jaxserve(name.strip(), {**options, **_parse_options(rest, "with")})

    @classmethod
    def parse_peer(cls, text: str) -> Participant:
        """Returns a peer, of a text like "openvino_genai=PYTHON: model=DIR"; PYTHON: this one."""
        head, _, rest = text.partition(": ")
        name, _, python = head.partition("=")
        name, python = name.strip(), python.strip() or sys.executable
        if name in PEERS:
            program, options = PEERS[name]
            path = str(_PROGRAMS / program)
        elif name.endswith(".py") and Path(name).is_file():
            path, options = name, {}
        else:
            message = f"there is no peer {shorten(name)}; there are {', '.join(PEERS)}, and your own FILE.py"
            raise ConfigError(message, field="peer", value=text)
        given = _parse_options(rest, "peer")
        if "api_key" in given:
            raise ConfigError("set OPENAI_API_KEY: a key here would be in the report", field="peer")
        if name == "openai":
            options = {"api_key": read_client_key()}
        dtype = given.pop("dtype", None)
        shown = ", ".join(f"{key}={value}" for key, value in given.items() if key not in ("model", "gguf"))
        label = Path(name).stem if name.endswith(".py") else name
        label = " ".join(filter(None, [label, dtype, shown]))
        return cls(label, (python, path), {**options, **given}, dtype)


def _parse_options(text: str, field: str) -> dict[str, Any]:
    """Returns the options of "key=value, key=value"; values are JSON where they can be."""
    found = {}
    for part in filter(None, (word.strip() for word in text.split(","))):
        key, equals, value = part.partition("=")
        if not equals or not key.strip():
            raise ConfigError(f"must be like key=value, got {shorten(part)}", field=field, value=text)
        try:
            found[key.strip().replace("-", "_")] = json.loads(value)
        except ValueError:
            found[key.strip().replace("-", "_")] = value.strip()
    return found


@dataclass(frozen=True)
class Comparison:
    """What all participants have in common.

    Attributes:
        model: a checkpoint's directory.
        requests: with token ids, in order of arrival; all are sent at once.
        dtype: of weights, products, keys and values.
        rows: requests that run at once, at most.
        threads: cores that a participant may use.
        ignores_eos: answers go on to their longest.
        num_iters: rounds; in each one every participant runs once.
        timeout: seconds of one load or run.
    """

    model: str
    requests: Sequence[BenchRequest]
    dtype: str
    rows: int
    threads: int
    ignores_eos: bool
    num_iters: int = 3
    timeout: float = 900.0

    @property
    def max_model_len(self) -> int:
        """Tokens of the longest request, in whole pages."""
        longest = max(request.num_prompt_tokens + request.max_tokens for request in self.requests)
        return -(-longest // 128) * 128

    def make_job(self, participant: Participant) -> dict[str, Any]:
        """Returns the first line that a participant reads."""
        return {
            "model": self.model,
            "dtype": participant.dtype or self.dtype,
            "rows": self.rows,
            "threads": self.threads,
            "max_model_len": self.max_model_len,
            "ignore_eos": self.ignores_eos,
            "options": dict(participant.options),
            "requests": [
                {"prompt_token_ids": list(request.prompt_token_ids or ()), "max_tokens": request.max_tokens}
                for request in self.requests
            ],
        }


@dataclass
class Outcome:
    """What one participant did; `skipped` says why it did not, or not to the end."""

    participant: Participant
    facts: dict[str, Any] = field(default_factory=dict)
    seconds: list[float] = field(default_factory=list)
    outputs: list[list[Any]] = field(default_factory=list)  # of each run: ids, or their number
    num_compiled: int = 0
    skipped: str | None = None

    @property
    def is_measured(self) -> bool:
        """Whether it ran in every round."""
        return self.skipped is None and bool(self.seconds)

    @property
    def num_tokens(self) -> int:
        """Output tokens of one run."""
        return sum(each if isinstance(each, int) else len(each) for each in self.outputs[0])


@dataclass(frozen=True)
class Agreement:
    """How many answers are those of the first participant, and where the others differ first, in tokens."""

    num_equal: int
    num_compared: int
    first_difference: int | None  # the earliest
    median_difference: int | None

    @classmethod
    def of(cls, mine: Sequence[Any], first: Sequence[Any]) -> Agreement | None:
        """Returns the agreement of two runs; None where one has no token ids."""
        pairs = [(a, b) for a, b in zip(mine, first, strict=True) if isinstance(a, list) and isinstance(b, list)]
        if not pairs:
            return None
        places = sorted(find_difference(a, b) for a, b in pairs if a != b)
        middle = places[len(places) // 2] if places else None
        return cls(len(pairs) - len(places), len(pairs), places[0] if places else None, middle)


def find_difference(first: Sequence[int], second: Sequence[int]) -> int:
    """Returns the first place at which two answers differ; the length of the shorter where it begins the other."""
    pairs = enumerate(zip(first, second, strict=False))
    return next((at for at, (a, b) in pairs if a != b), min(len(first), len(second)))


def compare(comparison: Comparison, participants: Sequence[Participant]) -> list[Outcome]:
    """Loads all participants one after the other, then lets them take turns; only one runs at a time."""
    outcomes = [Outcome(each) for each in participants]
    processes: dict[str, PeerProcess] = {}
    try:
        with show_progress("Loading", unit="participants") as report:
            for index, outcome in enumerate(outcomes):
                report(index, len(outcomes), outcome.participant.name)
                _load(comparison, outcome, processes)
            report(len(outcomes), len(outcomes))
        with show_progress("Measuring", unit="rounds") as report:
            for turn in range(comparison.num_iters):
                for outcome in outcomes:
                    report(turn, comparison.num_iters, outcome.participant.name)
                    if outcome.skipped is None:
                        _run(comparison, outcome, processes[outcome.participant.name])
            report(comparison.num_iters, comparison.num_iters)
    finally:
        for process in processes.values():
            process.close()
    return outcomes


def _load(comparison: Comparison, outcome: Outcome, processes: dict[str, PeerProcess]) -> None:
    participant = outcome.participant
    try:
        process = PeerProcess(
            participant.command, make_environment(participant, comparison.threads), comparison.timeout
        )
        processes[participant.name] = process
        outcome.facts = process.load(comparison.make_job(participant))
        process.stop()
    except PeerError as error:
        outcome.skipped = str(error)
        _close(participant, processes)


def _run(comparison: Comparison, outcome: Outcome, process: PeerProcess) -> None:
    process.resume()
    try:
        answer = process.run()
    except PeerError as error:
        outcome.skipped = str(error)
        process.stop()
        return
    process.stop()
    if len(answer["outputs"]) != len(comparison.requests):
        outcome.skipped = f"{len(answer['outputs'])} answers to {len(comparison.requests)} requests"
        return
    outcome.seconds.append(answer["seconds"])
    outcome.outputs.append(answer["outputs"])
    outcome.num_compiled += answer.get("num_compiled", 0)


def _close(participant: Participant, processes: dict[str, PeerProcess]) -> None:
    if (process := processes.pop(participant.name, None)) is not None:
        process.close()


def make_environment(participant: Participant, threads: int) -> dict[str, str]:
    """Returns the variables of a participant's process. A peer's interpreter finds `protocol` and nothing of ours."""
    mine, paths = read_environment(), [str(_PROGRAMS)]
    if participant.command[1] == _OURS and "PYTHONPATH" in mine:
        paths.append(mine["PYTHONPATH"])
    own = {**dict.fromkeys(_THREAD_VARIABLES, str(threads)), "PYTHONPATH": os.pathsep.join(paths)}
    return _VARIABLES | mine | own
