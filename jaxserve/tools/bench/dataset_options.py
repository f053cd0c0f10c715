"""The choice of a benchmark's requests, and its flags. Names and defaults are vLLM's where it has them."""

from __future__ import annotations

import argparse
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, shorten

EXCERPTS = ("azure-chat", "azure-code", "mooncake")
DATASETS = ("random", *EXCERPTS, "trace", "prefix_repetition", "demo", "custom", "sharegpt")
_FILES = ("trace", "custom", "sharegpt")  # datasets that are read from --dataset-path
_TEXTS = ("demo", "custom", "sharegpt")  # datasets of texts, whose answers may end early
_SHUFFLED = (*EXCERPTS, "custom", "sharegpt")


@dataclass(frozen=True)
class _Flag:
    """A flag of some datasets only."""

    datasets: tuple[str, ...]
    default: Any
    text: str


_FLAGS = {
    "dataset_path": _Flag(_FILES, None, "file of the dataset"),
    "random_input_len": _Flag(("random",), 1024, "tokens of a prompt, without the prefix"),
    "random_output_len": _Flag(("random",), 128, "tokens of an answer"),
    "random_range_ratio": _Flag(("random",), 0.0, "lengths vary by this share both ways, evenly; below 1"),
    "random_prefix_len": _Flag(("random",), 0, "tokens in front of every prompt, the same in all"),
    "prefix_repetition_prefix_len": _Flag(("prefix_repetition",), 256, "tokens of a shared prefix"),
    "prefix_repetition_suffix_len": _Flag(("prefix_repetition",), 256, "tokens behind it, of each prompt its own"),
    "prefix_repetition_num_prefixes": _Flag(("prefix_repetition",), 10, "shared prefixes; prompts take turns"),
    "prefix_repetition_output_len": _Flag(("prefix_repetition",), 128, "tokens of an answer"),
    "custom_output_len": _Flag(("custom",), 256, "tokens of an answer at most"),
    "ignore_eos": _Flag(_TEXTS, False, "answers go on to their longest; other datasets always do"),
    "disable_shuffle": _Flag(_SHUFFLED, False, "take requests in the order of the file"),
}


@dataclass(frozen=True)
class DatasetOptions:
    """A dataset and how many requests of it. Lengths are in tokens.

    Raises:
        ConfigError: the dataset is unknown, its file is not named, or a number is out of range.
    """

    name: str = "random"
    dataset_path: str | None = None
    num_prompts: int = 1000
    seed: int = 0
    random_input_len: int = 1024
    random_output_len: int = 128
    random_range_ratio: float = 0.0
    random_prefix_len: int = 0
    prefix_repetition_prefix_len: int = 256
    prefix_repetition_suffix_len: int = 256
    prefix_repetition_num_prefixes: int = 10
    prefix_repetition_output_len: int = 128
    custom_output_len: int = 256
    ignore_eos: bool = False
    disable_shuffle: bool = False

    def __post_init__(self) -> None:
        if self.name not in DATASETS:
            message = f"there is no dataset {shorten(self.name)}; there are {', '.join(DATASETS)}"
            raise ConfigError(message, field="dataset_name", value=self.name)
        if self.name in _FILES and not self.dataset_path:
            raise ConfigError(f"{self.name} is read from a file; name it", field="dataset_path")
        least_zero = ("random_prefix_len", "prefix_repetition_prefix_len", "seed")
        for field, value in vars(self).items():
            least = 0 if field in least_zero else 1
            if type(value) is int and value < least:
                raise ConfigError(f"must be at least {least}, got {value}", field=field, value=value)
        if not 0 <= self.random_range_ratio < 1:
            message = f"must be at least 0 and below 1, got {self.random_range_ratio}"
            raise ConfigError(message, field="random_range_ratio", value=self.random_range_ratio)

    @property
    def ignores_eos(self) -> bool:
        """Whether answers go on to `max_tokens`: lengths are the dataset's, or the user wants it."""
        return self.ignore_eos or self.name not in _TEXTS


def add_dataset_flags(
    command: argparse.ArgumentParser, *, has_seed: bool = False, name: str = "random", num_prompts: int = 1000
) -> None:
    """Adds the flags of `DatasetOptions` to a command.

    Args:
        has_seed: the command has `--seed` already, as all that take the engine's options do.
        name, num_prompts: the command's defaults.
    """
    group = command.add_argument_group("dataset")
    group.add_argument(
        "--dataset-name", default=name, metavar="NAME", help=f"{', '.join(DATASETS)} (default: %(default)s)"
    )
    group.add_argument(
        "--num-prompts", type=int, default=num_prompts, metavar="INT", help="requests (default: %(default)s)"
    )
    if not has_seed:
        group.add_argument("--seed", type=int, default=0, metavar="INT", help="of lengths and token ids (default: 0)")
    for field, flag in _FLAGS.items():
        text = f"{', '.join(flag.datasets)}: {flag.text}"
        spelled = f"--{field.replace('_', '-')}"
        if isinstance(flag.default, bool):
            group.add_argument(spelled, action="store_true", default=None, help=text)
        else:
            kind = str if flag.default is None else type(flag.default)
            note = "" if flag.default is None else f" (default: {flag.default})"
            metavar = "FILE" if flag.default is None else kind.__name__.upper()
            group.add_argument(spelled, type=kind, default=None, metavar=metavar, help=text + note)


def read_options(args: argparse.Namespace) -> DatasetOptions:
    """Returns the options of the flags.

    Raises:
        ConfigError: a value is wrong, or a flag is of another dataset.
    """
    given = {field: value for field in _FLAGS if (value := getattr(args, field)) is not None}
    for field, value in given.items():
        datasets = _FLAGS[field].datasets
        if args.dataset_name in DATASETS and args.dataset_name not in datasets:
            message = f"is for --dataset-name {', '.join(datasets)}; this is {args.dataset_name}"
            raise ConfigError(message, field=field, value=value)
    if args.dataset_path is not None and not Path(args.dataset_path).is_file():  # known before anything slow
        message = f"{args.dataset_path} cannot be read: there is no such file"
        raise ConfigError(message, field="dataset_path", value=args.dataset_path)
    return DatasetOptions(args.dataset_name, num_prompts=args.num_prompts, seed=args.seed or 0, **given)
