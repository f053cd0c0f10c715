"""Where a model's files are: a local directory, or a Hugging Face hub id that is fetched once, before serving."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from jaxserve.errors import ConfigError, shorten
from jaxserve.weights.orbax import PARAMS_FOLDER

# Files that make a checkpoint complete beside its weights and config.json.
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "*.model",
)
_WEIGHT_FILES = ("model.safetensors", "model-*.safetensors", "model.safetensors.index.json")
# Never wanted: anything that can run code, and folders (original weights, other frameworks' exports).
_UNWANTED = ("*/*", "*.bin", "*.pt", "*.pth", "*.pkl", "*.py")

_HOW_ELSE = (
    "Give the path of a local directory with config.json and *.safetensors, or fill the Hugging Face cache (HF_HOME) "
    "on a machine with network access; private and gated repositories need HF_TOKEN"
)


def resolve_checkpoint(model: str, revision: str | None = None) -> Path:
    """Returns the directory that holds the checkpoint `model`.

    An existing directory is taken as it is. Anything else is read as a hub id ("name" or "owner/name"), whose config,
    safetensors and tokenizer files are downloaded to the Hugging Face cache, or found there when the hub cannot be
    reached. `revision` is a branch, tag or commit of the hub repository.

    Raises ConfigError (field "model" or "revision") that says what was tried and what would work.
    """
    path = Path(model).expanduser()
    if model and path.is_dir():
        if revision is not None:
            raise ConfigError(f"{path} is a local directory, which has no revisions", field="revision", value=revision)
        return path
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; give the directory that holds config.json and *.safetensors", field="model", value=model
        )
    if not model or model[0] in "/.~" or model.count("/") > 1:
        raise ConfigError(f"there is no directory {shorten(model)}. {_HOW_ELSE}", field="model", value=model)
    return _download(model, revision)


def checkpoint_format(path: Path) -> Literal["safetensors", "orbax"]:
    """Returns how the parameters in the directory `path` are stored; "orbax" is what `save_params` writes."""
    return "orbax" if (path / PARAMS_FOLDER).is_dir() else "safetensors"


def _download(model: str, revision: str | None) -> Path:
    from huggingface_hub import constants, errors, snapshot_download

    where = f"no directory of that name, and {model!r} on the Hugging Face hub"
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=["config.json", *_WEIGHT_FILES, *COMPANION_FILES],
            ignore_patterns=list(_UNWANTED),
        )
    except errors.HFValidationError as error:
        message = f"there is no directory {shorten(model)}, and it is not a hub id ('owner/name'). {_HOW_ELSE}"
        raise ConfigError(message, field="model", value=model) from error
    except errors.GatedRepoError as error:
        message = f"{where} is gated: accept its licence on the hub, then set HF_TOKEN"
        raise ConfigError(message, field="model", value=model) from error
    except errors.RevisionNotFoundError as error:
        raise ConfigError(f"{model} has no such revision", field="revision", value=revision) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{where} does not exist, or is private and HF_TOKEN does not open it. {_HOW_ELSE}"
        raise ConfigError(message, field="model", value=model) from error
    except Exception as error:  # whatever the network stack, the disk or the offline switch raise
        message = (
            f"{where} could not be fetched ({type(error).__name__}: {_first_line(error)}), "
            f"nor is it in the cache {constants.HF_HUB_CACHE}. {_HOW_ELSE}"
        )
        raise ConfigError(message, field="model", value=model) from error
    return Path(folder)


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0][:200].rstrip(".")
