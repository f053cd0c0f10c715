"""Makes the small excerpts of public traces that `jaxserve bench` takes lengths and gaps from.

    python scripts/excerpt_traces.py FOLDER_OF_TRACES

A row is a request of the trace. The requests are sorted by prompt and cut into strata of equal size; each is sorted by
output and cut into equal parts, of which the row nearest to the mean is taken. Gaps between arrivals are sampled on
their own: their sorted list is cut into as many equal parts, and each row gets the mean of one, in a fixed random
order. So means and quantiles are nearly those of the trace; what depends on the order of its requests is not kept.
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path

from jaxserve.tools.simulation.traces import TraceRequest, read_trace

TRACES = {
    "azure-chat": "AzureLLMInferenceTrace_conv.csv",
    "azure-code": "AzureLLMInferenceTrace_code.csv",
    "mooncake": "mooncake_conversation.jsonl",
}
STRATA, PER_STRATUM = 50, 10
HEADER = "gap_seconds,prompt_tokens,output_tokens"
FOLDER = Path(__file__).parents[1] / "jaxserve" / "tools" / "bench" / "lengths"


def cut(count: int, parts: int) -> list[range]:
    """Returns `parts` ranges of nearly equal size that make up range(count)."""
    bounds = [round(index * count / parts) for index in range(parts + 1)]
    return [range(low, high) for low, high in pairwise(bounds)]


def sample_requests(trace: Sequence[TraceRequest]) -> list[TraceRequest]:
    """Returns STRATA * PER_STRATUM requests of the trace, by arrival."""
    by_prompt = sorted(trace, key=lambda each: (each.num_prompt_tokens, each.num_output_tokens))
    found = []
    for stratum in cut(len(by_prompt), STRATA):
        by_output = sorted((by_prompt[place] for place in stratum), key=lambda each: each.num_output_tokens)
        for part in cut(len(by_output), PER_STRATUM):
            mean = sum(by_output[place].num_output_tokens for place in part) / len(part)
            nearest = min(part, key=lambda place, mean=mean: abs(by_output[place].num_output_tokens - mean))
            found.append(by_output[nearest])
    return sorted(found, key=lambda each: each.arrival_time)


def sample_gaps(trace: Sequence[TraceRequest], count: int) -> list[float]:
    """Returns `count` gaps in seconds, with the mean of all gaps of the trace, in random order."""
    gaps = sorted(later.arrival_time - earlier.arrival_time for earlier, later in pairwise(trace))
    found = [sum(gaps[index] for index in part) / len(part) for part in cut(len(gaps), count)]
    random.Random(0).shuffle(found)
    return found


def make_excerpt(trace: Sequence[TraceRequest]) -> str:
    """Returns the text of an excerpt."""
    rows = sample_requests(trace)
    lines = [
        f"{gap:.6f},{each.num_prompt_tokens},{each.num_output_tokens}"
        for gap, each in zip(sample_gaps(trace, len(rows)), rows, strict=True)
    ]
    return "\n".join([HEADER, *lines]) + "\n"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("traces", type=Path)
    args = parser.parse_args()
    for name, file in TRACES.items():
        (FOLDER / f"{name}.csv").write_text(make_excerpt(read_trace(args.traces / file)))


if __name__ == "__main__":
    main()
