"""The adapters that clients of a server know as models: their names and paths, at the start and later."""

from __future__ import annotations

import asyncio
import itertools
import logging
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from jaxserve.errors import ConfigError, JaxServeError, shorten
from jaxserve.lora_options import LoRARequest
from jaxserve.server.errors import ApiError
from jaxserve.server.lora_modules import check_name

if TYPE_CHECKING:
    from jaxserve.features.lora.store import AdapterStore
    from jaxserve.request import Adapter

_log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class ServedAdapter:
    """An adapter as a model of the server."""

    request: LoRARequest
    parent: str  # the base model, by the name that clients know
    in_folder: bool = False  # it was loaded from `lora_dir`, where its files must still be when they are read again
    created: int = field(default_factory=lambda: int(time.time()))


class ServedAdapters:
    """The adapters of one server by name. The event loop changes it.

    Args:
        base_names: the names of the base model.
        folder: where adapters that are loaded later may lie (`lora_dir`); None: nowhere.
    """

    def __init__(self, base_names: Sequence[str], folder: str | None) -> None:
        self._base_names = tuple(base_names)
        self._folder = None if folder is None else Path(folder)
        self._by_name: dict[str, ServedAdapter] = {}
        self._numbers = itertools.count(1)
        self._lock = asyncio.Lock()
        self.store: AdapterStore | None = None

    @property
    def names(self) -> tuple[str, ...]:
        """All names, in the order in which they were loaded."""
        return tuple(self._by_name)

    def get(self, name: str | None) -> ServedAdapter | None:
        """Returns an adapter; None if there is none of this name."""
        return None if name is None else self._by_name.get(name)

    def open(self, store: AdapterStore | None, modules: Mapping[str, tuple[str, str | None]]) -> None:
        """Takes the engine's adapters, and reads those of the start.

        Raises:
            ConfigError, WeightsError: one of them cannot be served.
        """
        self.store = store
        for name, (path, base) in modules.items():
            self._refuse_taken(name, inplace=False)
            if base is not None and base not in self._base_names:
                message = f"{name!r} is an adapter of {base!r}, and here is {', '.join(self._base_names)}"
                raise ConfigError(message, field="lora_modules", value=base)
            request = LoRARequest(name, next(self._numbers), path)
            self._require_store().find(request)
            self._by_name[name] = ServedAdapter(request, base or self._base_names[0])

    async def find(self, wanted: LoRARequest | None) -> Adapter | None:
        """Returns the adapter of a request, read in a thread if there is no copy of it; whoever holds it keeps it.

        Raises:
            ApiError: 404; it has been unloaded meanwhile. 503; its files cannot be read any more.
        """
        if wanted is None:
            return None
        name, store = wanted.lora_name, self._require_store()
        if (loaded := store.find_loaded(name)) is not None:
            return loaded
        async with self._lock:  # one is read at a time, and none while another takes its name
            served = self._by_name.get(name)
            if served is None:
                raise ApiError(404, f"The model {name!r} was unloaded.", param="model", code="model_not_found")
            try:
                if served.in_folder:
                    await asyncio.to_thread(self._resolve, served.request.lora_path)
                return await asyncio.to_thread(store.find, served.request)
            except (JaxServeError, ApiError) as error:
                _log.error("adapter %s cannot be read any more: %s", name, error)
                message = f"The files of the model {name!r} cannot be read any more; its operator has to look."
                raise ApiError(503, message, param="model", code="adapter_unreadable") from error

    async def load(self, name: str, path: str, *, inplace: bool) -> None:
        """Reads an adapter and serves it from now on; with `inplace` in place of one of the same name.

        Raises:
            ApiError: 400; the name is taken, the path is not below `lora_dir`, or the adapter cannot be served. Nothing
                has changed then.
        """
        async with self._lock:
            store = self._require_store()
            _refuse_as_body(check_name, name)
            _refuse_as_body(self._refuse_taken, name, inplace=inplace)
            folder = await asyncio.to_thread(self._resolve, path)
            known = self._by_name.get(name)
            number = next(self._numbers) if known is None else known.request.lora_int_id
            request = LoRARequest(name, number, str(folder))
            try:
                await asyncio.to_thread(store.find, request, anew=True)
            except JaxServeError as error:
                raise ApiError(400, str(error), param="lora_path", code="adapter_refused") from error
            self._by_name[name] = ServedAdapter(request, self._base_names[0], in_folder=True)

    async def unload(self, name: str) -> None:
        """Refuses an adapter to new requests; those that run end with it. ApiError 404 if it is unknown."""
        async with self._lock:
            if self._by_name.pop(name, None) is None:
                raise ApiError(
                    404, f"There is no adapter {shorten(name)}.", param="lora_name", code="adapter_not_found"
                )
            self._require_store().remove(name)

    def _require_store(self) -> AdapterStore:
        if self.store is None:
            raise ApiError(400, "This server was started without enable_lora.", code="no_adapters")
        return self.store

    def _refuse_taken(self, name: str, *, inplace: bool) -> None:
        if name in self._base_names:
            raise ConfigError(f"{name!r} is the base model's", field="lora_name", value=name)
        if name in self._by_name and not inplace:
            raise ConfigError(f"{name!r} is loaded already; load_inplace replaces it", field="lora_name", value=name)

    def _resolve(self, path: str) -> Path:
        """Returns a directory below `lora_dir`, where links lead; ApiError 400 for any other path."""
        if self._folder is None:
            raise ApiError(400, "Adapters are loaded below lora_dir, which is not set.", code="no_lora_dir")
        try:
            root = self._folder.resolve(strict=True)
            folder = (root / path).resolve(strict=True)
            inside = [folder, *(each.resolve(strict=True) for each in folder.iterdir())]
        except (OSError, ValueError, RuntimeError):
            inside = []
        if not inside or not all(each.is_relative_to(root) for each in inside):
            message = f"lora_path: must be a directory below lora_dir, with all its files, got {shorten(path)}"
            raise ApiError(400, message, param="lora_path", code="path_not_allowed")
        return folder


def _refuse_as_body(check: Any, *args: Any, **options: Any) -> None:
    """Runs a check; ApiError 400 in place of its ConfigError."""
    try:
        check(*args, **options)
    except ConfigError as error:
        raise ApiError(400, str(error), param=error.field, code="adapter_refused") from error
