"""Assembles the server: routes, the middleware in front of them, and the playground at `/`."""

from __future__ import annotations

from importlib import resources
from typing import Any

from fastapi import FastAPI, Request
from starlette.exceptions import HTTPException
from starlette.middleware.cors import CORSMiddleware
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp

from jaxserve import __version__
from jaxserve.errors import JaxServeError
from jaxserve.server.docs_page import write_page
from jaxserve.server.errors import ApiError, drop_tracebacks, to_api_error
from jaxserve.server.gate import AccessLog, AdminGuard, Guard, HeadRequests
from jaxserve.server.keys import Keys
from jaxserve.server.openapi import install_document
from jaxserve.server.routes import admin, chat, completions, embeddings, health, messages, pooling, responses, tokens
from jaxserve.server.server_state import ServerApp, ServerState, get_state

_PAGE_HEADERS = {
    "content-security-policy": "default-src 'none'; style-src 'self' 'unsafe-inline'; "
    "script-src 'self' 'unsafe-inline'; connect-src 'self'; img-src 'self' data:; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cache-control": "no-cache",
}
_PAGE_TYPES = {"html": "text/html", "js": "text/javascript", "css": "text/css"}


def make_app(state: ServerState, keys: Keys | None = None) -> ASGIApp:
    """Returns the server's ASGI application; `keys` are the API keys it accepts, None: it needs none."""
    keys = {} if keys is None else keys
    app: ASGIApp = Guard(make_api(state, has_keys=bool(keys)), state, keys)
    access = state.config.access
    if access.allowed_origins:
        app = CORSMiddleware(
            app,
            allow_origins=access.allowed_origins,
            allow_methods=access.allowed_methods,
            allow_headers=access.allowed_headers,
            expose_headers=("x-request-id", "request-id", "retry-after", "x-omitted-tools"),
        )
    return AccessLog(HeadRequests(app), state)


def make_api(state: ServerState, *, has_keys: bool = False) -> FastAPI:
    """Returns the routes without the middleware in front of them."""
    docs = not state.config.logs.disable_fastapi_docs
    app = ServerApp(
        state,
        title="jaxserve",
        version=__version__,
        description="A server for clients of OpenAI and Anthropic. Fields are theirs, with vLLM's further ones.",
        openapi_url="/openapi.json" if docs else None,
        docs_url=None,  # `docs_page` has its own
        redoc_url=None,
        redirect_slashes=False,
        exception_handlers=_HANDLERS,
    )
    for module in (completions, chat, responses, messages, embeddings, pooling, tokens, health):
        app.include_router(module.router)
    _add_page(app)
    install_document(app, state.config.access, has_keys=has_keys)
    if docs:
        app.add_api_route("/docs", _show_docs, methods=["GET"], include_in_schema=False)
    return app


def make_admin_app(state: ServerState) -> ASGIApp:
    """Returns the ASGI application of the admin port."""
    return HeadRequests(AdminGuard(make_admin_api(state)))


def make_admin_api(state: ServerState) -> FastAPI:
    """Returns the routes of the admin port: profiling, health and metrics."""
    app = ServerApp(state, title="jaxserve admin", openapi_url=None, exception_handlers=_HANDLERS)
    app.include_router(admin.make_router())
    app.include_router(health.probes)
    return app


async def _answer_error(request: Request, error: Exception) -> JSONResponse:
    answer = to_api_error(error, get_state(request).retry_after()).to_response(request.scope["path"])
    if isinstance(error, ApiError | JaxServeError):  # others are faults of the server, which are logged once more
        drop_tracebacks(error)
    return answer


async def _answer_http_error(request: Request, error: Exception) -> JSONResponse:
    """Answers what the framework itself refuses: unknown paths and methods."""
    assert isinstance(error, HTTPException)
    text = {404: "There is nothing at this path.", 405: "This path does not take this method."}
    message = text.get(error.status_code, "The request is not valid.")
    headers = dict(error.headers or {})
    if headers.get("Allow") == "GET":
        headers["Allow"] = "GET, HEAD"
    return ApiError(error.status_code, message, headers=headers).to_response(request.scope["path"])


_HANDLERS: Any = {
    **dict.fromkeys((ApiError, JaxServeError, Exception), _answer_error),
    HTTPException: _answer_http_error,
}


def _add_page(app: FastAPI) -> None:
    """Serves the playground's files. They are read once, so no request path ever names a file."""
    folder = resources.files("jaxserve.server") / "playground"
    for file in sorted(folder.iterdir(), key=lambda each: each.name):
        kind = _PAGE_TYPES.get(file.name.rpartition(".")[2])
        if kind is None:
            continue
        path = "/" if file.name == "index.html" else f"/playground/{file.name}"
        app.add_api_route(path, _make_page(file.read_bytes(), kind), methods=["GET"], include_in_schema=False)


async def _show_docs(request: Request) -> Response:
    return Response(write_page(request.app.openapi()), media_type="text/html", headers=_PAGE_HEADERS)


def _make_page(content: bytes, kind: str) -> Any:
    async def show() -> Response:
        return Response(content, media_type=kind, headers=_PAGE_HEADERS)

    return show
