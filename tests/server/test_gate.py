"""What stands in front of the routes: the access log and the guard, without a network."""

from __future__ import annotations

import asyncio
import contextlib
import hmac
import logging
from typing import Any

import pytest
from starlette.responses import PlainTextResponse
from starlette.types import Receive, Scope, Send

from jaxserve.engine.engine import Engine
from jaxserve.request import ServiceTier, Tenant
from jaxserve.server import gate
from jaxserve.server.errors import ApiError
from jaxserve.server.gate import AccessLog, AdminGuard, Guard
from jaxserve.server.keys import KeyRights, hash_key
from jaxserve.server.request_context import get_context
from jaxserve.server.server_state import Phase, ServerState
from tests.engine.helpers import greedy, make_engine
from tests.server.asgi import Answer, Client, make_scope, make_state, wrap_engine
from tests.server.refusals import KEYLESS

KEYS = ("first-key-0123", "second-key-456", "third-key-789x")
JSON = ("Content-Type", "application/json")
HASHES = {hash_key(key): KeyRights() for key in KEYS}


async def greet(scope: Scope, receive: Receive, send: Send) -> None:
    await PlainTextResponse("hello")(scope, receive, send)


def ask(app: Any, path: str, method: str = "POST", *headers: tuple[str, str], **changes: Any) -> Answer:
    async def run() -> Answer:
        return await asyncio.wait_for(Client().ask(app, make_scope(path, method, headers, **changes)), 10)

    return asyncio.run(run())


def serve(state: ServerState, **queue: Any) -> Engine:
    """Gives the state an engine that has not begun a step."""
    engine, _ = make_engine(**queue)
    state.llm = wrap_engine(engine)
    return engine


def bearer(key: str) -> tuple[str, str]:
    return "Authorization", f"Bearer {key}"


# The access log


@pytest.fixture
def lines() -> Any:
    """What is logged of requests, as (status, request id)."""
    found: list[tuple[int, str]] = []
    logger = logging.getLogger("jaxserve.access")
    handler = logging.Handler()
    handler.emit = lambda record: found.append((record.status, record.request_id))  # type: ignore[attr-defined, method-assign]
    level = logger.level
    logger.addHandler(handler)
    logger.setLevel(logging.INFO)
    yield found
    logger.removeHandler(handler)
    logger.setLevel(level)


def test_an_answer_carries_the_number_that_is_logged(lines: list[tuple[int, str]]) -> None:
    state = make_state()
    answer = ask(AccessLog(greet, state), "/v1/models", "GET")
    assert (answer.status, answer.body) == (200, b"hello")
    assert lines == [(200, answer.headers["x-request-id"])]
    assert state.metrics.http_requests == {("other", "GET", "200"): 1}


def test_two_requests_have_two_numbers() -> None:
    app = AccessLog(greet, make_state())
    assert ask(app, "/").headers["x-request-id"] != ask(app, "/").headers["x-request-id"]


@pytest.mark.parametrize(
    ("label", "is_sane"),
    [
        ("my-request_7.b", True),
        ("a" * 128, True),
        ("a" * 129, False),
        ("", False),
        ("two words", False),
        ("a\r\nset-cookie: b", False),
        ("a\n", False),
        ("<script>", False),
        ("\xe9t\xe9", False),
        ("..;/x", False),
    ],
)
def test_a_label_of_the_client_comes_back_if_it_is_sane(
    label: str, is_sane: bool, lines: list[tuple[int, str]]
) -> None:
    answer = ask(AccessLog(greet, make_state()), "/", "POST", ("X-Request-Id", label))
    echoed = answer.headers["x-request-id"]
    assert (echoed == label) is is_sane and lines == [(200, echoed)]
    if not is_sane:
        assert len(echoed) == 16 and echoed.isalnum()


def test_the_label_is_not_the_number_that_the_engine_sees() -> None:
    seen: list[str] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(get_context(scope).request_id)
        await greet(scope, receive, send)

    app = AccessLog(note, make_state())
    for _ in range(2):
        assert ask(app, "/", "POST", ("X-Request-Id", "mine")).headers["x-request-id"] == "mine"
    assert len(set(seen)) == 2 and "mine" not in seen


def test_a_client_that_leaves_is_logged_as_499(lines: list[tuple[int, str]]) -> None:
    async def stream(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        await send({"type": "http.response.body", "body": b"a", "more_body": True})
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> Answer:
        return await Client(leaves=True).ask(AccessLog(stream, state), make_scope("/"))

    state = make_state()
    answer = asyncio.run(run())
    assert answer.status == 200 and [status for status, _ in lines] == [499]
    assert state.metrics.http_requests == {("other", "POST", "499"): 1}


def test_an_answer_whose_connection_is_lost_is_logged_as_499(lines: list[tuple[int, str]]) -> None:
    """Its writes do nothing, and nobody waits for the client to leave."""

    async def answer(scope: Scope, receive: Receive, send: Send) -> None:
        get_context(scope).has_left = True
        await greet(scope, receive, send)

    ask(AccessLog(answer, make_state()), "/")
    assert [status for status, _ in lines] == [499]


def test_a_client_that_leaves_after_its_answer_is_no_499(lines: list[tuple[int, str]]) -> None:
    async def answer_and_wait(scope: Scope, receive: Receive, send: Send) -> None:
        await greet(scope, receive, send)
        while (await receive())["type"] != "http.disconnect":
            pass

    async def run() -> Answer:
        return await Client(leaves=True).ask(AccessLog(answer_and_wait, make_state()), make_scope("/"))

    asyncio.run(run())
    assert [status for status, _ in lines] == [200]


def test_an_error_that_nobody_caught_is_answered_and_says_nothing_of_us(lines: list[tuple[int, str]]) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        raise ZeroDivisionError("a secret of ours")

    answer = ask(AccessLog(fail, make_state()), "/")
    assert answer.status == 500 and answer.error["code"] == "internal_error" and b"secret" not in answer.body
    assert [status for status, _ in lines] == [500]


def test_an_error_after_the_beginning_is_only_logged(lines: list[tuple[int, str]]) -> None:
    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        await send({"type": "http.response.start", "status": 200, "headers": []})
        raise ZeroDivisionError

    answer = ask(AccessLog(fail, make_state()), "/")
    assert len(answer.messages) == 1 and [status for status, _ in lines] == [200]


def test_the_access_log_can_be_off(lines: list[tuple[int, str]]) -> None:
    state = make_state(access_log=False)
    ask(AccessLog(greet, state), "/")
    assert lines == [] and state.metrics.http_requests


# The guard


@pytest.mark.parametrize("key", KEYS)
def test_every_key_lets_in(key: str) -> None:
    app = Guard(greet, make_state(), HASHES)
    for value in (f"Bearer {key}", f"bearer  {key} "):
        assert ask(app, "/v1/models", "GET", ("Authorization", value)).status == 200


@pytest.mark.parametrize(
    "value",
    [
        None,
        "",
        "Bearer",
        "Bearer ",
        f"Basic {KEYS[0]}",
        KEYS[0],
        f"Bearer {KEYS[0][:-1]}",
        f"Bearer {KEYS[0]}x",
        f"Bearer {KEYS[0].upper()}",
        f"Bearer {KEYS[0]},{KEYS[1]}",
        "Bearer \xff\xfe",
        "Bearer " + "x" * 10_000,
    ],
)
def test_nothing_else_lets_in(value: str | None) -> None:
    headers = [] if value is None else [("Authorization", value)]
    answer = ask(Guard(greet, make_state(), HASHES), "/v1/models", "GET", *headers)
    assert answer.status == 401 and answer.headers["www-authenticate"] == "Bearer"
    assert answer.error.items() >= KEYLESS.error.items()
    assert value is None or len(value) < 8 or value.encode() not in answer.body


def test_every_key_is_compared_in_constant_time(monkeypatch: pytest.MonkeyPatch) -> None:
    compared: list[tuple[bytes, bytes]] = []
    compare_digest = hmac.compare_digest

    def compare(one: bytes, other: bytes) -> bool:
        compared.append((one, other))
        return compare_digest(one, other)

    monkeypatch.setattr(gate.hmac, "compare_digest", compare)
    app = Guard(greet, make_state(), HASHES)
    for key in (KEYS[0], KEYS[2], "wrong-key-0000"):
        compared.clear()
        ask(app, "/v1/models", "GET", bearer(key))
        assert [known for _, known in compared] == list(HASHES)
        assert all(len(digest) == 32 for digest, _ in compared), "keys themselves are never compared"


@pytest.mark.parametrize(
    "path", ["/", "/health", "/health/generate", "/health/live", "/health/ready", "/ping", "/playground/page.js"]
)
def test_probes_and_the_page_need_no_key(path: str) -> None:
    assert ask(Guard(greet, make_state(), HASHES), path, "GET").status == 200


@pytest.mark.parametrize(
    "path",
    [
        "/metrics",
        "/live",
        "/v1/models",
        "/openapi.json",
        "/docs",
        "/health/",
        "//health",
        "/playground",
        "/Health",
        "/ping/x",
    ],
)
def test_everything_else_needs_one(path: str) -> None:
    assert ask(Guard(greet, make_state(), HASHES), path, "GET").status == 401


def test_an_option_opens_the_metrics_and_nothing_else() -> None:
    app = Guard(greet, make_state(allow_metrics_without_key=True), HASHES)
    assert ask(app, "/metrics", "GET").status == 200
    assert ask(app, "/metrics", "GET", ("Authorization", "Bearer an-old-key")).status == 200
    assert ask(app, "/metrics", "GET", bearer(KEYS[0])).status == 200
    for path in ("/metrics/", "//metrics", "/Metrics", "/metrics/x", "/x/metrics", "/live", "/v1/models", "/nothing"):
        assert ask(app, path, "GET").status == 401, path


def test_open_metrics_are_not_for_pages_of_other_origins() -> None:
    page = ("Origin", "https://page.example"), ("Host", "here:8000")
    own = ("Origin", "http://here:8000"), ("Host", "here:8000")
    app = Guard(greet, make_state(allow_metrics_without_key=True), HASHES)
    assert ask(app, "/metrics", "GET", *page).error["code"] == "origin_not_allowed"
    assert ask(app, "/metrics", "GET", *own).status == 200
    allowed = make_state(allow_metrics_without_key=True, allowed_origins=("https://page.example",))
    assert ask(Guard(greet, allowed, HASHES), "/metrics", "GET", *page).status == 200
    assert ask(app, "/v1/models", "GET", *page, bearer(KEYS[0])).status == 200, "where a key is needed, it decides"


def test_keys_keep_their_cached_prefixes_apart() -> None:
    salts: list[str] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        salts.append(get_context(scope).salt)
        await greet(scope, receive, send)

    for keys in (HASHES, {hash_key(KEYS[0]): KeyRights()}):
        for key in KEYS[:2]:
            ask(Guard(note, make_state(), keys), "/v1/models", "GET", bearer(key))
    assert len(salts) == 3 and len(set(salts[:2])) == 2 and all(salts[:2])
    assert salts[2] == "", "one key alone has nobody to be kept apart from"
    assert not any(hash_key(key).hex() in salts for key in KEYS), "a recording has the salts, and no hash of a key"


@pytest.mark.parametrize("root", ["", "/models/demo"])
def test_paths_are_meant_without_the_proxys_own(root: str) -> None:
    """uvicorn puts root_path in front of the path that it was asked for."""
    state = make_state(root_path=root)
    app = Guard(greet, state, HASHES)
    assert ask(app, f"{root}/health", "GET", root_path=root).status == 200
    assert ask(app, f"{root}/v1/models", "GET", root_path=root).status == 401
    assert ask(app, f"{root}/v1/completions", "POST", bearer(KEYS[0]), root_path=root).status == 503


@pytest.mark.parametrize(
    ("headers", "status", "code"),
    [
        ([("Content-Type", "application/json")], 200, None),
        ([("Content-Type", "Application/JSON; charset=utf-8")], 200, None),
        ([], 200, None),  # nor is there a body
        ([("Content-Length", "2")], 415, "unsupported_media_type"),
        ([("Transfer-Encoding", "chunked")], 415, "unsupported_media_type"),
        ([("Content-Type", "text/plain; application/json")], 415, "unsupported_media_type"),
        ([("Content-Encoding", "identity")], 200, None),
        ([JSON, ("Content-Length", "1000")], 200, None),
        ([JSON, ("Content-Length", "1001")], 413, "body_too_large"),
        ([JSON, ("Content-Length", "9" * 5000)], 413, "body_too_large"),
        ([JSON, ("Content-Length", "\xb2")], 200, None),  # no number: the protocol has refused it long before
    ],
)
def test_bodies_are_judged_by_their_headers(headers: list[tuple[str, str]], status: int, code: str | None) -> None:
    """Other types and encodings are in the table of refusals."""
    state = make_state(max_body_bytes=1000)
    serve(state)
    answer = ask(Guard(greet, state, {}), "/anything", "POST", *headers)
    assert answer.status == status
    if code is not None:
        assert answer.error["code"] == code
    if status == 413:
        assert answer.headers["connection"] == "close", "what still comes would be read for nothing"


@pytest.mark.parametrize("phase", [Phase.STARTING, Phase.WARMING, Phase.DRAINING, Phase.FAILED])
def test_work_is_refused_unless_ready(phase: Phase) -> None:
    state = make_state(phase)
    answer = ask(Guard(greet, state, {}), "/v1/completions")
    assert answer.status == 503 and int(answer.headers["retry-after"]) > 0
    assert answer.error["code"] == f"server_{phase}" and answer.error["type"] == "service_unavailable_error"
    assert ask(Guard(greet, state, {}), "/health", "GET").status == 200


def test_a_full_queue_is_said_before_the_body_is_read() -> None:
    state = make_state()
    engine, app = serve(state, rows=1, queue=(2, None)), Guard(greet, state, {})
    for name in ("a", "b", "c"):  # one has the idle row
        assert ask(app, "/v1/completions").status == 200
        engine.add_request(greedy(name, range(10), 5, service_tier=ServiceTier.PRIORITY))
    answer = ask(app, "/v1/completions")
    assert answer.status == 429 and int(answer.headers["retry-after"]) > 0
    assert answer.error["type"] == "rate_limit_error" and "max_num_queued_reqs=2" in answer.error["message"]
    assert state.metrics.events["queue_full"] == 1
    assert ask(app, "/v1/models", "GET").status == 200


@pytest.mark.parametrize(
    ("best", "rights", "status"),
    [
        (0, KeyRights(tiers=(ServiceTier.DEFAULT,)), 429),
        (-1, KeyRights(tiers=(ServiceTier.DEFAULT,)), 200),
        (0, KeyRights(best_priority=-1, tiers=(ServiceTier.DEFAULT,)), 200),
        (-1, KeyRights(best_priority=0, tiers=(ServiceTier.DEFAULT,)), 429),
        (0, KeyRights(), 200),  # it could be of the tier priority
    ],
)
def test_the_body_is_read_where_it_may_ask_for_a_better_rank_than_that_of_the_worst(
    best: int, rights: KeyRights, status: int
) -> None:
    state = make_state(max_priority=best)
    engine = serve(state, rows=1, queue=(1, None))
    for name in ("a", "b"):
        engine.add_request(greedy(name, range(10), 5))
    app = Guard(greet, state, {hash_key(KEYS[0]): rights})
    assert ask(app, "/v1/completions", "POST", bearer(KEYS[0])).status == status


def test_a_key_brings_its_rights_and_a_full_share_is_its_tenants_alone() -> None:
    seen: list[KeyRights] = []

    async def note(scope: Scope, receive: Receive, send: Send) -> None:
        seen.append(get_context(scope).rights)
        await greet(scope, receive, send)

    small = KeyRights(Tenant("small", queue_share=0.25))
    state = make_state()
    engine = serve(state, rows=1, queue=(4, None))
    app = Guard(note, state, {hash_key(KEYS[0]): small, hash_key(KEYS[1]): KeyRights()})
    for name in ("a", "b"):  # one has the idle row
        assert ask(app, "/v1/completions", "POST", bearer(KEYS[0])).status == 200
        engine.add_request(greedy(name, range(10), 5, service_tier=ServiceTier.PRIORITY, tenant=small.tenant))
    refused = ask(app, "/v1/completions", "POST", bearer(KEYS[0]))
    assert refused.status == 429 and "tenant 'small': 2 sequences wait" in refused.error["message"]
    assert ask(app, "/v1/completions", "POST", bearer(KEYS[1])).status == 200
    assert seen == [small, small, KeyRights()]


def test_retry_after_is_what_the_queue_takes() -> None:
    state = make_state()
    assert state.retry_after() == 1
    engine = serve(state, rows=1)
    for number in range(21):
        engine.add_request(greedy(f"r{number}", range(10), 1))
    assert state.retry_after() == 1, "nothing is known yet"
    pace = engine.scheduler.queue_admission.pace
    for second in range(20):
        pace.note(second, 0, waits=True)
    assert state.retry_after() == 60, "nothing has moved"
    pace.note(20.0, 1, waits=True)
    assert state.retry_after() == 60  # one in 20 s, and 21 wait
    pace.note(21.0, 31, waits=True)
    assert 4 <= state.retry_after() <= 8
    while engine.has_unfinished:
        engine.step()
    assert state.retry_after() == 1


@pytest.mark.parametrize(("rights", "status"), [(KeyRights(), 200), (KeyRights(tiers=(ServiceTier.DEFAULT,)), 429)])
def test_who_would_wait_too_long_is_refused_before_the_body_unless_it_may_be_flex(
    rights: KeyRights, status: int
) -> None:
    state = make_state()
    engine = serve(state, rows=1)
    admission = engine.scheduler.queue_admission
    admission.bound_wait(5.0)
    engine.add_request(greedy("runs", range(10), 5))
    engine.step()
    for second in range(20):
        admission.pace.note(second, 0, waits=True)
    app = Guard(greet, state, {hash_key(KEYS[0]): rights})
    answer = ask(app, "/v1/completions", "POST", bearer(KEYS[0]))
    assert answer.status == status
    if status == 429:
        assert "expected in an hour or more, and max_queue_wait=5" in answer.error["message"]
    for tier, priority in ((ServiceTier.FLEX, 0), (ServiceTier.DEFAULT, 0)):
        with contextlib.nullcontext() if tier == ServiceTier.FLEX else pytest.raises(ApiError, match="max_queue_wait"):
            state.refuse_if_full(KeyRights(), (tier, priority))


def test_streams_are_counted_while_they_last_however_they_end() -> None:
    state = make_state(max_streams=2)
    serve(state)
    counts: list[int] = []

    async def fail(scope: Scope, receive: Receive, send: Send) -> None:
        counts.append(state.num_streams)
        if len(counts) == 1:
            raise ApiError(418, "a refusal")
        raise ZeroDivisionError

    app = Guard(fail, state, {})
    assert ask(app, "/v1/completions").status == 418
    with pytest.raises(ZeroDivisionError):
        ask(app, "/v1/completions")
    assert counts == [1, 1] and state.num_streams == 0


def test_one_stream_too_many_is_refused_and_others_are_not() -> None:
    state = make_state(max_streams=2)
    serve(state)

    async def run() -> None:
        gate_ = asyncio.Event()

        async def wait(scope: Scope, receive: Receive, send: Send) -> None:
            if scope["path"] == "/v1/completions":
                await gate_.wait()
            await greet(scope, receive, send)

        app = Guard(wait, state, {})
        running = [asyncio.ensure_future(Client().ask(app, make_scope("/v1/completions"))) for _ in range(2)]
        await asyncio.sleep(0)
        refused = await Client().ask(app, make_scope("/v1/chat/completions"))
        assert refused.status == 429 and refused.error["code"] == "too_many_streams"
        assert int(refused.headers["retry-after"]) > 0
        assert (await Client().ask(app, make_scope("/metrics", "GET"))).status == 200
        gate_.set()
        assert [answer.status for answer in await asyncio.gather(*running)] == [200, 200]
        assert (await Client().ask(app, make_scope("/v1/completions"))).status == 200

    asyncio.run(run())
    assert state.num_streams == 0


@pytest.mark.parametrize(
    ("host", "status"),
    [
        ("api.example.org", 200),
        ("api.example.org:8000", 200),
        ("API.Example.org", 200),
        ("evil.example.org", 403),
        ("", 403),
        ("api.example.org.evil.org", 403),
    ],
)
def test_only_known_nodes_are_answered_to(host: str, status: int) -> None:
    app = Guard(greet, make_state(allowed_hosts=("api.example.org",)), {})
    assert ask(app, "/health", "GET", ("Host", host)).status == status


@pytest.mark.parametrize(
    ("origin", "status"),
    [
        (None, 200),
        ("http://localhost:8000", 200),
        ("HTTP://LocalHost:8000", 200),
        ("https://localhost:8000", 200),  # a proxy in front of the server speaks TLS
        ("https://page.example", 200),
        ("https://page.example:444", 403),
        ("https://page.example.evil.example", 403),
        ("http://localhost:3000", 403),
        ("http://localhost", 403),
        ("null", 403),
        ("", 403),
    ],
)
@pytest.mark.parametrize("path", ["/v1/completions", "/v1/models", "/health", "/"])
def test_pages_of_other_origins_cannot_use_a_server_without_keys(path: str, origin: str | None, status: int) -> None:
    state = make_state(allowed_origins=("https://page.example",))
    serve(state)
    headers = [("Host", "localhost:8000"), *([("Origin", origin)] if origin is not None else [])]
    answer = ask(Guard(greet, state, {}), path, "POST", *headers)
    assert answer.status == status
    if status == 403:
        assert answer.error["code"] == "origin_not_allowed"


def test_any_origin_may_come_by_option_or_with_a_key() -> None:
    foreign = ("Origin", "https://evil.example")
    assert ask(Guard(greet, make_state(allowed_origins=("*",)), {}), "/v1/models", "GET", foreign).status == 200
    assert ask(Guard(greet, make_state(), HASHES), "/v1/models", "GET", foreign, bearer(KEYS[0])).status == 200
    assert ask(Guard(greet, make_state(), HASHES), "/v1/models", "GET", foreign).status == 401


@pytest.mark.parametrize(
    ("host", "origin", "status"),
    [
        ("127.0.0.1:9000", None, 200),
        ("localhost:9000", "http://localhost:9000", 200),
        ("[::1]:9000", None, 200),
        ("127.0.0.1:9000", "https://evil.example", 403),
        ("127.0.0.1:9000", "http://127.0.0.1:8000", 403),
        ("127.0.0.1:9000", "null", 403),
        ("evil.example:9000", None, 403),  # a name that was bound to 127.0.0.1 meanwhile
        ("evil.example:9000", "http://evil.example:9000", 403),
        ("", None, 403),
    ],
)
def test_the_admin_port_is_closed_to_web_pages(host: str, origin: str | None, status: int) -> None:
    headers = [("Host", host), *([("Origin", origin)] if origin is not None else [])]
    assert ask(AdminGuard(greet), "/start_profile", "POST", *headers).status == status


def test_web_sockets_are_closed() -> None:
    client = Client()

    async def run() -> None:
        await client.ask(Guard(greet, make_state(), {}), {"type": "websocket", "path": "/live", "headers": []})

    asyncio.run(run())
    assert client.answer.messages == [{"type": "websocket.close", "code": 1008}]
