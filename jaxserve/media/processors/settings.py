"""Reads preprocessor_config.json, key by key; a key that nobody knows is an error."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, shorten
from jaxserve.files import read_regular
from jaxserve.media.processors.processor import PixelForm

_FILE = "preprocessor_config.json"
_WHOLE_FILE = "processor_config.json"  # of newer checkpoints, with the image processor as a part
_PART = "image_processor"
_MOST_BYTES = 1 << 20
# They name classes, or arguments of transformers that change no value of an image.
_IGNORED = (
    *("processor_class", "image_processor_type", "feature_extractor_type", "auto_map", "image_seq_length"),
    *("data_format", "input_data_format", "return_tensors", "device", "disable_grouping", "default_to_square"),
    *("_valid_processor_keys", "_valid_kwargs_names", "model_input_names"),
    "do_pad",  # of images beside each other to one size
    *("pan_and_scan_min_crop_size", "pan_and_scan_max_num_crops", "pan_and_scan_min_ratio_to_activate"),
)
_STEPS = ("do_resize", "do_rescale", "do_convert_rgb")  # done for every image; null where transformers has a default
_OFF = ("do_center_crop", "crop_size", "do_pan_and_scan", "pad_size")


class ImageSettings:
    """The settings of an image processor while they are read."""

    def __init__(self, values: Mapping[str, Any], processor: Mapping[str, Any] | None = None) -> None:
        """Takes them from `values`; `processor` has those of the processor around it."""
        self._values = dict(values)
        self.processor = dict(processor or {})

    def take(self, name: str, default: Any) -> Any:
        """Returns a setting, which then counts as read; null counts as missing."""
        value = self._values.pop(name, None)
        return default if value is None else value

    def take_size(self, name: str, default: int) -> int:
        """Returns a whole number above 0, also where it is given as equal height and width."""
        value = self.take(name, default)
        if isinstance(value, Mapping) and value.get("height") == value.get("width"):
            value = value.get("height")
        return require_size(value, name)

    def take_form(self, resample: int, mean: tuple[float, ...], std: tuple[float, ...]) -> PixelForm:
        """Returns the filter and the normalization; the arguments are the family's defaults."""
        form = PixelForm(
            resample=self.take("resample", resample),
            rescale_factor=float(self.take("rescale_factor", 1 / 255)),
            mean=_read_colours(self.take("image_mean", mean), "image_mean"),
            std=_read_colours(self.take("image_std", std), "image_std"),
        )
        if form.resample not in (2, 3):
            raise ConfigError("must be 2 (bilinear) or 3 (bicubic)", field=_name("resample"), value=form.resample)
        if self.take("do_normalize", True):
            return form
        return PixelForm(form.resample, form.rescale_factor, None, None)

    def end(self) -> None:
        """Raises ConfigError for a setting that was not read, or that no image processor here has."""
        for name in _STEPS:
            if self.take(name, True) is not True:
                raise ConfigError("must be true", field=_name(name), value=False)
        for name in _OFF:
            if self.take(name, None):
                raise ConfigError("is not supported; leave it out", field=_name(name))
        for name, value in self._values.items():
            if name not in _IGNORED and value is not None:
                raise ConfigError(f"is not known here, got {shorten(value)}", field=_name(name), value=value)


def require_size(value: Any, name: str) -> int:
    """Returns a whole number above 0; ConfigError for anything else."""
    if not isinstance(value, int) or isinstance(value, bool) or value < 1:
        message = f"must be a whole number above 0, got {shorten(value)}"
        raise ConfigError(message, field=_name(name), value=value)
    return value


def read_settings(folder: Path) -> ImageSettings | None:
    """Returns the settings in a model's folder; None if there are none.

    Raises:
        ConfigError: they are no JSON object.
    """
    whole = _read_object(folder / _WHOLE_FILE) or {}
    part = _read_object(folder / _FILE) or whole.get(_PART)
    if not isinstance(part, Mapping):
        return None
    return ImageSettings(part, {name: value for name, value in whole.items() if name != _PART})


def _read_object(path: Path) -> Mapping[str, Any] | None:
    """Returns the object in a JSON file, None if there is no file."""
    try:
        value = json.loads(read_regular(path, _MOST_BYTES))
    except FileNotFoundError:
        return None
    except (OSError, ValueError, RecursionError) as error:
        raise ConfigError(f"cannot be read: {error}", field=path.name, value=str(path)) from error
    if not isinstance(value, Mapping):
        raise ConfigError(f"must be a JSON object, got {shorten(value)}", field=path.name, value=str(path))
    return value


def _read_colours(value: Any, name: str) -> tuple[float, ...]:
    numbers = [value] * 3 if isinstance(value, int | float) else value
    if (
        not isinstance(numbers, list | tuple)
        or len(numbers) != 3
        or not all(isinstance(n, int | float) for n in numbers)
    ):
        raise ConfigError(f"must be three numbers, got {shorten(value)}", field=_name(name), value=value)
    return tuple(map(float, numbers))


def _name(name: str) -> str:
    return f"{_FILE}: {name}"
