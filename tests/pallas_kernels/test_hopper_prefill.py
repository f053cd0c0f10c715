"""The Hopper prefill kernel in its interpreter, with race detection, against the reference; and lowered for CUDA."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from pallas_kernels import prepare_batch
from pallas_kernels.hopper import prefill, prefill_answers, prefill_kernel, prefill_plan, wgmma
from pallas_kernels.hopper.prefill_place import find_number
from pallas_kernels.hopper.prefill_plan import ChunkUnits, PrefillConfig
from pallas_kernels.hopper.prefill_static import NUM_UNITS
from pallas_kernels.layout import pool_shape, update_kv_pages
from pallas_kernels.mosaic_gpu import compat
from pallas_kernels.spec import AttnLayer, AttnShape, KVSpec
from pallas_kernels.testing.case import Case, Inputs, largest_error, make_inputs
from pallas_kernels.testing.reference import attend_by_formula
from pallas_kernels.worklist import StepRows
from tests.pallas_kernels.gpu_interpreter import reset_interpreter, watch_races

FP8 = "float8_e4m3fn"
SMALL = PrefillConfig(
    keys=64, stages=2, num_sms=1
)  # a short row then wraps around the ring and has all kinds of key tiles


def make_case(
    name: str,
    rows: tuple[tuple[int, int], ...],
    *,
    heads: tuple[int, int, int] = (4, 1, 64),  # N, K, H
    page_size: int = 16,
    dtype: str = "bfloat16",
    layout: str = "plain",
    **options: Any,
) -> Case:
    num_heads, num_kv_heads, head_dim = heads
    spec = KVSpec(num_kv_heads, head_dim, page_size, dtype, layout)
    return Case(name, rows, num_heads, spec, max_rows=4, table_width=max(-(-192 // page_size), 2), **options)


# A tile of 192 keys then has three units, some with masked key tiles only and some with none.
SPLIT = PrefillConfig(keys=64, stages=2, num_sms=12, min_split_tiles=1, unit_cost=0)

# Each of two blocks has several units, and ones that use fewer slots than the ring has.
PERSISTENT = PrefillConfig(keys=64, stages=3, num_sms=2, persistent=True)

CASES = [
    (make_case("split", ((150, 40), (0, 5)), heads=(8, 2, 128), page_size=32), SPLIT),
    (
        make_case(
            "split, window, softcap, sinks",
            ((33, 1), (140, 20), (9, 3)),
            heads=(6, 2, 64),
            window=130,
            softcap=3.0,
            sinks=True,
        ),
        SPLIT,
    ),
    (make_case("split fp8 of 256", ((150, 30),), heads=(2, 1, 256), page_size=64, dtype=FP8), SPLIT),
    (make_case("a prompt", ((0, 40),), page_size=64), None),
    (make_case("deep chunks of two heads", ((150, 40), (0, 5)), heads=(8, 2, 128)), SMALL),
    (make_case("a chunk of many key tiles", ((150, 40),), page_size=32), SMALL),
    (make_case("one-token rows left out", ((33, 1), (70, 1), (64, 33)), page_size=32), None),
    (make_case("window", ((150, 40),), page_size=32, window=100), SMALL),
    (make_case("window within a key tile", ((150, 20), (0, 9)), page_size=64, window=13), None),
    (
        make_case("window, softcap, sinks", ((140, 40),), heads=(6, 2, 128), window=70, softcap=3.0, sinks=True),
        PrefillConfig(keys=64, stages=3, num_sms=1),
    ),
    (make_case("sinks", ((31, 33),), heads=(4, 2, 64), sinks=True), None),
    (make_case("1:1", ((10, 60),), heads=(1, 1, 128), page_size=128), None),
    (make_case("5:1", ((60, 40),), heads=(5, 1, 64)), None),
    (make_case("7:1 float16", ((60, 20),), heads=(7, 1, 64), dtype="float16"), None),
    (make_case("12:1", ((60, 20),), heads=(12, 1, 64)), SMALL),
    (make_case("16:1, pages wider than key tiles", ((270, 20),), heads=(16, 1, 64), page_size=256), None),
    (make_case("heads of 256", ((100, 30),), heads=(2, 1, 256), page_size=128, dtype="float16"), None),
    (make_case("heads of 80, padded", ((50, 30),), heads=(2, 1, 80), layout="padded"), None),
    (make_case("fp8", ((150, 40),), heads=(4, 2, 128), page_size=64, dtype=FP8), None),
    (
        make_case(
            "fp8, window, softcap", ((150, 40),), heads=(3, 1, 64), page_size=32, dtype=FP8, window=70, softcap=2.0
        ),
        PrefillConfig(keys=64, stages=2, raw_stages=1, registers=(216, 72), num_sms=1),
    ),
    (make_case("fp8 of 256, sinks", ((90, 10),), heads=(2, 1, 256), page_size=64, dtype=FP8, sinks=True), None),
    (make_case("nothing", ()), None),
    (make_case("a tile cut by the end of the step", ((70, 1), (20, 39)), window=30, max_tokens=40), SMALL),
    (make_case("a step shorter than a tile", ((50, 20),), heads=(2, 2, 64), max_tokens=24), None),
    (make_case("persistent", ((150, 40), (0, 5)), heads=(8, 2, 128)), PERSISTENT),
    (make_case("persistent, few key tiles", ((20, 70), (150, 30)), heads=(4, 2, 64), max_tokens=120), PERSISTENT),
    (
        make_case(
            "persistent, window, softcap, sinks",
            ((33, 1), (140, 20), (9, 43)),
            heads=(6, 2, 64),
            window=70,
            softcap=3.0,
            sinks=True,
        ),
        PERSISTENT,
    ),
    (
        make_case(
            "persistent fp8 of 256", ((150, 30), (0, 20)), heads=(4, 2, 256), page_size=64, dtype=FP8, window=100
        ),
        replace(PERSISTENT, stages=2, raw_stages=1),
    ),
    (make_case("persistent, nothing", ()), PERSISTENT),
]


def list_units(case: Case, rows: StepRows, config: PrefillConfig) -> ChunkUnits:
    wanted = rows.lens_between(rows.distribution[0], case.max_rows)
    return prefill_plan.list_units(prefill_plan.plan_tiles(rows, wanted, case.shape), rows, case.shape, config)


@partial(jax.jit, static_argnames=("case", "config", "call"))
def _attend(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    kv_pages: jax.Array,
    meta: tuple[jax.Array, ...],
    layer: AttnLayer,
    *,
    case: Case,
    config: PrefillConfig | None,
    call: object,  # a new one compiles anew, as is needed where an operation was broken on purpose
) -> jax.Array:
    """The kernel's answer for rows of more than one token."""
    batch = prepare_batch(*meta, num_tokens=q.shape[0], shape=case.shape, max_query_len=None, impl="xla")
    kv_pages = update_kv_pages(k, v, kv_pages, batch, layer)
    rows = StepRows(*meta[2:3], jnp.diff(meta[2]), batch.seq_lens, batch.distribution, q.shape[0], None, 192)
    config = config or prefill.default_config(case.shape)
    units = list_units(case, rows, config)
    return prefill.attend_chunks(q, kv_pages, replace(batch, interpret=True), units, config, layer)


def run(case: Case, inputs: Inputs, config: PrefillConfig | None = None) -> tuple[np.ndarray, np.ndarray]:
    layer = AttnLayer(case.params, inputs.heads, np.int32(inputs.num_pages))
    arrays = (inputs.q, inputs.k, inputs.v, inputs.kv_pages, inputs.meta, layer)
    found = _attend(*arrays, case=case, config=config, call=object())
    return np.asarray(found), attend_by_formula(case, inputs)[0]


# The others show other mixtures of what these have.
CI = {
    "split, window, softcap, sinks",
    "deep chunks of two heads",
    "heads of 256",
    "fp8, window, softcap",
    "nothing",
    "a tile cut by the end of the step",
    "persistent, window, softcap, sinks",
}
assert {case.name for case, _ in CASES} > CI, "a case was renamed"


@pytest.mark.parametrize(
    ("case", "config"),
    [
        pytest.param(case, config, id=case.name, marks=[] if case.name in CI else [pytest.mark.thorough])
        for case, config in CASES
    ],
)
def test_equals_reference(case: Case, config: PrefillConfig | None) -> None:
    inputs = make_inputs(case)
    with watch_races() as found_races:
        found, expected = run(case, inputs, config)
        assert not found_races()
    num_single = int(inputs.distribution[0])
    answered = slice(num_single, inputs.num_tokens)
    assert largest_error(case, found[answered], expected[answered], inputs.num_tokens) < 1
    others = np.delete(found, np.arange(found.shape[0])[answered], axis=0)
    assert np.isnan(others.astype(np.float32)).all()  # nothing is written to tokens of no tile


def is_caught(case: Case, config: PrefillConfig) -> bool:
    """Whether the interpreter objects, or says what it would: JAX 0.11 goes on after a race."""
    with watch_races() as found_races:
        try:
            run(case, make_inputs(case), config)
        except Exception as error:
            reset_interpreter()
            return "race" in str(error).lower()
        return found_races()


def without(name: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with one of compat's operations left out."""

    def broken(*args: Any) -> Any:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compat, name, lambda *_: None)
            return function(*args)

    return broken


def test_answer_without_commit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("a prompt", ((0, 40),), page_size=64)
    monkeypatch.setattr(prefill_kernel, "_attend", without("commit_smem", prefill_kernel._attend))
    assert is_caught(case, SMALL)


@pytest.mark.thorough
def test_cleaning_before_arrival_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    case = make_case("one key tile, cut", ((0, 40),), page_size=64)  # its memory warpgroup waits for nothing else
    monkeypatch.setattr(prefill_kernel, "load_unit", without("barrier_wait", prefill_kernel.load_unit))
    assert is_caught(case, SMALL)


@pytest.mark.thorough
def test_refilling_without_waiting_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill_kernel, "load_unit", without("barrier_wait", prefill_kernel.load_unit))
    assert is_caught(no_cut_tile(), SMALL)


def no_cut_tile() -> Case:
    return make_case("no key tile is cut", ((128, 64),), page_size=64)


@pytest.mark.thorough
def test_values_not_awaited_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    whole = wgmma.multiply_both

    def broken(scores: Any, values: Any, _: Callable[[], None], *rest: Any, **options: Any) -> Any:
        return whole(scores, values, lambda: None, *rest, **options)

    monkeypatch.setattr(wgmma, "multiply_both", broken)
    assert is_caught(no_cut_tile(), SMALL)


def test_values_given_back_before_they_are_mixed_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if nothing awaited their product: their slot is filled anew while it is read."""
    whole, free, find_slot = wgmma.multiply_both, prefill_kernel._Warpgroup.free, prefill_kernel._Warpgroup.find_slot
    asked: list[tuple[Any, jax.Array]] = []  # whose slot: the last one before the products is that of their values

    def remember(work: Any, block: jax.Array) -> jax.Array:
        asked.append((work, block))
        return find_slot(work, block)

    def broken(scores: Any, values: Any, await_values: Callable[[], None], *rest: Any, **options: Any) -> Any:
        work, block = asked[-1]

        def await_and_free() -> None:
            await_values()
            free(work, work.buffers.v_free, block)

        return whole(scores, values, await_and_free, *rest, **options)

    def free_keys(work: Any, barriers: jax.Ref, block: jax.Array) -> None:
        if barriers is not work.buffers.v_free:
            free(work, barriers, block)

    monkeypatch.setattr(prefill_kernel._Warpgroup, "find_slot", remember)
    monkeypatch.setattr(prefill_kernel._Warpgroup, "free", free_keys)
    monkeypatch.setattr(wgmma, "multiply_both", broken)
    assert is_caught(no_cut_tile(), SMALL)


def test_next_scores_begin_before_values_are_awaited(monkeypatch: pytest.MonkeyPatch) -> None:
    """The interpreter runs a product at once, so it cannot see what a wait leaves running. This reads it in the code:
    scores, values, a wait that leaves the values running, then one for all."""
    begin, step, end = ["product", "wait 0"], ["product", "product", "wait 1", "wait 0"], ["product"]
    assert list_products(KVSpec(8, 128, 64, "bfloat16")) == [*begin, *step, *step, *end]
    # Heads of 256 have no registers for two products: values are awaited first (by `run_state`, which names no number).
    assert list_products(KVSpec(8, 256, 64, "bfloat16")) == [*begin, *["product", "product", "wait 0"] * 2, *end]
    load = plgpu.wgmma_accumulator_load
    monkeypatch.setattr(plgpu, "wgmma_accumulator_load", lambda acc, *, wait_n: load(acc, wait_n=wait_n + 1))
    assert list_products(KVSpec(8, 128, 64, "bfloat16")) != [*begin, *step, *step, *end]


def list_products(spec: KVSpec) -> list[str]:
    """The products that the kernel begins, and its own waits for them, in the order of its code."""
    found = []

    def visit(jaxpr: Any) -> None:
        for equation in getattr(jaxpr, "jaxpr", jaxpr).eqns:
            name = equation.primitive.name.removesuffix("_p")
            if name == "wgmma_ref":
                found.append("product")
            elif name == "wgmma_accumulator_deref":
                found.append(f"wait {equation.params['wait_n']}")
            for inner in jax.tree.leaves(list(equation.params.values()), is_leaf=lambda leaf: hasattr(leaf, "eqns")):
                if hasattr(inner, "eqns"):
                    visit(inner)

    visit(trace(32, spec).jaxpr)
    return found


@pytest.mark.thorough
def test_queries_fetched_over_answers_are_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the memory warpgroup did not wait until the answers before have left their memory."""
    load, wait = prefill_kernel.load_unit, compat.barrier_wait

    def broken(static: Any, operands: Any, buffers: Any, *rest: Any) -> jax.Array:
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(compat, "barrier_wait", lambda barrier: None if barrier is buffers.q_free else wait(barrier))
            return load(static, operands, buffers, *rest)

    monkeypatch.setattr(prefill_kernel, "load_unit", broken)
    assert is_caught(make_case("two units a block", ((128, 64),), heads=(8, 2, 64), page_size=64), PERSISTENT)


@pytest.mark.parametrize("num_blocks", [1, 2, 132])
def test_blocks_take_units_in_reverse_every_other_time(num_blocks: int) -> None:
    found = np.array([[find_number(before, block, num_blocks) for block in range(num_blocks)] for before in range(4)])
    assert np.sort(found, axis=1).ravel().tolist() == list(range(4 * num_blocks))
    work = 1000 - found  # the longest units come first
    assert np.ptp(work.sum(axis=0)) == 0


def test_tiles_are_split_where_the_device_is_large() -> None:
    for case, config in CASES:
        inputs = make_inputs(case)
        lens, starts = jnp.asarray(inputs.seq_lens), jnp.asarray(inputs.query_start_loc)
        rows = StepRows(starts, jnp.diff(starts), lens, jnp.asarray(inputs.distribution), case.max_tokens, None, 192)
        list_joins = partial(list_units, case, rows, config or prefill.default_config(case.shape))
        assert (jax.eval_shape(list_joins).joins is not None) == (config is SPLIT)
        assert config is not SPLIT or int(np.asarray(jax.jit(list_joins)().joins)[:, NUM_UNITS].max()) > 1


TURN = make_case("a turn", ((150, 20),), page_size=32)  # is split


@pytest.mark.thorough
@pytest.mark.parametrize("name", ["commit_smem", "wait_smem_to_gmem"])
def test_partial_answers_without_commit_or_wait_are_caught(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without the wait, the second half of the columns overwrites the first on its way out."""
    monkeypatch.setattr(prefill_answers, "_store_partial", without(name, prefill_answers._store_partial))
    assert is_caught(TURN, SPLIT)


@pytest.mark.thorough
def test_join_without_commit_is_caught(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prefill, "join_tiles", without("commit_smem", prefill.join_tiles))
    assert is_caught(TURN, SPLIT)


def lower(num_heads: int, spec: KVSpec, *, config: PrefillConfig | None = None) -> str:
    """The kernel's call as MLIR for CUDA: layouts, shared memory and the shapes of products are checked on the way."""
    return trace(num_heads, spec, config=config).lower(lowering_platforms=("cuda",)).as_text()


def trace(num_heads: int, spec: KVSpec, *, config: PrefillConfig | None = None) -> Any:
    """The kernel's call for a device."""
    dtype = "bfloat16"
    shape, num_tokens, num_rows = AttnShape(num_heads, spec, dtype), 64, 4
    case = Case("lowered", (), num_heads, spec)
    config = config or prefill.default_config(shape)

    def call(q: jax.Array, kv_pages: jax.Array, *meta: jax.Array) -> jax.Array:
        batch = prepare_batch(*meta, num_tokens=num_tokens, shape=shape, max_query_len=None, impl="xla")
        rows = StepRows(meta[2], jnp.diff(meta[2]), meta[1], meta[3], num_tokens, None, 192)
        tiles = prefill_plan.plan_tiles(rows, rows.query_lens, shape)
        units = prefill_plan.list_units(tiles, rows, shape, config)
        return prefill.attend_chunks(q, kv_pages, batch, units, config, AttnLayer(case.params))

    meta = [jax.ShapeDtypeStruct(size, jnp.int32) for size in ((num_rows, 4), (num_rows,), (num_rows + 1,), (3,))]
    q = jax.ShapeDtypeStruct((num_tokens, num_heads, spec.head_dim), jnp.dtype(dtype))
    kv_pages = jax.ShapeDtypeStruct(pool_shape(spec, 16), jnp.dtype(spec.dtype))
    return jax.jit(call).trace(q, kv_pages, *meta)


@pytest.mark.parametrize(
    ("num_heads", "spec"),
    [
        (32, KVSpec(8, 128, 64, "bfloat16")),
        (8, KVSpec(4, 192, 64, "bfloat16")),
        (8, KVSpec(4, 256, 64, "bfloat16")),
        (4, KVSpec(1, 64, 16, FP8)),
    ],
    ids=["heads of 128", "heads of 192", "heads of 256", "fp8 heads of 64"],
)
def test_lowers_for_cuda(num_heads: int, spec: KVSpec) -> None:
    assert "mosaic_gpu" in lower(num_heads, spec)


def test_default_configs_fit_shared_memory() -> None:
    for head_dim in (64, 128, 192, 256):
        for dtype in ("bfloat16", FP8):
            config = prefill.default_config(AttnShape(8, KVSpec(2, head_dim, 64, dtype), "bfloat16"))
            assert config.stages >= 2 and sum(config.registers) + config.registers[0] <= 3 * 168


@pytest.mark.parametrize(
    ("spec", "config", "complaint"),
    [
        (KVSpec(1, 64, 128, "bfloat16"), PrefillConfig(keys=192), "divisor of page_size 128, got 192"),
        (KVSpec(1, 64, 256, "bfloat16"), PrefillConfig(keys=192), "divisor of page_size 256, got 192"),
        (KVSpec(1, 128, 64, "bfloat16"), PrefillConfig(stages=4), "shared memory"),
    ],
    ids=["small pages", "large pages", "smem"],
)
def test_refuses_what_it_cannot_do(spec: KVSpec, config: PrefillConfig, complaint: str) -> None:
    with pytest.raises(ValueError, match=complaint):
        lower(4, spec, config=config)


@pytest.mark.parametrize("options", [{"keys": 32}, {"stages": 1}, {"registers": (230, 40)}])
def test_config_refuses(options: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match=f"PrefillConfig.{next(iter(options))}"):
        PrefillConfig(**options)


def test_tiles_are_nearly_full() -> None:
    found = {}
    for group_size in range(1, 17):
        shape = AttnShape(group_size, KVSpec(1, 64, 16, "bfloat16"), "bfloat16")
        found[group_size] = prefill_plan.count_tile_tokens(shape)
        assert found[group_size] * group_size <= prefill.TILE_ROWS < (found[group_size] + 8) * group_size
    assert found[1] == 128 and found[3] == 40 and found[4] == 32 and found[5] == 24 and found[16] == 8
