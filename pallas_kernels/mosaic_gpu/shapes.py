"""The shapes that the GPU kernels take, which are the same for all of them, and what follows from a shape alone."""

from __future__ import annotations

import jax.numpy as jnp

from pallas_kernels.layout import pool_shape
from pallas_kernels.spec import AttnShape, KVSpec

WIDTHS = (64, 128, 256)  # elements of a stored head
MAX_GROUP_SIZE = 16
MIN_PAGE_SIZE = 16  # a TMA copy of fewer rows would cost more than it brings


def choose_layout(spec: KVSpec) -> str:
    """Heads of 64, 128 or 256 as they are, others padded."""
    return "plain" if spec.head_dim in WIDTHS else "padded"


def find_obstacle(shape: AttnShape) -> str | None:
    """Why the kernels cannot do a shape, in words for users."""
    spec, obstacle = shape.spec, None
    width = stored_width(shape)
    if shape.dtype not in ("bfloat16", "float16"):
        obstacle = f"its queries are bfloat16 or float16, these are {shape.dtype}"
    elif spec.dtype not in (shape.dtype, "float8_e4m3fn"):
        obstacle = f"with {shape.dtype} queries its pages are {shape.dtype} or float8_e4m3fn, these are {spec.dtype}"
    elif spec.is_latent:
        obstacle = "it has no kernel for latents"
    elif spec.layout == "paired":
        obstacle = "its pages are 'plain' or 'padded', these are 'paired'"
    elif width not in WIDTHS:
        works = "layout 'padded' would do" if spec.head_dim < WIDTHS[-1] else "larger heads do not fit"
        obstacle = f"its pages store heads as 64, 128 or 256 elements, these as {width}: {works}"
    elif shape.group_size > MAX_GROUP_SIZE:
        obstacle = f"it takes at most {MAX_GROUP_SIZE} query heads per KV head, these are {shape.group_size}"
    elif spec.page_size < MIN_PAGE_SIZE or spec.page_size & (spec.page_size - 1):
        obstacle = f"its page_size is a power of two from {MIN_PAGE_SIZE}, this is {spec.page_size}"
    return obstacle


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
