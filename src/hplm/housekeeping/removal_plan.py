"""Plans what to remove from a store and what to register. `garbage_collection` carries the plans out.

An artifact that the registry does not name is one of two things:

- If the registry knows its tenant or domain, a killed job left it. It is removed, and never adopted.
- If the registry does not know its name, it is older than the registry, or its registry was lost. It is adopted, and
  never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hplm.housekeeping.inventory import Card, StoreEntry
from hplm.registry.records import BaseRecord, NewDomain, NewTenant, Snapshot

DEFAULT_ROOT = "general"  # the root of tenants and domains that name no domain, if a base has several roots


@dataclass(frozen=True)
class Removal:
    """Files to remove: those of `retired` versions, and `leftovers` of killed processes.

    `strays` are uploads without a row in the registry, and scratch folders of jobs that have ended.
    """

    retired: tuple[str, ...]
    leftovers: tuple[StoreEntry, ...]
    strays: tuple[StoreEntry, ...]

    @property
    def count(self) -> int:
        """The number of things to remove."""
        return len(self.retired) + len(self.leftovers) + len(self.strays)


@dataclass(frozen=True)
class Skipped:
    """An artifact that cannot be adopted, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class AdoptPlan:
    """The artifacts to register, parents before children, as seen at `generation`."""

    generation: int
    bases: tuple[BaseRecord, ...] = ()
    domains: tuple[NewDomain, ...] = ()
    tenants: tuple[NewTenant, ...] = ()
    skipped: tuple[Skipped, ...] = ()


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

    Nothing that changed within `grace_s` is removed, no stray that changed within `stray_s`, and nothing that a running
    job may be making.
    """
    old = {entry.path: entry for entry in entries if entry.changed_s < now_s - grace_s}
    young = {entry.path for entry in entries} - old.keys()
    leftovers = [
        entry
        for entry in old.values()
        if ((entry.kind == "leftover" and not entry.held) or is_interrupted(entry, known))
        and _subject(entry) not in known.busy_subjects
    ]
    owners = {"upload": known.uploads, "scratch": known.unfinished}
    strays = [
        entry
        for entry in old.values()
        if entry.kind in owners
        and entry.parts[1] not in owners[entry.kind]
        # A stray that this registry never heard of may belong to a server with another registry: it gets longer.
        and (entry.parts[1] in known.ended or entry.changed_s < now_s - stray_s)
    ]
    return Removal(
        # A bank that was just built anew is in its place before its tenants are published.
        retired=tuple(path for path in collectable if path not in young),
        leftovers=tuple(leftovers),
        strays=tuple(strays),
    )


def is_interrupted(entry: StoreEntry, known: Snapshot) -> bool:
    """Return whether a killed job left the version: the registry knows its tenant or domain, but not the version."""
    return entry.path not in known.paths and _is_named(entry, known) and not is_later(entry, known)


def is_later(entry: StoreEntry, known: Snapshot) -> bool:
    """Return whether this registry never gave the version's number: a newer registry did, and this is an older copy."""
    if entry.path in known.paths or not _is_named(entry, known):
        return False
    return entry.number > known.last_numbers[_subject(entry)]


def given_up(entries: Iterable[StoreEntry], known: Snapshot) -> list[Skipped]:
    """List versions of deleted tenants and domains. An operator who puts such a folder back learns that it will go."""
    kept = {f"tenant:{tenant.tenant}" for tenant in known.tenants}
    kept |= {f"domain:{domain.base}/{domain.domain}" for domain in known.domains}
    why = "the registry has its name as deleted, or as never published: `hplm store gc` removes it"
    return [
        Skipped(entry.path, why)
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
    by_kind: dict[str, list[Card]] = {}
    for card in cards:
        if card.fault:
            planner.skip(card, card.fault)
        else:
            by_kind.setdefault(card.entry.kind, []).append(card)
    planner.add_bases(by_kind.get("base", []))
    planner.add_roots(by_kind.get("plot", []))
    planner.add_branches(by_kind.get("domain", []))
    planner.add_tenants(by_kind.get("tenant", []))
    planner.add_banks(by_kind.get("bank", []))
    return planner.plan()


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
        self._named = set(known.last_numbers)  # subjects that have a name in the registry or in the plan
        self._bases: list[BaseRecord] = []
        self._domains: list[NewDomain] = []
        self._tenants: list[NewTenant] = []
        self._skipped: list[Skipped] = []

    def plan(self) -> AdoptPlan:
        """Return the plan of everything that was added."""
        parts = tuple(self._bases), tuple(self._domains), tuple(self._tenants), tuple(self._skipped)
        return AdoptPlan(self._generation, *parts)

    def skip(self, card: Card, why: str) -> None:
        self._skipped.append(Skipped(card.entry.path, why))

    def add_bases(self, cards: Iterable[Card]) -> None:
        for card in cards:
            name = card.entry.parts[1]
            if name in self._fingerprints:
                self.skip(card, f"base {name!r} is registered elsewhere")
                continue
            self._fingerprints[name] = card.base
            self._bases.append(BaseRecord(name, card.base, card.entry.path))

    def add_roots(self, cards: Iterable[Card]) -> None:
        for card in cards:
            if base := self._base_of(card):
                name, path = card.entry.parts[1], card.entry.path
                if (subject := f"domain:{base}/{name}") in self._named:
                    self.skip(card, f"domain {name!r} is registered elsewhere")
                    continue
                self._roots[base, name] = path
                self._named.add(subject)
                self._paths.add(path)
                self._domains.append(NewDomain(base, name, 1, path, None, card.about or {}))

    def add_branches(self, cards: Iterable[Card]) -> None:
        waiting: dict[str, tuple[Card, str]] = {}
        for card in cards:
            if (base := self._base_of(card)) and (parent := self._parent_of(card, base)):
                waiting[card.entry.path] = card, parent
        while ready := [path for path, (_, parent) in waiting.items() if parent in self._paths]:
            for path in ready:
                card, parent = waiting.pop(path)
                _, base, name, _ = card.entry.parts
                if (base, name) in self._roots:
                    self.skip(card, f"a PLOT of the same base is also called {name!r}")
                    continue
                self._paths.add(path)
                self._domains.append(NewDomain(base, name, card.entry.number, path, parent, card.about or {}))
        for card, parent in waiting.values():
            self.skip(card, f"it stands on {parent}, which is not registered and cannot be registered")

    def add_tenants(self, cards: Sequence[Card]) -> None:
        for card in cards:
            if domain := self._domain_of(card):
                name, number = card.entry.parts[1], card.entry.number
                self._tenants.append(NewTenant(name, number, card.entry.path, domain, card.about or {}))
        self._named |= {f"tenant:{tenant.name}" for tenant in self._tenants}

    def add_banks(self, cards: Iterable[Card]) -> None:
        # The newest bank comes first: a tenant of several banks is served from it.
        for card in sorted(cards, key=lambda card: -card.made_s):
            new = [name for name in card.members if f"tenant:{name}" not in self._named]
            if not new:
                self.skip(card, "all its tenants are registered elsewhere")
            elif domain := self._domain_of(card):
                self._tenants += [NewTenant(name, 1, card.entry.path, domain, {}) for name in new]
                self._named.update(f"tenant:{name}" for name in new)

    def _base_of(self, card: Card) -> str:
        """Return the name of the base that an artifact was made over; skip the artifact and return "" if there is none."""
        names = sorted(name for name, fingerprint in self._fingerprints.items() if fingerprint == card.base)
        if card.entry.kind == "domain":
            names = [name for name in names if name == card.entry.parts[1]]
        if not names:
            self.skip(card, f"it was made over base {card.base}, which is not in the store")
        return names[0] if names else ""

    def _parent_of(self, card: Card, base: str) -> str:
        """Return the path of the domain version that an artifact stands on; skip the artifact and return "" if unclear."""
        if card.parent:
            return card.parent
        roots = {name: path for (of, name), path in self._roots.items() if of == base}
        if self._root:
            roots = {name: path for name, path in roots.items() if name == self._root}
        elif len(roots) > 1 and DEFAULT_ROOT in roots:
            roots = {DEFAULT_ROOT: roots[DEFAULT_ROOT]}
        if len(roots) == 1:
            return next(iter(roots.values()))
        self.skip(
            card, f"it names no domain, and base {base!r} has " + (f"several: {', '.join(roots)}" if roots else "none")
        )
        return ""

    def _domain_of(self, card: Card) -> str:
        """Return the path of the domain version of a tenant or bank; skip it and return "" if there is none."""
        if not (base := self._base_of(card)) or not (path := self._parent_of(card, base)):
            return ""
        if path not in self._paths:
            self.skip(card, f"its domain is {path}, which is not registered and cannot be registered")
            return ""
        return path
