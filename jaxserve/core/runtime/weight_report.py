"""A quantized model's weights in words for users: their size, and how they are multiplied."""

from __future__ import annotations

import math
from collections import Counter

from jaxserve.core.models.base import DecoderConfig
from jaxserve.families.registry import list_params


def describe_weights(model: DecoderConfig) -> str | None:
    """Returns the format of the quantized matrices, their bits for each weight with scales, and how they multiply.

    None for a model without quantized weights.
    """
    if model.quantization is None or not model.quantization.has_matrices:
        return None
    specs = {name: parameter.spec for name, parameter in list_params(model).items()}
    dtypes: Counter[str] = Counter()
    num_bytes = 0
    for name, spec in specs.items():
        if name.endswith(".weight.values"):
            dtypes[spec.dtype] += math.prod(spec.shape)
        if name.endswith((".weight.values", ".weight.scales", ".weight.zeros")):
            num_bytes += spec.num_bytes
    if not dtypes:
        return f"{model.quantization.method}, all expanded to {model.dtype}"
    bits = 8 * num_bytes / dtypes.total()
    row_dtypes = model.products.row_dtypes
    rows = f", products with activations in {' and '.join(row_dtypes)}" if row_dtypes else ""
    return f"{model.quantization.method} as {' and '.join(sorted(dtypes))}, {bits:.2f} bits each{rows}"
