"""The process that `bench_server.py` measures: the server, or `LLM`, on a device that only takes time.

Every step ends a fixed time after it began, with tokens of ordinary words. Only the two functions that load weights and
start the runner are replaced; all the rest is what serves users.

    python scripts/bench_server_null.py serve --rows 256 --ms 20
    python scripts/bench_server_null.py generate --rows 256 --ms 20 --tokens 256

With `--profile FILE`, SIGUSR1 starts to sample the threads, and a second SIGUSR1 writes the file.
"""

from __future__ import annotations

import argparse
import json
import os
import resource
import signal
import sys
import threading
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from types import FrameType
from typing import Any

import numpy as np

from jaxserve import LLM, SamplingParams
from jaxserve.config import EngineConfig
from jaxserve.core.runtime import startup
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.step_counts import StepCounts
from jaxserve.core.scheduler import StepOutputs, StepPlan
from jaxserve.engine import build
from jaxserve.presets import demo_model_dir
from jaxserve.tokenizers import load_tokenizer

_DRAWN = 1 << 16  # tokens drawn at the start and then repeated
_SAMPLE_SECONDS = 0.002
_SAMPLED = ("MainThread", "jaxserve-engine")  # they live as long as the server


class SlowStep:
    """A step that ends `device.seconds` after its start, or after the end of the step before it."""

    def __init__(self, device: SlowDevice, num_rows: int) -> None:
        self._device, self._num_rows = device, num_rows
        device.busy_until = self._end = max(time.perf_counter(), device.busy_until) + device.seconds

    def sample(self, mask: Any = None) -> SlowStep:
        assert mask is None, "no request here has a form"
        return self

    def result(self) -> StepOutputs:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return StepOutputs(self._device.draw(self._num_rows))


class SlowDevice:
    """Implements `engine.Runner`."""

    num_programs, num_compiles = 1, 0

    def __init__(self, seconds: float) -> None:
        self.seconds, self.busy_until, self.counts = seconds, 0.0, StepCounts()
        self.step_costs: dict[tuple[int, int], float] = {}  # no width is chosen by them
        tokenizer = load_tokenizer(demo_model_dir())
        texts = {token: tokenizer.decode([token], True).strip() for token in range(tokenizer.vocab_size)}
        words = [token for token, text in texts.items() if text.isascii() and text.isalpha()]
        self._ids, self._at = np.random.default_rng(0).choice(words, _DRAWN).tolist(), 0

    def start(self, plan: StepPlan) -> SlowStep:
        self.counts.count(Bucket(plan.num_tokens, plan.num_rows), plan.num_tokens)
        return SlowStep(self, plan.num_rows)

    def draw(self, num_rows: int) -> list[int]:
        """Returns the next of the tokens drawn at the start, which takes no time for random numbers."""
        if self._at + num_rows > _DRAWN:
            self._at = 0
        self._at += num_rows
        return self._ids[self._at - num_rows : self._at]

    def warm_thread(self) -> None:
        """Does nothing."""

    def reset(self) -> None:
        raise AssertionError("no step fails here")


def install(seconds: float, rows: int) -> None:
    """Makes all engines built afterwards run on a `SlowDevice`, with pages for all its rows."""

    def start_runner(shapes: Shapes, *_: Any, **__: Any) -> tuple[Any, Any]:
        pages = 1 + rows * shapes.state.pages_per_row
        plan = startup.plan_cache(
            shapes.model, specs=shapes.specs, max_chunk=rows, num_devices=1, budget=0, override=pages
        )
        return SlowDevice(seconds), plan

    startup.start_runner = start_runner  # type: ignore[assignment]
    build.load_params = lambda *_, **__: {}  # type: ignore[assignment]


class Sampler:
    """Samples the stacks of both busy threads, and charges a thread's CPU time since the last sample to its stack.

    A sample is taken when a thread releases the GIL: C code that holds it is charged to its caller.
    """

    def __init__(self, path: Path) -> None:
        self._path = path
        self._threads: dict[str, _Charges] = {}
        self._running: threading.Event | None = None

    def toggle(self, *_: Any) -> None:
        """Starts sampling, or ends it and writes the file."""
        if self._running is None:
            self._running = threading.Event()
            self._threads = {}
            threading.Thread(target=self._sample, args=(self._running,), name="sampler", daemon=True).start()
        else:
            self._running.set()
            self._running = None

    def _sample(self, end: threading.Event) -> None:
        clocks = {
            each: time.pthread_getcpuclockid(each.ident or 0) for each in threading.enumerate() if each.name in _SAMPLED
        }
        before = {each: time.clock_gettime(clock) for each, clock in clocks.items()}
        while not end.wait(_SAMPLE_SECONDS):
            frames = sys._current_frames()
            for each, clock in clocks.items():
                now = time.clock_gettime(clock)
                self._threads.setdefault(each.name, _Charges()).add(frames[each.ident or 0], now - before[each])
                before[each] = now
        partial = self._path.with_suffix(".partial")
        partial.write_text(json.dumps({name: vars(each) for name, each in self._threads.items()}))
        partial.rename(self._path)


@dataclass
class _Charges:
    """The seconds of one thread, by function."""

    seconds: float = 0.0
    own: Counter[str] = field(default_factory=Counter)
    with_callees: Counter[str] = field(default_factory=Counter)

    def add(self, frame: FrameType | None, seconds: float) -> None:
        self.seconds += seconds
        if frame is not None:
            self.own[_name(frame)] += seconds
        seen = set()
        while frame is not None:
            seen.add(_name(frame))
            frame = frame.f_back
        for name in seen:
            self.with_callees[name] += seconds


def _name(frame: FrameType) -> str:
    code = frame.f_code
    return f"{'/'.join(Path(code.co_filename).parts[-2:])}:{code.co_firstlineno} {code.co_qualname}"


def serve(config: EngineConfig, profile: Path | None) -> None:
    """Serves until a signal ends it."""
    from jaxserve.server import launch
    from jaxserve.server.options import ServerConfig

    if profile is not None:
        signal.signal(signal.SIGUSR1, Sampler(profile).toggle)
    limits = {"max_streams": 8192, "max_connections": 8192}
    launch.serve(config, ServerConfig.from_options(port=0, shutdown_timeout=1.0, **limits))


def generate(options: dict[str, Any], num_prompts: int, tokens: int, repeats: int) -> None:
    """Prints the time of `LLM.generate` for prompts that come together."""
    llm = LLM(show_progress=False, compile="all", **options)
    params = SamplingParams(temperature=0, max_tokens=tokens, ignore_eos=True)
    prompts = [make_prompt(index) for index in range(num_prompts)]
    llm.generate(prompts[:1], SamplingParams(max_tokens=2, ignore_eos=True), use_tqdm=False)
    found = []
    for _ in range(repeats):
        start, cpu = time.perf_counter(), time.process_time()
        outputs = llm.generate(prompts, params, use_tqdm=False)
        taken, cpu = time.perf_counter() - start, time.process_time() - cpu
        num_tokens = sum(len(output.outputs[0].token_ids) for output in outputs)
        found.append({"seconds": taken, "cpu_seconds": cpu, "tokens": num_tokens})
    print(json.dumps(found))


def make_prompt(index: int) -> str:
    """Returns a prompt of some dozens of tokens that shares no page with other prompts."""
    return f"{index}: Tell me a story about a cat, a dog and {index % 97} birds that live in the same old house."


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("what", choices=("serve", "generate"))
    parser.add_argument("--rows", type=int, default=256)
    parser.add_argument("--ms", type=float, default=20, help="what a step takes the device (default: %(default)s)")
    parser.add_argument("--tokens", type=int, default=256, help="of each answer of generate")
    parser.add_argument("--repeats", type=int, default=1, help="of generate")
    parser.add_argument("--profile", type=Path, metavar="FILE", help="SIGUSR1 starts and ends sampling, into this file")
    args = parser.parse_args()
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (max(soft, min(hard, 1 << 16)), hard))
    install(args.ms / 1e3, args.rows)
    options = {"max_num_seqs": args.rows, "max_num_batched_tokens": args.rows + 4096, "compilation_cache_dir": ""}
    if args.what == "serve":
        serve(EngineConfig.from_options(model="demo", **options), args.profile)
    else:
        generate(options, args.rows, args.tokens, args.repeats)


if __name__ == "__main__":
    os.environ.setdefault("JAX_PLATFORMS", "cpu")
    main()
