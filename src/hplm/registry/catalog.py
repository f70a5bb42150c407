"""The tenants of one base as the registry names them, followed while it serves."""

from __future__ import annotations

import logging
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import replace

from hplm.errors import RegistryUnavailableError, UnknownTenantError, UnknownVersionError
from hplm.registry.records import Changes, DomainVersion, ServedTenant
from hplm.registry.registry import Registry
from hplm.store.layout import Store

# How old a view of the registry may be: what is published is served within this time, and a look takes 0.3 ms.
LOOK_EVERY_S = 0.2
# What was replaced or deleted is still answered to requests that were under way; files are kept longer than this.
REMEMBER_S = 60.0
COMPLAIN_EVERY_S = 30.0
# A look that takes longer waits for a disk or a network that may not come back.
BLIND_AFTER_S = 3.0


class Catalog:
    """Finding a tenant is a look in a dictionary; a thread keeps it up to date.

    Where the registry cannot be read any more, what was known goes on being served, `failures` counts and the log says
    why. `on_forgotten` is told of versions that can no longer be found, from the thread that follows. Raises
    RegistryError on construction. Safe to use from several threads.
    """

    def __init__(
        self,
        store: Store,
        base: str,
        *,
        on_forgotten: Callable[[Sequence[ServedTenant]], None] = lambda versions: None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._base = base
        self._on_forgotten = on_forgotten
        self._forgotten: list[ServedTenant] = []
        self._clock = clock
        self._registry = Registry.open_read_only(store)
        self._refreshing = threading.Lock()
        self._generation = 0
        self._published: dict[str, ServedTenant] = {}
        self._replaced: dict[int, tuple[float, ServedTenant]] = {}
        self._lineages: dict[int, tuple[DomainVersion, ...]] = {}  # by id of a domain version
        self._stopped = threading.Event()
        self._complained_s = -COMPLAIN_EVERY_S
        self._has_failed = False
        self._looking_since_s: float | None = None
        self._failures = 0
        self._thread = threading.Thread(target=self._follow, name="hplm-catalog", daemon=True)
        try:
            self.refresh()
        except BaseException:
            self._registry.close()
            raise

    def __len__(self) -> int:
        return len(self._published)

    def start(self) -> None:
        """Begin to follow."""
        self._thread.start()

    def close(self) -> None:
        """Follow no more; what is known stays known."""
        self._stopped.set()
        if self._thread.is_alive():
            self._thread.join(BLIND_AFTER_S)
        self._registry.close()

    @property
    def failures(self) -> int:
        """Looks that failed, or took too long."""
        return self._failures + self._hangs

    @property
    def _hangs(self) -> bool:
        """Whether a look is under way for longer than any should take."""
        since_s = self._looking_since_s
        return since_s is not None and self._clock() - since_s > BLIND_AFTER_S

    def _cannot_look(self) -> bool:
        """Whether the registry cannot be read now. A look that hangs is told here: its own thread cannot tell."""
        if self._hangs:
            self._complain("a look at the registry hangs")
            return True
        return self._has_failed

    def find(self, name: str, version_id: int | None = None) -> ServedTenant:
        """What is served of a tenant now, or the version that another stage has found, which may have been replaced since.

        Raises UnknownTenantError, UnknownVersionError, RegistryUnavailableError where it is not known and nobody can look.
        """
        found = self.known(name, version_id)
        if found is None:
            assert version_id is not None
            found = self._ask(name, version_id)
        return found

    def known(self, name: str, version_id: int | None = None) -> ServedTenant | None:
        """As `find`, but the registry is not asked, which may hang: None of a version that only it may know."""
        found = self._published.get(name)
        if version_id is None:
            if found is None:
                # In this order: whoever can look again has published what it saw before it says so.
                is_blind = self._cannot_look()
                found = self._published.get(name)
                if found is None and is_blind:
                    raise RegistryUnavailableError("the registry cannot be read now, and this tenant is not known")
                if found is None:
                    raise UnknownTenantError(f"there is no tenant {name!r}")
            return found
        if found is None or found.version_id != version_id:
            _, found = self._replaced.get(version_id, (0.0, None))
        if found is not None and found.name != name:
            raise UnknownVersionError(f"there is no such version of tenant {name!r}")
        return found

    def _ask(self, name: str, version_id: int) -> ServedTenant:
        """A version that was current only between two looks of this catalog, or will be at the next."""
        if self._cannot_look():
            # Asking could take seconds, and there are few threads to do it.
            raise RegistryUnavailableError("the registry cannot be read now")
        found = None
        if 0 < version_id < 2**63:
            with suppress(UnknownVersionError):
                found = self._own(self._registry.served_version(version_id), self._lineages)
        if found is None or found.name != name:
            raise UnknownVersionError(f"there is no such version of tenant {name!r}")
        self._replaced[version_id] = self._clock(), found
        return found

    def served(self) -> list[ServedTenant]:
        """All tenants as they are now."""
        return list(self._published.values())

    def found(self) -> list[ServedTenant]:
        """As `served`, and what was replaced so lately that requests under way may still ask for it."""
        return [*self._published.values(), *(one for _, one in list(self._replaced.values()))]

    def lineage(self, domain: str) -> tuple[str, ...]:
        """Folders of a domain's current version and those above it. Raises UnknownDomainError where the base has no such."""
        current = self._registry.current_domain(self._base, domain)
        return tuple(version.path for version in self._registry.lineage(current.id))

    def refresh(self) -> None:
        """Take in what has changed since the last time. Raises RegistryError."""
        with self._refreshing:
            now = self._clock()
            if self._registry.generation() != self._generation:
                self._take_in(self._registry.changes_since(self._generation), now)
            old = [number for number, (since, _) in list(self._replaced.items()) if now - since > REMEMBER_S]
            for number in old:
                _, one = self._replaced.pop(number)
                if self._published.get(one.name) != one:  # else it was rolled back to
                    self._forgotten.append(one)

    def _take_in(self, changes: Changes, now: float) -> None:
        """Other threads see the view before or the view after, never one in between; where this fails, the one before."""
        if changes.full and self._published and not changes.published:
            # It was lost and is being made anew: what it will name is about to be adopted.
            raise RegistryUnavailableError(
                f"the registry names no tenant, though {len(self._published):,} were known; "
                "`hplm store adopt` registers what lies in the store"
            )
        # In another registry the same ids are somebody else's.
        lineages = {} if changes.full else self._lineages
        published = {} if changes.full else dict(self._published)
        replaced = {} if changes.full else self._replaced
        for name in (*changes.removed, *(one.name for one in changes.published)):
            if (before := published.pop(name, None)) is not None:
                replaced[before.version_id] = now, before
        for one in changes.published:
            # Another base's tenants have another server: here nobody learns that they exist.
            if (found := self._own(one, lineages)) is not None:
                published[one.name] = found
        if changes.full:
            self._forgotten += [one for one in self.found() if published.get(one.name) != one]
        self._lineages, self._published, self._replaced = lineages, published, replaced
        self._generation = changes.generation

    def _own(self, one: ServedTenant, lineages: dict[int, tuple[DomainVersion, ...]]) -> ServedTenant | None:
        """With its lineage, None where it stands on another base."""
        lineage = lineages.get(one.domain_version_id)
        if lineage is None:
            lineage = lineages[one.domain_version_id] = tuple(self._registry.lineage(one.domain_version_id))
        if lineage[0].base != self._base:
            return None
        return replace(one, lineage=tuple(version.path for version in lineage))

    def _follow(self) -> None:
        while not self._stopped.wait(LOOK_EVERY_S):
            self._look()
            if self._forgotten:
                self._tell()

    def _tell(self) -> None:
        forgotten, self._forgotten = self._forgotten, []
        try:
            self._on_forgotten(forgotten)
        except Exception:
            self._forgotten = forgotten + self._forgotten
            logging.getLogger(__name__).exception("what was replaced is not let go of yet; the next look tries again")

    def _look(self) -> None:
        self._looking_since_s = self._clock()
        try:
            self.refresh()
            self._failures += self._hangs
            self._has_failed = False
        except Exception as error:
            self._has_failed = True
            self._failures += 1
            self._complain(repr(error))
        finally:
            self._looking_since_s = None

    def _complain(self, why: str) -> None:
        if self._clock() - self._complained_s >= COMPLAIN_EVERY_S:
            self._complained_s = self._clock()
            logging.getLogger(__name__).error("what is known goes on being served: %s", why)
