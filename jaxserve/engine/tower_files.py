"""The tower of a model that reads images: its choices at a start, and its parameters on the devices."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from jaxserve.config import EngineConfig
from jaxserve.engine.images import SERVE_TEXT, choose_images
from jaxserve.engine.model_files import ModelFiles
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.errors import ConfigError, WeightsError
from jaxserve.media.options import ImageOptions

if TYPE_CHECKING:
    from jax.sharding import Mesh

    from jaxserve.core.models.base import DecoderConfig
    from jaxserve.core.models.tower import TowerConfig
    from jaxserve.core.runtime.shapes import Shapes


@dataclass(frozen=True)
class TowerFiles:
    """A tower in the files of its model, and how the engine reads images for it."""

    config: TowerConfig  # fitted to the devices
    images: ImageOptions
    files: ModelFiles

    def load_params(
        self, config: EngineConfig, shapes: Shapes, mesh: Mesh, *, progress: ShowProgress = hide_progress
    ) -> Any:
        """Returns the parameters as run-time arrays on the devices of `mesh`; random ones with "dummy".

        Raises:
            WeightsError: a tensor is missing, damaged, quantized or of another shape.
        """
        from jaxserve.core.layers.stack import stack_params, stack_specs
        from jaxserve.core.sharding import DEFAULT_RULES
        from jaxserve.core.weights import make_dummy_params
        from jaxserve.core.weights.tower import load_tower
        from jaxserve.families.towers import tower_param_specs

        if config.model.load_format == "dummy":
            specs = stack_specs(tower_param_specs(self.config), shapes.stack_mode)
            return make_dummy_params(specs, mesh=mesh, rules=DEFAULT_RULES, seed=config.model.seed)
        with _offer_text(), progress("Loading the tower", unit="bytes") as report:
            params = load_tower(
                self.config,
                self.files.find_weights(),
                mesh=mesh,
                rules=DEFAULT_RULES,
                progress=report,
                allow_nonfinite=config.model.allow_nonfinite,
            )
        return stack_params(params, shapes.stack_mode)


def locate_tower(config: EngineConfig, files: ModelFiles, model: DecoderConfig) -> TowerFiles | None:
    """Returns the tower of a resolved model; None if it is served for text.

    Raises:
        ConfigError: as `choose_images`; or the tower's config does not fit the processor, the model or the devices.
    """
    from jaxserve.core.runtime.tower import fit_tower
    from jaxserve.families.towers import TOWERS, parse_tower

    images = choose_images(config, files, model, TOWERS)
    if images is None:
        return None
    with _offer_text():
        tower = fit_tower(parse_tower(files.hf_config, model, images.processor), config.parallel.tensor_parallel_size)
    return TowerFiles(replace(tower, max_patches=images.max_patches), images, files)


@contextmanager
def _offer_text() -> Iterator[None]:
    """Adds to an error of the tower that the model can be served without it."""
    try:
        yield
    except (ConfigError, WeightsError) as error:
        message = str(error).removeprefix(f"{error.field}: ")
        raise type(error)(f"{message}; {SERVE_TEXT}", field=error.field, value=error.value) from error
