"""The files of a drafter with weights: what they hold, and its parameters on the devices."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.engine.model_files import ModelFiles
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.model_options import DEMO_MODEL
from jaxserve.presets import demo_head_dir

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.runtime.shapes import Shapes
    from jaxserve.features.speculation.drafters import DrafterModel


@dataclass(frozen=True)
class DraftFiles:
    """A drafter, and the directory of its weights; None: random ones, beside a target's."""

    model: DrafterModel
    path: Path | None

    def fingerprint(self) -> str | None:
        """Returns what tells its weights from others; None if they are random."""
        from jaxserve.core.weights.fingerprint import fingerprint_weights

        return None if self.path is None else fingerprint_weights(self.path)

    def load_params(self, shapes: Shapes, mesh: Mesh, *, seed: int, progress: ShowProgress = hide_progress) -> Any:
        """Returns the parameters as run-time arrays on the devices of `mesh`.

        Raises:
            WeightsError: a tensor is missing, too much, damaged or of another shape.
        """
        from jaxserve.core.layers.stack import stack_params, stack_specs
        from jaxserve.core.sharding import DEFAULT_RULES
        from jaxserve.core.weights import make_dummy_params
        from jaxserve.features.speculation.drafters import drafter_param_specs
        from jaxserve.features.speculation.drafters.files import load_drafter

        if self.path is None:
            specs = stack_specs(drafter_param_specs(self.model), shapes.stack_mode)
            return make_dummy_params(specs, mesh=mesh, rules=DEFAULT_RULES, seed=seed)
        with progress("Loading the drafter", unit="bytes") as report:
            params = load_drafter(
                self.model,
                self.path,
                mesh=mesh,
                rules=DEFAULT_RULES,
                progress=report,
                allow_nonfinite=shapes.config.model.allow_nonfinite,
            )
        return stack_params(params, shapes.stack_mode)


def locate_drafter(config: EngineConfig, files: ModelFiles, target: DecoderConfig) -> DraftFiles | None:
    """Returns the drafter with weights that `speculative_config` names, for the resolved `target`; None: there is none.

    Raises:
        ConfigError, WeightsError: it is no drafter, or not one for this model.
    """
    from jaxserve.features.speculation import LOOKUP_METHODS
    from jaxserve.features.speculation.drafters import expand_drafter_heads
    from jaxserve.features.speculation.drafters.files import read_drafter, resolve_drafter
    from jaxserve.features.speculation.drafters.mtp import parse_mtp

    chosen = config.speculation.speculative_config
    if chosen is None or chosen.method in LOOKUP_METHODS:
        return None
    path: Path | None
    if chosen.method == "mtp" and config.model.load_format == "dummy":
        model, path = parse_mtp(files.hf_config, target), None
    else:
        if chosen.method == "mtp":
            path = files.find_weights()
        elif chosen.method == "eagle3" and chosen.model == DEMO_MODEL:
            path = demo_head_dir()
        else:
            assert chosen.model is not None  # SpeculativeConfig requires it
            path = resolve_drafter(chosen.model)
        model = read_drafter(chosen.method, path, target, target_path=files.path)
    return DraftFiles(expand_drafter_heads(model, config.parallel.tensor_parallel_size), path)
