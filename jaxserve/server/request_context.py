"""The context of one HTTP request: what the server keeps of it beside the request itself."""

from __future__ import annotations

from dataclasses import dataclass

from starlette.types import Scope, Send

from jaxserve.server.budget import ByteShare
from jaxserve.server.keys import NO_TENANT, KeyRights

_KEY = "jaxserve.context"


@dataclass(slots=True)
class RequestContext:
    """One per HTTP request. Each field has one writer, which stands behind it."""

    request_id: str = ""  # the server's own id of the request, not the client's: AccessLog
    arrival: float = 0.0  # seconds on the monotonic clock: AccessLog
    wants_head: bool = False  # a HEAD request, answered as GET without its body: HeadRequests
    send: Send | None = None  # the connection's own, which skips the access log; None behind the answer: AccessLog
    salt: str = ""  # separates the cached prefixes of API keys; empty without keys, and with one: Guard
    rights: KeyRights = NO_TENANT  # those of its API key: Guard
    body_share: ByteShare | None = None  # bytes that the body holds of the server's budget: read_body
    image_share: ByteShare | None = None  # bytes that its images hold of another, to the answer's end: ServedImages
    prompt_tokens: int | None = None  # for the access log; None where nothing was generated: Generation
    output_tokens: int | None = None  # likewise: Generation
    service_tier: str | None = None  # likewise, and None for the default tier: Generation
    adapter: str | None = None  # the name of its adapter, None without one: make_request_options
    has_left: bool = False  # the connection was lost before the answer was complete: LimitedHttp
    was_unread: bool = False  # and that was because the client did not read: LimitedHttp


def get_context(scope: Scope) -> RequestContext:
    """Returns the context of the request with this scope; the first call makes it."""
    if _KEY not in scope:
        scope[_KEY] = RequestContext()
    context: RequestContext = scope[_KEY]
    return context
