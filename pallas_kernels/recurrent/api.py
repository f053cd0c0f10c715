"""The public call, and which implementation answers it.

An implementation is a module with `run(tokens, pool, offset, rows, shape, *, interpret)` and `find_obstacle(shape) ->
str | None`, in words for users. The portable form of a rule is where its layer is: it has products of chunks, which
XLA does well on a CPU.
"""

from __future__ import annotations

from importlib import import_module

import jax

from pallas_kernels.backends import choose_impl
from pallas_kernels.mosaic_gpu.toolkit import find_compiler_obstacle
from pallas_kernels.platform import name_platform
from pallas_kernels.recurrent.spec import RuleShape, RuleTokens, StateRows

_HOMES = {  # by name: a module, and whether it is interpreted
    "gpu": ("hopper", False),
    "gpu_interpret": ("hopper", True),
    "tpu": ("tpu", False),
    "tpu_interpret": ("tpu", True),
}


def advance_states(
    tokens: RuleTokens, pool: jax.Array, offset: int, rows: StateRows, *, impl: str
) -> tuple[jax.Array, jax.Array]:
    """Takes the states of rows through their tokens: by the state space of Mamba-2 if these have no betas, else by the
    gated delta rule.

    Returns the answers [T, N, B] in float32, zeros for tokens of no row, and the pool [L, R, N, ...] after the step, of
    which the layer `offset` is read and written. Donate the pool: the write is then in place. N may be one device's
    share under shard_map.

    Raises:
        ValueError: the implementation is unknown or cannot do the shapes.
    """
    if impl not in _HOMES:
        raise ValueError(f"impl must be one of {', '.join(_HOMES)}, got {impl!r}")
    num_tokens, keys, key_dim = tokens.q.shape
    heads, value_dim = tokens.v.shape[1:]
    rule = "space" if tokens.beta is None else "delta"
    shape = RuleShape(keys, heads // keys, key_dim, value_dim, pool.dtype.name, num_tokens, rule)
    home, interpret = _HOMES[impl]
    module = import_module(f"pallas_kernels.recurrent.{home}")
    return module.run(tokens, pool, offset, rows, shape, interpret=interpret)


def choose_recurrent_impl(shape: RuleShape, *, platform: str, device_kind: str = "") -> tuple[str, str]:
    """The implementation for a shape on a device, "xla" for none of these, and the reason for users.

    `platform` and `device_kind` are those of `choose_impl`, and the kernels run where those of attention do.
    """
    name, _ = choose_impl(platform, device_kind)
    portable = "XLA's operations in loops over rows and tiles"
    if not is_portable_slow(shape.rule, platform):
        return "xla", portable
    if name in _HOMES:
        obstacle = import_module(f"pallas_kernels.recurrent.{_HOMES[name][0]}").find_obstacle(shape)
        obstacle = find_compiler_obstacle() if obstacle is None and name == "gpu" else obstacle
    else:
        obstacle = "the kernels are for Hopper and TPUs from v5e on"
    if obstacle is None:
        return name, f"a Pallas kernel for recurrent states, compiled for {device_kind}"
    return "xla", f"{portable}, which are slow here: {obstacle}"


def is_portable_slow(rule: str, platform: str) -> bool:
    """Whether XLA's form of a rule is slow on a platform: GPUs wait for the host in each turn of its loops, and TPUs
    compile that of the delta rule for minutes."""
    return name_platform(platform) == "gpu" or (platform == "tpu" and rule == "delta")
