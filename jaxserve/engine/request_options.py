"""A request's scheduling arguments, checked: tier, priority, deadline, and with whom it shares the cache."""

from __future__ import annotations

from typing import Any, TypedDict

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.request import DEFAULT_TENANT, PRIORITIES, SERVICE_TIERS, ServiceTier, Tenant

_INFINITY = float("inf")


class Schedule(TypedDict, total=False):
    """The arguments; each may be left out."""

    cache_salt: str  # requests share prefix pages only if their salts are equal
    priority: int  # smaller ones run first within a tier; equal ones in order of arrival
    service_tier: ServiceTier | str  # or a name in SERVICE_TIERS
    tenant: Tenant
    deadline: float | None  # on the clock of `time.monotonic`; an unfinished request then ends with a DeadlineError


def check_schedule(
    *,
    cache_salt: object = "",
    priority: object = 0,
    service_tier: object = ServiceTier.DEFAULT,
    tenant: Tenant = DEFAULT_TENANT,
    deadline: object = None,
) -> dict[str, Any]:
    """Returns the fields of a `Request` by name; InvalidRequestError names the argument that is wrong."""
    if not isinstance(cache_salt, str):
        raise InvalidRequestError(f"must be a text, got {shorten(cache_salt)}", field="cache_salt", value=cache_salt)
    if not isinstance(priority, int) or isinstance(priority, bool) or priority not in PRIORITIES:
        message = f"must be an integer in [{PRIORITIES.start}, {PRIORITIES.stop}), got {shorten(priority)}"
        raise InvalidRequestError(message, field="priority", value=priority)
    _check_deadline(deadline)
    tier = _read_tier(service_tier)
    return {
        "cache_salt": cache_salt,
        "priority": priority,
        "service_tier": tier,
        "tenant": tenant,
        "deadline": deadline,
    }


def _check_deadline(deadline: object) -> None:
    if deadline is None:
        return
    if not isinstance(deadline, int | float) or isinstance(deadline, bool) or not -_INFINITY < deadline < _INFINITY:
        message = f"must be a finite time in seconds of time.monotonic(), got {shorten(deadline)}"
        raise InvalidRequestError(message, field="deadline", value=deadline)


def _read_tier(tier: object) -> ServiceTier:
    if isinstance(tier, ServiceTier):
        return tier
    if not isinstance(tier, str) or tier not in SERVICE_TIERS:
        message = f"must be one of {', '.join(SERVICE_TIERS)}, got {shorten(tier)}"
        raise InvalidRequestError(message, field="service_tier", value=tier)
    return SERVICE_TIERS[tier]
