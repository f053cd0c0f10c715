"""Adapters as models of a server: named by requests, loaded and unloaded by the admin port, limited by tenant."""

from __future__ import annotations

import asyncio
import re
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import httpx
import pytest

from jaxserve.config import EngineConfig
from jaxserve.errors import ConfigError
from jaxserve.features.lora.store import AdapterStore
from jaxserve.server.adapters import ServedAdapters
from jaxserve.server.errors import ApiError
from jaxserve.server.lora_modules import read_lora_modules
from jaxserve.server.metrics import ServerMetrics
from jaxserve.server.options import ServerConfig
from jaxserve.server.server_state import ServerState
from tests.features.lora.adapter_files import AdapterSpec, write_adapter
from tests.server.conftest import SMALL
from tests.server.running import RunningServer, run_server

DEMO = Path(__file__).parents[2] / "jaxserve" / "demo"
KEYS = {"all": "key-of-all-adapters", "some": "key-of-one-adapter"}
CHAT = {"messages": [{"role": "user", "content": "What is 20 + 30?"}], "max_tokens": 12, "temperature": 0}
TEXT = {"prompt": "Once upon a time", "max_tokens": 12, "temperature": 0}


BODIES: dict[str, dict[str, Any]] = {
    "/v1/completions": TEXT,
    "/v1/chat/completions": CHAT,
    "/v1/responses": {"input": "What is 20 + 30?", "max_output_tokens": 12, "temperature": 0},
    "/v1/messages": CHAT,
    "/v1/embeddings": {"input": "What is 20 + 30?"},
}
COUNTED: dict[str, dict[str, Any]] = {  # where nothing is generated
    "/tokenize": {"prompt": "What is 20 + 30?"},
    "/v1/responses/input_tokens": {"input": "What is 20 + 30?"},
    "/v1/messages/count_tokens": {"messages": CHAT["messages"]},
}


@dataclass(frozen=True)
class Served:
    server: RunningServer
    admin: str
    folder: Path

    def post(self, path: str, body: dict[str, Any], key: str = "all") -> httpx.Response:
        headers = {"Authorization": f"Bearer {KEYS[key]}"}
        return httpx.post(self.server.url + path, json=body, headers=headers, timeout=120)

    def get(self, path: str, key: str = "all") -> httpx.Response:
        return httpx.get(self.server.url + path, headers={"Authorization": f"Bearer {KEYS[key]}"}, timeout=60)

    def change(self, action: str, **body: Any) -> httpx.Response:
        return httpx.post(f"{self.admin}/v1/{action}_lora_adapter", json=body, timeout=120)

    def metrics(self) -> str:
        return httpx.get(f"{self.admin}/metrics", timeout=30).text

    def complete(self, model: str) -> str:
        response = self.post("/v1/completions", TEXT | {"model": model})
        assert response.status_code == 200 and response.json()["model"] == model, response.text
        return response.json()["choices"][0]["text"]


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("adapters")
    root = folder / "root"
    for number, path in enumerate((folder / "first", root / "second", root / "third"), 1):
        write_adapter(DEMO, path, AdapterSpec(8, seed=number, alpha=16.0, size=0.2))
    (root / "link").symlink_to(folder / "first")
    tenants = "".join(
        f'[[tenants]]\nname = "{name}"\nkey_hash = "{sha256(key.encode()).hexdigest()}"\n'
        + ('adapters = ["first"]\n' if name == "some" else "")
        for name, key in KEYS.items()
    )
    (folder / "tenants.toml").write_text(tenants)
    (folder / "tenants.toml").chmod(0o600)
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        port = int(taken.getsockname()[1])
    flags = ("--enable-lora", "--max-loras", "2", "--lora-modules", f"first={folder / 'first'}")
    flags = (*flags, "--lora-dir", str(root), "--admin-port", str(port), "--tenants", str(folder / "tenants.toml"))
    with run_server(*SMALL, *flags) as server:
        yield Served(server, f"http://127.0.0.1:{port}", folder)


def test_every_route_takes_an_adapter_as_its_model(served: Served):
    for path, body in BODIES.items():
        found = [served.post(path, body | {"model": model}) for model in ("demo", "first")]
        assert [each.status_code for each in found] == [200, 200], [each.text for each in found]
        base, adapted = (each.json() for each in found)
        assert (base.pop("model"), adapted.pop("model")) == ("demo", "first")
        kept = ("choices", "output", "content", "data")
        texts = [str([each.get(name) for name in kept]) for each in (base, adapted)]
        assert len(set(texts)) == 2, f"{path}: the adapter changes nothing"
    response = served.post("/v1/completions", TEXT | {"model": "nobody"})
    assert response.status_code == 404 and response.json()["error"]["code"] == "model_not_found"
    assert "first" not in response.json()["error"]["message"], "not all adapters are everybody's"
    assert any(" access " in line and "adapter first" in line for line in served.server.lines)


def test_models_are_listed_with_their_parent(served: Served):
    cards = {card["id"]: card for card in served.get("/v1/models").json()["data"]}
    assert cards["demo"]["parent"] is None
    assert (cards["first"]["parent"], cards["first"]["root"]) == ("demo", str(served.folder / "first"))
    assert served.get("/v1/models/first").json() == cards["first"]


def test_a_tenant_may_be_limited_to_some_adapters(served: Served):
    assert served.change("load", lora_name="hidden", lora_path="second").status_code == 200
    try:
        for path, body in (*BODIES.items(), *COUNTED.items()):
            refused = served.post(path, body | {"model": "hidden"}, key="some")
            assert refused.status_code == 403 and "may not use the model 'hidden'" in refused.text, path
            assert served.post(path, body | {"model": "hidden"}).status_code == 200, path
        assert served.post("/v1/completions", TEXT | {"model": "first"}, key="some").status_code == 200
        assert [card["id"] for card in served.get("/v1/models", key="some").json()["data"]] == ["demo", "first"]
        assert served.get("/v1/models/hidden", key="some").status_code == 403
    finally:
        assert served.change("unload", lora_name="hidden").status_code == 200


def test_adapters_are_loaded_replaced_and_unloaded_while_serving(served: Served):
    base = served.complete("demo")
    assert served.change("load", lora_name="second", lora_path="second").text.startswith("Success")
    before = served.complete("second")
    taken = served.change("load", lora_name="second", lora_path="third")
    assert taken.status_code == 400 and "load_inplace replaces it" in taken.text
    assert served.complete("second") == before != base
    assert served.change("load", lora_name="second", lora_path="third", load_inplace=True).status_code == 200
    after = served.complete("second")
    assert after not in (before, base)
    (served.folder / "root" / "broken").mkdir()
    broken = served.change("load", lora_name="second", lora_path="broken", load_inplace=True)
    assert broken.status_code == 400 and "adapter_config.json" in broken.text
    assert served.complete("second") == after, "what is refused changes nothing"
    assert served.change("unload", lora_name="second").text.startswith("Success")
    assert served.post("/v1/completions", TEXT | {"model": "second"}).status_code == 404
    assert served.change("unload", lora_name="second").status_code == 404
    assert served.complete("demo") == base
    assert re.search(r"^jaxserve:compiles_total\{.*\} 0\.0$", served.metrics(), re.M)


@pytest.mark.parametrize(
    ("body", "message"),
    [
        ({"lora_name": "x", "lora_path": "../first"}, "must be a directory below lora_dir"),
        ({"lora_name": "x", "lora_path": "/etc"}, "must be a directory below lora_dir"),
        ({"lora_name": "x", "lora_path": "link"}, "must be a directory below lora_dir"),
        ({"lora_name": "x", "lora_path": "missing"}, "must be a directory below lora_dir"),
        ({"lora_name": "demo", "lora_path": "second"}, "is the base model's"),
        ({"lora_name": "", "lora_path": "second"}, "a name has 1 to 256 printable characters"),
        ({"lora_name": "x"}, "lora_path"),
        ({"lora_name": "x", "lora_path": "second", "more": 1}, "more"),
    ],
)
def test_what_cannot_be_loaded_is_refused(served: Served, body: dict[str, Any], message: str):
    refused = served.change("load", **body)
    assert refused.status_code == 400 and message in refused.text, refused.text
    assert served.post("/v1/load_lora_adapter", body).status_code == 404, "it is on the admin port alone"


def test_metrics_name_adapters(served: Served):
    served.complete("first")
    text = served.metrics()
    assert re.search(r'^jaxserve:lora_requests_info\{.*max_lora="2".*running_lora_adapters=""', text, re.M)
    assert re.search(r'^jaxserve:lora_generation_tokens_total\{.*lora_name="first".*\} [1-9]', text, re.M)
    for name in ("lora_slots_used", "lora_host_copies", "lora_loads_total"):
        assert re.search(rf"^jaxserve:{name}\{{.*\}} [1-9]", text, re.M), name


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        (("a=/x",), {"a": ("/x", None)}),
        (("a=/x=y", '{"name": "b", "path": "/y"}'), {"a": ("/x=y", None), "b": ("/y", None)}),
        (('{"name": "b", "path": "/y", "base_model_name": "demo"}',), {"b": ("/y", "demo")}),
        (("demo",), "must be name=path"),
        (("=x",), "must be name=path"),
        (('{"name": "b"}',), "must be name=path"),
        (('{"name": "b", "path": 3}',), "must be name=path"),
        (('{"name": "b", "path": "/y", "rank": 3}',), "must be name=path"),
        (("a=/x", "a=/y"), "'a' is given twice"),
    ],
)
def test_lora_modules_are_pairs_or_objects(given: tuple[str, ...], expected: Any):
    if isinstance(expected, dict):
        assert read_lora_modules(given) == expected
        return
    with pytest.raises(ConfigError, match=f"lora_modules: .*{expected}|lora_modules: {expected}"):
        read_lora_modules(given)


def test_options_that_need_each_other_say_so():
    with pytest.raises(ConfigError, match="lora_dir: needs admin_port"):
        ServerConfig.from_options(lora_dir="/adapters")
    for options in ({"lora_modules": ["a=/x"]}, {"lora_dir": "/adapters", "admin_port": 9000}):
        config = ServerConfig.from_options(**options)
        with pytest.raises(ConfigError, match=f"{next(iter(options))}: needs enable_lora"):
            ServerState(config, EngineConfig(), ServerMetrics("demo"))


def test_files_that_are_gone_are_the_servers_fault(tmp_path: Path):
    def read(path: Path) -> str:
        if path.name == "gone":
            raise ConfigError("there is nothing", field=str(path))
        return path.name

    adapters = ServedAdapters(("demo",), None)
    adapters.open(AdapterStore(read, 1), {"a": ("/a", None), "b": ("/b", "demo")})
    found = adapters.get("a")
    assert found is not None and asyncio.run(adapters.find(found.request)) is not None
    with pytest.raises(ConfigError, match="'c' is an adapter of 'other', and here is demo"):
        adapters.open(AdapterStore(read, 1), {"c": ("/c", "other")})
    with pytest.raises(ConfigError, match="there is nothing"):
        adapters.open(AdapterStore(read, 1), {"d": ("/gone", None)})
    known = asyncio.run(adapters.find(found.request))
    asyncio.run(adapters.unload("a"))
    with pytest.raises(ApiError, match="was unloaded") as gone:
        asyncio.run(adapters.find(found.request))
    assert gone.value.status == 404 and known is not None
    found = adapters.get("b")
    assert found is not None
    adapters.store = AdapterStore(lambda path: read(Path("gone")), 1)
    with pytest.raises(ApiError, match="cannot be read any more") as caught:
        asyncio.run(adapters.find(found.request))
    assert caught.value.status == 503 and str(tmp_path) not in str(caught.value)
