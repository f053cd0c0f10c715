"""Times a layer's attention in the steps of an engine, as XLA runs it for users, with command buffers."""

from __future__ import annotations

from collections.abc import Iterator

from kernel_shapes import Shape

from device_stages.items import Context, Item
from device_stages.measure import decode_shape, name_shape, prefill_shape, slope_item


def list_shapes(context: Context) -> list[Shape]:
    """Returns the shapes, the most important first: a stage may run out of time."""
    if context.tiny:
        return [prefill_shape(context, 24, among=True)]
    return [
        decode_shape(context, 32, 4096),
        prefill_shape(context, 4096),
        decode_shape(context, 128, 4096),
        decode_shape(context, 8, 32_768),
        decode_shape(context, 1, 4096),
        decode_shape(context, 256, 512),
        prefill_shape(context, 4096, among=True),
        prefill_shape(context, 1024),
        prefill_shape(context, 64, 32_768),
        prefill_shape(context, 16_384),
        prefill_shape(context, 1024, among=True),
        prefill_shape(context, 16_384, among=True),
    ]


def list_items(context: Context) -> Iterator[Item]:
    for shape in list_shapes(context):
        yield Item(name_shape(shape), slope_item(context, shape))
