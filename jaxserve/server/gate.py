"""The middleware in front of the routes: the access log, and the guard, which checks keys, hosts, origins and sizes."""

from __future__ import annotations

import contextlib
import hmac
import re
import secrets
import time
from collections.abc import Collection

from starlette.datastructures import Headers
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from jaxserve.errors import is_failure
from jaxserve.server.errors import ApiError, is_messages, to_api_error
from jaxserve.server.keys import Keys, hash_key
from jaxserve.server.logs import log_access
from jaxserve.server.options import AccessOptions
from jaxserve.server.request_context import RequestContext, get_context
from jaxserve.server.server_state import ServerState

_OPEN_PATHS = frozenset(
    {"/", "/health", "/health/generate", "/health/live", "/health/ready", "/ping"}
)  # open without a key
_WORK = "POST"  # the method of every path that keeps the engine busy, or the threads in front of it
_METRICS = "/metrics"  # an option opens it
_STATIC = "/playground/"  # holds no data; what it fetches needs the key
_CLIENT_ID = re.compile(r"[A-Za-z0-9._-]{1,128}")
_LOOPBACK = frozenset({"127.0.0.1", "localhost", "[::1]"})
_GONE = 499  # logged when a client left before its answer was complete


class HeadRequests:
    """Answers HEAD as GET. The connection leaves the body out; the status and the head are those of GET."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or scope["method"] != "HEAD":
            await self._app(scope, receive, send)
            return
        get_context(scope).wants_head = True
        inner = {**scope, "method": "GET"}
        try:
            await self._app(inner, receive, send)
        finally:
            scope["route"] = inner.get("route")  # for the access log


class AccessLog:
    """Gives every request an id, and logs and counts how it ended."""

    def __init__(self, app: ASGIApp, state: ServerState) -> None:
        self._app, self._state = app, state

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        started, status, ended, gone = time.monotonic(), 0, False, False
        request_id = secrets.token_hex(8)
        context = get_context(scope)
        context.request_id, context.arrival, context.send = request_id, started, send
        label = _read_label(scope)
        names = (b"x-request-id", b"request-id") if is_messages(scope["path"]) else (b"x-request-id",)

        async def tracked_send(message: Message) -> None:
            nonlocal status, ended
            if message["type"] == "http.response.start":
                status = message["status"]
                shown = (label or request_id).encode()
                message["headers"] = [*message["headers"], *((name, shown) for name in names)]
            elif not message.get("more_body", False):
                ended = True
            await send(message)

        async def tracked_receive() -> Message:
            nonlocal gone
            message = await receive()
            gone |= message["type"] == "http.disconnect" and not ended
            return message

        try:
            await self._app(scope, tracked_receive, tracked_send)
        except BaseException as error:
            if not is_failure(error):
                raise
            if not status:  # otherwise the answer has begun, and the client sees that it is cut short
                await to_api_error(error).to_response(scope["path"])(scope, receive, tracked_send)
        finally:
            context.send = None  # it leads back to the scope: only the garbage collector would free such a circle
            seconds = time.monotonic() - started
            route = getattr(scope.get("route"), "path", None)
            status = _GONE if gone or context.has_left else status or 500
            self._state.metrics.observe_http(route, scope["method"], status, seconds)
            if self._state.config.logs.access_log:
                log_access(label or request_id, scope, status, seconds)


# Salts of prefixes go into recordings and to other nodes, where nobody is to try keys against them.
_SECRET = secrets.token_bytes(32)


def _make_salt(digest: bytes) -> str:
    """Returns what stands for a key in this process, and tells nothing of the key."""
    return hmac.digest(_SECRET, digest, "sha256").hex()


class Guard:
    """Checks host, origin, key, phase, queue and body headers. Paths are compared exactly as sent."""

    def __init__(self, app: ASGIApp, state: ServerState, keys: Keys) -> None:
        self._app, self._state, self._keys = app, state, keys
        self._root = state.config.listen.root_path
        self._hosts = frozenset(host.lower() for host in state.config.listen.allowed_hosts)
        self._origins = frozenset(state.config.access.allowed_origins)

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "lifespan":
            await self._app(scope, receive, send)
            return
        if scope["type"] != "http":
            await send({"type": "websocket.close", "code": 1008})
            return
        path = scope["path"].removeprefix(self._root)
        try:
            self._check(scope, path)
            counted = self._state.count_stream() if scope["method"] == _WORK else contextlib.nullcontext()
            with counted:
                await self._app(scope, receive, send)
        except ApiError as refusal:  # routes have handlers of their own
            await refusal.to_response(path)(scope, receive, send)
        finally:
            context = get_context(scope)
            for share in (context.body_share, context.image_share):  # the first is closed once the body is prepared
                if share is not None:
                    share.close()

    def _check(self, scope: Scope, path: str) -> None:
        headers, context = Headers(scope=scope), get_context(scope)
        if scope.get("http_version") == "1.1" and len(headers.getlist("host")) != 1:
            message = "An HTTP/1.1 request has one Host header."  # RFC 9112, 3.2: else proxies and server may disagree
            raise ApiError(400, message, code="invalid_host", headers={"Connection": "close"})
        if self._hosts and _strip_port(headers.get("host", "")).lower() not in self._hosts:
            raise ApiError(403, "The Host header is not among the hosts that this server answers to (--allowed-hosts).")
        access = self._state.config.access
        if (not self._keys or is_opened(path, access)) and is_foreign(headers, self._origins):
            raise foreign_origin()
        if self._keys and needs_key(path, access):
            self._find_key(headers, context)
        if scope["method"] == _WORK:
            self._state.refuse_if_full(context.rights)
            self._check_body(headers)

    def _find_key(self, headers: Headers, context: RequestContext) -> None:
        """Notes the key's rights and the salt of its prefixes. Every key is compared, so timing shows no match."""
        scheme, _, key = headers.get("authorization", "").partition(" ")
        if not scheme and "x-api-key" in headers:  # Anthropic's header
            scheme, key = "bearer", headers["x-api-key"]
        digest = hash_key(key.strip()) if scheme.lower() == "bearer" else b""
        found = [rights for known, rights in self._keys.items() if hmac.compare_digest(digest, known)]
        if not found:
            message = "A valid API key is required: send the header 'Authorization: Bearer KEY'."
            raise ApiError(401, message, code="invalid_api_key", headers={"WWW-Authenticate": "Bearer"})
        context.rights, context.salt = found[0], _make_salt(digest) if len(self._keys) > 1 else ""

    def _check_body(self, headers: Headers) -> None:
        if headers.get("content-encoding", "identity") != "identity":
            raise ApiError(415, "Compressed bodies are not supported.", code="unsupported_content_encoding")
        length = headers.get("content-length", "0")
        kind = headers.get("content-type", "").partition(";")[0].strip().lower()
        if kind != "application/json" and (kind or length != "0" or "transfer-encoding" in headers):
            # Browsers let any page send other types, or none, without a preflight request.
            message = "The body must be JSON: send the header 'Content-Type: application/json'."
            raise ApiError(415, message, code="unsupported_media_type")
        limit = self._state.config.limits.max_body_bytes
        if length.isdecimal() and int(length[:20]) > limit:
            raise too_large(limit)


class AdminGuard:
    """Keeps web pages away from the admin port, which has no keys: only loopback hosts are answered."""

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        headers = Headers(scope=scope)
        if scope["type"] == "http" and _strip_port(headers.get("host", "")).lower() not in _LOOPBACK:
            refusal = ApiError(403, "The admin port only answers to the hosts 127.0.0.1, localhost and [::1].")
            await refusal.to_response()(scope, receive, send)
        elif scope["type"] == "http" and is_foreign(headers, frozenset()):
            await foreign_origin().to_response()(scope, receive, send)
        else:
            await self._app(scope, receive, send)


def needs_key(path: str, access: AccessOptions) -> bool:
    """Whether a server with API keys requires one for this path."""
    return path not in _OPEN_PATHS and not path.startswith(_STATIC) and not is_opened(path, access)


def is_opened(path: str, access: AccessOptions) -> bool:
    """Whether an option opens this path, which would need a key otherwise."""
    return path == _METRICS and access.allow_metrics_without_key


def is_foreign(headers: Headers, allowed: Collection[str]) -> bool:
    """Whether the Origin header names neither the server's own origin nor an allowed one."""
    origin = headers.get("origin")
    if origin is None or origin in allowed or "*" in allowed:
        return False
    return origin.partition("://")[2].lower() != headers.get("host", "").lower()


def foreign_origin() -> ApiError:
    """The refusal of a page of another origin."""
    message = "Pages of this origin may not use the server; --allowed-origins lists those that may."
    return ApiError(403, message, code="origin_not_allowed")


def too_large(limit: int) -> ApiError:
    """The refusal of a body beyond the limit."""
    message = f"The body is larger than {limit} bytes."
    return ApiError(413, message, code="body_too_large", headers={"Connection": "close"})


def _strip_port(host: str) -> str:
    name, colon, port = host.rpartition(":")
    return name if colon and port.isdigit() else host


def _read_label(scope: Scope) -> str | None:
    """Returns the client's own id for the request if it is well-formed."""
    for name, value in scope["headers"]:
        if name == b"x-request-id" and _CLIENT_ID.fullmatch(text := value[:129].decode("latin-1")):
            return text
    return None
