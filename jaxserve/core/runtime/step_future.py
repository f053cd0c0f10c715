"""A step's outputs, on their way to the host."""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np

from jaxserve.core.runtime.feature import InFlight
from jaxserve.core.runtime.step_arrays import SampledTokens
from jaxserve.core.scheduler.sequence import NON_FINITE, NOT_KEPT
from jaxserve.core.scheduler.step_plan import StepOutputs


class StepFuture:
    """A step's outputs, whose copy to the host has begun.

    Args:
        more: (log-probabilities of tokens, of prompts, embeddings), each None if no row asked; None if all are.
        beside: what features run beside the step.
        lengths: the tokens of each row, where each token has an embedding of its own.
    """

    def __init__(
        self,
        sampled: SampledTokens,
        more: tuple[Any, Any, Any] | None,
        num_rows: int,
        beside: Sequence[InFlight] = (),
        lengths: Sequence[int] | None = None,
    ) -> None:
        self._sampled, self._more, self._num_rows, self._beside = sampled, more, num_rows, beside
        self._lengths = lengths
        if _is_reader():
            for array in jax.tree.leaves((sampled, more)):
                array.copy_to_host_async()

    def wait(self) -> None:
        """Waits for the device."""
        jax.block_until_ready((self._sampled, self._more))

    def result(self) -> StepOutputs:
        """Waits for the device and returns the outputs of the step's rows."""
        ids, drafts, more = _read((self._sampled.ids, self._sampled.drafts, self._more))
        logprobs, prompt_logprobs, embeddings = more or (None, None, None)
        if ids is None:  # the embeddings alone can tell whether the model's numbers are finite
            is_finite = np.isfinite(embeddings).all(axis=1, keepdims=True)
            if self._lengths is not None:
                ends = np.cumsum(self._lengths)
                embeddings = np.split(embeddings[: ends[-1]], ends[:-1])
                is_finite = np.array([[each.all()] for each in np.split(is_finite[: ends[-1]], ends[:-1])])
            ids = np.where(is_finite, 0, NON_FINITE)
        ids, drafts = ids[: self._num_rows], None if drafts is None else drafts[: self._num_rows].tolist()
        of_features: dict[str, Any] = {}
        for each in self._beside:
            of_features |= each.wait()
        counts = None
        if ids.shape[1] == 1:
            ids = ids[:, 0]
        else:
            is_kept = ids != NOT_KEPT
            counts, ids = is_kept.sum(axis=1).tolist(), ids[is_kept]
            lines = np.flatnonzero(is_kept)
            logprobs = jax.tree.map(lambda array: array[lines], logprobs)
        return StepOutputs(
            ids.tolist(),
            counts,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            embeddings=embeddings,
            drafts=drafts,
            **of_features,
        )


@functools.cache
def _is_reader() -> bool:
    """Whether this is the process that plans the steps: outputs are the same on all, and no other reads them."""
    return jax.process_index() == 0


def _read(arrays: tuple[Any, ...]) -> tuple[Any, ...]:
    """Waits for arrays and returns them on the host. `jax.device_get` would take a CPU three times as long."""
    with jax.transfer_guard_device_to_host("allow"):
        return jax.tree.map(np.asarray, arrays)
