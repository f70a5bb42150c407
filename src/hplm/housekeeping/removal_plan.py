"""Plans what to remove from a store and what to register. `garbage_collection` carries the plans out.

An artifact that the registry does not name is one of two things:

- If the registry knows its tenant or domain, a killed job left it. It is removed, and never adopted.
- If the registry does not know its name, it is older than the registry, or its registry was lost. It is adopted, and
  never removed.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from typing import Any

from hplm.core.settings import WHOLE
from hplm.housekeeping.inventory import Card, Kind, StoreEntry
from hplm.registry.records import BaseRecord, NewDomain, NewTenant, Snapshot
from hplm.store.layout import LOCAL

# Seconds for which an interrupted command can be continued. Its checkpoints, of hours of work, are removed after that.
LOCAL_WORK_S = 14 * 86_400.0
DEFAULT_ROOT = "general"  # the root of tenants and domains that name no domain, if a base has several roots


@dataclass(frozen=True)
class Removal:
    """Files to remove: those of `retired` versions, and `leftovers` of killed processes.

    Leftovers are also uploads without a row in the registry, and scratch folders of jobs that have ended.
    """

    retired: tuple[str, ...]
    leftovers: tuple[StoreEntry, ...]


@dataclass(frozen=True)
class Finding:
    """A remark about a path of the store, or about the registry itself."""

    where: str
    what: str


@dataclass(frozen=True)
class AdoptPlan:
    """The artifacts to register, parents before children, as seen at `generation`."""

    generation: int
    bases: tuple[BaseRecord, ...] = ()
    domains: tuple[NewDomain, ...] = ()
    tenants: tuple[NewTenant, ...] = ()
    skipped: tuple[Finding, ...] = ()


def plan_removal(
    entries: Iterable[StoreEntry],
    known: Snapshot,
    collectable: Sequence[str],
    *,
    now_s: float,
    grace_s: float,
    stray_s: float,
) -> Removal:
    """Plan what may be removed now.

    Nothing that changed within `grace_s` is removed, no upload or scratch folder that changed within `stray_s`, no work of an
    interrupted command that changed within LOCAL_WORK_S, and nothing that a running job may be making.
    """
    owners = {"upload": known.uploads, "scratch": known.unfinished}

    def is_left(entry: StoreEntry) -> bool:
        if entry.kind in owners:
            # A folder that this registry never heard of may belong to a server with another registry: it gets longer.
            least_s = max(stray_s, LOCAL_WORK_S) if entry.parts[1].startswith(LOCAL) else stray_s
            is_old = entry.parts[1] in known.ended or entry.changed_s < now_s - least_s
            return is_old and entry.parts[1] not in owners[entry.kind]
        is_unused = (entry.kind == "leftover" and not entry.held) or is_interrupted(entry, known)
        return is_unused and _subject(entry) not in known.busy_subjects

    old = {entry.path: entry for entry in entries if entry.changed_s < now_s - grace_s}
    # A bank that was just built anew is in its place before its tenants are published.
    young = {entry.path for entry in entries} - old.keys()
    return Removal(tuple(path for path in collectable if path not in young), tuple(filter(is_left, old.values())))


def is_interrupted(entry: StoreEntry, known: Snapshot) -> bool:
    """Return whether a killed job left the version: the registry knows its tenant or domain, but not the version."""
    return entry.path not in known.paths and _is_named(entry, known) and not is_later(entry, known)


def is_later(entry: StoreEntry, known: Snapshot) -> bool:
    """Return whether this registry never gave the version's number: a newer registry did, and this is an older copy."""
    if entry.path in known.paths or not _is_named(entry, known):
        return False
    return entry.number > known.last_numbers[_subject(entry)]


def given_up(entries: Iterable[StoreEntry], known: Snapshot) -> list[Finding]:
    """List versions of deleted tenants and domains. An operator who puts such a folder back learns that it will go."""
    kept = {f"tenant:{name}" for names in known.tenants.values() for name in names}
    kept |= {f"domain:{domain.base}/{domain.domain}" for domain in known.domains}
    why = "the registry has its name as deleted, or as never published: `hplm store gc` removes it"
    return [
        Finding(entry.path, why)
        for entry in entries
        if is_interrupted(entry, known) and _subject(entry) not in known.busy_subjects | kept
    ]


def is_unknown(entry: StoreEntry, known: Snapshot) -> bool:
    """Return whether the entry is an artifact that could be adopted."""
    is_artifact = entry.kind not in ("leftover", "upload", "scratch")
    return is_artifact and entry.path not in known.paths and not _is_named(entry, known)


def _is_named(entry: StoreEntry, known: Snapshot) -> bool:
    """Return whether the entry is a version of a tenant or domain that the registry knows."""
    return entry.kind in ("tenant", "domain") and _subject(entry) in known.last_numbers


def _subject(entry: StoreEntry) -> str:
    """Return the subject of the jobs that make such an artifact or leave such a leftover; no job's for other kinds.

    A running job protects its leftovers by this: on a network file system another machine's lock is invisible here.
    """
    kind, *names = entry.parts
    return f"tenant:{names[0]}" if kind == "tenants" else f"{kind.removesuffix('s')}:{'/'.join(names[:2])}"


def plan_adoption(cards: Sequence[Card], known: Snapshot, *, root: str = "") -> AdoptPlan:
    """Plan how to register the artifacts of `cards`, which are all `is_unknown`.

    An artifact that names no parent stands on a root of its base: the root called `root` if given, else the only root,
    else the root called DEFAULT_ROOT.
    """
    planner = _Planner(known, root)

    def of_kind(kind: Kind) -> list[Card]:
        return [card for card in cards if card.entry.kind == kind]

    planner.add_each(of_kind("base"), planner.add_base)
    planner.add_each(of_kind("plot"), planner.add_root)
    planner.add_branches(of_kind("domain"))
    planner.add_each(of_kind("tenant"), planner.add_tenant)
    # The newest bank comes first: a tenant of several banks over one base is served from it.
    planner.add_each(sorted(of_kind("bank"), key=lambda card: -card.made_s), planner.add_bank)
    return planner.plan()


class _Unfit(Exception):
    """The reason why an artifact cannot be adopted."""


class _Planner:
    """A plan under way: what is registered or planned already, so that the next artifact can stand on it."""

    def __init__(self, known: Snapshot, root: str) -> None:
        self._generation = known.generation
        self._root = root
        self._fingerprints = {base.name: base.fingerprint for base in known.bases}
        self._paths = {domain.path for domain in known.domains}
        self._roots = {
            (domain.base, domain.domain): domain.path for domain in known.domains if domain.parent_id is None
        }
        self._branches = {(domain.base, domain.domain) for domain in known.domains if domain.parent_id is not None}
        self._last_numbers = known.last_numbers
        # The highest number that is planned for a tenant over each base.
        self._numbers: defaultdict[str, dict[str, int]] = defaultdict(dict)
        self._bases: list[BaseRecord] = []
        self._domains: list[NewDomain] = []
        self._tenants: list[NewTenant] = []
        self._skipped: list[Finding] = []

    def plan(self) -> AdoptPlan:
        """Return the plan of everything that was added."""
        parts = tuple(self._bases), tuple(self._domains), tuple(self._tenants), tuple(self._skipped)
        return AdoptPlan(self._generation, *parts)

    def add_each(self, cards: Iterable[Card], add: Callable[[Card], None]) -> None:
        """Add sound artifacts by calling `add`. Note an artifact as skipped if it is faulty, or `add` raises _Unfit."""
        for card in cards:
            try:
                if card.fault:
                    raise _Unfit(card.fault)
                add(card)
            except _Unfit as unfit:
                self._skipped.append(Finding(card.entry.path, str(unfit)))

    def add_base(self, card: Card) -> None:
        name = card.entry.parts[1]
        if name in self._fingerprints:
            raise _Unfit(f"base {name!r} is registered elsewhere")
        self._fingerprints[name] = card.base
        self._bases.append(BaseRecord(name, card.base, card.entry.path))
        if (card.about or {}).get("lower_form") == WHOLE:
            # A whole base has no tables, so its root has no folder of its own.
            self._add_root(name, DEFAULT_ROOT, card.entry.path, {})

    def add_root(self, card: Card) -> None:
        base, name, path = self._base_of(card), card.entry.parts[1], card.entry.path
        if (base, name) in self._roots or (base, name) in self._branches:
            raise _Unfit(f"domain {name!r} is registered elsewhere")
        self._add_root(base, name, path, card.about or {})

    def _add_root(self, base: str, name: str, path: str, about: dict[str, Any]) -> None:
        # A root goes with its base. If both come back, the numbers go on.
        number = 1 + self._last_numbers.get(f"domain:{base}/{name}", 0)
        self._roots[base, name] = path
        self._paths.add(path)
        self._domains.append(NewDomain(base, name, number, path, None, about))

    def add_branches(self, cards: Sequence[Card]) -> None:
        """Add versions of domains, parents before children."""
        waiting = list(cards)
        while ready := [card for card in waiting if not card.parent or card.parent in self._paths]:
            waiting = [card for card in waiting if card.parent and card.parent not in self._paths]
            self.add_each(ready, self._add_branch)
        self.add_each(waiting, self._add_branch)

    def _add_branch(self, card: Card) -> None:
        parent = self._domain_of(card)
        _, base, name, _ = card.entry.parts
        if (base, name) in self._roots:
            raise _Unfit(f"a PLOT of the same base is also called {name!r}")
        self._paths.add(card.entry.path)
        self._domains.append(NewDomain(base, name, card.entry.number, card.entry.path, parent, card.about or {}))

    def add_tenant(self, card: Card) -> None:
        name, domain = card.entry.parts[1], self._domain_of(card)
        new = NewTenant(name, card.entry.number, card.entry.path, domain, card.about or {})
        self._add_version(self._base_of(card), new)

    def _add_version(self, base: str, new: NewTenant) -> None:
        numbers = self._numbers[new.name]
        numbers[base] = max(new.number, numbers.get(base, 0))
        self._tenants.append(new)

    def add_bank(self, card: Card) -> None:
        base, numbers = self._base_of(card), self._numbers
        unknown = [name for name in card.members if f"tenant:{name}" not in self._last_numbers]
        new = [name for name in unknown if base not in numbers[name]]
        if not new:
            raise _Unfit("all its tenants are registered elsewhere")
        domain = self._domain_of(card)
        for name in new:
            number = 1 + max(numbers[name].values(), default=0)
            self._add_version(base, NewTenant(name, number, card.entry.path, domain, {}))

    def _base_of(self, card: Card) -> str:
        """Return the name of the base that an artifact was made over. Raises _Unfit if there is none."""
        names = sorted(name for name, fingerprint in self._fingerprints.items() if fingerprint == card.base)
        if card.entry.kind == "domain":
            names = [name for name in names if name == card.entry.parts[1]]
        if not names:
            raise _Unfit(f"it was made over base {card.base}, which is not in the store")
        return names[0]

    def _domain_of(self, card: Card) -> str:
        """Return the path of the domain version that an artifact stands on. Raises _Unfit if it is unclear or missing."""
        base = self._base_of(card)
        if card.parent:
            if card.parent in self._paths:
                return card.parent
            raise _Unfit(f"it stands on {card.parent}, which is not registered and cannot be registered")
        roots = {name: path for (of, name), path in self._roots.items() if of == base}
        if self._root:
            roots = {name: path for name, path in roots.items() if name == self._root}
        elif len(roots) > 1 and DEFAULT_ROOT in roots:
            roots = {DEFAULT_ROOT: roots[DEFAULT_ROOT]}
        if len(roots) != 1:
            found = f"several: {', '.join(roots)}" if roots else "none"
            raise _Unfit(f"it names no domain, and base {base!r} has {found}")
        return next(iter(roots.values()))
