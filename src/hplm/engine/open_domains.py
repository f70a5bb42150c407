"""A cache of open domains. An open domain has its tables, its lower layers and computed windows in memory."""

from __future__ import annotations

import errno
import time
from collections import Counter
from collections.abc import Collection, Iterable
from concurrent.futures import Future, ThreadPoolExecutor
from weakref import WeakValueDictionary

import torch

from hplm.adapters.host_cache import HostCache
from hplm.core.settings import LookupSettings
from hplm.engine.kernels.int8 import check_int8
from hplm.engine.lower_layers import load_lower
from hplm.engine.open_domain import FilesState, Helpers, OpenDomain, files_state, open_lineage, verify_domain
from hplm.errors import HplmError, StoreUnavailableError, unusable
from hplm.models.base import Base
from hplm.models.device import CPU, choose_device, choose_dtype
from hplm.store.layout import Store

# Folders of a domain version and of those above it. Version ids would mean other domains in a registry that was made anew.
Lineage = tuple[str, ...]
# Seconds until a domain with broken files is opened again, because checking gigabytes takes seconds.
BROKEN_FOR_S = 10.0


class OpenDomains:
    """Open domains by their lineage, at most `most_domains` of the settings at a time.

    With `verify` in the settings, all files of a domain are checked before it is opened the first time, and again after a file
    has changed. Safe to use from several threads; an OpenDomain itself is not.

    Raises ConfigError if this machine cannot compute as the settings say.
    """

    def __init__(self, store: Store, base: Base, settings: LookupSettings, device_index: int = 0) -> None:
        """`device_index`: which of several GPUs computes what no table has."""
        self._store = store
        self._base = base
        self._settings = settings
        self.device = choose_lookup_device(settings, device_index)
        self._dtype = choose_dtype(settings.dtype, self.device)
        if settings.quantization == "int8" and settings.miss == "compute":
            check_int8(self.device)
        self._helpers: Helpers | None = None
        if settings.num_threads > 1 and self.device == CPU:
            count = settings.num_threads - 1
            self._helpers = Helpers(ThreadPoolExecutor(count, "hplm-window"), count)
        self._lower = load_lower(base).to(self.device) if settings.miss == "compute" else None
        self._windows_by_level: Counter[str] = Counter()
        # By folder: the state of its files when they were checked.
        self._verified: dict[str, FilesState] = {}
        # By lineage: when it could not be opened, and why.
        self._broken: dict[Lineage, tuple[float, HplmError]] = {}
        # Also domains that the cache has dropped while requests still use them: opening one twice would take its memory twice.
        self._in_use: WeakValueDictionary[Lineage, OpenDomain] = WeakValueDictionary()
        self._cache: HostCache[Lineage, OpenDomain] = HostCache(self._open, lambda _: 1, capacity=settings.most_domains)

    @property
    def windows_by_level(self) -> Counter[str]:
        """How many windows each level has answered since the start, in all domains."""
        return Counter(self._windows_by_level)

    @property
    def how_misses_are_computed(self) -> str:
        """Words for the log: what happens to windows that no table has."""
        is_int8 = self._settings.quantization == "int8"
        if self._settings.miss != "compute":
            return "backed off" + (", so quantization changes nothing" if is_int8 else "")
        dtype = str(self._dtype).removeprefix("torch.")
        how = f"with layers' matrices in int8, the gate's in {dtype}" if is_int8 else f"in {dtype}"
        return f"computed on {self.device} {how}"

    def get(self, lineage: Lineage) -> OpenDomain | None:
        """Return a domain if it is open."""
        return self._cache.get(lineage)

    def fetch(self, lineage: Lineage) -> Future[OpenDomain]:
        """Return a domain, opened in another thread if necessary. Requests for one lineage share one opening.

        The future fails with an ArtifactError or StoreUnavailableError if the domain cannot be opened.
        """
        return self._cache.fetch(lineage)

    def forget(self, lineages: Iterable[Lineage], still_served: Collection[Lineage]) -> None:
        """Close domain versions that no request asks for any more; `still_served` are those that requests may ask for."""
        gone = set(lineages).difference(still_served)
        self._cache.drop(gone)
        for lineage in gone:
            self._broken.pop(lineage, None)
            self._in_use.pop(lineage, None)
        for path in {path for lineage in gone for path in lineage}.difference(*still_served):
            self._verified.pop(path, None)

    def close(self) -> None:
        """End the threads. No domain is in use any more."""
        if self._helpers is not None:
            self._helpers.pool.shutdown()
        self._cache.close()

    def _open(self, lineage: Lineage) -> OpenDomain:
        if (domain := self._in_use.get(lineage)) is not None:
            return domain
        since_s, known = self._broken.get(lineage, (0.0, None))
        if known is not None and time.monotonic() - since_s < BROKEN_FOR_S:
            # A new error each time: a traceback grows with each raise, and keeps the variables of each frame.
            raise type(known)(*known.args)
        try:
            domain = self._in_use[lineage] = self._open_lineage(lineage)
        except (HplmError, OSError) as error:
            found = unusable(f"{lineage[0]} cannot be read", error) if isinstance(error, OSError) else error
            cause = error if isinstance(error, OSError) else error.__cause__
            # The next request tries again if the system lacked something, such as memory. A failing disk is slow to say so.
            if not isinstance(found, StoreUnavailableError) or getattr(cause, "errno", None) == errno.EIO:
                self._broken[lineage] = time.monotonic(), type(found)(*found.args)
            raise found from cause
        return domain

    def _open_lineage(self, lineage: Lineage) -> OpenDomain:
        if self._settings.verify:
            # Each folder once, and again after a file has changed: a root of gigabytes is in every lineage.
            for path in lineage:
                folder = self._store.path(path)
                if (state := files_state(folder)) != self._verified.get(path):
                    verify_domain(folder)
                    self._verified[path] = state
        domain = open_lineage(
            self._store,
            self._base,
            lineage,
            miss=self._settings.miss,
            overlay_windows=self._settings.overlay_windows,
            dtype=self._dtype,
            verify=False,
            base_lower=self._lower,
            quantization=self._settings.quantization,
            device=self.device,
            helpers=self._helpers,
        )
        domain.windows_by_level = self._windows_by_level
        return domain


def choose_lookup_device(settings: LookupSettings, index: int = 0) -> torch.device:
    """Return the device that computes windows: of several GPUs number `index`. Raises ConfigError if it is not there."""
    device = choose_device(settings.device, index)
    is_on_cpu = settings.miss != "compute" or (settings.device == "auto" and settings.quantization == "int8")
    return CPU if is_on_cpu else device
