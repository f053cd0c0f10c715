"""Attention alone: is it right on this device, how near to the copy rate is decode, how fast is prefill.

Correctness comes first: the shared case list against the float32 reference. Then decode bandwidth (bytes of keys and
values over time) and prefill TFLOP/s (multiplications of seen keys only), each beside the portable XLA path, cuDNN's
dense attention through jax.nn and, where torch is installed, its scaled_dot_product_attention. Dense peers read
contiguous keys without pages: they show what the shape could do.

A measured program runs several layers one after another, each on its own pages, as a model does: caches stay cold and
dispatch is paid once. `--dry-run` runs everything on small shapes with the kernels interpreted, on any machine.
"""

from __future__ import annotations

import argparse
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from device_limits import DeviceLimits, best_seconds, measure_limits
from rich.console import Console
from rich.table import Table

from pallas_kernels import (
    AttnParams,
    AttnShape,
    KVSpec,
    attend_with_update,
    choose_layout,
    page_bytes,
    pool_shape,
    prepare_batch,
    resolve_impl,
)
from pallas_kernels.testing.cases import CASES, Case, largest_error, make_inputs

MODELS = {"llama-8b": (32, 8, 128), "qwen3-0.6b": (16, 8, 128)}  # N, K, H
POOL_BYTES = 24 * 10**9  # at most, of all layers of one measurement


@dataclass(frozen=True)
class Effort:
    """How often things are run."""

    layers: int = 8  # per call
    repeats: int = 5  # of which the best counts
    calls: int = 4  # per repeat

    def time(self, call: Callable[..., Any], *args: Any) -> float:
        return best_seconds(call, *args, repeats=self.repeats, calls=self.calls)


FULL, DRY = Effort(), Effort(layers=1, repeats=1, calls=1)


@dataclass(frozen=True)
class Shape:
    """One measurement: rows of `cached` tokens in pages and `new` ones to compute."""

    model: str
    heads: tuple[int, int, int]
    rows: int
    cached: int
    new: int
    kv_dtype: str
    page_size: int
    dtype: str = "bfloat16"

    @property
    def is_decode(self) -> bool:
        return self.new == 1

    @property
    def flops(self) -> float:
        """Of both products, over the keys that each query sees."""
        num_heads, _, head_dim = self.heads
        seen = self.new * self.cached + self.new * (self.new + 1) / 2
        return 4.0 * self.rows * num_heads * head_dim * seen

    @property
    def spec(self) -> KVSpec:
        _, num_kv_heads, head_dim = self.heads
        return KVSpec(num_kv_heads, head_dim, self.page_size, self.kv_dtype)

    @property
    def bytes_read(self) -> int:
        """Keys and values of all rows, once."""
        return self.rows * (self.cached + self.new) * page_bytes(self.spec) // self.page_size

    @property
    def label(self) -> str:
        kind = (
            f"decode {self.rows} x {self.cached + 1}" if self.is_decode else f"prefill {self.new} after {self.cached}"
        )
        return f"{self.model} {kind} {self.kv_dtype}"


def list_shapes(page_size: int, *, dry_run: bool) -> Iterator[Shape]:
    if dry_run:
        tiny = ("tiny", (2, 1, 128))
        yield Shape(*tiny, rows=2, cached=63, new=1, kv_dtype="bfloat16", page_size=page_size)
        yield Shape(*tiny, rows=1, cached=32, new=32, kv_dtype="bfloat16", page_size=page_size)
        return
    for model, heads in MODELS.items():
        for kv_dtype in ("bfloat16", "float8_e4m3fn"):
            for context in (512, 4096, 32768):
                for rows in (1, 8, 32, 128, 256):
                    yield Shape(model, heads, rows, context - 1, 1, kv_dtype, page_size)
    for new, cached in ((1024, 0), (4096, 0), (16384, 0), (1024, 4096), (1024, 16384)):
        yield Shape("llama-8b", MODELS["llama-8b"], 1, cached, new, "bfloat16", page_size)
    yield Shape("llama-8b", MODELS["llama-8b"], 1, 0, 4096, "float8_e4m3fn", page_size)


def prepare_dry_run() -> None:
    """To be called before JAX starts: the GPU kernels' interpreter blocks threads of XLA's pool, one per warpgroup."""
    os.environ.setdefault("NPROC", "8")


def make_program(
    shape: Shape, impl: str, layers: int, config: Any = None
) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Returns a jitted chain of layers and its arguments: pages in random order, random keys and values."""
    num_heads, num_kv_heads, head_dim = shape.heads
    spec = replace(shape.spec, layout=choose_layout(impl, head_dim))
    attention = AttnShape(num_heads, spec, shape.dtype)
    width = -(-(shape.cached + shape.new) // shape.page_size)
    num_pages, num_tokens = shape.rows * width + 1, shape.rows * shape.new
    rng = np.random.default_rng(0)
    table = jnp.asarray(1 + rng.permutation(shape.rows * width).reshape(shape.rows, width), jnp.int32)
    lens = jnp.full(shape.rows, shape.cached + shape.new, jnp.int32)
    starts = jnp.arange(shape.rows + 1, dtype=jnp.int32) * shape.new
    ends = [shape.rows if shape.is_decode else 0, shape.rows, shape.rows]
    make = jax.jit(
        lambda key, dims, dtype: jax.random.normal(key, dims, jnp.bfloat16).astype(dtype), static_argnums=(1, 2)
    )
    keys = jax.random.split(jax.random.key(0), 4)
    pool = make(keys[0], pool_shape(spec, layers * num_pages), spec.dtype)
    q = make(keys[1], (num_tokens, num_heads, head_dim), shape.dtype)
    k, v = (make(key, (num_tokens, num_kv_heads, head_dim), shape.dtype) for key in keys[2:])
    params = AttnParams(scale=head_dim**-0.5)

    @partial(jax.jit, donate_argnums=0)
    def run(pool: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *meta: jax.Array) -> tuple[jax.Array, jax.Array]:
        batch = prepare_batch(
            *meta,
            num_tokens=num_tokens,
            shape=attention,
            max_query_len=1 if shape.is_decode else None,
            impl=impl,
            config=config,
        )
        for layer in range(layers):
            q, pool = attend_with_update(q, k, v, pool, batch, params=params, page_offset=layer * num_pages)
        return q, pool

    return run, (pool, q, k, v, table, lens, starts, jnp.array(ends, jnp.int32))


def time_paged(shape: Shape, impl: str, effort: Effort = FULL, config: Any = None) -> float:
    """Seconds of one layer, its keys' write included."""
    layers = max(1, min(effort.layers, POOL_BYTES // max(shape.bytes_read, 1)))
    run, (pool, *rest) = make_program(shape, impl, layers, config)
    held = [pool]

    def call() -> jax.Array:
        out, held[0] = run(held[0], *rest)
        return out

    return effort.time(call) / layers


def time_cudnn(shape: Shape, effort: Effort) -> float:
    """Seconds of dense attention of the same shape through jax.nn, causal unless a decode row sees all keys."""
    num_heads, num_kv_heads, head_dim = shape.heads
    keys = jax.random.split(jax.random.key(0), 3)
    q = jax.random.normal(keys[0], (shape.rows, shape.new, num_heads, head_dim), jnp.bfloat16)
    dims = (shape.rows, shape.cached + shape.new, num_kv_heads, head_dim)
    k, v = (jax.random.normal(key, dims, jnp.bfloat16) for key in keys[1:])
    attend = partial(jax.nn.dot_product_attention, is_causal=not shape.is_decode, implementation="cudnn")
    return effort.time(jax.jit(attend), q, k, v)


def time_torch(shape: Shape, effort: Effort) -> float:
    """The same through torch."""
    import torch

    num_heads, num_kv_heads, head_dim = shape.heads
    q = torch.randn(shape.rows, num_heads, shape.new, head_dim, dtype=torch.bfloat16, device="cuda")
    dims = (shape.rows, num_kv_heads, shape.cached + shape.new, head_dim)
    k, v = (torch.randn(dims, dtype=torch.bfloat16, device="cuda") for _ in range(2))
    is_causal = not shape.is_decode

    def call() -> None:
        torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal, enable_gqa=True)

    for _ in range(3):
        call()
    torch.cuda.synchronize()
    best = float("inf")
    for _ in range(effort.repeats):
        start = time.perf_counter()
        for _ in range(effort.calls):
            call()
        torch.cuda.synchronize()
        best = min(best, (time.perf_counter() - start) / effort.calls)
    return best


def check_cases(impl: str, console: Console, *, dry_run: bool) -> list[dict[str, Any]]:
    """Runs the case list; returns what failed. Cases that the implementation refuses are counted, with the reason."""
    failures, refused, passed = [], [], 0
    cases = [case for case in CASES if case.name in ("decode sinks", "mixed 8:2 of 128 bfloat16, sinks")]
    for case in cases if dry_run else CASES:
        case = case.with_layout(choose_layout(impl, case.spec.head_dim))  # noqa: PLW2901
        try:
            resolve_impl(impl, case.shape)
        except ValueError as error:
            refused.append(f"{case.name}: {error}")
            continue
        try:
            error = _case_error(case, impl)
        except Exception as problem:  # a kernel that does not compile must not hide the others
            failures.append({"case": case.name, "error": f"{type(problem).__name__}: {problem}"[:400]})
            continue
        passed += error < 1
        if not error < 1:
            failures.append({"case": case.name, "error": f"{error:.3g} times the tolerance"})
    console.print(f"[bold]{impl}[/] {passed} cases right, {len(failures)} wrong, {len(refused)} refused")
    for text in (*(f"{failure['case']}: {failure['error']}" for failure in failures), *refused):
        console.print(f"  {text}")
    return failures


def _case_error(case: Case, impl: str) -> float:
    inputs = make_inputs(case)

    def run(name: str) -> jax.Array:
        def step(pool: jax.Array) -> tuple[jax.Array, jax.Array]:
            batch = prepare_batch(
                *map(jnp.asarray, inputs.meta),
                num_tokens=case.max_tokens,
                shape=case.shape,
                max_query_len=case.max_query_len,
                impl=name,
            )
            arrays = map(jnp.asarray, (inputs.q, inputs.k, inputs.v))
            return attend_with_update(*arrays, pool, batch, params=case.params, heads=inputs.heads)

        return jax.jit(step)(jnp.asarray(inputs.kv_pages))[0]

    return largest_error(case, run(impl), run("reference"), inputs.num_tokens)


def measure(shape: Shape, impl: str, limits: DeviceLimits, effort: Effort, *, peers: bool) -> dict[str, Any]:
    """One line of the table: seconds of each contender, or why it did not run.

    Dense peers whose causal mask begins at the first key are left out where a prefix is cached.
    """
    contenders: dict[str, Callable[[], float]] = {impl: partial(time_paged, shape, impl, effort)}
    if impl != "xla":
        contenders["xla"] = partial(time_paged, shape, "xla", effort)
    if peers and (shape.is_decode or not shape.cached):
        contenders |= {"cudnn": partial(time_cudnn, shape, effort), "torch": partial(time_torch, shape, effort)}
    seconds: dict[str, float | str] = {}
    for name, run in contenders.items():
        try:
            seconds[name] = run()
        except Exception as problem:  # out of memory, not installed, not supported: said in the table
            seconds[name] = f"{type(problem).__name__}: {problem}"[:200]
    mine = seconds[impl]
    rate = (shape.bytes_read if shape.is_decode else shape.flops) / mine if isinstance(mine, float) else None
    roof = limits.bytes_per_second if shape.is_decode else limits.flops_per_second
    return {
        "shape": asdict(shape),
        "label": shape.label,
        "seconds": seconds,
        "rate": rate,
        "share": None if rate is None else rate / roof,
    }


def print_rows(rows: list[dict[str, Any]], impl: str, limits: DeviceLimits, console: Console) -> None:
    title = (
        f"{impl} on {limits.device}: copy {limits.bytes_per_second / 1e12:.2f} TB/s, "
        f"matmul {limits.flops_per_second / 1e12:.0f} TFLOP/s"
    )
    table, names = Table(title=title), list(dict.fromkeys(name for row in rows for name in row["seconds"]))
    for column in ("", *(f"{name} us" for name in names), "rate", "of the limit"):
        table.add_column(column, justify="right")
    for row in rows:
        unit = "TB/s" if row["shape"]["new"] == 1 else "TFLOP/s"
        found = [row["seconds"].get(name) for name in names]
        times = [f"{1e6 * seconds:.1f}" if isinstance(seconds, float) else "-" for seconds in found]
        rate = "-" if row["rate"] is None else f"{row['rate'] / 1e12:.3g} {unit}"
        table.add_row(row["label"], *times, rate, "-" if row["share"] is None else f"{row['share']:.0%}")
    console.print(table)
    problems = {f"{name}: {s}" for row in rows for name, s in row["seconds"].items() if isinstance(s, str)}
    for text in sorted(problems):
        console.print(f"- {text}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--impl", help="gpu, tpu, xla, ...; default: what this device gets")
    parser.add_argument("--only", default="", help="only shapes whose label contains this text")
    parser.add_argument("--skip-cases", action="store_true", help="measure without checking first")
    parser.add_argument("--minutes", type=float, default=8, help="stop measuring after so long (default: %(default)s)")
    parser.add_argument("--dry-run", action="store_true")
    parser.add_argument("--json", type=Path, metavar="FILE")
    args = parser.parse_args()
    if args.dry_run:
        prepare_dry_run()
    console, begun = Console(), time.perf_counter()
    platform = jax.default_backend()
    page_size = {"gpu": 64, "tpu": 128}.get(platform, 32)
    probe = AttnShape(32, KVSpec(8, 128, page_size, "bfloat16"), "bfloat16")
    impl, reason = resolve_impl(args.impl, probe)
    console.print(f"[bold]{impl}[/] on {jax.devices()[0].device_kind}, jax {jax.__version__}: {reason}")
    failures = [] if args.skip_cases else check_cases(impl, console, dry_run=args.dry_run)
    limits, rows, late = measure_limits(), [], 0
    for shape in list_shapes(page_size, dry_run=args.dry_run):
        if args.only not in shape.label or shape.bytes_read > POOL_BYTES:
            continue
        if time.perf_counter() - begun > 60 * args.minutes:
            late += 1
            continue
        rows.append(measure(shape, impl, limits, DRY if args.dry_run else FULL, peers=platform == "gpu"))
        console.print(f"{rows[-1]['label']}: {rows[-1]['seconds']}")
        if args.json:  # after every shape: a run that is cut off keeps what it has
            document = {"jax": jax.__version__, "impl": impl, "limits": limits.asdict(), "rows": rows}
            args.json.write_text(json.dumps(document | {"failures": failures}, indent=1) + "\n")
    if rows:
        print_rows(rows, impl, limits, console)
    if late:
        console.print(f"not measured for want of time: {late} shapes")
    if failures:
        raise SystemExit(f"{len(failures)} cases are wrong")


if __name__ == "__main__":
    main()
