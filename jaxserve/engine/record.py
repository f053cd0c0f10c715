"""Records the steps of an engine in a file (`record_steps`)."""

from __future__ import annotations

import logging
from pathlib import Path
from typing import TYPE_CHECKING

from jaxserve.engine.built import BuiltRunner
from jaxserve.errors import ConfigError

if TYPE_CHECKING:
    from jaxserve.core.runtime.protocol import Runner
    from jaxserve.features.multinode.leader import Followers

_log = logging.getLogger(__name__)


def refuse_recording(path: Path, *, has_processor: bool, only_largest: bool) -> None:
    """Raises ConfigError where steps could not be recorded, or not be replayed."""
    from jaxserve.features.recording.recording import refuse_target

    reason = None
    if has_processor:
        reason = "a logits_processor is a function, which a recording cannot hold; leave one of the two out"
    elif only_largest:
        reason = "with serve_while_warming, the first steps run in larger programs than a replay's; leave one out"
    if reason is not None:
        raise ConfigError(reason, field="record_steps", value=str(path))
    refuse_target(path)


def record_runner(built: BuiltRunner, runner: Runner, followers: Followers | None, path: Path) -> Runner:
    """Returns `runner`, perhaps that of several nodes, with each call recorded in a new file."""
    from jaxserve.core.runtime.identity import describe_engine, digest_params
    from jaxserve.core.runtime.tee import TeeRunner
    from jaxserve.features.choose import find_adapters
    from jaxserve.features.recording.recording import Recording, RecordingFile

    def digest() -> str:
        if followers is not None:
            followers.digest_params()
        return digest_params(built.runner.all_params)

    all_params = built.runner.all_params
    file = RecordingFile(path, describe_engine(built.shapes, built.plan, built.mesh, all_params, digest()))
    _log.warning("record_steps: %s gets the tokens of all prompts and answers", path)
    recording = Recording(file, digest)
    if (adapters := find_adapters(built.shapes)) is not None:
        adapters.on_load.append(recording.load_adapter)
    return TeeRunner(runner, recording)
