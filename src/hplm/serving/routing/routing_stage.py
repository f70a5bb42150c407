"""The part of a stage that calls the models of several bases: settings that may change, tenants, routes, and a sweep."""

from __future__ import annotations

import logging
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, ClassVar, Generic, TypeVar

from hplm.access.gate import open_gate
from hplm.access.quotas import open_quotas
from hplm.core.names import check_name
from hplm.core.settings import RouteSettings, load_settings
from hplm.errors import ArtifactError, ConfigError, HplmError, RegistryUnavailableError
from hplm.metering.text_meter import TextMeter, open_meter
from hplm.models import base_folder
from hplm.registry.catalog import Catalog
from hplm.registry.records import ServedTenant
from hplm.runtime.memory import freeze_garbage_collection
from hplm.runtime.process import is_told_to_stop
from hplm.runtime.rate_limited_log import log_rate_limited
from hplm.runtime.thread_priority import SWITCH_INTERVAL_S
from hplm.scheduling.gathering import GatherLimits
from hplm.serving.backlog_file import SERVER
from hplm.serving.counts import Counts
from hplm.serving.request import Request
from hplm.serving.routing.base_routes import BaseRoutes
from hplm.serving.routing.call_tensors import RouteInput, Tensors
from hplm.serving.routing.model_route import STOPPING, ModelRoute
from hplm.store.layout import Store

# The name of a model, and the rest as `model_route.CallModel`.
CallNamedModel = Callable[[str, Any, Any, float | None, Any], Tensors]
Settings = TypeVar("Settings", bound=RouteSettings)
# Seconds between two sweeps of the texts that wait.
SWEEP_EVERY_S = 0.1
# Sweeps between two looks at the settings file.
LOOK_EVERY = 10
# Seconds for calls under way to end.
STOP_S = 5.0


class RoutingStage(Generic[Settings]):
    """A stage that answers texts by calls of the models of several bases. It loads no torch.

    A base that is added to the settings file, or taken out of it, is served or refused within two seconds. If a model gets
    another base, it is called for the tenants of both, because nobody here knows when it is loaded again. Other settings
    count from the start. A subclass submits texts to routes. Raises RegistryError or ConfigError on construction.
    """

    name: ClassVar[str]
    settings_type: type[Settings]

    def __init__(self, settings_path: Path, call: CallNamedModel) -> None:
        """`call` calls a model of this server."""
        sys.setswitchinterval(SWITCH_INTERVAL_S)
        self._path = settings_path
        self._call = call
        self._settings = load_settings(self.settings_type, settings_path)
        self._stamp = _stamp(settings_path)
        store = Store((settings_path.parent / self._settings.store).resolve(), self._settings.registry)
        self._store = store
        self.most_tokens = _most_tokens(store, self._settings)
        self._catalog = Catalog(store, None, on_forgotten=self.on_forgotten)
        self.gate = open_gate(store)
        self.quotas = open_quotas(store, SERVER)
        # Answers by outcome, and what the routes count.
        self._counts = Counts()
        self._is_closed = False
        self._routes = [BaseRoutes(models, self._route) for models in self.models_of(self._settings)]
        self._stopped = threading.Event()
        self._thread = threading.Thread(target=self._sweep_loop, name=f"{self.name}-sweep", daemon=True)

    def models_of(self, settings: Settings) -> list[Mapping[str, str]]:
        """Return the models by base, once for each way in which the stage calls a base."""
        raise NotImplementedError

    def submit_text(self, request: Request[RouteInput, Any], name: str) -> None:
        """Queue a text of the tenant `name`. Raises the error of a text that is refused at once."""
        raise NotImplementedError

    def on_forgotten(self, versions: Sequence[ServedTenant]) -> None:
        """Take note of versions that can no longer be found."""

    @property
    def call_counts(self) -> Counts:
        """The counter of the routes."""
        return self._counts

    def open_meter(self) -> TextMeter:
        """Return a meter of this stage's texts, into which the caller notes answers."""
        return open_meter(self.name, self._settings.metering, self._store.root, self._store.registry)

    def start(self) -> None:
        """Begin to answer requests."""
        freeze_garbage_collection()
        self._catalog.start()
        self.gate.start()
        self.quotas.start()
        self._thread.start()

    def stop(self) -> None:
        """Refuse the texts that wait, answer the calls under way, end all threads."""
        self._close()
        self._stopped.set()
        until_s = time.monotonic() + STOP_S
        for routes in self._routes:
            routes.join(until_s)
        self._thread.join(max(0.0, until_s - time.monotonic()))
        self.gate.close()
        self.quotas.close()
        self._catalog.close()

    @property
    def is_running(self) -> bool:
        """Whether the stage answers requests: it is started, and the server is not about to end."""
        return not self._is_closed and self._thread.is_alive()

    @property
    def counts(self) -> Counter[str]:
        """Answers by outcome, calls of models, texts that were sent once more, and failed polls of the registry."""
        return self._counts.read() + Counter(failed_registry_looks=self._catalog.failures + self.gate.failures)

    @property
    def waiting(self) -> int:
        """The number of texts that wait for a call."""
        return sum(routes.waiting for routes in self._routes)

    def has_tenant(self, name: str) -> bool:
        """Return whether there is a tenant of this name, as far as the registry could be read."""
        return name in self._catalog

    @property
    def tenants(self) -> int:
        """The number of tenants in the registry now."""
        return len(self._catalog)

    def count_refused(self, error: HplmError) -> None:
        """Count a request that was refused before it could be submitted."""
        self._counts.add_answer(error)

    def submit(self, request: Request[RouteInput, Any]) -> None:
        """Queue a text and return at once. The text gets exactly one reply, from any thread.

        Raises the error of a text that is refused at once; such a text gets no reply.
        """
        try:
            self.submit_text(request, check_name(request.tenant.decode("utf-8", "replace")))
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
            self.call_counts,
            calls=settings.calls,
            capacity=settings.queue_capacity,
            gather_s=settings.gather_ms / 1000,
            limits=GatherLimits(texts=settings.call_texts),
            sign=self.gate.sign if self.gate.needs_keys else None,
        )

    def _close(self) -> None:
        self._is_closed = True
        for routes in self._routes:
            routes.close()

    def _sweep_loop(self) -> None:
        sweeps = 0
        while not self._stopped.wait(SWEEP_EVERY_S):
            try:
                for routes in self._routes:
                    routes.sweep()
                sweeps += 1
                if sweeps % LOOK_EVERY == 0 and not self._is_closed:
                    for routes in self._routes:
                        routes.close_empty()
                    self._follow_settings()
                if not self._is_closed and is_told_to_stop(SERVER):
                    logging.getLogger(__name__).warning("%s: %s; what waits is refused", self.name, STOPPING)
                    self._close()
            except Exception as error:
                log_rate_limited(f"{self.name}: a sweep failed", error)

    def _follow_settings(self) -> None:
        """Serve the bases that the settings file names now, if it has changed."""
        if (stamp := _stamp(self._path)) == self._stamp:
            return
        try:
            settings = load_settings(self.settings_type, self._path)
        except ConfigError as error:
            # For example, the file is being replaced.
            log_rate_limited(f"the bases stay as they are: {error}")
            return
        self._stamp = stamp
        self.most_tokens = _most_tokens(self._store, settings)
        for routes, models in zip(self._routes, self.models_of(settings), strict=True):
            routes.follow(models)


def _most_tokens(store: Store, settings: RouteSettings) -> int:
    """Return how many tokens of a text any of the bases reads. A base that cannot be read answers no text either."""
    found = [0]
    for name in settings.models:
        try:
            found.append(base_folder.read(store.base(name), verify=False).config.max_tokens)
        except (ArtifactError, ConfigError) as error:
            log_rate_limited(f"how many tokens of a text base {name} reads is not known: {error}")
    return max(found)


def _stamp(path: Path) -> tuple[int, ...]:
    """Return what changes when a file is written or replaced; empty if there is no file."""
    try:
        stat = path.stat()
    except OSError:
        return ()
    return stat.st_ino, stat.st_mtime_ns, stat.st_size
