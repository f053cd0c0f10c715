"""The attention shapes of real models, which the gate compiles for every target."""

from __future__ import annotations

from dataclasses import dataclass, replace
from pathlib import Path

from pallas_kernels.spec import AttnParams, AttnShape, KVSpec
from pallas_kernels.targets import Target
from pallas_kernels.tune.table import DATA, KERNELS, read_entries

MIXED_TOKENS = 2048  # T of the mixed bucket
DRAFT_LEN = 5  # most tokens of a row that verifies drafts: four drafts and the last sampled token
DRAFT_ROWS = 64
TURN_TOKENS, TURN_ROWS = 288, 256  # the smallest mixed bucket of 256 rows: a chat's turn beside rows that decode
MAX_MODEL_LEN = 8192
TUNED_WINDOW = 4096  # for tuning entries, which only say whether there is a window
FP8 = "float8_e4m3fn"
FP8_SCORES, PERSISTENT = ("decode", "fp8_scores"), ("prefill", "persistent")


@dataclass(frozen=True)
class GateShape:
    """One layer on one device. `portable` maps an implementation to the reason why it cannot do this shape. The gate
    then expects `find_obstacle` to say so, and fails when it no longer does."""

    name: str
    num_heads: int  # N
    num_kv_heads: int  # K
    head_dim: int  # H
    window: int | None = None
    softcap: float | None = None
    sinks: bool = False
    dtype: str = "bfloat16"  # q's
    kv_dtype: str = "bfloat16"
    max_len: int = MAX_MODEL_LEN
    value_dim: int | None = None  # of a latent
    fixed_splits: bool = False
    causal: bool = True
    switch: tuple[str, str] | None = None  # what is on in Hopper's configuration: the kernel's part, and its field
    portable: tuple[tuple[str, str], ...] = ()

    @property
    def params(self) -> AttnParams:
        return AttnParams(scale=self.head_dim**-0.5, window=self.window, softcap=self.softcap)

    def attention(self, page_size: int) -> AttnShape:
        """The shape on pages of the plain layout; the implementation chooses its own."""
        spec = KVSpec(self.num_kv_heads, self.head_dim, page_size, self.kv_dtype, value_dim=self.value_dim)
        return AttnShape(self.num_heads, spec, self.dtype, self.window, self.fixed_splits, self.causal)


@dataclass(frozen=True)
class GateProgram:
    """One program: a shape and a bucket."""

    name: str
    shape: GateShape
    num_tokens: int  # T
    num_rows: int  # S
    max_query_len: int | None
    page_size: int

    @property
    def table_width(self) -> int:
        """M."""
        return -(-self.shape.max_len // self.page_size)


_NO_LATENTS = (("ampere", "it has no kernel for latents"),)
_CAUSAL_ONLY = (("tpu", "its kernels have causal masks only"),)


def _latents(name: str, num_heads: int, rank: int = 512, kv_dtype: str = "bfloat16") -> GateShape:
    return GateShape(name, num_heads, 1, rank + 64, value_dim=rank, kv_dtype=kv_dtype, portable=_NO_LATENTS)


SHAPES = (
    GateShape("llama-8b", 32, 8, 128),
    GateShape("llama-8b, one of 8 devices", 4, 1, 128),
    GateShape("llama-8b, fp8 pages", 32, 8, 128, kv_dtype=FP8),
    GateShape("llama-7b, no groups", 32, 32, 128),
    GateShape("llama-1b, heads of 64", 32, 8, 64),
    GateShape("gemma, heads of 256, window, softcap", 8, 4, 256, window=4096, softcap=50.0),
    GateShape("heads of 64, window, sinks", 64, 8, 64, window=128, sinks=True),
    GateShape("llama-8b, long rows", 32, 8, 128, max_len=32768),
    _latents("deepseek-v3, one of 8 devices", 16),
    _latents("deepseek-v3, one of 8 devices, fp8 pages", 16, kv_dtype=FP8),
    _latents("kimi-k2, all heads", 64),
    _latents("glm-4.7-flash", 20),
    _latents("mistral-small-4", 32, rank=256),
    GateShape("nemotron-4-340b, one of 4 devices, heads of 192", 24, 2, 192),
    GateShape("heads of 192, window, softcap, fp8 pages", 32, 8, 192, window=4096, softcap=50.0, kv_dtype=FP8),
    GateShape("whisper-large-v3, not causal", 20, 20, 64, causal=False, portable=_CAUSAL_ONLY),
    GateShape("heads of 128, not causal", 16, 8, 128, causal=False, portable=_CAUSAL_ONLY),
)


# The buckets and shapes that need the most registers on Hopper without spilling, and buckets whose chunks it splits.
# Without `--full` only Hopper has some of them.
TIGHT = (
    ("drafts", GateShape("heads of 128, window", 32, 8, 128, window=4096)),
    ("drafts", GateShape("heads of 128, window, softcap", 32, 8, 128, window=4096, softcap=50.0)),
    ("mixed", GateShape("heads of 256, window, fp8 pages", 16, 8, 256, window=4096, kv_dtype=FP8)),
    ("turn", GateShape("heads of 256, window, fp8 pages", 16, 8, 256, window=4096, kv_dtype=FP8)),
    ("turn", GateShape("heads of 64, sinks", 64, 8, 64, sinks=True)),
    ("turn", GateShape("heads of 128", 32, 8, 128, max_len=32768)),
    ("turn", GateShape("heads of 192, fp8 pages", 32, 8, 192, kv_dtype=FP8)),
    ("turn", GateShape("heads of 192, window", 32, 8, 192, window=4096)),
    ("turn", GateShape("heads of 192, window, softcap, sinks", 32, 8, 192, window=4096, softcap=50.0, sinks=True)),
    ("drafts", GateShape("heads of 192, window", 32, 8, 192, window=4096)),
    ("drafts", GateShape("fp8 scores, heads of 128", 32, 8, 128, kv_dtype=FP8, switch=FP8_SCORES)),
    (
        "drafts",
        GateShape("fp8 scores, heads of 64, window", 32, 8, 64, window=4096, kv_dtype=FP8, switch=FP8_SCORES),
    ),
    ("mixed", GateShape("persistent, heads of 64, sinks", 64, 8, 64, sinks=True, switch=PERSISTENT)),
    ("mixed", GateShape("persistent, heads of 128", 32, 8, 128, switch=PERSISTENT)),
    (
        "mixed",
        GateShape("persistent, heads of 128, window, softcap, sinks", 32, 8, 128, 4096, 50.0, True, switch=PERSISTENT),
    ),
    ("mixed", GateShape("persistent, heads of 128, fp8 pages", 32, 8, 128, kv_dtype=FP8, switch=PERSISTENT)),
    ("mixed", GateShape("persistent, heads of 192, window", 32, 8, 192, window=4096, switch=PERSISTENT)),
    ("mixed", GateShape("persistent, heads of 256", 16, 8, 256, switch=PERSISTENT)),
    (
        "turn",
        GateShape(
            "heads of 128, not causal, long rows", 32, 8, 128, causal=False, max_len=32768, portable=_CAUSAL_ONLY
        ),
    ),
)

# What each target compiles without `--full`: shapes by bucket. The targets of an implementation together have each size
# of heads, 8-bit pages, a window, a soft cap and sinks: elsewhere these are the same kernels with other tiles. One of
# them has every bucket. A mixed bucket has the kernels of decoding rows, too; a fixed one is a decode bucket. One TPU
# has portable attention of heads that do not fill its lanes. Hopper's mixed bucket of heads of 64, with a window and
# sinks, is a step of `scripts/compile_step.py`.
_BASE, _FP8 = "llama-8b", "llama-8b, fp8 pages"
_LATENT, _FP8_LATENT = "deepseek-v3, one of 8 devices", "deepseek-v3, one of 8 devices, fp8 pages"
_OF_64, _OF_256 = "heads of 64, window, sinks", "gemma, heads of 256, window, softcap"
_NOT_CAUSAL, _PORTABLE_OF_64 = "heads of 128, not causal", "whisper-large-v3, not causal"
_OF_192 = "nemotron-4-340b, one of 4 devices, heads of 192"
SAMPLES: dict[str, dict[str, tuple[str, ...]]] = {
    "h200": {
        "mixed": (_BASE, _LATENT, _NOT_CAUSAL, "heads of 256, window, fp8 pages"),
        "turn": ("heads of 192, window, softcap, sinks",),
        "drafts": ("fp8 scores, heads of 64, window",),
        "fixed": (_BASE, _FP8_LATENT),
    },
    "a100": {"decode": (_OF_192,), "mixed": (_OF_256,), "drafts": (_BASE,), "fixed": (_OF_64,)},
    "l4": {"mixed": (_FP8,)},
    "b200": {"mixed": (_NOT_CAUSAL,)},
    "rtx5090": {"mixed": (_OF_64,)},
    "v5e": {"decode": (_OF_192,), "mixed": (_OF_256, _OF_64), "drafts": (_BASE,)},
    "v5p": {"mixed": (_FP8,)},
    "v6e": {"decode": (_PORTABLE_OF_64,), "mixed": (_BASE,)},
    "tpu7x": {"mixed": (_FP8_LATENT,)},
}


def list_programs(target: Target, *, full: bool = True) -> list[GateProgram]:
    """The gate's programs for a target: each shape in the decode and the mixed bucket (on GPUs with fixed splits,
    too), drafts for the first shape, and the tight ones. Without `full`, those that every run of the gate compiles."""
    programs = [_fill_bucket(bucket, shape, target) for shape in SHAPES for bucket in ("decode", "mixed")]
    programs.append(_fill_bucket("drafts", SHAPES[0], target))
    if target.platform == "gpu":  # with fixed splits a decode bucket has other kernels
        own = [shape for shape in SHAPES if target.impl not in dict(shape.portable)]
        programs += [_fill_bucket("fixed", shape, target) for shape in own]
    is_hopper = target.impl == "gpu"
    tight = [(bucket, shape) for bucket, shape in TIGHT if is_hopper or shape.switch is None]
    programs += [_fill_bucket(bucket, shape, target) for bucket, shape in tight]
    sample = {f"{bucket}: {name}" for bucket, names in SAMPLES[target.name].items() for name in names}
    return programs if full else [program for program in programs if program.name in sample]


def _fill_bucket(bucket: str, shape: GateShape, target: Target) -> GateProgram:
    num_tokens, num_rows, max_query_len = {
        "decode": (target.num_rows, target.num_rows, 1),
        "fixed": (target.num_rows, target.num_rows, 1),
        "mixed": (MIXED_TOKENS, target.num_rows, None),
        "turn": (TURN_TOKENS, TURN_ROWS, None),
        "drafts": (DRAFT_ROWS * DRAFT_LEN, DRAFT_ROWS, DRAFT_LEN),
    }[bucket]
    shape = replace(shape, fixed_splits=bucket == "fixed")
    return GateProgram(f"{bucket}: {shape.name}", shape, num_tokens, num_rows, max_query_len, target.page_size)


def list_tuned_programs(target: Target, directory: Path = DATA) -> list[GateProgram]:
    """A program for each entry of the target's tuning tables, in the shape and bucket that make the kernel use it."""
    programs = []
    for kernel in KERNELS:
        for index, entry in enumerate(read_entries(directory, target.device_kind, kernel)):
            key, is_decode = entry.key, kernel.endswith("decode")
            shape = GateShape(
                f"{kernel} {index}",
                key.num_heads,
                key.num_kv_heads,
                key.head_dim,
                window=TUNED_WINDOW if key.window else None,
                dtype=key.dtype,
                kv_dtype=key.kv_dtype,
                max_len=key.max_len,
            )
            programs.append(
                GateProgram(
                    f"tuned: {shape.name}",
                    shape,
                    num_tokens=key.tokens,
                    num_rows=key.tokens if is_decode else min(key.tokens, target.num_rows),
                    max_query_len=1 if is_decode else None,
                    page_size=key.page_size,
                )
            )
    return programs
