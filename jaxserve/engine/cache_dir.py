"""The directory of compiled programs, which are code: an engine reads it only if nobody else may write there."""

from __future__ import annotations

import atexit
import dataclasses
import logging
import shutil
import tempfile

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.files import find_other_writer

_log = logging.getLogger(__name__)


def make_cache_dir(config: EngineConfig) -> EngineConfig:
    """Makes the directory of compiled programs; returns the config, without a directory if the default cannot be made.

    Programs are code. So a directory into which others may write is left alone, and this process has one of its own.

    Raises:
        ConfigError: the requested directory cannot be made.
    """
    directory = config.compile.cache_dir
    if directory is None:
        return config
    try:
        directory.mkdir(mode=0o755, parents=True, exist_ok=True)
    except OSError as error:
        reason = f"{directory} cannot be made ({error.strerror})"
        if config.compile.compilation_cache_dir is not None:
            message = f"{reason}; give another directory, or '' for none"
            raise ConfigError(message, field="compilation_cache_dir", value=str(directory)) from error
        _log.warning("compiled programs are not kept: %s; compilation_cache_dir takes another directory", reason)
        return _with_cache_dir(config, "")
    reason = find_other_writer(directory)
    if reason is None:
        return config
    own = tempfile.mkdtemp(prefix="jaxserve-programs-")
    atexit.register(shutil.rmtree, own, ignore_errors=True)
    _log.warning(
        "compiled programs are not read from %s: %s, and programs are code; this process compiles its own. Make the "
        "directory yours alone (chown, chmod -R go-w), or give another with compilation_cache_dir",
        *(directory, reason),
    )
    return _with_cache_dir(config, own)


def _with_cache_dir(config: EngineConfig, directory: str) -> EngineConfig:
    return dataclasses.replace(config, compile=dataclasses.replace(config.compile, compilation_cache_dir=directory))
