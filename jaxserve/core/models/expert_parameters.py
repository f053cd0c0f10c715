"""The parameters of a mixture of experts.

Canonical names per layer: `router.weight` [D, E], `experts.gate_up.weight` [2, E, D, F] or, without gates,
`experts.up.weight` [E, D, F], `experts.down.weight` [E, F, D] and, where the model has them, `router.bias` and
`router.scales` [E], `router.correction` [E] (always float32), `experts.gate_up.bias` [2, E, F], `experts.down.bias`
[E, D], `shared.gate_up.weight` or `shared.up.weight`, `shared.down.weight` and `shared_gate.weight` [D, 1].
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence

import numpy as np

from jaxserve.core.layers.moe import MoEConfig
from jaxserve.core.models.base import CheckpointLayer, HostArray, Parameter, ParamSpec, Table, WeightSource
from jaxserve.core.models.layouts import Assembled, StackedParts, stack_matrices, transpose
from jaxserve.core.models.parameters import linear_params, make_source, mlp_params, plain_mlp_params
from jaxserve.core.sharding import Axes


def moe_params(
    layer: CheckpointLayer,
    *,
    module: str = "mlp",
    packed_module: str = "mlp",
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
    shared: str = "shared_expert",
    correction: str = "gate.e_score_correction_bias",
) -> Table:
    """Returns the router, the experts and the shared block below `module`.

    Experts are read one tensor each (`experts.7.gate_proj`), or all of a layer in one (`experts.gate_up_proj`
    [E, 2F, D] and `experts.down_proj` [E, D, F]), as transformers 5 holds them.

    Args:
        packed_module: the module's name in files of the second form.
        projections: names of gate, up and down.
        shared: the name of the shared block.
        correction: the name of the router's correction.
    """
    config, moe = layer.config, layer.kind.mlp
    assert isinstance(moe, MoEConfig)
    table = router_params(layer, moe, layer.tensor(f"{module}.gate"), layer.tensor(f"{packed_module}.gate"))
    if moe.router.correction:
        shape = (moe.router.num_experts,)
        source, packed = (
            make_source((layer.tensor(f"{name}.{correction}"),), (shape,), lambda tensor: tensor)
            for name in (module, packed_module)
        )
        source = dataclasses.replace(source, otherwise=packed)
        table["router.correction"] = Parameter(ParamSpec(shape, "float32", (None,), "zeros"), source)
    modules = layer.tensor(f"{module}.experts"), layer.tensor(f"{packed_module}.experts")
    table |= expert_params(layer, moe, *modules, projections)
    if moe.shared is not None:
        if moe.shared.gated:
            inner = mlp_params(layer, moe.shared, f"{module}.{shared}")
        else:
            up, down = (f"{module}.{shared}.{name}" for name in projections[1:])
            inner = plain_mlp_params(layer, up=up, down=down, mlp=moe.shared)
        table |= {f"shared.{name}": parameter for name, parameter in inner.items()}
    if moe.gated_shared:
        gate = {layer.tensor(f"{module}.{shared}_gate"): 1}
        table |= linear_params(
            config, "shared_gate", gate, (config.hidden_size, 1), (None, None), transpose, bias=False
        )
    return table


def router_params(layer: CheckpointLayer, moe: MoEConfig, module: str, otherwise: str | None = None) -> Table:
    """Returns `router`; `otherwise` is the module's name in other files."""
    shape = (layer.config.hidden_size, moe.router.num_experts)

    def list_params(module: str) -> Table:
        return linear_params(
            layer.config, "router", {module: shape[1]}, shape, (None, None), transpose, bias=moe.router.bias
        )

    table = list_params(module)
    if otherwise is None:
        return table
    others = list_params(otherwise)
    sources = {name: dataclasses.replace(table[name].source, otherwise=others[name].source) for name in table}
    return {name: Parameter(table[name].spec, source) for name, source in sources.items()}


def expert_params(
    layer: CheckpointLayer,
    moe: MoEConfig,
    module: str,
    packed: str,
    projections: tuple[str, str, str] = ("gate_proj", "up_proj", "down_proj"),
) -> Table:
    """Returns the experts alone, of a tensor each below `module`, or of one for all below `packed`."""
    hidden, size, count = layer.config.hidden_size, moe.expert.intermediate_size, moe.router.num_experts
    gate, up, down = projections
    first = (gate, up) if moe.expert.gated else (up,)
    build = _stack_pairs if moe.expert.gated else _stack_all
    wide = _single_source(module, first, count, (size, hidden), build)
    narrow = _single_source(module, (down,), count, (hidden, size), _stack_all)
    names = (f"{packed}.{'gate_' * moe.expert.gated}up_proj", f"{packed}.down_proj")
    others = _packed_sources(layer, moe, names)
    sources = (dataclasses.replace(one, otherwise=other) for one, other in zip((wide, narrow), others, strict=True))
    return _list_experts(layer, moe, *sources)


def packed_expert_params(layer: CheckpointLayer, moe: MoEConfig, module: str, names: tuple[str, str]) -> Table:
    """Returns experts of one tensor each for gate and up, and for down: `names` below `module`, or transformers 5's."""
    older = _packed_sources(layer, moe, tuple(f"{module}.{name}" for name in names))
    newer = _packed_sources(layer, moe, (f"{module}.experts.gate_up_proj", f"{module}.experts.down_proj"))
    sources = (dataclasses.replace(one, otherwise=other) for one, other in zip(older, newer, strict=True))
    return _list_experts(layer, moe, *sources)


def _packed_sources(
    layer: CheckpointLayer, moe: MoEConfig, names: tuple[str, ...]
) -> tuple[WeightSource, WeightSource]:
    """Returns the sources of all experts in one tensor each, [E, 2F, D] or [E, F, D], and [E, D, F]."""
    hidden, size, count = layer.config.hidden_size, moe.expert.intermediate_size, moe.router.num_experts
    parts, build = (2, _split_pairs) if moe.expert.gated else (1, stack_matrices)
    wide, narrow = names
    return (
        make_source((wide,), ((count, parts * size, hidden),), build),
        make_source((narrow,), ((count, hidden, size),), stack_matrices),
    )


def _list_experts(layer: CheckpointLayer, moe: MoEConfig, wide: WeightSource, narrow: WeightSource) -> Table:
    hidden, size, count = layer.config.hidden_size, moe.expert.intermediate_size, moe.router.num_experts
    expert, column = moe.expert_axes
    shape, axes = (count, hidden, size), (expert, None, column)
    down = expert_parameter(layer, (count, size, hidden), (expert, column, None), narrow, expert_axis=0)
    if not moe.expert.gated:
        up = expert_parameter(layer, shape, axes, wide, expert_axis=0)
        return {"experts.up.weight": up, "experts.down.weight": down}
    gate_up = expert_parameter(layer, (2, *shape), (None, *axes), wide, expert_axis=1)
    return {"experts.gate_up.weight": gate_up, "experts.down.weight": down}


def expert_parameter(
    layer: CheckpointLayer,
    shape: tuple[int, ...],
    axes: Axes,
    source: WeightSource,
    *,
    expert_axis: int,
    init: str = "normal",
) -> Parameter:
    """Returns a parameter of all experts in the model's dtype."""
    return Parameter(ParamSpec(shape, layer.config.dtype, axes, init, expert_axis), source)


def _single_source(
    module: str, parts: Sequence[str], count: int, shape: tuple[int, int], build: Callable[..., HostArray]
) -> WeightSource:
    """Returns the source of tensors [out, in] of one expert each, all experts of the first part first."""
    names = tuple(f"{module}.{index}.{part}.weight" for part in parts for index in range(count))
    return make_source(names, (shape,) * len(names), build)


def _stack_all(*tensors: np.ndarray) -> Assembled:
    return stack_matrices(tensors)


def _stack_pairs(*tensors: np.ndarray) -> Assembled:
    """Returns [2, E, in, out] of all gates, then all ups."""
    count = len(tensors) // 2
    return StackedParts([stack_matrices(tensors[:count]), stack_matrices(tensors[count:])])


def _split_pairs(packed: np.ndarray) -> Assembled:
    """Returns [2, E, in, out] of one tensor [E, 2 * out, in], gate first."""
    size = packed.shape[1] // 2
    return StackedParts([stack_matrices(packed[:, :size]), stack_matrices(packed[:, size:])])
