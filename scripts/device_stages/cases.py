"""All cases of the kernels' own tests on the device: hostile inputs, compared with the formula.

Programs are compiled ahead in threads. After a process of the stage died they are compiled one after the other, so that
the case that was begun is the one to blame.
"""

from __future__ import annotations

import os
import threading
from collections import deque
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from device_stages.items import Context, Item, NotHereError
from device_stages.results import Line
from pallas_kernels import AttnLayer, attend_stored, attend_with_update, choose_layout, prepare_batch, resolve_impl
from pallas_kernels.testing.case import LAYER, Case, choose_config, largest_error, make_inputs
from pallas_kernels.testing.cases import CASES, LONG_CASES
from pallas_kernels.testing.reference import attend_by_formula

TINY_CASES = ("drafts verified, 3:1, window, sinks",)
MAX_THREADS = 12
_AHEAD = 2 * MAX_THREADS  # cases compiled while one runs
Prepared = tuple[Callable[[], jax.Array], np.ndarray]
_LOWERING = threading.Lock()  # lowering is Python: threads would only interleave it


def list_items(context: Context) -> Iterator[Item]:
    cases = [
        case
        for case in (*CASES, *LONG_CASES)
        if case.name not in context.skip and (not context.tiny or case.name in TINY_CASES)
    ]
    cases.sort(key=partial(is_portable, context))  # kernels first, in case time runs out
    if context.careful:
        for case in cases:
            yield Item(case.name, partial(check_case, context, case, partial(prepare_case, context, case)))
        return
    with ThreadPoolExecutor(min(MAX_THREADS, os.cpu_count() or 1)) as pool:
        ahead = deque(pool.submit(prepare_case, context, case) for case in cases[:_AHEAD])
        for index, case in enumerate(cases):
            yield Item(case.name, partial(check_case, context, case, ahead.popleft().result))
            ahead.extend(
                pool.submit(prepare_case, context, late) for late in cases[index + _AHEAD : index + _AHEAD + 1]
            )


def is_portable(context: Context, case: Case) -> bool:
    """Whether no kernel runs a case."""
    try:
        return resolve_impl(context.impl, case.shape)[0] == "xla"
    except ValueError:
        return True


def prepare_case(context: Context, case: Case) -> Prepared:
    """Compiles a case's step; returns a call of it, and the attention that is right.

    Raises:
        NotHereError: the implementation does not support the case; says why.
    """
    try:
        impl, _ = resolve_impl(context.impl, case.shape)
    except ValueError as problem:
        raise NotHereError(str(problem)) from problem
    case = case.with_layout(choose_layout(impl, case.spec))
    inputs = make_inputs(case)
    new = inputs.k, inputs.v  # None for latents
    arrays = jax.tree.map(jnp.asarray, (inputs.kv_pages, inputs.q, new, inputs.meta))

    def step(pool: jax.Array, q: jax.Array, new: tuple[Any, ...], meta: tuple[jax.Array, ...]) -> Any:
        k, v = new
        batch = prepare_batch(
            *meta,
            num_tokens=case.max_tokens,
            shape=case.shape,
            max_query_len=case.max_query_len,
            impl=impl,
            config=choose_config(case, impl),
        )
        layer = AttnLayer(case.params, inputs.heads, LAYER * inputs.num_pages)
        if case.is_stored:
            return attend_stored(q, pool, batch, layer)[0]
        return attend_with_update(q, k, v, pool, batch, layer)[0]

    # GPUs round float32 operands to 10 bits by default, but not in the kernels' own products.
    with _LOWERING, jax.default_matmul_precision("highest"):
        lowered = jax.jit(step).lower(*arrays)
    return partial(lowered.compile(), *arrays), attend_by_formula(case, inputs)[0]


def check_case(context: Context, case: Case, prepare: Callable[[], Prepared]) -> Line:
    """Returns the error as a share of the case's tolerance."""
    call, expected = prepare()
    found = call()
    num_tokens = sum(new for _, new in case.rows)
    error = largest_error(case, found, expected, num_tokens)
    line = {"impl": resolve_impl(context.impl, case.shape)[0], "share_of_tolerance": error}
    if not error < 1:
        largest = float(np.max(np.abs(expected[:num_tokens]), initial=0))
        line |= {"ok": False, "error": f"{error:.3g} times the tolerance; values up to {largest:.3g}"}
    return line
