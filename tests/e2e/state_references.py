"""The state of a model's first layer behind any text, token by token in float64, by the definition of its mixer."""

from __future__ import annotations

from abc import ABC, abstractmethod
from typing import Any

import jax
import numpy as np

from jaxserve import LLM
from jaxserve.core.layers.gated_delta import GatedDeltaConfig
from jaxserve.core.layers.mamba2 import Mamba2Config
from jaxserve.core.layers.short_conv import ShortConvConfig

State = dict[str, np.ndarray]  # by the names of the pool's arrays


def _silu(x: np.ndarray) -> np.ndarray:
    return x / (1 + np.exp(-x))


class Reference(ABC):
    """The states of one mixer. `inputs` are the last inputs of its convolution, [W - 1, C]."""

    def __init__(self, mixer: Any, leaves: Any, x: np.ndarray) -> None:
        """`x` is what the mixer reads of each token of the vocabulary; `leaves` are its parameters, in float64."""
        self.mixer, self.leaves, self.weight = mixer, leaves, leaves["conv"]
        self.prepare(x)
        arrays = {array.name: np.zeros(array.shape) for array in mixer.memory.arrays}
        self.known: dict[tuple[int, ...], State] = {(): arrays | {"inputs": np.zeros_like(self.weight[1:])}}

    def find(self, text: tuple[int, ...]) -> State:
        """The state behind a text, as it lies in the pool."""
        length = len(text)
        while text[:length] not in self.known:
            length -= 1
        for end in range(length, len(text)):
            self.known[text[: end + 1]] = self.advance(self.known[text[:end]], text[end])
        state = self.known[text]
        return state | {"inputs": self.store(state["inputs"])}

    def convolve(self, state: State, inputs: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What a token's inputs [C] become, and the last inputs behind it."""
        inputs = np.concatenate([state["inputs"], inputs[None]])
        return (self.weight * inputs).sum(0) + self.leaves.get("conv_bias", 0.0), inputs[1:]

    @abstractmethod
    def prepare(self, x: np.ndarray) -> None:
        """Computes what depends on a token alone."""

    @abstractmethod
    def advance(self, state: State, token: int) -> State:
        """The state behind one more token."""

    @abstractmethod
    def store(self, inputs: np.ndarray) -> np.ndarray:
        """The last inputs as the pool has them."""


class DeltaReference(Reference):
    """Gated DeltaNet."""

    def prepare(self, x: np.ndarray) -> None:
        leaves, self.sizes = self.leaves, self.mixer.sizes
        columns = (x @ leaves["qkvz"]["weight"]).reshape(len(x), self.sizes.keys, -1)
        self.channels = columns[..., : self.mixer.head_channels].reshape(len(x), -1)
        b, a = np.split((x @ leaves["ba"]["weight"]).reshape(len(x), self.sizes.keys, -1), 2, axis=-1)
        self.beta = self.mixer.beta_scale / (1 + np.exp(-b.reshape(len(x), -1)))
        self.remains = np.exp(-np.exp(leaves["decay"]) * np.logaddexp(0, a.reshape(len(x), -1) + leaves["decay_bias"]))

    def advance(self, state: State, token: int) -> State:
        mixed, inputs = self.convolve(state, self.channels[token])
        mixed, size = _silu(mixed).reshape(self.sizes.keys, -1), self.mixer.key_dim
        k = mixed[:, size : 2 * size]
        k = np.repeat(k / np.sqrt((k * k).sum(-1, keepdims=True) + 1e-6), self.sizes.group, axis=0)
        v = mixed[:, 2 * size :].reshape(-1, self.mixer.value_dim)
        heads = state["state"] * self.remains[token][:, None, None]
        change = self.beta[token][:, None] * (v - np.einsum("nab,na->nb", heads, k))
        return {"state": heads + k[:, :, None] * change[:, None], "inputs": inputs}

    def store(self, inputs: np.ndarray) -> np.ndarray:
        by_head = inputs.reshape(len(inputs), self.sizes.keys, -1).swapaxes(0, 1)
        return by_head.reshape(len(by_head), -1)


class SpaceReference(Reference):
    """Mamba-2."""

    def prepare(self, x: np.ndarray) -> None:
        leaves, self.sizes = self.leaves, self.mixer.sizes
        projected = x @ leaves["zxbcdt"]["weight"] + leaves["zxbcdt"].get("bias", 0.0)
        columns = projected.reshape(len(x), self.sizes.groups, -1)
        width, heads = self.sizes.heads * self.sizes.head_dim, self.sizes.heads
        self.channels = columns[..., width:-heads].reshape(len(x), -1)
        self.steps = np.logaddexp(0, columns[..., -heads:].reshape(len(x), -1) + leaves["decay_bias"])
        self.remains = np.exp(-np.exp(leaves["decay"]) * self.steps)

    def advance(self, state: State, token: int) -> State:
        mixed, inputs = self.convolve(state, self.channels[token])
        mixed, width = _silu(mixed).reshape(self.sizes.groups, -1), self.sizes.heads * self.sizes.head_dim
        x = mixed[:, :width].reshape(-1, self.sizes.head_dim)
        b = np.repeat(mixed[:, width : width + self.sizes.state_size], self.sizes.heads, axis=0)
        grown = (self.steps[token][:, None] * x)[:, :, None] * b[:, None]
        return {"state": state["state"] * self.remains[token][:, None, None] + grown, "inputs": inputs}

    def store(self, inputs: np.ndarray) -> np.ndarray:
        by_group = inputs.reshape(len(inputs), self.sizes.groups, -1).swapaxes(0, 1)
        return by_group.reshape(len(by_group), -1)


class ConvReference(Reference):
    """A gated short convolution."""

    def prepare(self, x: np.ndarray) -> None:
        bias = self.leaves["bcx"].get("bias", np.zeros((3, self.mixer.num_channels)))
        b, _, values = np.einsum("td,pdc->ptc", x, self.leaves["bcx"]["weight"]) + bias[:, None]
        self.channels = b * values

    def advance(self, state: State, token: int) -> State:
        return {"inputs": self.convolve(state, self.channels[token])[1]}

    def store(self, inputs: np.ndarray) -> np.ndarray:
        return inputs


_REFERENCES = {GatedDeltaConfig: DeltaReference, Mamba2Config: SpaceReference, ShortConvConfig: ConvReference}


def make_reference(llm: LLM, scale: float) -> Reference:
    """The reference of an engine's first layer, which depends on its tokens' embeddings alone.

    `scale` multiplies the weights of its convolution.
    """
    model, params = llm.ready.shapes.model, jax.device_get(llm.ready.runner.params)
    mixer = model.layers[0].mixer
    leaves = jax.tree.map(lambda leaf: np.asarray(leaf, np.float64), params["layers"][0])
    leaves |= {"conv": leaves["conv"] * scale}
    x = np.asarray(params["embed"]["weight"], np.float64) * (model.embedding.scale or 1.0)
    x = x / np.sqrt((x * x).mean(-1, keepdims=True) + model.norm.eps)
    return _REFERENCES[type(mixer)](mixer, leaves, x * (model.norm.unit_offset + leaves["attn_norm"]["weight"]))
