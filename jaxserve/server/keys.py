"""API keys, as hashes, and what the requests of each may ask for; the tenants file."""

from __future__ import annotations

import hashlib
import os
import re
import stat
import tomllib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from jaxserve.errors import ConfigError, InvalidRequestError, shorten
from jaxserve.files import open_regular
from jaxserve.request import DEFAULT_TENANT, PRIORITIES, SERVICE_TIERS, Rank, ServiceTier, Tenant
from jaxserve.server.errors import ApiError
from jaxserve.server.metrics.recorder import OTHER
from jaxserve.server.options import AccessOptions

_NAME = re.compile(r"[A-Za-z0-9._-]{1,64}")
_HASH = re.compile(r"[0-9A-Fa-f]{64}")
_LEAST_WEIGHT, _MOST_WEIGHT = 0.001, 1000


@dataclass(frozen=True, slots=True)
class KeyRights:
    """Whose an API key is, and what its requests may ask for."""

    tenant: Tenant = DEFAULT_TENANT
    best_priority: int | None = None  # the smallest priority; None: the server's max_priority
    tiers: tuple[ServiceTier, ...] = tuple(ServiceTier)
    adapters: tuple[str, ...] | None = None  # the names of those that it may use; None: all

    def may_use(self, adapter: str) -> bool:
        """Whether requests may name an adapter."""
        return self.adapters is None or adapter in self.adapters

    def require_adapter(self, name: str) -> None:
        """Raises ApiError 403 for an adapter that the key may not use."""
        if not self.may_use(name):
            message = f"This API key may not use the model {name[:100]!r}."
            raise ApiError(403, message, param="model", code="model_not_allowed")

    def find_best_rank(self, best: int) -> Rank:
        """Returns the best rank of a request; `best` is the server's best priority."""
        return min(self.tiers), best if self.best_priority is None else self.best_priority

    def choose_tier(self, name: str | None) -> ServiceTier:
        """Returns the tier to serve a request in; ApiError 403 when the key may not have the one it asks for.

        "auto", or None, is "default", or the first of the key's tiers where "default" is none of them.
        """
        wanted = SERVICE_TIERS[name or "auto"]
        if wanted in self.tiers:
            return wanted
        if name in (None, "auto"):
            return self.tiers[0]
        message = f"This API key may not use service_tier {name!r}; it may use {_join(self.tiers)}."
        raise ApiError(403, message, param="service_tier", code="service_tier_not_allowed")

    def choose_priority(self, wanted: int | None, best: int) -> int:
        """Returns the priority of a request.

        Args:
            wanted: None: 0, or the best that is allowed if that is worse.
            best: the server's, for keys without one of their own.

        Raises:
            ApiError: 403; the key may not have this priority.
            InvalidRequestError: no request of this server may.
        """
        own = self.best_priority
        least = best if own is None else own
        if wanted is None:
            return max(0, least)
        if wanted >= least:
            return wanted
        if own is None:
            message = f"must be at least {best} on this server (smaller runs first; max_priority), got {wanted}"
            raise InvalidRequestError(message, field="priority", value=wanted)
        message = f"This API key may not use priority {wanted}: smaller runs first, and {own} is its best."
        raise ApiError(403, message, param="priority", code="priority_not_allowed")


NO_TENANT = KeyRights()  # of keys without a tenant, and of all requests to a server without keys
Keys = dict[bytes, KeyRights]  # by hash


def hash_key(key: str) -> bytes:
    """Returns the hash under which the server keeps a key: its SHA-256, as in a tenants file."""
    return hashlib.sha256(key.encode("utf-8", "surrogateescape")).digest()


def read_keys(options: AccessOptions, environment: Sequence[str]) -> Keys:
    """Returns all keys: those of the options, the key file and the environment, which have no name, and the tenants'.

    Raises:
        ConfigError: a file cannot be read or used, a key is too short or holds other characters, or it is given twice,
            with and without a tenant.
    """
    keys = [*options.api_key, *environment]
    if options.api_key_file is not None:
        try:
            with open_regular(Path(options.api_key_file)) as file:  # a FIFO would hang whoever reads it again
                keys += [line.strip() for line in file.read().decode("utf-8").splitlines() if line.strip()]
        except (OSError, UnicodeDecodeError) as error:
            raise ConfigError(f"cannot be read: {error}", field="api_key_file", value=options.api_key_file) from error
    for key in keys:
        if len(key) < 8 or not key.isascii() or not key.isprintable() or " " in key:
            message = "each key needs at least 8 printable ASCII characters and no spaces"
            raise ConfigError(message, field="api_key", value=None)
    found = dict.fromkeys(map(hash_key, keys), NO_TENANT)
    for digest, rights in (read_tenants(options.tenants) if options.tenants is not None else {}).items():
        if digest in found:
            message = f"the key of {rights.tenant.name!r} is also given without a tenant; give it once"
            raise ConfigError(message, field="tenants", value=options.tenants)
        found[digest] = rights
    return found


def read_tenants(path: str) -> Keys:
    """Returns the keys of a tenants file: TOML with one table `[[tenants]]` for each; `_FIELDS` says what they hold.

    Raises:
        ConfigError: the file cannot be read, others may write it, or a tenant is malformed or given twice.
    """

    def refuse(message: str) -> ConfigError:
        return ConfigError(message, field="tenants", value=path)

    try:
        with open_regular(Path(path)) as file:
            mode = stat.S_IMODE(os.fstat(file.fileno()).st_mode)
            document = tomllib.loads(file.read().decode("utf-8"))
    except (OSError, UnicodeDecodeError, tomllib.TOMLDecodeError) as error:
        raise refuse(f"{path} cannot be read: {error}") from None
    if mode & (stat.S_IWGRP | stat.S_IWOTH):
        raise refuse(f"others than its owner may write {path} (mode {mode:04o}); chmod go-w {path}")
    tables = document.pop("tenants", None)
    if document or not tables or not isinstance(tables, list) or not all(isinstance(each, dict) for each in tables):
        raise refuse(f"{path} must hold one table [[tenants]] or more, and nothing else")
    found: Keys = {}
    names: set[str] = set()
    for number, table in enumerate(tables, 1):
        try:
            digest, rights = _read_tenant(table)
        except ValueError as error:
            raise refuse(f"tenant {number} of {path}: {error}") from None
        name = rights.tenant.name
        if name in names:
            raise refuse(f"tenant {number} of {path}: there is another one named {name!r}")
        if digest in found:
            raise refuse(f"tenant {number} of {path}: its key_hash is that of {found[digest].tenant.name!r}, too")
        names.add(name)
        found[digest] = rights
    return found


def _read_tenant(table: Mapping[str, Any]) -> tuple[bytes, KeyRights]:
    """Returns the hash of a tenant's key, and its rights; ValueError says what is wrong, and repeats no key."""
    if unknown := table.keys() - _FIELDS.keys():
        raise ValueError(f"{shorten(min(unknown))} is not known; {', '.join(_FIELDS)} are")
    for name in ("name", "key_hash"):
        if name not in table:
            raise ValueError(f"{name} is missing")
    for name, value in table.items():
        is_right, text = _FIELDS[name]
        if not is_right(value):
            got = "" if name == "key_hash" else f", got {shorten(value)}"  # it could be the key itself
            raise ValueError(f"{name} must be {text}{got}")
    digest = bytes.fromhex(table["key_hash"])
    if digest == hash_key(""):
        raise ValueError("key_hash is that of an empty key")
    given = {name: table[name] for name in ("name", "weight", "queue_share") if name in table}
    tiers = tuple(SERVICE_TIERS[name] for name in table["tiers"]) if "tiers" in table else tuple(ServiceTier)
    adapters = tuple(table["adapters"]) if "adapters" in table else None
    return digest, KeyRights(Tenant(**given), table.get("best_priority"), tiers, adapters)


def _is_number(value: Any, least: float, most: float) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and least <= value <= most


def _is_tiers(value: Any) -> bool:
    names = [str(tier) for tier in ServiceTier]
    return isinstance(value, list) and bool(value) and all(each in names for each in value)


def _join(tiers: Sequence[ServiceTier]) -> str:
    return ", ".join(map(str, tiers))


# The fields of a tenant: which values are right, and how an error describes them.
_FIELDS: dict[str, tuple[Callable[[Any], bool], str]] = {
    "name": (
        lambda value: isinstance(value, str) and bool(_NAME.fullmatch(value)) and value != OTHER,
        f"1 to 64 letters, digits, '.', '_' or '-', and not {OTHER!r}",
    ),
    "key_hash": (
        lambda value: isinstance(value, str) and bool(_HASH.fullmatch(value)),
        "the SHA-256 of the key in 64 hexadecimal digits",
    ),
    "weight": (
        lambda value: _is_number(value, _LEAST_WEIGHT, _MOST_WEIGHT),
        f"a number from {_LEAST_WEIGHT} to {_MOST_WEIGHT}",
    ),
    "best_priority": (
        lambda value: isinstance(value, int) and not isinstance(value, bool) and value in PRIORITIES,
        f"an integer in [{PRIORITIES.start}, {PRIORITIES.stop})",
    ),
    "tiers": (_is_tiers, f"a list of some of {_join(tuple(ServiceTier))}"),
    "queue_share": (lambda value: _is_number(value, 0, 1) and value > 0, "a number above 0, at most 1"),
    "adapters": (
        lambda value: isinstance(value, list) and all(isinstance(each, str) and each for each in value),
        "a list of names of adapters",
    ),
}
