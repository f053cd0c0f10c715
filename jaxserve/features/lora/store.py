"""The adapters of an engine on the host: which are known, and the copies of those that were read."""

from __future__ import annotations

import hashlib
import itertools
import logging
import threading
import weakref
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from weakref import WeakValueDictionary

import jax
import numpy as np

from jaxserve.errors import InvalidRequestError, shorten
from jaxserve.lora_options import LoRARequest
from jaxserve.presets import find_adapter
from jaxserve.request import Adapter

_log = logging.getLogger(__name__)


@dataclass(slots=True)
class AdapterCounts:
    """What has happened since the start."""

    loads: int = 0
    evictions: int = 0  # of copies on the host
    refusals: int = 0  # of files


class AdapterStore:
    """Adapters by name. Safe from any thread; files are read on the caller's, one adapter at a time.

    A copy stays while a request or `num_copies` recent uses hold it; then a request has it read again, as another load.

    Others hear of each load: other nodes, which read the files on their own, and a recording. Each of `on_load` is
    called with the load's generation, path and `digest_copy` before a request can have it, and refuses it by an error.
    Each of `on_drop` is called with the generation when the copy is gone, at any time and on any thread.

    Args:
        read: a directory -> what a slot holds.
        num_copies: adapters to keep whether or not a request needs them, the most recently used.
    """

    def __init__(self, read: Callable[[Path], Any], num_copies: int) -> None:
        self.counts = AdapterCounts()
        self.check: Callable[[Path], None] = lambda folder: None  # before its matrices are read
        self.on_load: list[Callable[[int, str, str], None]] = []
        self.on_drop: list[Callable[[int], object]] = []
        self._read, self.num_copies = read, num_copies
        self._generations = itertools.count(1)
        self._requests: dict[str, LoRARequest] = {}  # by name: the number and the path that it has
        self._names: dict[int, str] = {}  # by number
        self._current: WeakValueDictionary[str, Adapter] = WeakValueDictionary()  # by name: the last load
        self._live: WeakValueDictionary[int, Adapter] = WeakValueDictionary()  # by generation
        self._recent: OrderedDict[int, Adapter] = OrderedDict()  # by generation
        self._kept: dict[int, Adapter] = {}  # likewise, of another store
        self._lock, self._reading = threading.Lock(), threading.Lock()

    @property
    def num_live(self) -> int:
        """Copies on the host."""
        return len(self._live)

    def find_loaded(self, name: str) -> Adapter | None:
        """Returns the last load of an adapter; None if there is no copy of it."""
        with self._lock:
            adapter = self._current.get(name)
            if adapter is not None:
                self._use(adapter)
            return adapter

    def find(self, wanted: LoRARequest, *, anew: bool = False) -> Adapter:
        """Returns an adapter, read now if there is no copy of it.

        Args:
            anew: read it in any case, also from another path. Requests that have the load before it keep that one.

        Raises:
            InvalidRequestError: its name or number is that of an adapter with another path.
            ConfigError, WeightsError: it cannot be read; nothing has changed then.
        """
        if (known := self._find_known(wanted, anew)) is not None:
            return known
        with self._reading:
            if (known := self._find_known(wanted, anew)) is not None:
                return known  # another thread has just read it
            try:
                self.check(find_adapter(wanted.lora_path))
                adapter = Adapter(wanted.lora_name, next(self._generations), self.read(wanted.lora_path))
                self._announce(adapter, wanted.lora_path)
            except Exception:
                self.counts.refusals += 1
                raise
            with self._lock:
                self._check(wanted, anew)
                self._requests[wanted.lora_name], self._names[wanted.lora_int_id] = wanted, wanted.lora_name
                if (before := self._current.get(wanted.lora_name)) is not None:
                    self._recent.pop(before.generation, None)  # no request can name it any more
                self._current[wanted.lora_name] = self._live[adapter.generation] = adapter
                self._use(adapter)
            self.counts.loads += 1
        _log.info("adapter %s: read from %s, load %d", wanted.lora_name, wanted.lora_path, adapter.generation)
        return adapter

    def read(self, path: str) -> Any:
        """Returns what a slot holds of an adapter that this store does not know; ConfigError, WeightsError."""
        return self._read(find_adapter(path))

    def keep(self, generation: int, copy: Any) -> None:
        """Holds a copy for the plans of another store, by that one's generation, until `drop`."""
        self._kept[generation] = self._live[generation] = Adapter("", generation, copy)

    def drop(self, generation: int) -> None:
        """Holds a copy no longer."""
        self._kept.pop(generation, None)

    def remove(self, name: str) -> bool:
        """Forgets an adapter, so that no later request has it; returns whether it was known. Running ones keep it."""
        with self._lock:
            request, adapter = self._requests.pop(name, None), self._current.pop(name, None)
            if request is not None:
                del self._names[request.lora_int_id]
            if adapter is not None:
                self._recent.pop(adapter.generation, None)
        return request is not None

    def find_copy(self, generation: int) -> Any:
        """Returns what a slot holds of a load; KeyError if nobody needs it any more."""
        return self._live[generation].copy

    def _announce(self, adapter: Adapter, path: str) -> None:
        digest = digest_copy(adapter.copy) if self.on_load else ""
        for tell in self.on_load:
            tell(adapter.generation, path, digest)
        for tell_drop in self.on_drop:
            weakref.finalize(adapter, tell_drop, adapter.generation).atexit = False

    def _find_known(self, wanted: LoRARequest, anew: bool) -> Adapter | None:
        with self._lock:
            self._check(wanted, anew)
            adapter = None if anew else self._current.get(wanted.lora_name)
            if adapter is not None:
                self._use(adapter)
            return adapter

    def _check(self, wanted: LoRARequest, anew: bool) -> None:
        """Raises InvalidRequestError if a name or a number would have two meanings."""
        name, number = wanted.lora_name, wanted.lora_int_id
        known, owner = self._requests.get(name), self._names.get(number)
        if known is not None and known.lora_int_id != number:
            message = f"{name!r} has the number {known.lora_int_id}, not {number}"
            raise InvalidRequestError(message, field="lora_request", value=wanted)
        if owner is not None and owner != name:
            message = f"the number {number} is that of {owner!r}; {name!r} needs another"
            raise InvalidRequestError(message, field="lora_request", value=wanted)
        if known is not None and known.lora_path != wanted.lora_path and not anew:
            message = f"{name!r} was read from {shorten(known.lora_path)}; give another name"
            raise InvalidRequestError(message, field="lora_request", value=wanted)

    def _use(self, adapter: Adapter) -> None:
        self._recent[adapter.generation] = adapter
        self._recent.move_to_end(adapter.generation)
        while len(self._recent) > self.num_copies:
            self._recent.popitem(last=False)
            self.counts.evictions += 1


def digest_copy(copy: Any) -> str:
    """Returns a digest of the arrays that a slot holds, equal for equal files on all machines."""
    found = hashlib.sha256()
    for leaf in jax.tree.leaves(copy):
        found.update(np.ascontiguousarray(leaf).view(np.uint8).data)
    return found.hexdigest()[:32]
