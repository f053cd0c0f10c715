"""The gate: what it reads from compilers, what it lets pass, and that the real compilers refuse what it relies on."""

from __future__ import annotations

import itertools
import json
import os
import subprocess
import sys
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import jax
import pytest

from pallas_kernels.recurrent.api import choose_recurrent_impl
from pallas_kernels.targets import TARGETS, Target, find_target
from pallas_kernels.testing import grouped_gate, kernel_gate, recurrent_gate
from pallas_kernels.testing.compile_gate import Gate, capture_output
from pallas_kernels.testing.gate_report import (
    KernelUse,
    ProgramReport,
    count_collectives,
    count_headed_products,
    count_launches,
    count_layer_launches,
    count_repeated,
    find_faults,
    list_complaints,
    list_copied_params,
    list_fixed_turns,
    list_small_tiles,
    merge_uses,
    parse_ptxas,
    parse_tpu_kernels,
    read_report,
)
from pallas_kernels.testing.gate_shapes import (
    SAMPLES,
    SHAPES,
    TIGHT,
    GateShape,
    list_programs,
    list_tuned_programs,
)
from pallas_kernels.tune.table import KERNELS, TuneKey
from scripts.test_kernels import MARKER, WHEELS, find_folder, list_requirements, make_environment
from tests.pallas_kernels.gate_programs import COLUMNS, ROWS, measure

ROOT = Path(__file__).parents[2]
H200, V5E = TARGETS["h200"], TARGETS["v5e"]

PTXAS = """
ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'decode_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for decode_mosaic_gpu_kernel
    32 bytes stack frame, 24 bytes spill stores, 36 bytes spill loads
ptxas info    : Used 128 registers, used 2 barriers, 32 bytes cumulative stack size
ptxas info    : Compiling entry function 'combine_mosaic_gpu_kernel' for 'sm_90a'
ptxas info    : Function properties for combine_mosaic_gpu_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 40 registers, used 1 barriers, 1 bytes smem
"""


PTX = """
.visible .entry decode_mosaic_gpu_kernel(
	.param .u64 decode_mosaic_gpu_kernel_param_0
)
{
	ret;
}
.visible .entry combine_mosaic_gpu_kernel(
)
{
	ret;
}
"""


def make_call(name: str, size: int) -> str:
    config = f'{{"memory_space":"1","offset":"0","size":"{size}"}},{{"memory_space":"5","offset":"0","size":"7"}}'
    call = f'  %{name} = f32[8]{{0:T(8)S(1)}} custom-call(%x.1), custom_call_target="tpu_custom_call", backend_config='
    return call + f'{{"scoped_memory_configs":[],"used_scoped_memory_configs":[{config}],"retry_config":{{}}}}'


def make_gpu_report() -> ProgramReport:
    kernel = KernelUse("decode", registers=128, spill_bytes=0, threads=256, shared_memory_bytes=100_000)
    return ProgramReport(
        "decode",
        "h200",
        is_compiled=True,
        argument_bytes=3000,
        alias_bytes=2000,
        temp_bytes=100,
        donated_bytes=2000,
        impl="gpu",
        kernels=(kernel,),
    )


def make_tpu_report() -> ProgramReport:
    return replace(make_gpu_report(), target="v5e", impl="tpu", kernels=(KernelUse("decode", vmem_bytes=1 << 20),))


def with_kernel(**changes: Any) -> ProgramReport:
    report = make_gpu_report()
    return replace(report, kernels=(replace(report.kernels[0], **changes),))


def test_ptxas_is_read() -> None:
    decode, combine = parse_ptxas(PTX + PTXAS)
    assert (decode.name, decode.registers, decode.spill_bytes) == ("decode_mosaic_gpu_kernel", 128, 60)
    assert (combine.registers, combine.spill_bytes) == (40, 0)
    assert decode.faults == combine.faults == ()
    assert [use.faults for use in parse_ptxas(PTXAS)] == [("its PTX is unknown",)] * 2


@pytest.mark.parametrize(
    "line",
    [
        "ptxas info    : (C7508) Potential Performance Loss: 'setmaxnreg' ignored; unable to determine register count "
        "at entry.",
        "ptxas info    : (C7511) Potential Performance Loss: wgmma.mma_async instructions are serialized due to "
        "insufficient register resources for the wgmma pipeline in the function 'decode_mosaic_gpu_kernel'",
        "ptxas warning : Registers are spilled to local memory in function 'decode_mosaic_gpu_kernel', 24 bytes spill "
        "stores, 36 bytes spill loads",
    ],
)
def test_complaints_of_ptxas_fail_a_program(line: str) -> None:
    assert list_complaints(PTXAS) == []
    found = list_complaints(f"{PTXAS}{line}\n{PTXAS}{line}\n")
    assert found == [line]
    report = replace(make_gpu_report(), complaints=tuple(found))
    assert find_faults(read_report(report.to_json()), H200) == [line]


def test_figures_of_a_kernel_that_was_compiled_before_are_remembered() -> None:
    launches = [KernelUse("decode", "d1", shared_memory_bytes=9), KernelUse("combine", "c1", shared_memory_bytes=5)]
    seen: dict[str, KernelUse] = {}
    first = merge_uses(launches, parse_ptxas(PTX + PTXAS), seen)
    assert [(use.spill_bytes, use.registers, use.shared_memory_bytes) for use in first] == [(60, 128, 9), (0, 40, 5)]
    assert merge_uses(launches, [], seen) == first
    (unknown,) = merge_uses([KernelUse("decode", "d2")], [], seen)
    assert unknown.registers is None, "another kernel of the same name is not the one that was seen"


def test_vmem_of_the_largest_call_of_a_name_is_read() -> None:
    hlo = "\n".join(["HloModule x", make_call("decode.3", 100), make_call("decode.4", 300), make_call("chunk", 200)])
    assert parse_tpu_kernels(hlo) == [KernelUse("decode", vmem_bytes=300), KernelUse("chunk", vmem_bytes=200)]


def test_copies_of_weights_are_found() -> None:
    name = r"params[\'layers\'][\'qkv\']"
    line = '  %copy.{} = bf16[4,8]{{0,1}} copy(%param.3), metadata={{op_name="{}"}}, backend_config={{}}'
    hlo = "\n".join([line.format(1, name), line.format(2, name), line.format(3, "jit(f)/transpose"), "ROOT x"])
    assert list_copied_params(hlo) == ["params['layers']['qkv']"]
    assert list_copied_params(line.format(1, "feature_params[0]")) == ["feature_params[0]"]
    assert list_copied_params(hlo.replace(" copy(", " slice(")) == []
    assert list_copied_params(hlo.replace("{0,1} copy(", "{0,1:T(8,128)S(1)} copy(")) == [], "into VMEM"


def test_products_over_an_axis_of_heads_are_found() -> None:
    line = "  %convolution.{} = bf16[2048,6,128]{{2,0,1}} convolution(%a, %b), {}, metadata={{}}"
    heads = "window={size=6 pad=5_5 rhs_reversal=1}, dim_labels=bf0_0oi->b0f"
    parts = "window={size=2 lhs_dilate=2}, dim_labels=0bf_0io->0bf"  # of a weight [parts, in, out]
    hlo = "\n".join(line.format(index, each) for index, each in enumerate((heads, parts, "dim_labels=bf_io->bf")))
    assert count_headed_products(hlo) == 1


def test_loops_of_a_fixed_length_are_found() -> None:
    compare = "pred[] compare(%index, %{}), direction=LT"
    lines = [
        "%inner (x: s32[]) -> pred[] {",
        "  %limit = s32[]{:T(128)} constant(1024), metadata={}",
        f"  ROOT %less = {compare.format('limit')}",
        "}",
        "",
        "%fused_compare.1 (x: s32[]) -> pred[] {",
        "  %limit = s32[] constant(16)",
        f"  ROOT %less = {compare.format('limit')}",
        "}",
        "",
        "%outer (x: (s32[], s32[])) -> pred[] {",
        "  ROOT %fusion = pred[] fusion(%index), kind=kLoop, calls=%fused_compare.1, metadata={}",
        "}",
        "",
        "%traced (x: (s32[], s32[])) -> pred[] {",
        "  %index = s32[] get-tuple-element(%x), index=0",
        f"  ROOT %less = {compare.format('bound')}",
        "}",
        "",
        "ENTRY %main.7 (p: s32[]) -> s32[] {",
        *(
            f"  %w.{name} = (s32[]) while(%tuple.1), condition=%{name}, body=%b"
            for name in ("inner", "outer", "traced")
        ),
        "}",
    ]
    assert list_fixed_turns("\n".join(lines)) == [1024, 16]


def test_launches_of_the_main_computation_are_counted() -> None:
    lines = [
        "%fused_copy {",
        "  ROOT %copy.1 = bf16[4]{0} copy(%p)",
        "}",
        "ENTRY %main.7 (p: bf16[4]) -> bf16[4] {",
        "  %fusion.1 = (bf16[4]{0}, bf16[4]{0}) fusion(%p), kind=kLoop, calls=%fused_copy",
        "  %gte = bf16[4]{0} get-tuple-element(%fusion.1), index=0",
        '  %call = (bf16[4]{0}) custom-call(%gte), custom_call_target="mosaic_gpu_v2"',
        "  ROOT %bitcast.3 = bf16[4]{0} bitcast(%call)",
        "}",
    ]
    assert count_launches("\n".join(lines)) == 2


@pytest.mark.parametrize(
    ("shape", "tile", "is_small"),
    [
        ("2,256,6144", '"1","8","16"', True),
        ("2,256,6144", '"1","64","128"', False),
        ("256,128256", '"128","16"', False),
        ("2048,4096", '"32","32"', True),
        ("8,8,4096", '"1","8","64"', False),  # no more rows than that
        ("8,8,4096", '"1","8","16"', True),
        ("16,256,32", '"1","16","32"', False),  # a router's
    ],
)
def test_products_in_small_tiles_fail_a_step(shape: str, tile: str, is_small: bool) -> None:
    hlo = (
        f"  %gemm_fusion_dot.1 = f32[{shape}]{{2,1,0}} fusion(%bitcast.2, %param), kind=kCustom, "
        'backend_config={"operation_queue_id":"0","fusion_backend_config":{"kind":"__triton_nested_gemm_fusion",'
        f'"block_level_fusion_config":{{"num_warps":"2","output_tiles":[{{"sizes":[{tile}]}}],"num_stages":1}}}}}}\n'
        '  %fusion.1 = bf16[256,4096] fusion(%p), backend_config={"fusion_backend_config":{"kind":"__triton",'
        '"block_level_fusion_config":{"output_tiles":[{"sizes":["2","16"]}]}}}'
    )
    found = list_small_tiles(hlo)
    assert len(found) == is_small and all(text.startswith(f"gemm_fusion_dot.1 [{shape}] in tiles") for text in found)
    report = replace(make_gpu_report(), small_tiles=tuple(found))
    assert find_faults(report, H200) == [], "kernels are compiled without the options of steps"
    faults = find_faults(read_report(replace(report, judges_tiles=True).to_json()), H200)
    assert len(faults) == is_small and all("1 products have small tiles" in fault for fault in faults)


def test_collectives_that_run_beside_other_work_are_counted() -> None:
    """A TPU's fusions for the two ends of a collective, and a start and an end as other compilers write them."""
    hlo = """
%async_collective_fusion {
  %all-gather.1 = bf16[8] all-gather(%param.1), channel_id=1
}

ENTRY %main {
  %all-reduce.2 = bf16[8] all-reduce(%x), channel_id=4
  %async-collective-start.3 = (bf16[8], bf16[8]) fusion(%y), kind=kCustom, calls=%async_collective_fusion
  %async-collective-done.3 = bf16[8] fusion(%async-collective-start.3), kind=kCustom
  %collective-permute-start = (bf16[8], bf16[8]) collective-permute-start(%y)
  %collective-permute-done = bf16[8] collective-permute-done(%collective-permute-start)
}
"""
    assert count_collectives(hlo) == (3, 2)


def test_kernels_of_a_layer_are_counted_from_one_call_to_the_next() -> None:
    call = '  %call.{} = bf16[4] custom-call(%x), custom_call_target="mosaic_gpu_v2", metadata={{op_name="f/{}/run"}}'
    fusion = "  %fusion = bf16[4]{0} fusion(%p), kind=kLoop, calls=%fused_copy"
    layer = [call.format(1, "decode"), call.format(2, "combine"), fusion, "  %gte = bf16[4] get-tuple-element(%fusion)"]
    counts = "  %input_scatter_fusion = s32[257]{0} fusion(%rows), kind=kInput, calls=%fused_copy"  # of the step
    lines = ["%fused_copy {", "}", "ENTRY %main.7 (p: bf16[4]) -> bf16[4] {", fusion, *layer, fusion, *layer, "}"]
    assert count_layer_launches("\n".join(lines)) == 4
    assert count_layer_launches("\n".join([*lines[:7], counts, *lines[7:]])) == 4
    assert count_layer_launches("\n".join([*lines[:8], "}"])) is None, "one layer"
    report = replace(make_gpu_report(), layer_launches=4, most_layer_launches=4)
    assert find_faults(report, H200) == []
    assert find_faults(replace(report, most_layer_launches=3), H200) == ["4 kernels a layer, at most 3 are expected"]
    assert find_faults(replace(report, layer_launches=None), H200) == ["None kernels a layer, at most 4 are expected"]


def test_what_is_computed_again_fails_a_program() -> None:
    lines = [
        "  %gemm_fusion_dot = f32[2,256,6144]{2,1,0} fusion(%bitcast.1, %param), kind=kCustom",
        "  %gemm_fusion_dot.remat2 = f32[2,256,6144]{2,1,0} fusion(%bitcast.1, %param), kind=kCustom",
        "  %gte.remat.11 = s32[] get-tuple-element(%input_fusion.remat3), index=0",
        "  %loop_broadcast_fusion.rematerialized.1 = bf16[1,2048,4096]{2,1,0} fusion(), kind=kLoop",  # a constant
    ]
    assert [count_repeated("\n".join(lines[:count])) for count in (1, 2, 3, 4)] == [0, 1, 2, 2]
    (fault,) = find_faults(replace(make_gpu_report(), repeated=2), H200)
    assert fault == "2 instructions are computed again to save memory"


def test_reports_travel_as_a_line() -> None:
    report = replace(make_gpu_report(), copied_params=("params['layers']['qkv']",), fixed_turns=(1024,))
    assert "\n" not in report.to_json() and read_report(report.to_json()) == report


def test_a_target_may_allow_some_spills() -> None:
    b200 = TARGETS["b200"]
    warning = "ptxas warning : Registers are spilled to local memory in function 'decode', 28 bytes spill stores"
    report = replace(with_kernel(spill_bytes=b200.spill_bytes), impl="ampere", complaints=(warning,))
    assert find_faults(report, b200) == [] and len(find_faults(report, H200)) == 2
    assert find_faults(replace(report, kernels=with_kernel(spill_bytes=b200.spill_bytes + 4).kernels), b200)
    assert find_faults(replace(report, complaints=("ptxas warning : something else",)), b200)


@pytest.mark.parametrize(
    "report",
    [make_gpu_report(), make_tpu_report(), replace(make_tpu_report(), headed_products=2, impl="xla")],
    ids=["gpu", "tpu", "heads"],
)
def test_what_is_in_order_passes(report: ProgramReport) -> None:
    assert find_faults(report, TARGETS[report.target]) == []


@pytest.mark.parametrize(
    ("report", "message"),
    [
        (with_kernel(spill_bytes=4), "decode: 4 bytes of registers spill"),
        (with_kernel(shared_memory_bytes=232_449), "232,449 bytes of shared memory, the h200 has 232,448"),
        (with_kernel(shared_memory_bytes=None), "shared memory is unknown"),
        (with_kernel(faults=("a box of 512 entries",)), "decode: a box of 512 entries"),
        (replace(make_gpu_report(), short_indices=("gather: short",)), "gather: short"),
        (with_kernel(registers=None, spill_bytes=None), "ptxas said nothing"),
        (replace(make_gpu_report(), kernels=()), "no Pallas kernel"),
        (replace(make_gpu_report(), alias_bytes=1999), "the donated pool is copied: 2,000 bytes"),
        (replace(make_tpu_report(), copied_params=("params['o']",)), "copied in every step: params['o']"),
        (replace(make_tpu_report(), headed_products=2), "2 products have an axis of heads"),
        (replace(make_gpu_report(), fixed_turns=(1024,), loops_follow_batch=True), "loops have (1024,) turns"),
        (
            replace(make_gpu_report(), fixed_turns=(9, 7), loops_follow_batch=True, layer_turns=(9,)),
            "have (9, 7) turns",
        ),
        (replace(make_gpu_report(), temp_bytes=2000), "room for a second pool"),
        (replace(make_gpu_report(), temp_bytes=2001, most_temp_bytes=2000), "at most 2,000 are expected"),
        (replace(make_gpu_report(), argument_bytes=1 << 40), "bytes of arguments and temporaries, the h200 has"),
        (replace(make_gpu_report(), error="RuntimeError: refused"), "refused"),
        (replace(make_tpu_report(), kernels=(KernelUse("k", vmem_bytes=(128 << 20) + 1),)), "of VMEM, the v5e has"),
        (replace(make_tpu_report(), kernels=(KernelUse("k"),)), "VMEM is unknown"),
    ],
)
def test_what_is_not_in_order_fails(report: ProgramReport, message: str) -> None:
    (fault,) = find_faults(report, TARGETS[report.target])
    assert message in fault


def test_a_lowered_program_is_judged_by_what_lowering_says() -> None:
    lowered = replace(with_kernel(registers=None, spill_bytes=None), is_compiled=False, alias_bytes=0)
    assert find_faults(lowered, H200) == []
    assert find_faults(replace(lowered, kernels=()), H200) != []


def test_output_of_compilers_is_captured() -> None:
    with capture_output() as read_output:
        os.write(1, b"from below\n")
    assert read_output() == "from below\n"


def test_targets_have_a_name() -> None:
    with pytest.raises(ValueError, match=r"h200, a100, l4, b200, rtx5090, v5e, v5p, v6e, tpu7x, got 'v7x'"):
        find_target("v7x")
    assert "shared_memory_per_block_optin: 232448" in str(H200.target_config)
    assert H200.shared_memory_bytes == 232_448


def test_programs_have_different_names_and_every_bucket() -> None:
    for target in TARGETS.values():
        programs = list_programs(target)
        assert len({program.name for program in programs}) == len(programs)
        fixed = [program for program in programs if program.shape.fixed_splits]
        kernels = [shape for shape in SHAPES if target.impl not in dict(shape.portable)]
        assert [replace(program.shape, fixed_splits=False) for program in fixed] == (
            kernels if target.platform == "gpu" else []
        )
        tight = [shape for _, shape in TIGHT if target.impl == "gpu" or shape.switch is None]
        assert len(programs) == 2 * len(SHAPES) + 1 + len(tight) + len(fixed)
        assert {program.max_query_len for program in programs} == {1, None, 5}
        sample = list_programs(target, full=False)
        assert sample == [program for program in programs if program in sample]
        assert any(program.max_query_len is None for program in sample), "mixed steps have every kernel of a target"
        named = [f"{bucket}: {name}" for bucket, names in SAMPLES[target.name].items() for name in names]
        assert sorted(program.name for program in sample) == sorted(named), "a sample names programs that there are"
        tight = [program for program in sample if replace(program.shape, fixed_splits=False) not in SHAPES]
        assert bool(tight) == (target.name == "h200"), "the tight ones are Hopper's"


@pytest.mark.parametrize("impl", ["gpu", "ampere", "tpu"])
def test_the_samples_have_every_kind_of_shape_on_some_target(impl: str) -> None:
    def describe(shapes: Iterable[GateShape]) -> set[object]:
        found: set[object] = set()
        for shape in shapes:
            if impl in dict(shape.portable):
                continue
            heads = shape.head_dim if shape.value_dim is None else "latents"
            found |= {heads, shape.kv_dtype, shape.window is None, shape.softcap is None, shape.sinks}
            found.add("causal" if shape.causal else "not causal")
        return found

    kinds = describe(SHAPES)
    targets = [target for target in TARGETS.values() if target.impl == impl]
    samples = [list_programs(target, full=False) for target in targets]
    assert describe(program.shape for sample in samples for program in sample) == kinds
    assert any(
        {program.max_query_len for program in sample} == {1, None, 5}
        and (impl == "tpu" or any(program.shape.fixed_splits for program in sample))
        for sample in samples
    )


def test_names_of_all_kernels_programs_differ() -> None:
    for target in TARGETS.values():
        grouped = grouped_gate.list_programs(target, full=True)
        attention = list_programs(target) + list_tuned_programs(target)
        others = len(grouped) + len(recurrent_gate.list_programs(target, full=True))
        assert len(kernel_gate.list_programs(target, full=True)) == len(attention) + others


@pytest.mark.parametrize("platform", ["gpu", "tpu"])
def test_the_samples_of_grouped_products_have_both_kernels_on_one_target(platform: str) -> None:
    samples = {
        name: grouped_gate.list_programs(TARGETS[name], full=False)
        for name in grouped_gate.SAMPLES
        if TARGETS[name].platform == platform
    }
    assert all(samples.values())
    kinds = [{(shape.quantized is None, tokens) for _, shape, tokens in sample} for sample in samples.values()]
    assert any(len(kind) == 4 for kind in kinds), "16 bits and few, in the decode and the mixed bucket"


def test_the_samples_of_recurrent_rules_are_programs() -> None:
    for name, sample in recurrent_gate.SAMPLES.items():
        assert len(recurrent_gate.list_programs(TARGETS[name], full=False)) == len(sample) > 0
    assert not recurrent_gate.list_programs(TARGETS["a100"], full=True)
    for shape, name in itertools.product(recurrent_gate.SHAPES, ("h200", "v6e")):
        target = TARGETS[name]
        place = {"platform": target.platform, "device_kind": target.device_kind}
        chosen, _ = choose_recurrent_impl(shape.fill(recurrent_gate.MIXED_TOKENS), **place)
        assert (chosen == target.impl) == (target.platform in shape.platforms), shape.name


def test_the_sample_of_tight_ones_has_every_bucket() -> None:
    tight = {(bucket, shape.name) for bucket, shape in TIGHT}
    sample = {(bucket, name) for bucket, names in SAMPLES["h200"].items() for name in names}
    assert {bucket for bucket, _ in tight & sample} == {bucket for bucket, _ in TIGHT}


def test_every_tuning_entry_is_a_program(tmp_path: Path) -> None:
    key = TuneKey(16, 2, 128, 64, "bfloat16", "float8_e4m3fn", window=True, tokens=48, max_len=4096)
    for kernel in ("gpu_decode", "gpu_prefill"):
        entry = {"kernel": kernel, "version": KERNELS[kernel], "key": asdict(key), "config": {}, "measured": None}
        path = tmp_path / H200.device_kind / f"{kernel}.json"
        path.parent.mkdir(exist_ok=True)
        path.write_text(json.dumps([entry]))
    decode, prefill = list_tuned_programs(H200, tmp_path)
    shape = decode.shape.attention(decode.page_size)
    assert (shape.num_heads, shape.spec.num_kv_heads, shape.spec.dtype) == (16, 2, "float8_e4m3fn")
    assert shape.window is not None and decode.table_width == 64
    assert (decode.num_tokens, decode.num_rows, decode.max_query_len) == (48, 48, 1)
    assert (prefill.num_tokens, prefill.max_query_len) == (48, None)
    assert list_tuned_programs(V5E, tmp_path) == []


@pytest.fixture
def fresh_traces() -> Iterator[None]:
    """A trace of one target must not be found by the next."""
    jax.clear_caches()
    yield
    jax.clear_caches()


@pytest.mark.parametrize(
    ("changes", "fitting"),
    [
        ({"shared_memory_bytes": 114_792}, 2),  # of 233,472, less 1,024 for each block
        ({"shared_memory_bytes": 115_583}, 2),
        ({"shared_memory_bytes": 115_712}, 1),
        ({"registers": 129}, 1),
        ({"threads": 288}, 1),
        ({"shared_memory_bytes": 0, "registers": 32, "threads": 512}, 4),
        ({"shared_memory_bytes": 0, "registers": 16, "threads": 1024}, 2),
    ],
)
def test_a_plan_has_no_more_blocks_than_a_multiprocessor(changes: dict[str, int], fitting: int) -> None:
    report = replace(with_kernel(**changes), planned_blocks=2)
    assert report.kernels[0].count_blocks(H200) == fitting
    faults = find_faults(report, H200)
    assert faults == ([] if fitting >= 2 else ["decode: 1 blocks per multiprocessor, its plan has 2"])


@pytest.mark.usefixtures("fresh_traces")
@pytest.mark.parametrize(("name", "fault"), [("element", "an offset of 32 bits"), ("elements", "an axis of")])
def test_offsets_that_need_more_than_32_bits_are_found_without_a_compiler(name: str, fault: str) -> None:
    assert find_faults(measure(Gate(H200), f"near {name}"), H200) == []
    (found,) = find_faults(measure(Gate(H200), f"far {name}"), H200)
    assert found.startswith(f"copy: {fault}") and "4,294,967,296" in found


@pytest.mark.usefixtures("fresh_traces")
def test_shared_memory_is_known_without_a_compiler() -> None:
    report = measure(Gate(H200), "copy_through_smem")
    assert find_faults(report, H200) == []
    (kernel,) = report.kernels
    assert kernel.threads == 128
    assert ROWS * COLUMNS * 4 <= (kernel.shared_memory_bytes or 0) < ROWS * COLUMNS * 4 + 1024
    assert "shared memory" in measure(Gate(H200), "too much shared memory").error


def compile_in_child(target: str, *names: str) -> list[ProgramReport]:
    """Reports of the real compiler; skips the test where it is not installed."""
    platform = TARGETS[target].platform
    wheels = find_folder(platform, WHEELS)
    if not (wheels / MARKER).exists() or (wheels / MARKER).read_text().split("\n") != list_requirements(platform):
        pytest.skip(f"the compiler for {platform} is not installed: `make test-gate` does that")
    command = [sys.executable, "-m", "tests.pallas_kernels.gate_programs", target, *names]
    environment = make_environment(TARGETS[target], wheels)
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return [read_report(line) for line in done.stdout.splitlines()]


@pytest.mark.slow
def test_the_gpu_compiler_passes_good_programs_and_no_bad_ones(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The ptxas of the wheels compiles, and not that of the path."""
    fake = tmp_path / "ptxas"
    fake.write_text("#!/bin/sh\necho 'Cuda compilation tools, release 13.1, V13.1.1'\n")
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", str(tmp_path), prepend=os.pathsep)
    good, spilling, forgetful, kept, copied, fixed, traced = compile_in_child(
        "h200",
        *("copy_through_smem", "hold_too_much", "no fence"),
        *("donated pool", "pool that is not donated", "fixed loop", "traced loop"),
    )
    assert find_faults(good, H200) == [] and good.kernels[0].registers
    complaint, fault = sorted(find_faults(spilling, H200), reverse=True)
    assert "registers spill" in fault and complaint.startswith("ptxas warning"), "what ptxas says reaches the gate"
    (fault,) = find_faults(forgetful, H200)
    assert fault == "copy_block: cp.async.bulk.global.shared::cta behind a store, no fence"
    check_programs_of_any_platform(H200, kept, copied, fixed, traced)


def check_programs_of_any_platform(
    target: Target, kept: ProgramReport, copied: ProgramReport, fixed: ProgramReport, traced: ProgramReport
) -> None:
    assert find_faults(kept, target) == []
    assert any("pool is copied" in fault for fault in find_faults(copied, target))
    assert find_faults(fixed, target) == ["loops have (1024,) turns, however short the contexts are"]
    assert find_faults(traced, target) == []


@pytest.mark.slow
def test_the_tpu_compiler_passes_good_programs_and_no_bad_ones() -> None:
    good, bad, large, *others = compile_in_child(
        "v5e",
        *("double_blocks", "slice_lanes", "fill_vmem"),
        *("donated pool", "pool that is not donated", "fixed loop", "traced loop"),
    )
    assert find_faults(good, V5E) == [] and (good.kernels[0].vmem_bytes or 0) > 0
    assert "slice" in bad.error and not bad.is_compiled
    assert "vmem" in large.error
    check_programs_of_any_platform(V5E, *others)
