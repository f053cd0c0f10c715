"""The names in Hugging Face's files of a GGUF file's tensors."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass

from jaxserve.core.weights.gguf_architectures import Architecture
from jaxserve.errors import WeightsError, shorten
from jaxserve.gguf_file import GGUFFile, GGUFTensor

_LAYER = re.compile(r"blk\.(\d{1,5})\.(.+)\.(weight|bias)")
_AROUND = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_ROTARY = re.compile(r"rope_(freqs|factors_(long|short))\.weight")  # part of the config
_FORMS = {"Q8_0": "int8", "Q4_0": "int4", "MXFP4": "float4"}
_MATRIX = re.compile(r"model\.layers\..*(_proj|\.w[123])\.weight")


@dataclass(frozen=True)
class TensorName:
    """The tensor, or the expert of a tensor, that has a name."""

    tensor: GGUFTensor
    expert: int | None = None
    gguf_name: str = ""

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape under this name."""
        return self.tensor.shape if self.expert is None else self.tensor.shape[1:]


def list_names(file: GGUFFile, architecture: Architecture) -> dict[str, TensorName]:
    """Returns the tensors by their names in Hugging Face's files. Stacked experts have a name each.

    Tensors that are read together, gpt-oss's experts and the halves of `kv_b_proj`, keep their name.

    Raises WeightsError, naming the tensor, for one that the architecture does not have.
    """
    found = {}
    for name, tensor in file.tensors.items():
        if not _ROTARY.fullmatch(name):
            found |= dict(_name(file, architecture, name, tensor))
    return found


def find_form(name: str, tensor: TensorName, architecture: Architecture) -> str | None:
    """Returns how a matrix keeps its 4 or 8 bits ("int8", "int4", "float4"); None for one that is expanded."""
    form = _FORMS.get(tensor.tensor.type)
    if architecture.model_type == "gpt_oss":
        return form if form == "float4" and _is_joined(name, architecture) else None
    return form if _MATRIX.fullmatch(name) and len(tensor.shape) == 2 else None


def _is_joined(name: str, architecture: Architecture) -> bool:
    """Whether a tensor of a GGUF file is read with others as one."""
    parts = _LAYER.fullmatch(name)
    return parts is not None and parts[2] in architecture.joined


def _name(
    file: GGUFFile, architecture: Architecture, name: str, tensor: GGUFTensor
) -> Iterator[tuple[str, TensorName]]:
    around, parts = _AROUND.get(name), _LAYER.fullmatch(name)
    if around is not None:
        yield around, TensorName(tensor, gguf_name=name)
        return
    index, module, kind = parts.groups() if parts else (0, "", "")
    if _is_joined(name, architecture):
        yield name, TensorName(tensor, gguf_name=name)
        return
    own = architecture.modules.get(module)
    if own is None:
        message = f"tensor {shorten(name)} is none that the architecture {architecture.model_type} has"
        raise WeightsError(message, field=str(file.path), value=name)
    prefix = f"model.layers.{int(index)}."
    if "{}" not in own:
        end = "" if own.endswith((".sinks", "_bias")) else f".{kind}"
        yield f"{prefix}{own}{end}", TensorName(tensor, gguf_name=name)
        return
    if len(tensor.shape) != 3:
        message = f"tensor {shorten(name)} has shape {tensor.shape}, and experts have three axes"
        raise WeightsError(message, field=str(file.path), value=name)
    for expert in range(tensor.shape[0]):
        yield f"{prefix}{own.format(expert)}.{kind}", TensorName(tensor, expert, name)
