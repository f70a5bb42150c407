"""Bases that are added to a served repository, or deleted from it: their models are loaded and unloaded while others serve."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Collection
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Protocol

from hplm.core.roles import CALLING, names, served_bases, unload_order
from hplm.errors import StartError
from hplm.triton.workarounds.dead_stubs import stubs_of
from hplm.triton.workarounds.running_server import RunningServer, ask_triton

# Seconds between two looks at the repository: a base that was added begins to load within this time.
LOOK_EVERY_S = 2.0
# Seconds until models that could not be loaded are tried again, unless their files change before.
RETRY_S = 60.0
# Seconds for the requests under way of a deleted base: twice a stage's default deadline.
UNLOAD_S = 60.0

# The files of a group of models: when each was written, and its bytes.
Files = dict[str, tuple[int, int]]


class ServerWithModels(RunningServer, Protocol):
    """A running Triton with the names of its loaded models."""

    models: set[str]


class StubWatch(Protocol):
    """The part of `hplm.triton.workarounds.dead_stubs.StubKeeper` that follows changes of the models."""

    def watch(self, models: Collection[str]) -> None:
        """Look after the stubs of models that have just been loaded."""

    def forget(self, models: Collection[str]) -> None:
        """Look after the stubs of these models no longer."""


class BaseChanges:
    """Follows the bases of a repository, and the model that routes between them.

    Triton loads and unloads models beside its requests, so other bases are served meanwhile. Loads run in a thread, one change
    at a time, because a load may read large tables.
    """

    def __init__(
        self,
        repository: Path,
        server: ServerWithModels,
        stubs: StubWatch,
        is_over: Callable[[], bool],
        *,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        """Follow the repository of a server that has just loaded `server.models`. `is_over` says whether it has ended."""
        self._repository, self._server, self._stubs = repository, server, stubs
        self._is_over, self._clock = is_over, clock
        self._next_look_s = clock() + LOOK_EVERY_S
        # The loaded models by group, with their files as they were loaded. A group is a base, or a model that calls bases.
        self._loaded = {
            name: (models, self._files(models))
            for name, models in self._groups().items()
            if server.models.issuperset(models)
        }
        # Groups that could not be loaded, and when they are tried again.
        self._failed: dict[str, tuple[Files, float]] = {}
        # Groups whose changed files were told.
        self._told: dict[str, Files] = {}
        self._change: threading.Thread | None = None
        self._finish: Callable[[], list[str]] = list

    @property
    def is_changing(self) -> bool:
        """Whether models are being loaded or unloaded."""
        return self._change is not None and self._change.is_alive()

    def look(self) -> list[str]:
        """Begin a change if one is due, and return messages about what has changed."""
        if self.is_changing:
            return []
        if self._change is not None:
            self._change = None
            return self._finish()
        if (now_s := self._clock()) < self._next_look_s:
            return []
        self._next_look_s = now_s + LOOK_EVERY_S
        # An export that cannot swap folders in one step leaves none for a moment.
        if not (there := self._groups()):
            return []
        # The models that call bases were loaded last, and go first.
        for name, (models, _) in reversed(self._loaded.items()):
            if name not in there:
                self._begin_unload(name, models)
                return []
        for name, models in there.items():
            if name not in self._loaded and self._may_load(name, models, now_s):
                self._begin_load(name, models)
                return []
        return [message for name, models in there.items() if (message := self._changed(name, models))]

    def _groups(self) -> dict[str, tuple[str, ...]]:
        """Return the models of each base in loading order, and after the bases the models that call them."""
        groups = {base.name: names(base.roles) for base in served_bases(self._repository)}
        return groups | {name: (name,) for name in CALLING if (self._repository / name).is_dir()}

    def _files(self, models: Collection[str]) -> Files:
        files = {}
        for model in models:
            for name in ("config.pbtxt", "1/settings.json"):
                try:
                    found = (self._repository / model / name).stat()
                except OSError:
                    continue
                files[f"{model}/{name}"] = (found.st_mtime_ns, found.st_size)
        return files

    def _may_load(self, name: str, models: Collection[str], now_s: float) -> bool:
        files, retry_s = self._failed.get(name, ({}, now_s))
        return now_s >= retry_s or files != self._files(models)

    def _changed(self, name: str, models: Collection[str]) -> str:
        """Return a message about a loaded group whose files have changed, once for each change."""
        now = self._files(models)
        # The models that call bases read their settings again by themselves.
        if name in CALLING or name not in self._loaded or self._told.get(name, self._loaded[name][1]) == now:
            return ""
        self._told[name] = now
        return f"the files of model {name} have changed: they are used when `hplm serve` starts again"

    def _begin_load(self, name: str, models: tuple[str, ...]) -> None:
        files = self._files(models)
        errors: list[StartError] = []
        is_loaded = False

        def load() -> None:
            nonlocal is_loaded
            try:
                is_loaded = all(ask_triton(self._server, model, "load", self._is_over) for model in models)
            except StartError as error:
                errors.append(error)
                # No half of a base stays behind.
                for model in reversed(models):
                    with suppress(StartError):
                        ask_triton(self._server, model, "unload", self._is_over)

        def finish() -> list[str]:
            if errors:
                self._failed[name] = (files, self._clock() + RETRY_S)
                return [f"{errors[0]}; model {name} is tried again in {RETRY_S:.0f} s, or when its files change"]
            if not is_loaded:
                return []
            self._failed.pop(name, None)
            self._loaded[name] = (models, files)
            self._server.models |= set(models)
            self._server.hide_texts()
            self._stubs.watch(models)
            return [f"model {name} was added to the repository and is served"]

        self._begin(name, load, finish)

    def _begin_unload(self, name: str, models: tuple[str, ...]) -> None:
        self._stubs.forget(models)
        errors: list[StartError] = []
        is_unloaded = False

        def unload() -> None:
            nonlocal is_unloaded
            try:
                for model in chain.from_iterable(unload_order(models)):
                    ask_triton(self._server, model, "unload", self._is_over)
            except StartError as error:
                errors.append(error)
            # The folders are gone, so Triton's index does not list the models. A stage's process ends when none of its
            # requests is under way.
            until_s = time.monotonic() + UNLOAD_S
            while not (is_unloaded := not errors and not self._has_stubs(models)) and time.monotonic() < until_s:
                if errors or self._is_over():
                    return
                time.sleep(0.1)

        def finish() -> list[str]:
            if not is_unloaded:
                why = str(errors[0]) if errors else "its requests have not ended"
                return (
                    []
                    if self._is_over()
                    else [f"model {name} was deleted and is not unloaded yet ({why}): trying again"]
                )
            del self._loaded[name]
            self._told.pop(name, None)
            self._server.models -= set(models)
            return [f"model {name} was deleted from the repository and is unloaded"]

        self._begin(name, unload, finish)

    def _has_stubs(self, models: Collection[str]) -> bool:
        return not set(stubs_of(self._server.process.pid).values()).isdisjoint(models)

    def _begin(self, name: str, change: Callable[[], None], finish: Callable[[], list[str]]) -> None:
        self._finish = finish
        self._change = threading.Thread(target=change, name=f"change of {name}", daemon=True)
        self._change.start()
