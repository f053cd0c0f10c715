"""The whole step, compiled against a large pool: the pool is donated, never copied."""

from __future__ import annotations

import dataclasses
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import jax
import pytest
from jax.sharding import Mesh

from jaxserve.config import EngineConfig
from jaxserve.core.layers.stack import LayerStack, stack_params
from jaxserve.core.runtime import startup
from jaxserve.core.runtime.arguments import make_compiler
from jaxserve.core.runtime.buckets import Bucket
from jaxserve.core.runtime.memory import DeviceUse, plan_cache
from jaxserve.core.runtime.shapes import Shapes
from jaxserve.core.runtime.startup import measure_use, start_runner
from jaxserve.core.scheduler import ChunkWork, NewRow, StepPlan
from jaxserve.core.sharding import DEFAULT_RULES, make_mesh
from jaxserve.core.weights import check_update, make_dummy_params
from jaxserve.errors import CapacityError
from jaxserve.families.registry import param_specs, parse_config
from jaxserve.features.choose import make_shapes
from jaxserve.sampling_params import SamplingParams
from tests.golden_cases import load_case


def make_small_shapes(case: str, **options: Any) -> Shapes:
    """Programs are compiled when a step needs them: a runner of all of them takes a minute to build."""
    config = EngineConfig.from_options(
        max_num_seqs=4, max_num_batched_tokens=64, compile="used", compilation_cache_dir="", **options
    )
    return make_shapes(config, parse_config(load_case(case).config).with_max_model_len(160), "cpu", "cpu")


@pytest.mark.parametrize("case", ["llama_gqa", "gemma2"])
def test_pool_is_not_copied(case: str) -> None:
    shapes = make_small_shapes(case)
    plan = plan_cache(shapes.model, specs=shapes.specs, max_chunk=64, num_devices=1, budget=0, override=4000)
    compiler = make_compiler(shapes, plan, make_mesh(1))
    for bucket in (shapes.buckets.buckets[0], shapes.buckets.largest):
        analysis = compiler.compile("forward", bucket).memory_analysis()
        assert plan.bytes_per_device > 40 * 2**20
        assert analysis.alias_size_in_bytes >= plan.bytes_per_device
        assert analysis.temp_size_in_bytes < plan.bytes_per_device / 10


def test_copies_of_states_copy_no_pool() -> None:
    shapes = make_small_shapes("qwen3_next")
    plan = startup.plan_pools(shapes, budget=0, num_pages=(8,), num_snapshots=30_000)
    compiler = make_compiler(shapes, plan, make_mesh(1))
    for bucket in (shapes.buckets.buckets[0], shapes.buckets.largest):
        analysis = compiler.compile("forward", bucket).memory_analysis()
        assert plan.bytes_per_device > 40 * 2**20
        assert analysis.alias_size_in_bytes >= plan.bytes_per_device
        assert analysis.temp_size_in_bytes < plan.bytes_per_device / 10


@pytest.mark.parametrize("case", ["qwen3_next", "lfm2"])
def test_verify_steps_copy_no_states(case: str) -> None:
    drafts = {"method": "ngram", "num_speculative_tokens": 2, "prompt_lookup_max": 2}
    shapes = make_small_shapes(case, speculative_config=drafts)
    plan = startup.plan_pools(shapes, budget=0, num_pages=(8,), num_snapshots=100_000)
    compiler = make_compiler(shapes, plan, make_mesh(1))
    assert plan.bytes_per_device > 20 * 2**20
    for rows in (1, 2):
        for program in (("forward", Bucket(rows * 3, rows, 3)), ("settle", (rows, 3))):
            analysis = compiler.compile(*program).memory_analysis()
            assert analysis.alias_size_in_bytes >= plan.bytes_per_device, program
            assert analysis.temp_size_in_bytes < plan.bytes_per_device / 10, program
            assert compiler.programs.make(*program).has_products, "a GPU would repeat updates of the pools"


def test_programs_are_measured_in_threads_that_see_the_devices() -> None:
    shapes, names = make_small_shapes("llama_gqa", compile_threads=2), []

    @contextmanager
    def trace() -> Iterator[None]:
        names.append(threading.current_thread().name)
        yield

    use = measure_use(shapes, make_mesh(1), trace)
    assert use.temporaries > 0 and len(names) == 1 + len(shapes.sample_programs)
    assert all(name.startswith("compile") for name in names) and len(set(names)) == 2


@pytest.mark.parametrize(
    ("case", "given"),
    [
        ("llama_gqa", {"num_kv_pages_override": 30}),
        ("llama_gqa", {"kv_cache_memory_bytes": 8 * 2**20}),
        ("qwen3_next", {"kv_cache_memory_bytes": 8 * 2**20}),
    ],
)
def test_nothing_is_measured_for_pools_of_a_given_size(
    case: str, given: dict[str, int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(startup, "measure_use", None)
    monkeypatch.setattr(startup, "device_memory_bytes", lambda device: 2**30)
    shapes = dataclasses.replace(make_small_shapes(case, **given), platform="gpu")
    budget = startup._find_budget(shapes, make_mesh(1), None)
    plan = startup.plan_pools(shapes, budget=budget)
    assert plan.num_pages == (30,) if "num_kv_pages_override" in given else 0 < plan.bytes_per_device <= 8 * 2**20
    assert (plan.num_snapshots > 0) == (case == "qwen3_next")


def test_a_prefix_cache_that_was_asked_for_has_room_for_a_snapshot() -> None:
    shapes = make_small_shapes("qwen3_next")
    least = startup.plan_pools(shapes, budget=0, num_pages=(160 // shapes.page_size + 1,), num_snapshots=0)
    options = {"kv_cache_memory_bytes": least.bytes_per_device}
    assert not startup.caches_prefixes(shapes, startup.plan_pools(make_small_shapes("qwen3_next", **options), budget=0))
    with pytest.raises(CapacityError, match=r"^enable_prefix_caching: needs snapshots.*max_model_len=160;"):
        start_runner(make_small_shapes("qwen3_next", enable_prefix_caching=True, **options), make_mesh(1), {})


@pytest.mark.slow
def test_pools_take_what_the_programs_leave(monkeypatch: pytest.MonkeyPatch) -> None:
    """The accelerator's way of planning, with a device that says it has one GiB."""
    limit, measured = 2**30, []

    def measure(shapes: Shapes, mesh: Mesh) -> DeviceUse:
        measured.append(measure_use(shapes, mesh))
        return measured[-1]

    monkeypatch.setattr(startup, "measure_use", measure)
    monkeypatch.setattr(startup, "device_memory_bytes", lambda device: limit)
    shapes, mesh = dataclasses.replace(make_small_shapes("llama_gqa"), platform="gpu"), make_mesh(1)
    tree = make_dummy_params(param_specs(shapes.model), mesh=mesh, rules=DEFAULT_RULES, seed=0)
    runner, plan = start_runner(shapes, mesh, stack_params(tree, shapes.stack_mode))
    (use,) = measured
    assert use.params > 0 and use.temporaries > 0 and use.state > 0
    assert use.total == use.params + use.temporaries + use.code + use.state + use.reserve
    used = use.total + plan.bytes_per_device
    assert 0.8 * limit < used <= 0.9 * limit
    assert sum(pool.nbytes for pool in runner.device.cache) == plan.bytes_per_device


@pytest.mark.slow
@pytest.mark.thorough
def test_stacked_parameters_give_the_same_step() -> None:
    """A TPU's form of the parameters, on CPU: same canonical weights, same logits, same in-place update."""
    shapes, mesh = make_small_shapes("gemma2"), make_mesh(1)
    params = SamplingParams(temperature=0)
    plan = StepPlan(
        0,
        (),
        (),
        (ChunkWork(0, 0, 0, (5, 6, 7), is_last=True),),
        (NewRow(0, 0, params, 0, 0, 99),),
        ((0, 0, 0, 1), (1, 0, 0, 1)),
    )
    decode = StepPlan(1, (0,), (0,), (), (), ())
    ids = []
    for platform in ("cpu", "tpu"):  # "tpu" chooses the stacked form; everything is placed on the CPU all the same
        case = dataclasses.replace(shapes, platform=platform)
        tree = make_dummy_params(param_specs(case.model), mesh=mesh, rules=DEFAULT_RULES, seed=3)
        runner, _ = start_runner(case, mesh, stack_params(tree, case.stack_mode))
        assert isinstance(runner.params["layers"], LayerStack) == (platform == "tpu")
        first = [runner.start(step).sample().result().token_ids for step in (plan, *[decode] * 5)]
        canonical = make_dummy_params(param_specs(case.model), mesh=mesh, rules=DEFAULT_RULES, seed=4)
        runner.write_params(check_update(param_specs(case.model), jax.device_get(canonical)))
        runner.reset()
        second = [runner.start(step).sample().result().token_ids for step in (plan, *[decode] * 5)]
        assert first != second
        ids.append((first, second))
    assert ids[0] == ids[1]
