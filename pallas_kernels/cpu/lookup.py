"""Drafts looked up by the library of this room, one call for all rows of a step, and answers kept for it.

As XLA's operations a row is some hundred of them, and on a CPU a few cost as much as the whole search does here.
"""

from __future__ import annotations

from dataclasses import dataclass

import jax
import jax.numpy as jnp
import numpy as np

from pallas_kernels.cpu import library

_WRITTEN = ("tokens", "salts", "ends")  # by `remember`


@dataclass(frozen=True)
class Rule:
    """What a match gives."""

    limits: np.ndarray  # [D + 1] i32: the most drafts for a match of 0 to D tokens, the most that are compared
    needs: np.ndarray  # [C + 1] i32: how many of 0 to C occurrences must go on alike for a draft
    most_occurrences: int  # of the longest match in a row, the last ones
    no_draft: int  # stands where there is no draft


@dataclass(frozen=True)
class Answers:
    """Finished answers: a ring of tokens, and tables of where n-grams of some lengths ended."""

    levels: tuple[int, ...]  # the lengths, ascending, at most D
    tokens: jax.Array  # [N] i32; below zero: between answers
    salts: jax.Array  # [N, 2] u32
    ends: jax.Array  # [levels, buckets, ways] i32
    oldest: jax.Array  # [] i32: the first position that counts
    row_salts: jax.Array  # [R, 2] u32


def look_up(
    history: jax.Array,  # [R, L] i32
    row_ids: jax.Array,  # [S] i32
    lengths: jax.Array,  # [S] i32
    num_drafts: int,
    rule: Rule,
    answers: Answers | None,
) -> jax.Array:
    """Returns the drafts [S, K] i32 of rows of which `lengths` tokens are known, `no_draft` from the first missing one.

    None lies at L or after. The library must be loaded.
    """
    arrays = [history, row_ids.astype(jnp.int32), lengths.astype(jnp.int32)]
    arrays += [np.asarray(each, np.int32) for each in (rule.limits, rule.needs, (rule.most_occurrences, rule.no_draft))]
    if answers is not None:
        arrays += _list_arrays(answers)
    shape = jax.ShapeDtypeStruct((row_ids.shape[0], num_drafts), jnp.int32)
    return jax.ffi.ffi_call(library.target_name(library.LOOKUP), shape)(*arrays)


def remember(
    answers: Answers,
    numbers: tuple[jax.Array, jax.Array, jax.Array],  # [] i32: first slot, its token's position, what positions lose
    tokens: jax.Array,  # [D + M] i32: those before the block, then the block
    reaches: jax.Array,  # [M] i32: tokens of an answer up to each; 0: nothing that is looked up ends here
    ways: jax.Array,  # [M] i32; below zero: the slot keeps what it has
    salts: jax.Array,  # [2, M] u32
) -> dict[str, jax.Array]:
    """Returns, by name, the arrays that change with a block of answers, written in place. The library must be loaded.

    D is at least the longest level.
    """
    written = [getattr(answers, name) for name in _WRITTEN]
    call = jax.ffi.ffi_call(
        library.target_name(library.REMEMBER),
        [jax.ShapeDtypeStruct(each.shape, each.dtype) for each in written],
        input_output_aliases={place + 1: place for place in range(len(written))},  # behind the levels
    )
    found = call(*_list_arrays(answers), jnp.stack(numbers), tokens, reaches, ways, salts)
    return dict(zip(_WRITTEN, found, strict=True))


def _list_arrays(answers: Answers) -> list[jax.Array | np.ndarray]:
    written = [getattr(answers, name) for name in _WRITTEN]
    return [np.asarray(answers.levels, np.int32), *written, answers.oldest, answers.row_salts]
