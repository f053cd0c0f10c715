"""Packs conversations into fixed shapes, so that training compiles few programs and pads little."""

from __future__ import annotations

import queue
import random
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass

import numpy as np

Document = tuple[list[int], list[float]]  # token ids and the loss weight of each


@dataclass(frozen=True)
class Shape:
    """One batch shape. `isolated` rows hide their documents from each other; the others read them as one long text."""

    rows: int
    length: int
    isolated: bool


@dataclass(frozen=True)
class Batch:
    """Arrays of one step, all `[rows, length]`."""

    tokens: np.ndarray  # int32, zero where padded
    targets: np.ndarray  # int32, the token after each
    weights: np.ndarray  # float32, loss weight of each target
    segments: np.ndarray  # int32, positions attend within their own number only


class Packer:
    """Draws documents and fills batches with them; what does not fit waits for a later batch."""

    def __init__(self, draw: Callable[[], Document]) -> None:
        self._draw = draw
        self._waiting: list[Document] = []

    def fill(self, shape: Shape) -> Batch:
        """A batch in which no document is cut: each goes to the first row that still has room for it."""
        size = shape.rows * shape.length
        self._waiting += self._draw_tokens(1.3 * size - sum(len(ids) for ids, _ in self._waiting))
        rows: list[list[Document]] = [[] for _ in range(shape.rows)]
        room = [shape.length + 1] * shape.rows
        left = []
        for document in self._waiting:
            length = len(document[0])
            row = next((index for index, free in enumerate(room) if length <= free), None)
            if row is None:
                left.append(document)
            else:
                rows[row].append(document)
                room[row] -= length
        self._waiting = left
        return _lay_out(rows, shape)

    def _draw_tokens(self, num_tokens: float) -> list[Document]:
        documents, total = [], 0
        while total < num_tokens:
            documents.append(self._draw())
            total += len(documents[-1][0])
        return documents


def cycle_batches(packer: Packer, shapes: tuple[Shape, ...], *, ahead: int = 4) -> Iterator[Batch]:
    """Batches without end, one of each shape in turn, packed up to `ahead` in advance by a thread of their own.

    The thread is a daemon and ends with the process.
    """
    ready: queue.Queue[Batch] = queue.Queue(ahead)

    def produce() -> None:
        while True:
            for shape in shapes:
                ready.put(packer.fill(shape))

    threading.Thread(target=produce, name="packer", daemon=True).start()
    while True:
        yield ready.get()


def seed_step(seed: int, step: int) -> random.Random:
    """Randomness of the documents from `step` on: a resumed run sees new ones, and the same ones each time."""
    return random.Random(f"{seed}:{step}")


def _lay_out(rows: list[list[Document]], shape: Shape) -> Batch:
    tokens = np.zeros((shape.rows, shape.length + 1), np.int32)
    weights = np.zeros((shape.rows, shape.length + 1), np.float32)
    segments = np.zeros((shape.rows, shape.length + 1), np.int32)
    for row, documents in enumerate(rows):
        start = 0
        for number, (ids, loss_weights) in enumerate(documents, 1):
            end = start + len(ids)
            tokens[row, start:end] = ids
            weights[row, start:end] = loss_weights
            segments[row, start:end] = number if shape.isolated else 1
            start = end
    return Batch(tokens[:, :-1], tokens[:, 1:], weights[:, 1:], segments[:, :-1])
