"""Two servers for all tests that need no other, and logs that are as they were after each module."""

from __future__ import annotations

import logging
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx
import pytest

from jaxserve.server.logs import _LIBRARIES, LogWriter
from tests.server.pressure import probe
from tests.server.running import RunningServer, run_server

# Many tests send more at once than the default queue of 8 rows would take, and machines may be slow.
ALL_PROGRAMS = (
    *("--max-num-seqs", "8", "--max-num-batched-tokens", "128", "--max-model-len", "1024"),
    *("--max-num-queued-reqs", "4096", "--max-queue-wait", "0"),
)
# Compiling takes most of the time of these tests: one bucket of each kind.
FEW_PROGRAMS = ("--precompile-bs-paddings", "8", "--precompile-token-paddings", "128")
SMALL = (*ALL_PROGRAMS, *FEW_PROGRAMS)
MAX_BODY = 2**20  # bytes
TEMPLATE = """{{ bos_token }}{% if tools %}<|system|>Answer with <tool_call>{"name": "f", "arguments": {}}</tool_call>
{{ tools | tojson }}<|end|>{% endif %}{% for m in messages %}<|{{ 'user' if m.role == 'tool' else m.role }}|>
{{- m.content }}{% for c in m.tool_calls or [] %}<tool_call>{{ c.function | tojson }}</tool_call>{% endfor %}<|end|>
{%- endfor %}{% if add_generation_prompt %}<|assistant|>{% endif %}"""


@pytest.fixture(scope="session")
def server() -> Iterator[RunningServer]:
    """Has limits that tests can reach, and that no request reaches by accident."""
    limits = ("--max-body-bytes", str(MAX_BODY), "--slow-reader-timeout", "1")
    with run_server(*SMALL, *limits, "--hf-overrides", '{"is_matryoshka": true}') as running:
        yield running


@pytest.fixture(scope="session")
def http(server: RunningServer) -> Iterator[httpx.Client]:
    with httpx.Client(base_url=server.url, timeout=30) as client:
        yield client


@pytest.fixture(scope="session")
def text(server: RunningServer) -> str:
    """What `probe` gets from the server."""
    return probe(server)


@pytest.fixture
def untouched(server: RunningServer, text: str) -> Iterator[None]:
    """After the test the same request gets the same text."""
    yield
    assert probe(server) == text


@pytest.fixture(scope="session")
def admin_port() -> int:
    """Of `narrow`."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        return int(taken.getsockname()[1])


@pytest.fixture(scope="session")
def narrow(tmp_path_factory: pytest.TempPathFactory, admin_port: int) -> Iterator[RunningServer]:
    """Bears three requests at once and one in its queue, has a template that knows tools, and an admin port."""
    path = tmp_path_factory.mktemp("template") / "tools.jinja"
    path.write_text(TEMPLATE)
    flags = ("--max-streams", "3", "--max-num-queued-reqs", "1", "--chat-template", str(path))
    with run_server(*SMALL, *flags, "--admin-port", str(admin_port)) as running:
        yield running


@contextmanager
def keep_loggers() -> Iterator[None]:
    """Puts back what `configure_logging` changes."""
    loggers = [logging.getLogger(name) for name in ("jaxserve", *_LIBRARIES)]
    before = [(logger, logger.level, logger.propagate) for logger in loggers]
    yield
    logging.captureWarnings(False)
    for logger, level, propagate in before:
        for handler in [h for h in logger.handlers if isinstance(h, LogWriter)]:
            logger.removeHandler(handler)
            handler.close()
        logger.setLevel(level)
        logger.propagate = propagate


@pytest.fixture(scope="module", autouse=True)
def restore_loggers_of_a_module() -> Iterator[None]:
    """A server that runs in the test's own process has taken them, as `run-batch` does."""
    with keep_loggers():
        yield
