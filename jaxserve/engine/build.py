"""Builds an engine from options: loads the model, plans memory and compiles programs."""

from __future__ import annotations

import dataclasses
import logging
import weakref
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal, get_args

from jaxserve.config import EngineConfig, allow_pinned_memory
from jaxserve.core.pages import PageManager
from jaxserve.core.scheduler import Scheduler
from jaxserve.engine.built import BuiltRunner
from jaxserve.engine.cache_dir import make_cache_dir
from jaxserve.engine.draft_files import DraftFiles, locate_drafter
from jaxserve.engine.engine import Engine
from jaxserve.engine.engine_counts import AttentionStats
from jaxserve.engine.generation_config import (
    GenerationDefaults,
    read_end_tokens,
    read_generation_defaults,
)
from jaxserve.engine.images import ImageInput, describe_images
from jaxserve.engine.model_files import (
    ModelFiles,
    load_model_tokenizer,
    load_params,
    locate_model,
    open_update,
    resolve_model,
)
from jaxserve.engine.nodes import (
    end_process,
    lead_nodes,
    lead_steps,
    refuse_copies,
    refuse_with_nodes,
    resolve_nodes,
)
from jaxserve.engine.pairs import make_pair_encoder
from jaxserve.engine.pooling import list_tasks
from jaxserve.engine.progress import ShowProgress, hide_progress
from jaxserve.engine.prompts import RequestFactory
from jaxserve.engine.record import record_runner, refuse_recording
from jaxserve.engine.request_options import FindAdapter, refuse_adapter
from jaxserve.engine.tower_files import TowerFiles, locate_tower
from jaxserve.errors import ClusterError, ConfigError, TokenizerError
from jaxserve.logits_processor import LogitsProcessor
from jaxserve.sampling_params import SamplingParams

if TYPE_CHECKING:
    import jax
    from jax.sharding import Mesh

    from jaxserve.core.runtime.memory import CachePlan
    from jaxserve.core.runtime.nodes import Nodes
    from jaxserve.core.runtime.protocol import Runner
    from jaxserve.core.runtime.runner import ModelRunner
    from jaxserve.core.runtime.shapes import Shapes
    from jaxserve.features.lora.store import AdapterStore
    from jaxserve.features.multinode.leader import Followers
    from jaxserve.request import RequestOutput
    from jaxserve.tokenizers import Tokenizer

_log = logging.getLogger(__name__)
RunningChoice = Literal["requeue", "abort"]  # what becomes of unfinished requests when weights change


@dataclass(frozen=True)
class ReadyEngine:
    """A built engine, its parts, and the choices made at the start."""

    engine: Engine
    requests: RequestFactory
    tokenizer: Tokenizer | None
    defaults: GenerationDefaults
    shapes: Shapes
    plan: CachePlan
    runner: ModelRunner
    mesh: Mesh
    followers: Followers | None = None  # the other nodes
    adapters: AdapterStore | None = None  # with `enable_lora`

    def require_tokenizer(self) -> Tokenizer:
        """Returns the tokenizer; TokenizerError if there is none."""
        if self.tokenizer is None:
            raise TokenizerError("there is none: skip_tokenizer_init is set, or a preset is served", field="tokenizer")
        return self.tokenizer

    @property
    def default_params(self) -> SamplingParams:
        """The parameters of a request that gives none."""
        return self.defaults.params

    def compile_rest(self, progress: ShowProgress) -> Iterator[Callable[[], None]]:
        """Compiles the programs that `only_largest` left out; yields functions that must run between two steps."""
        from jaxserve.core.runtime.startup import compile_rest

        with progress("Compiling programs") as report:
            note = lambda name, done, total, loaded: report(done, total, name, loaded=loaded)  # noqa: E731
            for change in compile_rest(self.shapes, self.mesh, self.plan, self.runner, note):
                yield change if self.followers is None else partial(self.followers.add_programs, change)

    def close(self) -> None:
        """Ends the other nodes of the engine, if there are any. Further calls do nothing."""
        if self.followers is not None:
            self.followers.stop()

    def update_weights(self, tree: Any, running: RunningChoice) -> list[RequestOutput]:
        """Swaps the weights while the device is idle; see `LLM.update_weights`."""
        from jaxserve.core.weights import CheckpointUpdate, check_update
        from jaxserve.families.registry import describe_files, param_specs

        if running not in get_args(RunningChoice):
            raise ConfigError(f"must be 'requeue' or 'abort', got {running!r}", field="running", value=running)
        updates: Mapping[str, Any] | CheckpointUpdate
        if isinstance(tree, str | Path):
            updates = open_update(tree, self.shapes, self.mesh)
        elif self.shapes.config.nodes.nnodes == 1:
            allow = self.shapes.config.model.allow_nonfinite
            updates = check_update(param_specs(describe_files(self.shapes.model)), tree, allow_nonfinite=allow)
        else:
            message = "must be the path of a checkpoint, which all nodes of the engine can read"
            raise ConfigError(message, field="tree")
        outputs = self.engine.drain()
        outputs += self.engine.abort_all() if running == "abort" else []
        self.engine.runner.write_params(updates)
        self.engine.scheduler.requeue_running()
        return outputs


def build_engine(
    config: EngineConfig,
    *,
    progress: ShowProgress = hide_progress,
    processor: LogitsProcessor | None = None,
    only_largest: bool = False,
    announce: Callable[[str], None] = lambda text: None,
    on_loss: Callable[[ClusterError], None] = end_process,
) -> ReadyEngine:
    """Builds an engine that can take requests; if it runs on several nodes, that of rank 0.

    Args:
        only_largest: compile only the programs large enough for any step; `ReadyEngine.compile_rest` compiles the rest.
        announce: called with a line about what the engine holds, and one for each program compiled later.
        on_loss: called on another thread when another node is lost.

    Raises:
        ConfigError, DeviceError, WeightsError, TokenizerError, CapacityError, ClusterError: name what to change.
    """
    record_steps = config.observability.record_steps
    if record_steps is not None:
        refuse_recording(Path(record_steps), has_processor=processor is not None, only_largest=only_largest)
    config = dataclasses.replace(make_cache_dir(config), nodes=resolve_nodes(config.nodes))
    refuse_copies(config)
    refuse_with_nodes(config, has_processor=processor is not None)
    from jaxserve.engine.memory_report import describe_capacity
    from jaxserve.features.choose import find_adapters
    from jaxserve.features.lora.tokenizer import check_tokenizer

    with lead_nodes(config, on_loss, only_largest=only_largest) as group:
        files = locate_model(config.model)
        tokenizer = load_model_tokenizer(config.model, files)
        eos_token_ids = read_end_tokens(config.model, files.path)
        defaults = read_generation_defaults(
            files.generation_config,
            end_tokens=eos_token_ids,
            has_tokenizer=tokenizer is not None,
            is_limit=config.model.names_generation_config,
        )
        built = build_runner(
            config,
            files,
            progress=progress,
            processor=processor,
            only_largest=only_largest,
            announce=announce,
            nodes=group,
        )
    capacity = describe_capacity(built.shapes, built.plan)
    _log.info("%s", capacity)
    announce(capacity)
    runner, followers = lead_steps(built.runner, group)
    if record_steps is not None:
        runner = record_runner(built, runner, followers, Path(record_steps))
    engine = make_engine(built, runner, tokenizer)
    shapes, adapters = built.shapes, find_adapters(built.shapes)
    if adapters is not None:
        adapters.check = partial(check_tokenizer, tokenizer)
        if followers is not None:
            adapters.on_load.insert(0, followers.load_adapter)  # before a recording has it: another node may refuse
            adapters.on_drop.append(followers.drop_adapter)
    images = None
    if built.images is not None:
        images = ImageInput(built.images, shapes.config, shapes.model.max_model_len)
        _log.info("%s", describe_images(built.images))
        announce(describe_images(built.images))
    found = None if adapters is None else adapters.find
    factory = _make_factory(shapes, files, tokenizer, eos_token_ids, processor, found, images)
    if followers is not None:
        weakref.finalize(engine, followers.stop)
    parts = shapes, built.plan, built.runner, built.mesh
    return ReadyEngine(engine, factory, tokenizer, defaults, *parts, followers, adapters)


def _make_factory(
    shapes: Shapes,
    files: ModelFiles,
    tokenizer: Tokenizer | None,
    eos_token_ids: Sequence[int],
    processor: LogitsProcessor | None,
    find_adapter: FindAdapter | None,
    images: ImageInput | None,
) -> RequestFactory:
    return RequestFactory(
        tokenizer,
        vocab_size=shapes.model.vocab_size,
        eos_token_ids=(*shapes.model.eos_token_ids, *eos_token_ids),
        seed=shapes.config.model.seed,
        max_model_len=shapes.model.max_model_len,
        reads_whole=shapes.model.reads_whole,
        max_logprobs=shapes.config.compile.max_logprobs,
        processor=processor,
        tasks=list_tasks(shapes.model),
        pairs=make_pair_encoder(tokenizer, shapes.model, files.hf_config),
        prompts=None if files.modules is None else files.modules.prompts,
        images=images,
        find_adapter=find_adapter or refuse_adapter,
    )


def make_engine(built: BuiltRunner, runner: Runner, tokenizer: Tokenizer | None) -> Engine:
    """Returns the engine whose scheduler plans for a built runner; its steps go to `runner`, which wraps that one."""
    from jaxserve.core.runtime.startup import caches_prefixes, page_groups

    shapes, options = built.shapes, built.shapes.config
    assert options.cache.page_size is not None and options.scheduler.max_num_batched_tokens is not None
    pages = PageManager(
        page_groups(shapes, built.plan),
        page_size=options.cache.page_size,
        max_chunk=options.scheduler.max_num_batched_tokens,
        enable_prefix_caching=caches_prefixes(shapes, built.plan),
        num_snapshots=built.plan.num_snapshots,
        **shapes.page_options,
    )
    return Engine(
        Scheduler(shapes.limits, pages, costs=built.runner.step_costs),
        runner,
        vocab_size=shapes.model.vocab_size,
        tokenizer=tokenizer,
        overlap=options.scheduler.async_scheduling,
        attention=AttentionStats(shapes.impl, shapes.impl_reason, shapes.fell_back),
    )


def build_runner(
    config: EngineConfig,
    files: ModelFiles,
    *,
    progress: ShowProgress = hide_progress,
    processor: LogitsProcessor | None = None,
    only_largest: bool = False,
    announce: Callable[[str], None] = lambda text: None,
    num_pages: Sequence[int] | None = None,
    num_snapshots: int | None = None,
    nodes: Nodes | None = None,
) -> BuiltRunner:
    """Loads the weights, plans memory and compiles programs; see `build_engine`.

    Args:
        num_pages: the pages of each KV group, in place of a memory plan.
        num_snapshots: those of recurrent states, likewise.
        nodes: those that run this engine together, if there are several. Each calls this function.
    """
    from jaxserve.core.runtime.nodes import ONE_NODE
    from jaxserve.core.runtime.program_cache import enable_persistent_cache
    from jaxserve.core.runtime.self_test import confirm_kernels
    from jaxserve.core.runtime.startup import start_runner
    from jaxserve.core.sharding import make_mesh
    from jaxserve.features.bundle.read import Bundle
    from jaxserve.features.images.feature import Images
    from jaxserve.features.speculation.drafter import Drafter

    nodes = nodes or ONE_NODE
    allow_pinned_memory(config.cache.kv_offloading_size)
    mesh = make_mesh(config.parallel.tensor_parallel_size)
    device = mesh.local_devices[0]
    shapes, drafter, tower = _choose_shapes(config, files, device, processor)
    if files.hub_id is not None and shapes.model.embedding.tied:  # it fits, but its files may have their own head
        shapes, drafter, tower = _choose_shapes(config, files, device, processor, download=True)
    bundle = None if config.compile.bundle is None else Bundle(Path(config.compile.bundle), mesh)
    enable_persistent_cache(config.compile.cache_dir)
    if bundle is None or not bundle.is_tested:
        shapes = confirm_kernels(shapes, mesh.local_devices[0])
    _log_choices(shapes)
    if bundle is not None:
        bundle.require(shapes)
    if nodes.size > 1:
        facts = {
            "bundle": None if bundle is None else bundle.digest,
            "drafter": None if drafter is None else drafter.fingerprint(),
        }
        nodes.require_equal(describe_model_files(files, shapes) | facts)
    params = load_params(config, files, shapes, mesh, progress=progress, has_tower=tower is not None)
    of_drafter = None
    if drafter is not None:
        of_drafter = drafter.load_params(shapes, mesh, seed=config.model.seed, progress=progress)
    of_tower = None if tower is None else tower.load_params(config, shapes, mesh, progress=progress)
    of_features: dict[type, Any] = {Drafter: of_drafter, Images: of_tower}
    with progress("Loading programs" if bundle is not None else "Compiling programs") as report:
        note = lambda name, done, total, loaded: report(done, total, name, loaded=loaded)  # noqa: E731
        runner, plan = start_runner(
            shapes,
            mesh,
            params,
            note,
            feature_params=[of_features.get(type(each)) for each in shapes.features],
            only_largest=only_largest,
            announce=announce,
            num_pages=num_pages,
            num_snapshots=num_snapshots,
            nodes=nodes,
            stored=bundle,
        )
    return BuiltRunner(shapes, mesh, plan, runner, None if tower is None else tower.images)


def _log_choices(shapes: Shapes) -> None:
    from jaxserve.core.runtime.memory import GIB
    from jaxserve.core.runtime.startup import estimate_use
    from jaxserve.core.runtime.weight_report import describe_weights

    level = logging.WARNING if shapes.fell_back else logging.INFO
    _log.log(level, "attention: %s, %s", shapes.impl, shapes.impl_reason)
    if shapes.prompt_impl is not None:
        _log.info("attention of prompts: %s, %s", *shapes.prompt_impl)
    for name, choice in {"experts": shapes.experts, "recurrent states": shapes.recurrence}.items():
        if choice is not None:
            _log.log(
                logging.WARNING if choice.is_slow else logging.INFO, "%s: %s, %s", name, choice.impl, choice.reason
            )
    weights = describe_weights(shapes.model)
    if weights is not None:
        _log.info("weights: %s, %.2f GiB on each device", weights, estimate_use(shapes).params / GIB)


def _choose_shapes(
    config: EngineConfig,
    files: ModelFiles,
    device: jax.Device,
    processor: LogitsProcessor | None,
    *,
    download: bool = False,
) -> tuple[Shapes, DraftFiles | None, TowerFiles | None]:
    """Returns the shapes of the engine on a device, its drafter if it has weights, and its tower if it reads images.

    Raises:
        CapacityError: the device has no room for it.
    """
    from jaxserve.core.runtime.memory import device_memory_bytes
    from jaxserve.core.runtime.startup import require_room
    from jaxserve.features.choose import make_shapes

    model = resolve_model(config, files, device.device_kind, download=download)
    drafter, tower = locate_drafter(config, files, model), locate_tower(config, files, model)
    parts = None if drafter is None else drafter.model, None if tower is None else tower.config
    shapes = make_shapes(config, model, device.platform, device.device_kind, *parts)
    shapes = dataclasses.replace(shapes, processor=processor)
    require_room(shapes, device_memory_bytes(device))
    return shapes, drafter, tower


def describe_model_files(files: ModelFiles, shapes: Shapes) -> dict[str, Any]:
    """Returns what the nodes of one engine must have in common before they read weights."""
    from jaxserve.core.runtime.identity import describe_model
    from jaxserve.core.weights.fingerprint import fingerprint_weights

    reads = files.path is not None and shapes.config.model.load_format != "dummy"
    return {
        **describe_model(shapes.model),
        "attention": shapes.impl,
        "weights": fingerprint_weights(files.find_weights()) if reads else None,
    }
