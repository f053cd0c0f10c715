"""The demo: a hundred questions answered at once, then one workload served in three ways and compared.

1. About a hundred prompts for the model that ships in the package, with a live view of the engine. Stories are sampled,
   each with its own seed; everything else is greedy, in the same batch.
2. A workload with exponential prompt and output lengths: one at a time, in static batches, and continuously batched.
   Static batches are the naive baseline: in order of arrival, prompts are padded to the longest of the batch and every
   row runs to the batch's longest answer. Programs and kernels are the same. Only requested tokens count.
"""

from __future__ import annotations

import argparse
import random
import statistics
import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from demo_plot import Curve, draw_curves
from rich.console import Console
from rich.live import Live
from rich.table import Table

from jaxserve import LLM, RequestOutput, SamplingParams

ROWS = 32
ANSWERS_SHOWN = 2  # per skill
NAMES = ("Ada", "Grace", "Alan", "Clara", "Emil", "Ida", "Nora", "Otto")
QUESTIONS = (
    "What is continuous batching?",
    "What is a KV cache?",
    "What does TTFT mean?",
    "Why are KV caches divided into pages?",
    "What is prefill?",
    "What is preemption?",
    "What is prefix caching?",
    "What is jaxserve?",
)


@dataclass(frozen=True)
class Job:
    """One request of the compared workload."""

    prompt: list[int]
    num_output: int


@dataclass
class Result:
    """The result of one way of serving."""

    name: str
    seconds: float
    tokens: int
    latencies: list[float]

    @property
    def rate(self) -> float:
        return self.tokens / self.seconds


@dataclass(frozen=True)
class Question:
    """One prompt of the live part."""

    skill: str
    text: str
    params: SamplingParams


def make_questions(count: int, rng: random.Random) -> list[Question]:
    """Returns questions over every skill that the demo model has, in random order."""
    makers: dict[str, Callable[[], str]] = {
        "addition": lambda: f"What is {rng.randint(10, 999)} + {rng.randint(10, 999)}?",
        "glossary": lambda: rng.choice(QUESTIONS),
        "json": lambda: f"Turn this into JSON: name: {rng.choice(NAMES)}, age: {rng.randint(18, 90)}",
        "story": lambda: "Tell me a story.",
    }
    skills = [list(makers)[index % len(makers)] for index in range(count)]
    rng.shuffle(skills)
    greedy = SamplingParams(temperature=0, max_tokens=96)
    sampled = replace(greedy, temperature=0.8, top_p=0.9)
    return [
        Question(skill, makers[skill](), replace(sampled, seed=index) if skill == "story" else greedy)
        for index, skill in enumerate(skills)
    ]


class LiveView:
    """A table of the engine's state, drawn a few times a second while it works."""

    def __init__(self, llm: LLM, total: int) -> None:
        self._ready, self._total = llm.ready, total
        self._start = time.perf_counter()
        self.done = 0

    def __rich__(self) -> Table:
        scheduler, counts = self._ready.engine.scheduler, self._ready.runner.counts
        pool = scheduler.pages.pools[0]
        steps = ", ".join(f"{bucket}: {number}" for bucket, number in sorted(counts.steps.items()))
        table = Table(title="jaxserve", min_width=64)
        table.add_column("now")
        table.add_column("", justify="right")
        table.add_row("requests finished", f"{self.done} of {self._total}")
        table.add_row("rows running / waiting", f"{len(scheduler.batch)} / {len(scheduler.waiting)}")
        table.add_row(
            "KV pages in use / cached / all", f"{pool.num_referenced} / {pool.num_cached} / {pool.num_pages - 1}"
        )
        rate = counts.useful_tokens / (time.perf_counter() - self._start)
        table.add_row("tokens computed per second", f"{rate:,.0f}")
        table.add_row("steps by bucket", steps or "none yet")
        table.add_row("useful / padded tokens", f"{counts.useful_tokens / max(1, counts.padded_tokens):.2f}")
        return table


def answer_live(llm: LLM, questions: Sequence[Question], console: Console) -> list[RequestOutput]:
    """Answers all questions at once and shows the engine meanwhile."""
    ready = llm.ready
    requests = [ready.requests.make_chat([{"role": "user", "content": q.text}], q.params) for q in questions]
    for request in requests:
        ready.engine.add_request(request)
    view, outputs = LiveView(llm, len(requests)), {}
    with Live(view, console=console, refresh_per_second=8):
        while ready.engine.has_unfinished:
            outputs.update((output.request_id, output) for output in ready.engine.step() if output.finished)
            view.done = len(outputs)
    console.print()
    return [outputs[request.request_id] for request in requests]


def make_load(count: int, vocab_size: int, rng: random.Random) -> list[Job]:
    """Returns jobs with exponential prompt and output lengths."""
    jobs = []
    for _ in range(count):
        num_prompt = min(8 + int(rng.expovariate(1 / 48)), 384)
        num_output = min(4 + int(rng.expovariate(1 / 60)), 320)
        jobs.append(Job([rng.randrange(10, vocab_size) for _ in range(num_prompt)], num_output))
    return jobs


def serve_one_at_a_time(llm: LLM, jobs: Sequence[Job]) -> Result:
    return _time("one at a time", jobs, [(llm, [job], [job.num_output]) for job in jobs])


def serve_static_batches(llm: LLM, jobs: Sequence[Job]) -> Result:
    groups = []
    for start in range(0, len(jobs), ROWS):
        batch = jobs[start : start + ROWS]
        width, longest = max(len(job.prompt) for job in batch), max(job.num_output for job in batch)
        padded = [Job([9] * (width - len(job.prompt)) + job.prompt, job.num_output) for job in batch]
        groups.append((llm, padded, [longest] * len(batch)))
    return _time(f"static batches of {ROWS}", jobs, groups, ends_together=True)


def serve_continuously(llm: LLM, jobs: Sequence[Job]) -> Result:
    return _time("continuous batching", jobs, [(llm, list(jobs), [job.num_output for job in jobs])])


def _time(
    name: str, jobs: Sequence[Job], groups: Sequence[tuple[LLM, list[Job], list[int]]], *, ends_together: bool = False
) -> Result:
    """Runs groups one after another; every request arrives at the beginning."""
    start, latencies = time.perf_counter(), []
    for llm, group, lengths in groups:
        ends = _run_group(llm, group, lengths)
        latencies += [(max(ends) if ends_together else end) - start for end in ends]
    return Result(name, time.perf_counter() - start, sum(job.num_output for job in jobs), latencies)


def _run_group(llm: LLM, jobs: Sequence[Job], lengths: Sequence[int]) -> list[float]:
    ready, ends = llm.ready, {}
    for job, length in zip(jobs, lengths, strict=True):
        params = SamplingParams(temperature=0, max_tokens=length, ignore_eos=True, detokenize=False)
        request = ready.requests.make({"prompt_token_ids": job.prompt}, params)
        ends[request.request_id] = 0.0
        ready.engine.add_request(request)
    while ready.engine.has_unfinished:
        for output in ready.engine.step():
            if output.finished:
                ends[output.request_id] = time.perf_counter()
    return list(ends.values())


def compare(llm: LLM, jobs: Sequence[Job], console: Console) -> list[Result]:
    """Serves the workload in three ways and prints one table."""
    ways: list[Callable[[LLM, Sequence[Job]], Result]] = [serve_one_at_a_time, serve_static_batches, serve_continuously]
    results = []
    for way in ways:
        with console.status(way.__name__.replace("_", " ") + " ..."):
            llm.ready.engine.scheduler.pages.drop_prefix_index()
            results.append(way(llm, jobs))
    best = results[-1]
    tokens = best.tokens
    table = Table(title=f"{len(jobs)} requests, {tokens:,} output tokens, {ROWS} rows, measured just now")
    for column in ("", "seconds", "tokens/s", "p50 latency", "p99 latency", "slower by"):
        table.add_column(column, justify="right", no_wrap=column == "")
    for result in results:
        p50, p99 = (statistics.quantiles(result.latencies, n=100)[q] for q in (49, 98))
        factor = "" if result is best else f"{best.rate / result.rate:.1f}x"
        row = (f"{result.seconds:.1f}", f"{result.rate:,.0f}", f"{p50:.2f} s", f"{p99:.2f} s", factor)
        table.add_row(result.name, *row)
    console.print(table)
    return results


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--num-prompts", type=int, default=100, help="prompts answered live (default: 100)")
    parser.add_argument("--num-requests", type=int, default=128, help="requests of the compared load (default: 128)")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--plot", metavar="FILE", type=Path, help="draw the comparison as an SVG")
    args = parser.parse_args()
    console, rng = Console(), random.Random(args.seed)
    start = time.perf_counter()
    llm = LLM(max_num_seqs=ROWS, enable_prefix_caching=True, compile="all")
    console.print(f"Ready after {time.perf_counter() - start:.1f} s; nothing is compiled from here on.")
    questions = make_questions(args.num_prompts, rng)
    outputs = answer_live(llm, questions, console)
    shown: Counter[str] = Counter()
    for question, output in zip(questions, outputs, strict=True):
        shown[question.skill] += 1
        if shown[question.skill] <= ANSWERS_SHOWN:
            console.print(f"[bold]> {question.text}[/]\n{output.outputs[0].text.strip()}", highlight=False)
    results = compare(llm, make_load(args.num_requests, llm.ready.shapes.model.vocab_size, rng), console)
    if args.plot is not None:
        tokens = f"{results[-1].tokens:,} output tokens"
        title = f"{args.num_requests} requests, {tokens}, {ROWS} rows: the same programs, served three ways"
        args.plot.write_text(draw_curves([Curve(result.name, result.latencies) for result in results], title))
        console.print(f"The plot is in {args.plot}.")


if __name__ == "__main__":
    main()
