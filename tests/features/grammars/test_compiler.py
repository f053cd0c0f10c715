"""Hostile grammars cost a worker process and a typed error; results are kept, and nothing is left behind."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import textwrap
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from jaxserve.errors import InvalidRequestError
from jaxserve.features.grammars import CheckerError, GrammarCompiler, MatcherError
from jaxserve.features.grammars import compiler as compiler_module
from jaxserve.features.grammars.checker import WORKER
from jaxserve.structured_params import StructuredOutputsParams
from jaxserve.tokenizers import Tokenizer
from jaxserve.workers import Worker
from tests.features.grammars.tiny import TinyTokenizer
from tests.features.grammars.walks import walk

ROOT = Path(__file__).parents[3]
LIMIT_S = 6.0


def make_bomb(depth: int, width: int) -> dict[str, Any]:
    definitions: dict[str, Any] = {"a0": {"type": "string"}}
    for level in range(1, depth):
        names = [f"p{n}" for n in range(width)]
        properties = {name: {"$ref": f"#/$defs/a{level - 1}"} for name in names}
        definitions[f"a{level}"] = {"type": "object", "properties": properties, "required": names}
    return {"$defs": definitions, "$ref": f"#/$defs/a{depth - 1}"}


HOSTILE: dict[str, dict[str, Any]] = {
    "nested counts": {"regex": "((a{1,1000}){1,1000}){1,1000}"},
    "a million": {"regex": "a{1,1000000}"},
    "ten thousands": {"regex": "(x{10000}y{10000}){10000}"},
    "catastrophic": {"regex": "(a+)+b" * 20},
    "optional": {"regex": "a?" * 4000 + "a" * 4000},
    "subsets": {"regex": "(a|b)*a(a|b){25}"},
    "unicode": {"regex": r"(\p{L}{1,500}\s){1,500}"},
    "parentheses": {"regex": "(" * 8000 + "a" + ")" * 8000},
    "look-around": {"regex": "(?=a)b"},
    "open group": {"regex": "("},
    "backslash": {"regex": "a\\"},
    "self reference": {"json": {"$ref": "#"}},
    "reference loop": {
        "json": {"$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}, "$ref": "#/$defs/a"}
    },
    "endless object": {
        "json": {
            "$defs": {"a": {"type": "object", "properties": {"x": {"$ref": "#/$defs/a"}}, "required": ["x"]}},
            "$ref": "#/$defs/a",
        }
    },
    "remote reference": {"json": {"$ref": "http://127.0.0.1:9/x.json"}},
    "bomb": {"json": make_bomb(30, 30)},
    "products": {
        "json": {
            "allOf": [
                {"anyOf": [{"properties": {f"p{i}{j}": {"type": "string"}}} for j in range(8)]} for i in range(30)
            ]
        }
    },
    "long array": {"json": {"type": "array", "items": {"type": "integer"}, "minItems": 10**6}},
    "long string": {"json": {"type": "string", "minLength": 10**6}},
    "length and pattern": {"json": {"type": "string", "pattern": "^(ab|ba)*$", "minLength": 5000, "maxLength": 10000}},
    "large enum": {"json": {"enum": [f"{i:04} {i * 7919 % 997}" for i in range(4096)]}},
    "crowded": {"json": {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}}},
    "patterns": {"json": {"type": "object", "patternProperties": {f".*x{i}.*": {} for i in range(60)}}},
    "deep": {"json": "[" * 30_000 + "]" * 30_000},
    "a megabyte": {"json": {"const": "x" * 2**20}},
    "intersections": {"grammar": "start: A\nA: " + " & ".join(f"/(?s:.*)x{i}(?s:.*)/" for i in range(40))},
    "negation": {"grammar": "start: A\nA: ~/(?s:.*)a(?s:.{18})/ & ~/(?s:.*)b(?s:.{17})/ & /[ab]{30,40}/"},
    "special negation": {"grammar": "start: A\nA: ~/(.*a){30}/"},
    "rules": {
        "grammar": "start: a0\n" + "\n".join(f"a{i}: a{i + 1} a{i + 1} a{i + 1}" for i in range(300)) + '\na300: "x"'
    },
    "repeats": {"grammar": 'start: a{1000000}\na: b{1000000}\nb: "x"'},
    "ambiguous": {"grammar": 'start: s\ns: s s s | s s | "a" | '},
    "no end": {"grammar": "start: start"},
    "deep rule": {"grammar": "start: " + "(" * 5000 + '"a"' + ")" * 5000},
    "unknown rule": {"grammar": "start: foo"},
    "whitespace": {"json_object": True, "whitespace_pattern": "("},
}
# These compile, because llguidance builds automata lazily; they end or fail as a sequence of their own.
LAZY = {
    "nested counts", "a million", "catastrophic", "subsets", "unicode", "endless object", "bomb", "long array",
    "long string", "large enum", "crowded", "ambiguous",
}  # fmt: skip


@pytest.mark.slow
def test_hostile_constraints(compiler: GrammarCompiler) -> None:
    for name, options in HOSTILE.items():
        start = time.monotonic()
        try:
            grammar = compiler.compile(StructuredOutputsParams(**options))
        except InvalidRequestError as error:
            assert name not in LAZY, (name, error)
            assert error.field.startswith("structured_outputs.") and len(str(error)) < 400
            assert "\n" not in str(error)
        else:
            assert name in LAZY, name
            matcher, row = grammar.new_matcher(), np.zeros(compiler.vocab_size // 32 + 1, np.uint32)
            try:
                for _ in range(20):
                    matcher.fill_mask(row)
                    matcher.accept(int(np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))[-1]))
            except MatcherError:
                pass
        assert time.monotonic() - start < 4 * LIMIT_S, name  # four times: this host may be busy
    works = compiler.compile(StructuredOutputsParams(regex="[a-z]{2}[0-9]"))
    assert len(walk(works.new_matcher(), np.random.default_rng(0))) == 3


@pytest.fixture
def worker(tmp_path: Path) -> Path:
    """The worker, with jobs that sleep, end, print or take memory when a grammar's text says so."""
    path = tmp_path / "worker.py"
    path.write_text(
        textwrap.dedent(f"""
            import importlib.util, os, time
            spec = importlib.util.spec_from_file_location("real_worker", {str(WORKER)!r})
            real = importlib.util.module_from_spec(spec)
            spec.loader.exec_module(real)
            check, kept = real.check, []
            def play(source, vocabulary, limits):
                if "sleep" in source:
                    time.sleep(60)
                if "crash" in source:
                    os._exit(3)
                if "print" in source:
                    print("noise on stdout", flush=True)
                if "much" in source:
                    kept.append(bytearray(1 << 30))
                if "some" in source:
                    kept.append(bytearray(40 << 20))
                return check(source, vocabulary, limits)
            real.check = play
            prepare = real.prepare
        """)
    )
    return path


@pytest.fixture
def played(worker: Path) -> Iterator[GrammarCompiler]:
    made = GrammarCompiler(TinyTokenizer(), worker=worker, time_limit_s=3.0, memory_bytes=128 << 20)
    yield made
    made.close()


def compile_rule(compiler: GrammarCompiler, text: str) -> Any:
    return compiler.compile(StructuredOutputsParams(grammar=f'start: "a" // {text}'))


def get_worker(compiler: GrammarCompiler) -> int:
    assert compiler._checker is not None and compiler._checker.process_id is not None
    return compiler._checker.process_id


def is_alive(process_id: int) -> bool:
    try:
        return "\nState:\tZ" not in Path(f"/proc/{process_id}/status").read_text()
    except FileNotFoundError:
        return False


def test_a_slow_worker_is_killed_and_replaced(played: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    compile_rule(played, "fine")
    first = get_worker(played)
    with pytest.raises(InvalidRequestError, match=r"structured_outputs\.grammar: .* 3 s\b"):
        compile_rule(played, "sleep")
    assert not is_alive(first)
    start = time.monotonic()
    with pytest.raises(InvalidRequestError, match=r" 3 s\b"):
        compile_rule(played, "sleep")
    assert time.monotonic() - start < 3, "the refusal is kept"
    compile_rule(played, "fine too")
    assert get_worker(played) != first
    later = time.monotonic() + 1000
    monkeypatch.setattr(compiler_module.time, "monotonic", lambda: later)
    assert played._look_up(StructuredOutputsParams(grammar='start: "a" // sleep').key) is None, "but not for ever"


def test_a_worker_that_crashes_or_takes_memory(played: GrammarCompiler) -> None:
    with pytest.raises(InvalidRequestError, match=r"128 MiB .*\(exit status 3\)"):
        compile_rule(played, "crash")
    with pytest.raises(InvalidRequestError, match="128 MiB"):
        compile_rule(played, "much")
    compile_rule(played, "print")
    before = get_worker(played)
    compile_rule(played, "some")
    compile_rule(played, "fine")
    assert get_worker(played) != before, "one that keeps memory is replaced"


def test_an_interrupted_check_leaves_no_answer_behind(played: GrammarCompiler, monkeypatch: pytest.MonkeyPatch) -> None:
    played.warm_up()
    first, checker = get_worker(played), played._checker
    assert checker is not None
    with monkeypatch.context() as patched:
        patched.setattr(Worker, "_exchange", lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
        with pytest.raises(KeyboardInterrupt):
            compile_rule(played, "fine")
    assert not is_alive(first)
    compile_rule(played, "fine")


def test_a_killed_worker_is_replaced(played: GrammarCompiler) -> None:
    played.warm_up()
    first = get_worker(played)
    os.kill(first, signal.SIGKILL)
    while is_alive(first):
        time.sleep(0.01)
    compile_rule(played, "fine")
    assert get_worker(played) != first


def test_a_worker_that_does_not_start(tmp_path: Path) -> None:
    path = tmp_path / "worker.py"
    path.write_text("raise SystemExit(7)")
    compiler = GrammarCompiler(TinyTokenizer(), worker=path)
    for _ in range(2):  # not kept: the host may be repaired
        with pytest.raises(CheckerError, match="exit status 7"):
            compile_rule(compiler, "fine")


@pytest.mark.parametrize("state", ["idle", "sleep"])
def test_no_orphans(worker: Path, state: str) -> None:
    """The parent is killed while its worker is idle, or compiles."""
    script = textwrap.dedent(f"""
        import threading, time
        from pathlib import Path
        from jaxserve.features.grammars import GrammarCompiler
        from jaxserve.structured_params import StructuredOutputsParams
        from tests.features.grammars.tiny import TinyTokenizer
        compiler = GrammarCompiler(TinyTokenizer(), worker=Path({str(worker)!r}), time_limit_s=2.0)
        compiler.warm_up()
        print(compiler._checker.process_id, flush=True)
        if {state!r} == "sleep":
            compiler.compile(StructuredOutputsParams(grammar='start: "a" // sleep'))
        time.sleep(60)
    """)
    parent = subprocess.Popen([sys.executable, "-c", script], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    process_id = int(parent.stdout.readline())
    assert is_alive(process_id)
    time.sleep(0.2 if state == "sleep" else 0.0)
    parent.kill()
    parent.wait()
    deadline = time.monotonic() + 30
    while is_alive(process_id):
        assert time.monotonic() < deadline, "an orphan"
        time.sleep(0.05)


def test_equal_constraints_compile_once(monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = GrammarCompiler(TinyTokenizer(), max_grammars=3)
    sources: list[str] = []
    compiler.warm_up()
    assert compiler._checker is not None
    check = compiler._checker.check
    monkeypatch.setattr(compiler._checker, "check", lambda source: (sources.append(source), check(source))[1])
    schema = {"type": "object", "properties": {"a": {"type": "integer"}}}
    grammars = [compiler.compile(StructuredOutputsParams(json=schema)) for _ in range(3)]
    assert len(sources) == 1 and grammars[0] is grammars[1] is grammars[2]
    for _ in range(3):
        with pytest.raises(InvalidRequestError, match="unclosed group"):
            compiler.compile(StructuredOutputsParams(regex="("))
    assert len(sources) == 2, "refusals are kept too"
    for regex in ("a", "b", "c"):
        compiler.compile(StructuredOutputsParams(regex=regex))
    assert len(compiler._results) == 3 and len(sources) == 5
    assert compiler._num_bytes == sum(map(len, compiler._results))
    compiler.compile(StructuredOutputsParams(regex="a"))
    compiler.compile(StructuredOutputsParams(json=schema))
    assert len(sources) == 6, "the one used longest ago is dropped"
    monkeypatch.setattr(compiler_module, "MAX_CACHE_BYTES", 10)
    compiler.compile(StructuredOutputsParams(regex="d" * 20))
    assert not compiler._results and compiler._num_bytes == 0
    compiler.close()


def test_threads_wait_for_one_compilation(played: GrammarCompiler) -> None:
    played.warm_up()
    found: list[Any] = []
    threads = [threading.Thread(target=lambda: found.append(compile_rule(played, "fine"))) for _ in range(6)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert len(found) == 6 and len(set(map(id, found))) == 1
    assert not played._running


def test_without_llguidance(demo: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "llguidance", None)
    with pytest.raises(InvalidRequestError, match=r"llguidance.*pip install 'llguidance"):
        GrammarCompiler(demo).compile(StructuredOutputsParams(json_object=True))


def test_without_an_end_token() -> None:
    class Endless(TinyTokenizer):
        eos_token_ids = ()

    with pytest.raises(InvalidRequestError, match="EOS"):
        GrammarCompiler(Endless()).compile(StructuredOutputsParams(json_object=True))
