"""The shapes that the GPU kernels take, which are the same for all of them, and what follows from a shape alone."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import pool_shape
from pallas_kernels.spec import AttnShape, KVSpec

WIDTHS = (64, 128, 192, 256)  # elements of a stored head
MAX_GROUP_SIZE = 16
MIN_PAGE_SIZE = 16  # a TMA copy of fewer rows would cost more than it brings


def choose_layout(spec: KVSpec) -> str:
    """Heads of 64, 128, 192 or 256 as they are, and latents of whole 64s, others padded."""
    fits = spec.head_dim % WIDTHS[0] == 0 if spec.is_latent else spec.head_dim in WIDTHS
    return "plain" if fits else "padded"


def find_obstacle(shape: AttnShape) -> str | None:
    """Why the kernels for keys and values cannot do a shape, in words for users."""
    spec, obstacle = shape.spec, find_page_obstacle(shape)
    width = stored_width(shape)
    if obstacle is not None:
        return obstacle
    if spec.is_latent:
        obstacle = "it has no kernel for latents"
    elif spec.layout == "paired":
        obstacle = "its pages are 'plain' or 'padded', these are 'paired'"
    elif width not in WIDTHS:
        works = "layout 'padded' would do" if spec.head_dim < WIDTHS[-1] else "larger heads do not fit"
        obstacle = f"its pages store heads as 64, 128, 192 or 256 elements, these as {width}: {works}"
    elif shape.group_size > MAX_GROUP_SIZE:
        obstacle = f"it takes at most {MAX_GROUP_SIZE} query heads per KV head, these are {shape.group_size}"
    return obstacle


def find_page_obstacle(shape: AttnShape) -> str | None:
    """Why no kernel can do pages of such a size and dtype with such queries, in words for users."""
    spec = shape.spec
    if shape.dtype not in ("bfloat16", "float16"):
        return f"its queries are bfloat16 or float16, these are {shape.dtype}"
    if spec.dtype not in (shape.dtype, "float8_e4m3fn"):
        return f"with {shape.dtype} queries its pages are {shape.dtype} or float8_e4m3fn, these are {spec.dtype}"
    if spec.page_size < MIN_PAGE_SIZE or spec.page_size & (spec.page_size - 1):
        return f"its page_size is a power of two from {MIN_PAGE_SIZE}, this is {spec.page_size}"
    if shape.window is not None and not shape.causal:
        return f"its windows end at the query, this one has a radius of {shape.window} keys on both sides"
    return None


def stored_width(shape: AttnShape) -> int:
    """Elements of a head as pages store it."""
    return pool_shape(shape.spec, 1)[-1]


def is_narrow(shape: AttnShape) -> bool:
    """Whether pages have 8 bits, which are widened on the way to the tensor cores."""
    return jnp.dtype(shape.spec.dtype).itemsize == 1


def compute_dtype(shape: AttnShape) -> jnp.dtype:
    """The dtype of the tensor cores' operands. 8-bit floats widen to float16 exactly, and do not convert to
    bfloat16."""
    return jnp.dtype("float16" if is_narrow(shape) else shape.spec.dtype)


def round_up(count: int, multiple: int) -> int:
    """The next multiple."""
    return -(-count // multiple) * multiple
