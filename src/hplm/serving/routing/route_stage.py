"""The stage behind the model `hplm`: finds the base of each text's tenant, and sends the text to the base's model."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

from hplm.core.names import check_name
from hplm.core.settings import RouteSettings, load_settings
from hplm.errors import ConfigError, HplmError, RegistryUnavailableError, UnknownTenantError
from hplm.registry.catalog import Catalog
from hplm.runtime.memory import freeze_garbage_collection
from hplm.runtime.process import is_told_to_stop
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import SWITCH_INTERVAL_S
from hplm.scheduling.gathering import GatherLimits
from hplm.serving.backlog_file import SERVER
from hplm.serving.counts import Counts
from hplm.serving.routing.call_tensors import Tensors
from hplm.serving.routing.model_route import STOPPING, ModelRoute, RouteRequest
from hplm.store.layout import Store

# The name of a model, and the rest as `model_route.CallModel`.
CallNamedModel = Callable[[str, Any, Any, float | None], Tensors]
# Seconds between two sweeps of the texts that wait.
SWEEP_EVERY_S = 0.1
# Sweeps between two looks at the settings file.
LOOK_EVERY = 10
# Seconds for calls under way to end.
STOP_S = 5.0


class RouteStage:
    """Routes texts by tenant to the models of several bases. It loads no torch.

    A base that is added to the settings file, or taken out of it, is served or refused within two seconds. If a model gets
    another base, it is called for the tenants of both, because nobody here knows when it is loaded again. Other settings
    count from the start. Raises RegistryError or ConfigError on construction.
    """

    def __init__(self, settings_path: Path, call: CallNamedModel) -> None:
        """`call` calls a model of this server."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self.name = "route"
        self._path = settings_path
        self._call = call
        self._settings = load_settings(RouteSettings, settings_path)
        self._stamp = _stamp(settings_path)
        store = Store((settings_path.parent / self._settings.store).resolve(), self._settings.registry)
        self._catalog = Catalog(store, None)
        self._counts = Counts()
        self._is_closed = False
        # By base. Replaced as a whole, because requests read it without a lock.
        self._routes = {base: self._route(model) for base, model in self._settings.models.items()}
        # Routes of bases that were taken out, until their last texts have left.
        self._leaving: list[ModelRoute] = []
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sweep_loop, name="route-sweep", daemon=True)

    def start(self) -> None:
        """Begin to answer requests."""
        freeze_garbage_collection()
        self._catalog.start()
        self._thread.start()

    def stop(self) -> None:
        """Refuse the texts that wait, answer the calls under way, end all threads."""
        self._close()
        self._stopped.set()
        until_s = time.monotonic() + STOP_S
        for route in self._routes.values():
            route.join(until_s)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        self._catalog.close()

    @property
    def counts(self) -> Counter[str]:
        """Answers by outcome, calls of models, texts that were sent once more, and failed polls of the registry."""
        return self._counts.read() + Counter(failed_registry_looks=self._catalog.failures)

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a call."""
        return sum(route.waiting for route in set(self._routes.values()))

    @property
    def tenants(self) -> int:
        """The number of tenants in the registry now."""
        return len(self._catalog)

    def count_refused(self, error: HplmError) -> None:
        """Count a request that was refused before it could be submitted."""
        self._counts.add_answer(error)

    def submit(self, request: RouteRequest) -> None:
        """Queue a text and return at once. The text gets exactly one reply, from any thread.

        Raises the error of a text that is refused at once; such a text gets no reply.
        """
        try:
            name = check_name(request.tenant.decode("utf-8", "replace"))
            route = self._routes.get(self._catalog.find(name).base)
            if route is None:
                # A tenant of a base that this server does not serve does not exist here.
                raise UnknownTenantError(f"there is no tenant {name!r}")
            route.submit(request, name)
        except RegistryUnavailableError:
            # As the stages say it: the cause is in the log, once.
            refused: HplmError = RegistryUnavailableError("the registry cannot be read now; try again later")
        except HplmError as error:
            refused = error
        else:
            return
        self._counts.add_answer(refused)
        raise refused

    def _route(self, model: str) -> ModelRoute:
        settings = self._settings
        return ModelRoute(
            model,
            partial(self._call, model),
            self._counts,
            calls=settings.calls,
            capacity=settings.queue_capacity,
            gather_s=settings.gather_ms / 1000,
            limits=GatherLimits(texts=settings.call_texts),
        )

    def _close(self) -> None:
        self._is_closed = True
        for route in (*self._routes.values(), *self._leaving):
            route.close()

    def _sweep_loop(self) -> None:
        sweeps = 0
        while not self._stopped.wait(SWEEP_EVERY_S):
            try:
                for route in (*self._routes.values(), *self._leaving):
                    route.sweep()
                sweeps += 1
                if sweeps % LOOK_EVERY == 0 and not self._is_closed:
                    self._close_empty()
                    self._follow_settings()
                if not self._is_closed and is_told_to_stop(SERVER):
                    logging.getLogger(__name__).warning("route: %s; what waits is refused", STOPPING)
                    self._close()
            except Exception as error:
                log_rate_limited("route: a sweep failed", error)

    def _close_empty(self) -> None:
        """End the threads of routes that were taken out a second ago or earlier, once no text waits there."""
        empty = [route for route in self._leaving if not route.waiting]
        for route in empty:
            route.close()
        self._leaving = [route for route in self._leaving if route not in empty]

    def _follow_settings(self) -> None:
        """Serve the bases that the settings file names now, if it has changed."""
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        try:
            models = load_settings(RouteSettings, self._path).models
        except ConfigError as error:
            # For example, the file is being replaced.
            log_rate_limited(f"the bases stay as they are: {error}")
            return
        self._stamp = stamp
        before, named = self._routes, set(models.values())
        # A model that an export gives another base serves its first base until it is loaded again, so it is called for both.
        kept = {base: route for base, route in before.items() if route.name in named}
        by_name = {route.name: route for route in kept.values()}
        self._routes = kept | {base: by_name.get(model) or self._route(model) for base, model in models.items()}
        self._leaving += set(before.values()) - set(self._routes.values())


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; empty if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
