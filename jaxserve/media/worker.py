"""The process that decodes images: a hostile one costs this process and nothing else.

It is run by `workers/`. A job is {"is_base64": ..., "field": ..., "processor": ..., "limits": ...}, and the file is its
attachment. The reply is {"shape": [height, width]}, with the pixels attached, or {"error": why, "field": ...}.
"""

from __future__ import annotations

import io
from collections.abc import Callable
from typing import Any

from jaxserve.errors import InvalidRequestError
from jaxserve.media.decode import FORMATS, ImageLimits, decode, decode_base64
from jaxserve.media.processors import load_processor


def prepare(options: dict[str, Any]) -> Callable[[dict[str, Any]], dict[str, Any]]:
    """Loads all decoders and numpy, before memory is limited; returns the function that answers jobs."""
    import numpy as np
    from PIL import Image

    for name in FORMATS:
        file = io.BytesIO()
        Image.new("RGB", (8, 8)).save(file, name)
        np.asarray(decode(file.getvalue(), ImageLimits(), "image").resize((16, 16)))
    return _answer


def _answer(job: dict[str, Any]) -> dict[str, Any]:
    field, limits = job["field"], ImageLimits(**job["limits"])
    read = decode_base64 if job["is_base64"] else decode
    try:
        image = read(bytes(job.pop("attachment")), limits, field)
        pixels = load_processor(job["processor"]).resize(image, field)
    except InvalidRequestError as error:
        return {"error": str(error).removeprefix(f"{error.field}: "), "field": error.field}
    return {"shape": pixels.shape[:2], "attachment": pixels.tobytes()}
