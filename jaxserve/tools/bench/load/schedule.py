"""The schedule of requests: when each is sent, in seconds after the start."""

from __future__ import annotations

import math
from collections.abc import Sequence

from jaxserve.errors import ConfigError


def draw_arrivals(count: int, rate: float, *, burstiness: float = 1.0, seed: int = 0) -> list[float]:
    """Returns the times of `count` arrivals at `rate` a second on average; all are 0 where the rate is infinite.

    Gaps are drawn from a gamma distribution of shape `burstiness`: 1 is a Poisson process, less is burstier, more is
    steadier.
    """
    import numpy as np

    if math.isinf(rate):
        return [0.0] * count
    gaps = np.random.default_rng(seed).gamma(burstiness, 1 / (rate * burstiness), count)
    return np.cumsum(gaps).tolist()


def scale_arrivals(times: Sequence[float], rate_scale: float) -> list[float]:
    """Returns the arrivals of a trace, begun at 0, `rate_scale` times as fast; ConfigError without times."""
    if not any(times):
        message = "the dataset has no arrival times; use a trace, or leave this out and give --request-rate"
        raise ConfigError(message, field="use_trace_arrivals", value=True)
    first = min(times)
    return [(time - first) / rate_scale for time in times]
