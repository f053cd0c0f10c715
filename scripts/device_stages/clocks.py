"""Records the GPU's clocks and power during measurements, by nvidia-smi. Changes no setting."""

from __future__ import annotations

import contextlib
import shutil
import statistics
import subprocess
import threading
import time
from collections import deque
from collections.abc import Iterator
from typing import Any

PERIOD_MS = 50
FIELDS = ("clocks.sm", "clocks.mem", "power.draw", "temperature.gpu")
_LATE = 0.5  # seconds that a sample may lie outside its measurement


def query_gpu(*fields: str) -> dict[str, str]:
    """Returns nvidia-smi's values of the first GPU by field; empty if there is none."""
    if shutil.which("nvidia-smi") is None:
        return {}
    command = ["nvidia-smi", "-i", "0", f"--query-gpu={','.join(fields)}", "--format=csv,noheader"]
    done = subprocess.run(command, capture_output=True, text=True, check=False, timeout=20)
    values = [value.strip() for value in done.stdout.strip().split(",")]
    return (
        dict(zip(fields, values, strict=True)) if len(values) == len(fields) else {"error": done.stdout + done.stderr}
    )


class ClockLog:
    """Samples of one nvidia-smi that runs beside the measurements; none without a GPU."""

    def __init__(self) -> None:
        self._samples: deque[tuple[float, list[float]]] = deque(maxlen=20_000)
        self._process: subprocess.Popen[str] | None = None

    def start(self) -> None:
        if shutil.which("nvidia-smi") is None:
            return
        query = [f"--query-gpu={','.join(FIELDS)}", "--format=csv,noheader,nounits", "-lms", str(PERIOD_MS)]
        self._process = subprocess.Popen(
            ["nvidia-smi", "-i", "0", *query], stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True
        )
        threading.Thread(target=self._read, daemon=True).start()

    def stop(self) -> None:
        if self._process is not None:
            self._process.kill()

    def _read(self) -> None:
        assert self._process is not None and self._process.stdout is not None
        for line in self._process.stdout:
            self.add(time.monotonic(), line)

    def add(self, when: float, line: str) -> None:
        """Adds a line of nvidia-smi; ignores one that is no sample."""
        with contextlib.suppress(ValueError):
            values = [float(value) for value in line.split(",")]
            if len(values) == len(FIELDS):
                self._samples.append((when, values))

    @contextlib.contextmanager
    def watch(self) -> Iterator[dict[str, Any]]:
        """Yields a dictionary, filled at the end with the medians of its time and the range of the SM clock."""
        seen: dict[str, Any] = {}
        begin = time.monotonic()
        yield seen
        seen |= self.summarize(begin, time.monotonic())

    def summarize(self, begin: float, end: float) -> dict[str, Any]:
        """Summarizes the samples between two times of `time.monotonic`, or the nearest one if there is none."""
        samples = list(self._samples)  # a copy: the thread adds samples
        inside = [values for when, values in samples if begin <= when <= end]
        if not inside:
            near = [(abs(when - (begin + end) / 2), values) for when, values in samples]
            distance, values = min(near, default=(float("inf"), []))
            if distance > (end - begin) / 2 + _LATE:
                return {}
            inside = [values]
        clock, memory, watts, degrees = (list(column) for column in zip(*inside, strict=True))
        return {
            "sm_mhz": statistics.median(clock),
            "sm_mhz_range": [min(clock), max(clock)],
            "memory_mhz": statistics.median(memory),
            "watts": statistics.median(watts),
            "celsius": statistics.median(degrees),
            "clock_samples": len(inside),
        }
