"""Runs plans on the device. A step's transfers are all here: `_run` and `_send` to the device, `device_get` back."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping
from functools import partial
from typing import Any

import jax
import numpy as np

from jaxserve.errors import MissingProgramError
from jaxserve.pages.host_tier import PageCopy
from jaxserve.runtime.buckets import Bucket, BucketTable
from jaxserve.runtime.counts import StepCounts
from jaxserve.runtime.device_state import KVCache, RowState, make_zeros
from jaxserve.runtime.inputs import InputLayout, StateShape, StepPacker
from jaxserve.runtime.page_copies import CopiesInFlight, HostMemory, HostSlots
from jaxserve.runtime.params import WeightWriter
from jaxserve.runtime.rows import RowMirror, SampleVariant
from jaxserve.runtime.step import HiddenStates, SampleInputs, head_params
from jaxserve.sampling import RowSetting, SamplerState, make_row_setting
from jaxserve.scheduler.plan import NewRow, StepOutputs, StepPlan

_KINDS = ("forward", "sample", "loop", "logprobs", "prompt_logprobs", "pool", "set_row", "read_pages", "write_pages")


@dataclasses.dataclass(frozen=True)
class Programs:
    """The compiled programs, by kind. The set is closed unless there is a `compile_missing`."""

    forward: dict[Bucket, Any] = dataclasses.field(default_factory=dict)
    sample: dict[tuple[int, SampleVariant], Any] = dataclasses.field(default_factory=dict)
    loop: dict[tuple[int, SampleVariant], Any] = dataclasses.field(default_factory=dict)
    logprobs: dict[int, Any] = dataclasses.field(default_factory=dict)  # by rows
    prompt_logprobs: dict[Bucket, Any] = dataclasses.field(default_factory=dict)
    pool: dict[int, Any] = dataclasses.field(default_factory=dict)  # by rows
    set_row: dict[None, Any] = dataclasses.field(default_factory=dict)
    read_pages: dict[int, Any] = dataclasses.field(default_factory=dict)  # by KV group
    write_pages: dict[int, Any] = dataclasses.field(default_factory=dict)
    compile_missing: Callable[[str, Any], Any] | None = None  # (kind, key) -> the program

    def get(self, kind: str, key: Any) -> Any:
        """Returns a program, compiled now if the set is open; MissingProgramError if a closed set lacks it."""
        programs = getattr(self, kind)
        if key not in programs:
            if self.compile_missing is None:
                raise MissingProgramError(f"no {kind} program was compiled for {key}; there are {list(programs)}")
            programs[key] = self.compile_missing(kind, key)
        return programs[key]

    def copy(self) -> Programs:
        """Returns a shallow copy, to which programs can be added."""
        return dataclasses.replace(self, **{kind: dict(getattr(self, kind)) for kind in _KINDS})

    def __len__(self) -> int:
        return sum(len(getattr(self, kind)) for kind in _KINDS)


class StepFuture:
    """A step's outputs, whose copy to the host has begun.

    Args:
        token_ids: [rows] int32, or [steps, rows] of several decode steps.
        more: (log-probabilities of tokens, of prompts, embeddings), each None if no row asked; None if all are.
        copies: those of the step's pages from and to the host; None: it has none.
    """

    def __init__(
        self, token_ids: jax.Array, more: tuple[Any, Any, Any] | None, num_rows: int, copies: CopiesInFlight | None
    ) -> None:
        self._token_ids, self._more, self._num_rows, self._copies = token_ids, more, num_rows, copies
        token_ids.copy_to_host_async()
        if more is not None:
            for array in jax.tree.leaves(more):
                array.copy_to_host_async()

    def result(self) -> StepOutputs:
        """Waits for the device and returns the outputs of the step's rows."""
        found = jax.device_get(self._token_ids)[..., : self._num_rows]
        failed = frozenset() if self._copies is None else self._copies.wait()
        if found.ndim == 2:
            counts = [len(found)] * self._num_rows
            return StepOutputs(found.T.reshape(-1).tolist(), counts, failed_copies=failed)
        token_ids = found.tolist()
        if self._more is None:
            return StepOutputs(token_ids, failed_copies=failed)
        more = dict(zip(("logprobs", "prompt_logprobs", "embeddings"), jax.device_get(self._more), strict=True))
        return StepOutputs(token_ids, failed_copies=failed, **more)


@dataclasses.dataclass(frozen=True, slots=True)
class StartedLoop:
    """Several decode steps, dispatched as a whole."""

    future: StepFuture

    def sample(self, mask: np.ndarray | None = None) -> StepFuture:
        """Returns the outputs; rows with masks are never in a loop."""
        assert mask is None
        return self.future


@dataclasses.dataclass(frozen=True, slots=True)
class StartedStep:
    """A step whose forward pass was dispatched and whose tokens are not sampled yet."""

    runner: ModelRunner
    bucket: Bucket
    num_rows: int
    variant: SampleVariant
    wants_logprobs: bool
    selected: SampleInputs
    prompt_logprobs: Any
    embeddings: Any
    copies: CopiesInFlight | None = None

    def sample(self, mask: np.ndarray | None = None) -> StepFuture:
        """Dispatches sampling and returns its outputs; `mask` [num_rows, W] uint32 has the allowed tokens' bits."""
        return self.runner.sample(self, mask)


class ModelRunner:
    """Owns the parameters and the donated state. `start` and `sample` do not wait for the device."""

    def __init__(
        self,
        programs: Programs,
        buckets: BucketTable,
        *,
        params: Any,
        writer: WeightWriter,
        state_specs: tuple[KVCache, RowState, SamplerState],
        state_shape: StateShape,
        input_sharding: jax.sharding.Sharding,
        variants: Mapping[SampleVariant, SampleVariant],
        count_compiles: Callable[[], int] = lambda: 0,
        host_memory: HostMemory | None = None,
    ) -> None:
        self.params = params
        self.counts = StepCounts()
        self.host_slots = HostSlots(host_memory or HostMemory(), self.counts)
        self._count_compiles, self._compiles_before = count_compiles, count_compiles()
        self.programs = programs
        self._buckets, self._variants = buckets, variants
        self._layouts = {bucket: InputLayout(bucket, state_shape) for bucket in buckets.buckets}
        self._writer = writer
        self._state_specs = state_specs
        self._state_shape = state_shape
        self._input_sharding = input_sharding
        self._vocab_size = state_specs[2].token_stats.shape[1]
        self._mask_words = state_specs[2].allowed.shape[1]
        self.reset()

    @property
    def num_programs(self) -> int:
        """Compiled programs that steps can use."""
        return len(self.programs)

    @property
    def num_compiles(self) -> int:
        """XLA compilations in this process since the runner was ready, cached or not."""
        return self._count_compiles() - self._compiles_before

    def reset(self) -> None:
        """Replaces pools, rows and the sampler's state by zeros, at the start and after a failed step."""
        self._cache = self._rows = self._sampler = None  # freed first: there is no room for two
        self._cache, self._rows, self._sampler = make_zeros(self._state_specs)
        self.host_slots.reset()
        self._mirror = RowMirror(self._state_shape.rows)
        self._packer = StepPacker(self._mirror)

    def write_params(self, updates: Mapping[str, Any]) -> None:
        """Replaces parameters by canonical name. No step may be in flight."""
        self.params = self._writer.write(self.params, updates)

    def warm_up(self) -> None:
        """Runs every program once on padding, and waits for it."""
        self._set_row(self._state_shape.padding_row, make_row_setting(self._vocab_size, (), ()))
        for bucket in self._buckets.buckets:
            self._warm_up(bucket)
        self._compiles_before = self._count_compiles()

    def warm_thread(self) -> None:
        """Runs a compiled program on the calling thread, which will run the steps, and waits for it.

        XLA opens the random device when a thread runs its first program; by the first step the process may be out of
        file descriptors.
        """
        bucket = min(self.programs.forward)
        jax.block_until_ready(self._run(bucket, self._layouts[bucket].new()))

    def time_copies(self, copies: tuple[PageCopy, ...]) -> tuple[float, float]:
        """Saves and loads pages while no step runs; returns the seconds of each direction."""
        self._cache, save, load = self.host_slots.time_copies(self.programs.get, self._cache, copies)
        return save, load

    def list_additions(self, programs: Programs, buckets: BucketTable) -> Iterator[Callable[[], None]]:
        """Yields functions to call in order, between steps; after the last one steps use the programs of `buckets`.

        `programs` must include those already in use.
        """
        known = self._buckets.buckets

        def change() -> None:
            self._buckets = buckets
            self._compiles_before = self._count_compiles()

        yield partial(setattr, self, "programs", programs)
        for bucket in buckets.buckets:
            if bucket not in known:
                yield partial(self._warm_up, bucket)
        yield change

    def _warm_up(self, bucket: Bucket) -> None:
        """Runs the programs of a bucket on padding, which touches no row."""
        layout = self._layouts.setdefault(bucket, InputLayout(bucket, self._state_shape))
        selected, hidden = self._run(bucket, layout.new())
        targets = None if bucket.is_decode else np.zeros(bucket.tokens, np.int32)
        prompt_logprobs, embeddings = self._find_prompt_logprobs(bucket, hidden, targets), self._pool(bucket, hidden)
        for variant in sorted(set(self._variants.values())):
            if bucket.is_decode and (bucket.rows, variant) in self.programs.loop:
                self._run_loop(bucket, variant, layout.new())
            step = StartedStep(self, bucket, 0, variant, True, selected, prompt_logprobs, embeddings)
            step.sample().result()

    def start(self, plan: StepPlan) -> StartedStep | StartedLoop:
        """Dispatches the forward pass of a step, or a loop; MissingProgramError if no program holds it."""
        bucket = self._buckets.find(plan.num_tokens // plan.width, plan.num_rows)
        for new_row in plan.new_rows:
            if new_row.history is not None:
                self._set_row(new_row.row, _make_setting(self._vocab_size, new_row))
        packed = self._packer.pack(plan, self._layouts[bucket])
        self._cache = self.host_slots.place(self.programs.get, self._cache)
        copies = self.host_slots.start(self.programs.get, self._cache, plan)
        self.counts.count(bucket, plan.num_tokens, plan.width)
        if plan.width > 1:
            token_ids = self._run_loop(bucket, packed.variant, packed.inputs)
            return StartedLoop(StepFuture(token_ids, None, plan.num_rows, copies))
        selected, hidden = self._run(bucket, packed.inputs)
        return StartedStep(
            self,
            bucket,
            plan.num_rows,
            packed.variant,
            packed.wants_logprobs,
            selected,
            self._find_prompt_logprobs(bucket, hidden, self._find_targets(plan, bucket)),
            self._pool(bucket, hidden) if self._wants_embeddings(plan) else None,
            copies,
        )

    def sample(self, step: StartedStep, mask: np.ndarray | None) -> StepFuture:
        """See `StartedStep.sample`."""
        rows, variant = step.bucket.rows, self._variants[step.variant if mask is None else SampleVariant.MASKED]
        program = self.programs.get("sample", (rows, variant))
        if variant <= SampleVariant.RANDOM:
            self._rows, token_ids = program(self._rows, step.selected)
        else:
            sent = self._send(self._pad_mask(mask, rows)) if variant is SampleVariant.MASKED else None
            self._rows, self._sampler, token_ids = program(self._rows, self._sampler, step.selected, sent)
        if not step.wants_logprobs and step.prompt_logprobs is None and step.embeddings is None:
            return StepFuture(token_ids, None, step.num_rows, step.copies)
        logprobs = self.programs.get("logprobs", rows)(step.selected, token_ids) if step.wants_logprobs else None
        return StepFuture(token_ids, (logprobs, step.prompt_logprobs, step.embeddings), step.num_rows, step.copies)

    def _run(self, bucket: Bucket, packed: np.ndarray) -> tuple[SampleInputs, HiddenStates]:
        forward = self.programs.get("forward", bucket)
        # The step's one transfer: an argument costs the host a tenth of a `device_put`.
        with jax.transfer_guard_host_to_device("allow"):
            self._cache, self._rows, selected, hidden = forward(self.params, self._cache, self._rows, packed)
        return selected, hidden

    def _run_loop(self, bucket: Bucket, variant: SampleVariant, packed: np.ndarray) -> jax.Array:
        program = self.programs.get("loop", (bucket.rows, variant))
        with jax.transfer_guard_host_to_device("allow"):
            self._cache, self._rows, self._sampler, token_ids = program(
                self.params, self._cache, self._rows, self._sampler, packed
            )
        return token_ids

    def _set_row(self, row: int, setting: RowSetting) -> None:
        self._sampler = self.programs.get("set_row", None)(self._sampler, *self._send((np.int32(row), setting)))

    def _find_prompt_logprobs(self, bucket: Bucket, hidden: HiddenStates, targets: np.ndarray | None) -> Any:
        if targets is None:
            return None
        return self.programs.get("prompt_logprobs", bucket)(head_params(self.params), hidden.every, self._send(targets))

    def _pool(self, bucket: Bucket, hidden: HiddenStates) -> Any:
        return self.programs.get("pool", bucket.rows)(self.params["final_norm"], hidden.last)

    def _wants_embeddings(self, plan: StepPlan) -> bool:
        return any(chunk.samples and self._mirror.embeds(chunk.row) for chunk in plan.chunks)

    def _find_targets(self, plan: StepPlan, bucket: Bucket) -> np.ndarray | None:
        """Returns the token after each token of the step [T]; None if no row wants a prompt's log-probabilities.

        Rows with a single token end their prompt or follow it, so decode buckets need none.
        """
        if bucket.is_decode or not any(self._mirror.wants_prompt_logprobs(chunk.row) for chunk in plan.chunks):
            return None
        targets, at = np.zeros(bucket.tokens, np.int32), len(plan.decode_rows)
        for chunk in plan.chunks:
            targets[at : at + len(chunk.token_ids)] = (*chunk.token_ids[1:], chunk.next_token)
            at += len(chunk.token_ids)
        return targets

    def _pad_mask(self, mask: np.ndarray | None, rows: int) -> np.ndarray:
        """Returns the mask for all rows of the bucket; padding rows may sample anything, without a mask all rows."""
        padded = np.full((rows, self._mask_words), 2**32 - 1, np.uint32)
        if mask is not None:
            padded[: len(mask)] = mask
        return padded

    def _send(self, arrays: Any) -> Any:
        return jax.device_put(arrays, self._input_sharding)


def _make_setting(vocab_size: int, new_row: NewRow) -> RowSetting:
    params, history = new_row.params, new_row.history
    assert history is not None
    return make_row_setting(
        vocab_size,
        history.token_ids[: history.num_prompt_tokens],
        history.token_ids[history.num_prompt_tokens :],
        logit_bias=params.logit_bias,
        allowed_ids=params.allowed_token_ids,
        suppressed_ids=params.suppress_tokens or (),
        bad_words=history.bad_words,
        banned_ids=history.stop_ids if params.min_tokens else (),
        banned_until=history.num_prompt_tokens + params.min_tokens,
        automaton=history.automaton,
    )
