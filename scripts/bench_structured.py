"""What structured output costs per token: the real engine loop on a device that only takes time.

The device answers a step a fixed time after it was started, with random tokens that its masks allow; everything on the
host is real: scheduler, masks in threads, matchers, detokenizing. Rows with a JSON schema are compared with the same
rows without one. `--quick` is for the tests.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import numpy as np
from rich.console import Console
from rich.table import Table

from jaxserve import SamplingParams, StructuredOutputsParams
from jaxserve.engine.engine import Engine
from jaxserve.engine.prompts import RequestFactory
from jaxserve.pages import PageGroup, PageManager
from jaxserve.presets import demo_model_dir
from jaxserve.scheduler import Scheduler, SchedulerLimits, StepOutputs, StepPlan
from jaxserve.scheduler.sequence import MASK_LATE
from jaxserve.tokenizers import load_tokenizer

PAGE_SIZE, CONTEXT = 64, 4096
SCHEMA = {
    "type": "array",
    "minItems": 200,  # no row ends while the clock runs
    "items": {
        "type": "object",
        "properties": {
            "name": {"type": "string"},
            "age": {"type": "integer"},
            "kind": {"enum": ["cat", "dog", "bird"]},
            "tags": {"type": "array", "items": {"type": "string"}},
        },
        "required": ["name", "age", "kind", "tags"],
        "additionalProperties": False,
    },
}


class SlowStep:
    """A step that began now and ends `seconds` later, however long the host takes to choose from it."""

    def __init__(self, device: SlowDevice, num_rows: int) -> None:
        self._device, self._num_rows = device, num_rows
        begin = max(time.perf_counter(), device.busy_until)
        device.busy_until = self._end = begin + device.seconds

    def choose(self, mask: Any = None) -> SlowStep:
        self._ids = self._device.draw(self._num_rows, mask)
        self._end = max(self._end, time.perf_counter())
        return self

    def result(self) -> StepOutputs:
        time.sleep(max(0.0, self._end - time.perf_counter()))
        return StepOutputs(self._ids)


class SlowDevice:
    """Implements `engine.Runner`."""

    def __init__(self, seconds: float, vocab_size: int) -> None:
        self.seconds, self.busy_until, self.late = seconds, 0.0, 0
        self._vocab_size, self._rng = vocab_size, np.random.default_rng(0)

    def start(self, plan: StepPlan) -> SlowStep:
        return SlowStep(self, plan.num_rows)

    def draw(self, num_rows: int, mask: Any) -> list[int]:
        if mask is None:
            return self._rng.integers(3, self._vocab_size, num_rows).tolist()
        ids = []
        for line in mask:
            allowed = np.flatnonzero(np.unpackbits(line.view(np.uint8), bitorder="little")[: self._vocab_size])
            self.late += not len(allowed)
            ids.append(int(self._rng.choice(allowed)) if len(allowed) else MASK_LATE)
        return ids

    def reset(self) -> None:
        raise AssertionError("no step fails here")


def measure(rows: int, seconds: float, steps: int, structured: StructuredOutputsParams | None) -> dict[str, float]:
    """Returns milliseconds per step with `rows` rows decoding, and what came late."""
    tokenizer = load_tokenizer(demo_model_dir())
    device = SlowDevice(seconds, tokenizer.vocab_size)
    limits = SchedulerLimits(rows, rows + 4096, CONTEXT, CONTEXT // PAGE_SIZE)
    pages = PageManager(
        [PageGroup(rows * CONTEXT // PAGE_SIZE + 1)],
        page_size=PAGE_SIZE,
        max_chunk=rows + 4096,
        enable_prefix_caching=False,
    )
    engine = Engine(Scheduler(limits, pages), device, vocab_size=tokenizer.vocab_size, tokenizer=tokenizer)
    requests = RequestFactory(
        tokenizer, vocab_size=tokenizer.vocab_size, eos_token_ids=(), seed=0, max_model_len=CONTEXT, max_logprobs=0
    )
    params = SamplingParams(max_tokens=None, ignore_eos=True, structured_outputs=structured)
    for _ in range(rows):
        engine.add_request(requests.make("People:", params))
    while len(engine.scheduler.batch.decoding) < rows:
        engine.step()
    for _ in range(4):
        engine.step()
    tokens_before = sum(len(stream.token_ids) for stream in engine.scheduler.batch.by_ticket.values())
    times = []
    for _ in range(steps):
        start = time.perf_counter()
        engine.step()
        times.append(1e3 * (time.perf_counter() - start))
    tokens = sum(len(stream.token_ids) for stream in engine.scheduler.batch.by_ticket.values()) - tokens_before
    return {
        "ms_per_step": statistics.fmean(times),
        "tokens_per_step": tokens / steps,
        "late_rows": device.late,
        "open_rows": len(engine.scheduler.batch),
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, nargs="+", default=[1, 16, 64])
    parser.add_argument("--ms", type=float, default=20, help="what a step takes the device (default: %(default)s)")
    parser.add_argument("--steps", type=int, default=100)
    parser.add_argument("--quick", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.quick:
        args.rows, args.steps = [4], 10
    table = Table(title=f"A step of {args.ms:g} ms, mean of {args.steps} steps, a JSON schema on every row")
    for column in ("rows", "free, ms", "structured, ms", "cost", "tokens per step", "late or jumping rows"):
        table.add_column(column, justify="right")
    found = []
    structured = StructuredOutputsParams(json=SCHEMA, disable_any_whitespace=True)
    for rows in args.rows:
        free, formed = (measure(rows, args.ms / 1e3, args.steps, form) for form in (None, structured))
        cost = formed["ms_per_step"] / free["ms_per_step"] - 1
        found.append({"rows": rows, "free": free, "structured": formed, "cost": cost})
        cells = (f"{free['ms_per_step']:.2f}", f"{formed['ms_per_step']:.2f}", f"{cost:+.1%}")
        table.add_row(str(rows), *cells, f"{formed['tokens_per_step']:.1f}", str(formed["late_rows"]))
    Console().print(table)
    if args.json:
        args.json.write_text(json.dumps(found, indent=1) + "\n")


if __name__ == "__main__":
    main()
