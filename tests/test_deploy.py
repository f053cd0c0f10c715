"""What people deploy with says nothing that the command line, the routes and the files do not know."""

from __future__ import annotations

import http.server
import json
import re
import subprocess
import sys
import threading
import tomllib
from functools import cache
from pathlib import Path
from typing import Any

import httpx
import pytest
from packaging.requirements import Requirement

from jaxserve.config import EngineConfig
from jaxserve.features.lora.store import AdapterStore
from jaxserve.options import list_options
from jaxserve.server.app import make_admin_api, make_api
from jaxserve.server.launch import make_state
from jaxserve.server.metrics import ImageCounts, ServerMetrics
from jaxserve.server.metrics.exposition import render
from jaxserve.server.options import ServerConfig
from jaxserve.server.protocol.chat import ChatCompletionRequest
from jaxserve.server.protocol.completions import CompletionRequest
from jaxserve.server.protocol.messages import MessagesRequest
from jaxserve.server.protocol.responses import ResponseRequest
from jaxserve.server.protocol.tokens import DetokenizeRequest, EmbeddingRequest, TokenizeRequest
from jaxserve.server.server_state import Phase
from jaxserve.tools import cli
from jaxserve.tools.cli.flags import read_flags
from tests.server.conftest import SMALL
from tests.server.engine_stats import make_stats
from tests.server.running import run_server

ROOT = Path(__file__).parents[1]
DEPLOY = ROOT / "configs" / "deploy"
DOC = (ROOT / "docs" / "serving.md").read_text()
SCRIPT = ROOT / "scripts" / "tpu_vm.sh"
NOTEBOOK = ROOT / "scripts" / "colab.ipynb"
PRESETS = {"demo.toml": "cpu", "cpu.toml": "cpu", "h200.toml": "gpu", "v5e-8.toml": "tpu"}
DOCKERFILES = ("Dockerfile.cpu", "Dockerfile.cuda", "Dockerfile.tpu")
FOREIGN_FLAGS = {"--gpus", "--from-literal", "--yes", "--zone", "--ntasks-per-node"}  # of other commands
REQUESTS = (
    ChatCompletionRequest,
    CompletionRequest,
    ResponseRequest,
    MessagesRequest,
    EmbeddingRequest,
    TokenizeRequest,
    DetokenizeRequest,
)


def read_notebook() -> list[dict[str, Any]]:
    notebook = json.loads(NOTEBOOK.read_text())
    assert (notebook["nbformat"], notebook["nbformat_minor"]) == (4, 5)
    cells: list[dict[str, Any]] = notebook["cells"]
    return cells


def list_code() -> str:
    return "\n\n".join("".join(cell["source"]) for cell in read_notebook() if cell["cell_type"] == "code")


DOCUMENTS = {
    "serving.md": DOC,
    "tiers.md": (ROOT / "docs" / "tiers.md").read_text(),
    "clusters.md": (ROOT / "docs" / "clusters.md").read_text(),
    "bundles.md": (ROOT / "docs" / "bundles.md").read_text(),
    "kubernetes.yaml": (DEPLOY / "kubernetes.yaml").read_text(),
    "tpu_vm.sh": SCRIPT.read_text(),
    "colab.ipynb": list_code(),
    **{name: (DEPLOY / name).read_text() for name in (*DOCKERFILES, *PRESETS)},
}


@cache
def list_flags() -> frozenset[str]:
    """Every flag of every command."""
    subparsers = next(action for action in cli._make_parser()._actions if action.dest not in ("help", "version"))
    assert isinstance(subparsers.choices, dict)
    return frozenset(flag for each in subparsers.choices.values() for flag in each._option_string_actions)


@cache
def list_endpoints() -> frozenset[tuple[str, str]]:
    """(method, path) of everything that is served, on either port."""
    state = make_state(EngineConfig(), ServerConfig())
    found = {
        (method.upper(), path)
        for app in (make_api(state), make_admin_api(state))
        for path, methods in app.openapi()["paths"].items()
        for method in methods
    }
    return frozenset(found | {("GET", path) for path in ("/", "/playground/...", "/openapi.json", "/docs")})


def check_flags(arguments: list[str]) -> None:
    """Reads arguments as `jaxserve serve` does; a key is there, as the environment gives it."""
    args = cli._make_parser().parse_args(["serve", *arguments])
    EngineConfig.from_options(**read_flags(args, EngineConfig))
    ServerConfig.from_options(**read_flags(args, ServerConfig))


@pytest.mark.docs
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_flag_that_is_named_exists(name: str) -> None:
    named = set(re.findall(r"(?<![\w-])--[a-z][a-z0-9-]*(?!\w)", DOCUMENTS[name]))  # XLA's have underscores
    own = set(re.findall(r"^  (--[a-z-]+)", SCRIPT.read_text(), flags=re.M))
    foreign = own if name in ("tpu_vm.sh", "clusters.md") else set()
    if name.startswith("Dockerfile"):  # instructions have flags of their own
        foreign = {"--from", "--interval", "--timeout", "--start-period", "--retries", "--no-cache-dir"}
        foreign |= {"--uid", "--no-create-home", "--home-dir", "--require-hashes", "--no-deps", "--no-build-isolation"}
        foreign |= {"--no-install-recommends"}  # of apt-get
    if name == "tpu_vm.sh":
        foreign |= {"--quiet", "--disable-pip-version-check", "--silent", "--fail", "--header"}  # of pip and curl
        foreign |= {"--worker", "--command", "--exclude", "--of-slice"}  # of gcloud and tar, and between its own starts
    assert named - foreign - FOREIGN_FLAGS <= list_flags()


@pytest.mark.docs
def test_every_flag_of_the_server_is_explained() -> None:
    for _, option in list_options(ServerConfig):
        flag = option.name.replace("_", "-")
        assert re.search(rf"--(no-)?{flag}(?![\w-])", DOC), flag


@pytest.mark.docs
def test_endpoints_of_the_table_are_those_of_the_server() -> None:
    table = DOC.partition("## Endpoints")[2].partition("\n## ")[0]
    assert set(re.findall(r"`(GET|POST) (/[^`]*)`", table)) == list_endpoints()


@pytest.mark.docs
@pytest.mark.parametrize("name", DOCUMENTS)
def test_every_path_that_is_named_is_served(name: str) -> None:
    paths = {path for _, path in list_endpoints()}
    pattern = r"(?<![\w.~}])/(?:v1|health|metrics|live|version|ping|tokenize|detokenize)(?:/[\w{}]+)*(?![\w./])"
    named = set(re.findall(pattern, DOCUMENTS[name])) - {"/v1"}
    assert named <= paths


@pytest.mark.docs
def test_every_field_of_a_request_is_explained() -> None:
    for kind in REQUESTS:
        for name in kind.model_fields:
            assert f"`{name}`" in DOC, f"{kind.__name__}.{name}"


@pytest.mark.docs
def test_refused_fields_stand_in_the_table_of_refusals() -> None:
    table = DOC.partition("| Refused |")[2].partition("\n\n")[0]
    for kind in REQUESTS:
        for name in kind.refused:
            assert f"`{name}`" in table, f"{kind.__name__}.{name}"


@pytest.mark.docs
def test_codes_of_errors_are_those_of_the_source() -> None:
    rows = DOC.partition("## Errors")[2].partition("\n## ")[0].splitlines()
    named = {code for row in rows if row.startswith("|") for code in re.findall(r"`(\w+)`", row.split("|")[3])}
    source = "\n".join(path.read_text() for path in (ROOT / "jaxserve" / "server").rglob("*.py"))
    known = set(re.findall(r"\bcode=\"(\w+)\"", source))  # of ApiError
    known |= set(re.findall(r"\d{3}, \"(\w+)\"\),$", source, flags=re.M))  # of the engine's errors
    known |= set(re.findall(r"message, code = .*\"(\w+)\"$", source, flags=re.M))
    known |= {f"server_{phase}" for phase in Phase if phase is not Phase.READY}
    assert named - {"code"} == known


@pytest.mark.docs
def test_metrics_of_the_table_are_those_that_are_rendered() -> None:
    table = DOC.partition("| Metric |")[2].partition("\n\n")[0]
    named = {name for row in table.splitlines() for name in re.findall(r"`(\w+)`", row.partition(" | ")[0])}
    metrics = ServerMetrics("demo")
    metrics.cache_config, metrics.adapters = {"page_size": 32}, AdapterStore(lambda folder: None, 1)
    metrics.images = ImageCounts(lambda: 0)
    text = render(metrics, None, make_stats(), "ready")[0].decode()
    assert named == {name.removeprefix("jaxserve:") for name in re.findall(r"^# TYPE (\S+)", text, flags=re.M)}


@pytest.mark.parametrize(("name", "platform"), PRESETS.items())
def test_presets_are_options_in_their_sections(name: str, platform: str) -> None:
    sections = tomllib.loads((DEPLOY / name).read_text())
    places = {(place, option.name) for config in (EngineConfig, ServerConfig) for place, option in list_options(config)}
    assert {(section, option) for section, options in sections.items() for option in options} <= places
    args = cli._make_parser().parse_args(["serve", "--config", str(DEPLOY / name)])
    engine = EngineConfig.from_options(**read_flags(args, EngineConfig)).resolve(platform)
    make_state(engine, ServerConfig.from_options(**read_flags(args, ServerConfig)))
    assert engine.model.model == sections["model"]["model"]


BOUNDS = {"max_num_queued_reqs", "max_num_queued_tokens", "max_connections", "max_streams"}
TIMEOUTS = {"request_timeout", "slow_reader_timeout"}


@pytest.mark.parametrize("name", PRESETS)
def test_presets_bound_what_they_bear(name: str) -> None:
    sections = tomllib.loads((DEPLOY / name).read_text())
    assert {*sections["scheduler"], *sections["limits"]} >= BOUNDS | TIMEOUTS
    assert sections["scheduler"]["max_num_queued_reqs"] <= 4 * sections["scheduler"]["max_num_seqs"]


def read_dockerfile(name: str) -> list[tuple[str, str]]:
    text = "\n".join(line for line in (DEPLOY / name).read_text().splitlines() if not line.startswith("#"))
    lines = text.replace("\\\n", " ").splitlines()
    return [(word, rest.strip()) for word, _, rest in (line.partition(" ") for line in lines if line.strip())]


def check_lock(lock: Path, project: dict[str, Any], builders: list[str]) -> None:
    """A lock file has all that the project and its build ask for, at versions that they take, each with a hash."""
    header, *lines = lock.read_text().splitlines()
    extras = re.findall(r"from \.\[([\w,]+)\]", header)[0].split(",")
    locked = {}
    for line in lines:
        found = re.fullmatch(r"([a-z0-9.-]+)==(\S+) --hash=sha256:[0-9a-f]{64}", line)
        assert found is not None, line
        locked[found[1]] = found[2]
    wanted = [*builders, *project["dependencies"]]
    wanted += [each for name in extras for each in project["optional-dependencies"][name]]
    for text in wanted:
        requirement = Requirement(text)
        name = requirement.name.lower().replace("_", "-")
        assert requirement.specifier.contains(locked[name]), f"{text}: {lock.name} has {locked[name]}"


@pytest.mark.parametrize("name", DOCKERFILES)
def test_dockerfile_fits_the_checkout_and_the_command_line(name: str) -> None:
    instructions = read_dockerfile(name)
    found = dict(instructions)
    assert re.fullmatch(r"PYTHON_IMAGE=python:3\.12\.\d+-slim-[a-z]+", found["ARG"]), "a tag that stays what it is"
    stages = [rest.partition(" AS ")[2] for word, rest in instructions if word == "FROM"]
    for source in [rest for word, rest in instructions if word == "COPY"]:
        *paths, _target = [part for part in source.split() if not part.startswith("--")]
        if source.startswith("--from="):
            assert source.split()[0].removeprefix("--from=") in stages
        else:
            assert all((ROOT / path).exists() for path in paths)
    packaged = tomllib.loads((ROOT / "pyproject.toml").read_text())
    copied = " ".join(rest for word, rest in instructions if word == "COPY")
    targets = packaged["tool"]["hatch"]["build"]["targets"]["wheel"]
    for needed in (*targets["packages"], *targets["force-include"], packaged["project"]["readme"], "LICENSE"):
        assert needed in copied.split()
    commands = " ".join(rest for word, rest in instructions if word == "RUN")
    lock = DEPLOY / re.findall(r"--require-hashes -r (\S+)", commands)[0]
    check_lock(lock, packaged["project"], packaged["build-system"]["requires"])
    needed_flags = "install --no-cache-dir --no-deps --no-build-isolation ."
    assert needed_flags in commands, "what is not in the lock is not installed, nor does it build anything"
    assert found["USER"] == "10001:10001" and found["STOPSIGNAL"] == "SIGTERM" and found["VOLUME"] == "/cache"
    assert "XDG_CACHE_HOME=/cache" in found["ENV"].split()
    assert json.loads(found["ENTRYPOINT"]) == ["jaxserve", "serve"]
    check_flags(json.loads(found["CMD"]))


@pytest.mark.parametrize("name", DOCKERFILES)
@pytest.mark.parametrize(("status", "expected"), [(200, 0), (503, 1)])
def test_health_check_follows_the_status(name: str, status: int, expected: int) -> None:
    class Answer(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health/live" else 404)
            self.end_headers()

        def log_message(self, *_: Any) -> None:
            pass

    command = json.loads(dict(read_dockerfile(name))["HEALTHCHECK"].partition("CMD ")[2])
    with http.server.HTTPServer(("127.0.0.1", 0), Answer) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        command = [sys.executable, command[1], command[2].replace(":8000/", f":{server.server_port}/")]
        done = subprocess.run(command, capture_output=True, check=False)
        server.shutdown()
    assert done.returncode == expected


@pytest.mark.docs
@pytest.mark.slow
def test_examples_of_the_document_run_against_a_server() -> None:
    examples = re.findall(r"```python\n(.*?)```", DOC, flags=re.S)
    assert examples
    with run_server(*SMALL) as server:
        for example in examples:
            program = example.replace("http://127.0.0.1:8000", server.url)
            assert program != example
            command = [sys.executable, "-c", program]
            done = subprocess.run(command, capture_output=True, text=True, check=False)
            assert done.returncode == 0, done.stderr[-2000:]
            assert "attention keys" in done.stdout
        refused = re.search(r"```json\n([^`]*\"error\"[^`]*)```", DOC)
        assert refused is not None
        body = {"messages": [{"role": "user", "content": "hi"}], "store": True}
        answer = httpx.post(f"{server.url}/v1/chat/completions", json=body, timeout=None)
        assert answer.status_code == 400 and answer.json() == json.loads(refused[1])
