"""The demo model in Ray Serve. `make test-ray` has it: Ray is no part of the other environments."""

from __future__ import annotations

import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
import openai
import pytest

from tests.nodes.nodes import find_ports
from tests.programs import PROGRAMS
from tests.tools.cluster.clients import stream_sum

ray = pytest.importorskip("ray", reason="needs the extra ray")
os.environ.setdefault("JAX_PLATFORMS", "cpu")

from ray import serve  # noqa: E402

from jaxserve.tools.cluster.ray_app import build  # noqa: E402

OPTIONS = {
    "model": "demo",
    "dtype": "float32",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 64,
    "max_model_len": 256,
    "compilation_cache_dir": str(PROGRAMS),
    "status_interval": 0,
    "accelerator": "cpu",
    "num_cpus": 0.5,
}
SECONDS = 120.0  # only a hang takes so long


class Application:
    """A running application."""

    def __init__(self, port: int) -> None:
        self.url = f"http://127.0.0.1:{port}"
        self.client = openai.OpenAI(base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=SECONDS)

    def metrics(self) -> str:
        return httpx.get(f"{self.url}/metrics", timeout=10).text

    def count_replicas(self) -> int:
        found = serve.status().applications["app"].deployments
        name = "engine" if "engine" in found else "jaxserve"
        return sum(found[name].replica_states.get(state, 0) for state in ("RUNNING",))

    def complete(self, prompt: str, **fields: Any) -> str:
        given = {"max_tokens": 8, "temperature": 0, **fields}
        return self.client.completions.create(model="demo", prompt=prompt, **given).choices[0].text


@pytest.fixture(scope="module")
def port() -> Iterator[int]:
    (port,) = find_ports(1)
    ray.init(num_cpus=4, include_dashboard=False, object_store_memory=200 * 2**20, log_to_driver=False)
    serve.start(http_options={"port": port})
    yield port
    serve.shutdown()
    ray.shutdown()


@contextmanager
def run(port: int, **options: Any) -> Iterator[Application]:
    serve.run(build({**OPTIONS, **options}), name="app")
    try:
        yield Application(port)
    finally:
        serve.delete("app")


def wait_for(ask: Callable[[], bool], seconds: float = SECONDS) -> None:
    deadline = time.monotonic() + seconds
    while not ask():
        assert time.monotonic() < deadline
        time.sleep(0.1)


@pytest.fixture(scope="module")
def pair(port: int) -> Iterator[Application]:
    with run(port, num_replicas=2, router="prefix") as application:
        yield application


def test_streams_and_errors(pair: Application) -> None:
    assert pair.client.models.list().data[0].id == "demo"
    assert len(stream_sum(pair.client)) > 20
    with pytest.raises(openai.BadRequestError, match="temperature"):
        pair.complete("Hi", temperature=-1)
    assert pair.client.chat.completions.create(
        model="demo", messages=[{"role": "user", "content": ""}], max_tokens=2
    ).choices


def test_each_prefix_stays_on_one_replica(pair: Application) -> None:
    """Hits show it: a replica that had not seen the prefix would have none."""
    for text in ("The quick brown fox jumps over the lazy dog. ", "A journey of a thousand miles begins with a step. "):
        cached = []
        for turn in range(6):
            answer = pair.client.completions.create(model="demo", prompt=f"{text * 2}{turn}", max_tokens=2)
            assert answer.usage is not None and answer.usage.prompt_tokens_details is not None
            cached.append(answer.usage.prompt_tokens_details.cached_tokens or 0)
        assert cached[0] == 0 and all(count >= 32 for count in cached[1:]), cached


@pytest.mark.parametrize("router", ["prefix", "none"])
def test_a_client_that_leaves_frees_its_row_within_a_second(port: int, router: str) -> None:
    most = 2000  # tokens, which take longer than a second
    with run(port, router=router, max_model_len=most + 20) as application:
        stream = application.client.completions.create(
            model="demo", prompt="Once", max_tokens=most, stream=True, extra_body={"ignore_eos": True}
        )
        for _ in range(5):
            next(iter(stream))
        stream.close()
        time.sleep(1.0)
        lines = application.metrics().splitlines()
        running = [line for line in lines if line.startswith("jaxserve:num_requests_running{")]
        left = [line for line in lines if line.startswith("jaxserve:client_disconnects_total")]
        generated = [line for line in lines if line.startswith("jaxserve:generation_tokens_total{")]
        assert float(running[0].rpartition(" ")[2]) == 0.0
        assert float(left[0].rpartition(" ")[2]) == 1.0
        assert float(generated[0].rpartition(" ")[2]) < most


def test_replicas_follow_the_load(port: int) -> None:
    delays = {"upscale_delay_s": 1.0, "downscale_delay_s": 4.0, "target_queue_s": 0.2}
    with run(port, max_replicas=2, **delays) as application:
        assert application.count_replicas() == 1
        is_over = threading.Event()

        def load() -> None:
            while not is_over.is_set():
                try:
                    application.complete("Once upon a time there was", max_tokens=120, extra_body={"ignore_eos": True})
                except openai.APIError:
                    time.sleep(0.1)

        threads = [threading.Thread(target=load, daemon=True) for _ in range(16)]
        for thread in threads:
            thread.start()
        try:
            wait_for(lambda: application.count_replicas() == 2)
        finally:
            is_over.set()
        for thread in threads:
            thread.join(SECONDS)
        wait_for(lambda: application.count_replicas() == 1)
        assert application.complete("Once")
