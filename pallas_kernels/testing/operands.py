"""Finds operands that a TPU kernel is given and never reads.

With such an operand, libtpu from 0.0.43 on may make copies of others read zeros (jax issue 39744).
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


def list_unread_operands(jaxpr: Any) -> list[str]:
    """The operands of the Pallas calls in a traced program that neither the kernel nor a block's index reads.

    An operand that is also the memory of an output is not listed: its kernel reads and writes the output.
    """
    return sorted({name for call in _find_calls(jaxpr) for name in _list_unread(call)})


def _find_calls(jaxpr: Any) -> Iterator[Any]:
    for equation in jaxpr.eqns:
        if equation.primitive.name == "pallas_call":
            yield equation
            continue
        for value in equation.params.values():
            for part in value if isinstance(value, tuple | list) else (value,):
                inner = getattr(part, "jaxpr", part)
                if hasattr(inner, "eqns"):
                    yield from _find_calls(inner)


def _list_unread(call: Any) -> list[str]:
    body, mapping = call.params["jaxpr"], call.params["grid_mapping"]
    num_scalars, num_operands = mapping.num_index_operands, mapping.num_index_operands + mapping.num_inputs
    read = _find_read(body)
    kept = {index for index, _ in call.params["input_output_aliases"]}
    for block in mapping.block_mappings:
        scalars = block.index_map_jaxpr.jaxpr.invars[len(mapping.grid) :]
        seen = _find_read(block.index_map_jaxpr.jaxpr)
        kept |= {index for index, scalar in enumerate(scalars[:num_scalars]) if scalar in seen}
    unread = (index for index in range(num_operands) if body.invars[index] not in read and index not in kept)
    return [f"operand {index} of {call.params['name']}, {body.invars[index].aval}" for index in unread]


def _find_read(jaxpr: Any) -> set[Any]:
    """The variables that any equation takes. A branch or a loop takes only what is used inside."""
    return {var for equation in jaxpr.eqns for var in equation.invars if not hasattr(var, "val")}
