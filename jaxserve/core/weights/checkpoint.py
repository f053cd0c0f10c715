"""Finds a model's files: a local directory, or a Hugging Face hub id that is downloaded once, before serving."""

from __future__ import annotations

import difflib
import shutil
from fnmatch import fnmatch
from glob import escape
from pathlib import Path

from jaxserve.core.weights.file_formats import (
    ADAPTER_CONFIG,
    INDEX_FILE,
    ORIGINAL_CONFIG,
    QUANTIZATION_FILES,
    SINGLE_FILE,
    has_weights,
    refuse_foreign_name,
)
from jaxserve.core.weights.json_files import MODELOPT_FILE
from jaxserve.core.weights.sentence_transformers import MODULE_FILES, MODULES_FILE, PROMPTS_FILE, TEXTS_FILE
from jaxserve.errors import ConfigError, shorten
from jaxserve.gguf_file import is_gguf, list_parts
from jaxserve.model_options import DEMO_MODEL
from jaxserve.presets import SMOL_MODEL, list_presets

# The files of a complete checkpoint beside its weights and config.json.
COMPANION_FILES = (
    "generation_config.json",
    "tokenizer*",
    "special_tokens_map.json",
    "added_tokens.json",
    "chat_template*",
    "preprocessor_config.json",
    "processor_config.json",
    "*.model",
    MODULES_FILE,
    TEXTS_FILE,
    PROMPTS_FILE,
)
# Files that identify a model, or a checkpoint that cannot be read, before its weights are downloaded.
_CONFIG_FILES = ("config.json", ADAPTER_CONFIG, ORIGINAL_CONFIG, *QUANTIZATION_FILES, MODELOPT_FILE, *COMPANION_FILES)
_WEIGHT_FILES = (SINGLE_FILE, "model-*.safetensors", INDEX_FILE)
# Never downloaded: anything that can run code, and other folders than those of modules.json (original weights, other
# frameworks' exports).
_CODE = ("*.bin", "*.pt", "*.pth", "*.pkl", "*.py")
_UNWANTED = ("*/*", *_CODE)

_HOW_ELSE = (
    "Give the path of a local directory with config.json and *.safetensors, or fill the Hugging Face cache (HF_HOME) "
    "on a machine with network access; private and gated repositories need HF_TOKEN"
)


def resolve_checkpoint(model: str, revision: str | None = None, *, need_weights: bool = True) -> Path:
    """Returns the directory that holds the checkpoint `model`, or its GGUF file.

    `model` is a directory, a GGUF file, a hub id ("name" or "owner/name") or a GGUF file there ("owner/name:file.gguf",
    the first of several parts, which are all downloaded at once). The config, safetensors and tokenizer files of a hub
    id are downloaded to the Hugging Face cache, or found there when the hub cannot be reached. `revision` is a branch,
    tag or commit of the hub repository. Without `need_weights` the weights are not downloaded yet: `download_weights`
    does that when everything else is known to fit.

    Raises ConfigError (field "model" or "revision"), which says what was tried and what would work.
    """
    path = Path(model).expanduser()
    if model and path.is_dir() and not is_gguf(model):
        if revision is not None:
            raise ConfigError(f"{path} is a local directory, which has no revisions", field="revision", value=revision)
        return path
    refuse_foreign_name(model)
    if is_gguf(model):
        return _resolve_gguf(model, path, revision)
    if path.is_file():
        raise ConfigError(
            f"{path} is a file; give the directory that holds config.json and *.safetensors", field="model", value=model
        )
    if not model or model[0] in "/.~" or model.count("/") > 1:
        raise ConfigError(f"there is no directory {shorten(model)}. {_HOW_ELSE}", field="model", value=model)
    folder = _download(model, revision, (*_CONFIG_FILES, *(_WEIGHT_FILES if need_weights else ())))
    if (folder / MODULES_FILE).exists():
        _download(model, folder.name, MODULE_FILES, unwanted=_CODE)
    return folder


def _resolve_gguf(model: str, path: Path, revision: str | None) -> Path:
    repository, colon, name = model.rpartition(":")
    if path.exists() or not colon:
        if not path.is_file():
            reason = "is a directory, and GGUF models are files" if path.is_dir() else "does not exist"
            raise ConfigError(f"{shorten(model)} {reason}. {_HOW_ELSE}", field="model", value=model)
        if revision is not None:
            raise ConfigError(f"{path} is a local file, which has no revisions", field="revision", value=revision)
        return path
    names = [part.as_posix() for part in list_parts(Path(name))]
    folder = _download(repository, revision, tuple(map(escape, names)), unwanted=())
    missing = [part for part in names if not (folder / part).is_file()]
    if missing:
        raise ConfigError(f"{repository} on the hub has no file {missing[0]}", field="model", value=model)
    return folder / names[0]


def copy_companions(source: Path, target: Path) -> None:
    """Copies the files of a checkpoint other than config.json and weights."""
    for file in sorted(source.iterdir()):
        if file.is_file() and any(fnmatch(file.name, pattern) for pattern in COMPANION_FILES):
            shutil.copyfile(file, target / file.name)
    for file in (found for pattern in MODULE_FILES for found in sorted(source.glob(pattern))):
        (target / file.parent.name).mkdir(exist_ok=True)
        shutil.copyfile(file, target / file.parent.name / file.name)


def download_weights(model: str, snapshot: Path) -> None:
    """Downloads the weights of the hub id `model` to the directory that `resolve_checkpoint` returned without them.

    They come from the same commit. Raises ConfigError as `resolve_checkpoint` does, and for a repository without
    weights.
    """
    _download(model, snapshot.name, _WEIGHT_FILES)
    if not has_weights(snapshot):
        message = (
            f"{model!r} on the Hugging Face hub has no {SINGLE_FILE}, nor {INDEX_FILE} with shards; give a revision or "
            "repository with safetensors, or convert its weights and give the directory"
        )
        raise ConfigError(message, field="model", value=model)


def _download(model: str, revision: str | None, files: tuple[str, ...], unwanted: tuple[str, ...] = _UNWANTED) -> Path:
    from huggingface_hub import errors, snapshot_download

    where = f"no directory of that name{_hint(model)}, and {model!r} on the Hugging Face hub"
    try:
        folder = snapshot_download(
            model,
            revision=revision,
            allow_patterns=list(files),
            ignore_patterns=list(unwanted),
        )
    except errors.HFValidationError as error:
        message = f"there is no directory {shorten(model)}, and it is not a hub id ('owner/name'). {_HOW_ELSE}"
        raise ConfigError(message, field="model", value=model) from error
    except errors.GatedRepoError as error:
        message = f"{where} is gated: accept its licence on the hub, then set HF_TOKEN"
        raise ConfigError(message, field="model", value=model) from error
    except errors.RevisionNotFoundError as error:
        message = f"{model} has no revision {shorten(revision)}; give one of its branches, tags or commits"
        raise ConfigError(message, field="revision", value=revision) from error
    except errors.RepositoryNotFoundError as error:
        message = f"{where} does not exist, or is private and HF_TOKEN does not open it. {_HOW_ELSE}"
        raise ConfigError(message, field="model", value=model) from error
    except errors.HfHubHTTPError as error:
        if error.response.status_code not in (401, 403):
            raise _unreachable(model, where, error) from error
        message = (
            f"{where} cannot be opened with your access token (HTTP {error.response.status_code}): renew HF_TOKEN or "
            "the stored login, or remove them for a public repository"
        )
        raise ConfigError(message, field="model", value=model) from error
    except Exception as error:  # from the network, the disk or offline mode
        raise _unreachable(model, where, error) from error
    return Path(folder)


def _unreachable(model: str, where: str, error: Exception) -> ConfigError:
    from huggingface_hub import constants

    message = (
        f"{where} could not be fetched ({type(error).__name__}: {_first_line(error)}), "
        f"nor is it in the cache {constants.HF_HUB_CACHE}. {_HOW_ELSE}"
    )
    return ConfigError(message, field="model", value=model)


def _hint(model: str) -> str:
    """Returns a suggestion if the name is close to that of a model that comes with jaxserve, else ""."""
    nearest = difflib.get_close_matches(model, (DEMO_MODEL, SMOL_MODEL, *list_presets()), n=1, cutoff=0.7)
    return f" (did you mean {nearest[0]!r}?)" if nearest else ""


def _first_line(error: Exception) -> str:
    return (str(error).strip().splitlines() or ["no details"])[0][:200].rstrip(".")
