"""A device's part of a profile of jax's profiler: its kernels, and the time between them."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator
from typing import Any

import jax

from device_stages.results import Line

MOST = 10  # kernels in a line, the slowest ones
_NAME_CHARS = 60


def list_events(profile: jax.profiler.ProfileData) -> Iterator[Any]:
    """Yields the events of the device: kernels of GPUs, operations of TPUs."""
    for plane in profile.planes:
        if not plane.name.startswith("/device:") or plane.name.startswith("/device:CUSTOM"):
            continue
        is_gpu = plane.name.startswith("/device:GPU")
        for line in plane.lines:
            # Other lines of a GPU's plane repeat its streams.
            if line.name.startswith("Stream" if is_gpu else "XLA Ops"):
                yield from line.events


def read_kernels(profile: jax.profiler.ProfileData) -> dict[str, tuple[float, int]]:
    """Returns (seconds, launches) by name."""
    found: dict[str, tuple[float, int]] = defaultdict(lambda: (0.0, 0))
    for event in list_events(profile):
        seconds, count = found[event.name]
        found[event.name] = (seconds + event.duration_ns / 1e9, count + 1)
    return dict(found)


def describe_trace(profile: jax.profiler.ProfileData, num_steps: int) -> Line:
    """Returns the microseconds of a step in which kernels run and in which none does, and the longest kernels.

    Empty if the profile has no kernel.
    """
    spans = sorted((event.start_ns, event.start_ns + event.duration_ns) for event in list_events(profile))
    if not spans:
        return {}
    gaps, end = [], spans[0][1]
    for start, last in spans[1:]:
        if start > end:
            gaps.append((start - end) / 1e3)
        end = max(end, last)
    total, idle = (end - spans[0][0]) / 1e3, sum(gaps)
    kernels = read_kernels(profile)
    slowest = sorted(kernels, key=lambda name: kernels[name][0], reverse=True)[:MOST]
    return {
        "busy_us_of_step": (total - idle) / num_steps,
        "idle_us_of_step": idle / num_steps,
        "longest_gaps_us": [round(gap, 1) for gap in sorted(gaps, reverse=True)[:num_steps]],
        "kernels_of_step": len(spans) / num_steps,
        "us_of_kernels": {name[:_NAME_CHARS]: round(1e6 * kernels[name][0] / num_steps, 1) for name in slowest},
        "launches": {name[:_NAME_CHARS]: kernels[name][1] / num_steps for name in slowest},
    }
