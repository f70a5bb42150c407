"""What to remove from a store, what to register, and what is wrong with it: plans only, `caretaker` acts on them.

An artifact that the registry does not name is one of two things. Beside a tenant or domain that the registry knows, it is
what a killed job left: it is removed, and never adopted. Under a name that the registry does not know, it comes from
before the registry, or from one that was lost: it is adopted, and never removed.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from hplm.housekeeping.inventory import Card, Found
from hplm.registry.records import BaseRecord, NewDomain, NewTenant, Snapshot

DEFAULT_ROOT = "general"  # the domain of tenants that name none, where a base has several roots


@dataclass(frozen=True)
class Removal:
    """What may go: files of `retired` versions, `leftovers` of killed processes.

    `strays` are bytes of uploads that the registry has no row of, and what jobs that have ended kept to go on from.
    """

    retired: tuple[str, ...]
    leftovers: tuple[Found, ...]
    strays: tuple[Found, ...]

    @property
    def count(self) -> int:
        """How many things went, or would go."""
        return len(self.retired) + len(self.leftovers) + len(self.strays)


@dataclass(frozen=True)
class Skipped:
    """An artifact that cannot be adopted, and why."""

    path: str
    why: str


@dataclass(frozen=True)
class AdoptPlan:
    """What to register, parents before children, as seen at `generation`."""

    generation: int
    bases: tuple[BaseRecord, ...] = ()
    domains: tuple[NewDomain, ...] = ()
    tenants: tuple[NewTenant, ...] = ()
    skipped: tuple[Skipped, ...] = ()


def plan_removal(
    found: Iterable[Found],
    known: Snapshot,
    collectable: Sequence[str],
    *,
    now_s: float,
    grace_s: float,
    stray_s: float,
) -> Removal:
    """What may go now: nothing that changed within `grace_s`, no stray that did within `stray_s`, and nothing that a running
    job may just be making.
    """
    old = {one.path: one for one in found if one.changed_s < now_s - grace_s}
    young = {one.path for one in found} - old.keys()
    leftovers = [
        one
        for one in old.values()
        if ((one.kind == "leftover" and not one.held) or is_interrupted(one, known)) and _subject(one) not in known.busy
    ]
    owners = {"upload": known.uploads, "scratch": known.unfinished}
    strays = [
        one
        for one in old.values()
        if one.kind in owners
        and one.parts[1] not in owners[one.kind]
        # What this registry never heard of may be in use by a server that has another.
        and (one.parts[1] in known.ended or one.changed_s < now_s - stray_s)
    ]
    return Removal(
        # A bank that was just built anew has its path before its tenants are published.
        retired=tuple(path for path in collectable if path not in young),
        leftovers=tuple(leftovers),
        strays=tuple(strays),
    )


def is_interrupted(one: Found, known: Snapshot) -> bool:
    """Whether it is what a killed job left: a version that the registry does not name, of what it knows."""
    return one.path not in known.paths and _is_named(one, known) and not is_later(one, known)


def is_later(one: Found, known: Snapshot) -> bool:
    """Whether its number was never given out here: it is of a registry that went on longer, this one is an older copy."""
    number = one.parts[-1]
    if one.path in known.paths or not _is_named(one, known) or not number.isdigit():
        return False
    subject = f"{one.kind}:{'/'.join(one.parts[1:-1])}"  # "tenant:" of one called by digits whose folder is its first version's
    return int(number) > known.given.get(subject, int(number))


def given_up(found: Iterable[Found], known: Snapshot) -> list[Skipped]:
    """Versions of tenants and domains that have none any more: who puts one back is told that it will not stay."""
    kept = {f"tenants/{one.tenant}" for one in known.tenants} | {
        f"domains/{one.base}/{one.domain}" for one in known.domains
    }
    why = "the registry has its name as deleted, or as never published: `hplm store gc` removes it"
    return [
        Skipped(one.path, why)
        for one in found
        if is_interrupted(one, known) and _subject(one) not in known.busy and _version_of(one) not in kept
    ]


def _version_of(one: Found) -> str:
    """The folder that a version of a tenant or domain is in, or, as a tenant's first once was, is."""
    return "/".join(one.parts[: 2 if one.kind == "tenant" else 3])


def is_unknown(one: Found, known: Snapshot) -> bool:
    """Whether it is an artifact that could be adopted."""
    artifact = one.kind not in ("leftover", "upload", "scratch")
    return artifact and one.path not in known.paths and not _is_named(one, known)


def _is_named(one: Found, known: Snapshot) -> bool:
    """Whether it is of a tenant or domain that the registry knows."""
    return one.kind in ("tenant", "domain") and _subject(one) in known.given


def plan_adoption(cards: Sequence[Card], known: Snapshot, *, root: str = "") -> AdoptPlan:
    """How to register the artifacts of `cards`, those that are `is_unknown`.

    What names no parent stands on the root of its base: the one called `root` where that is given, else the only one or
    the one called `general`.
    """
    planner = _Planner(known, root)
    by_kind: dict[str, list[Card]] = {}
    for card in cards:
        if card.fault:
            planner.skip(card, card.fault)
        else:
            by_kind.setdefault(card.found.kind, []).append(card)
    planner.add_bases(by_kind.get("base", []))
    planner.add_roots(by_kind.get("plot", []))
    planner.add_branches(by_kind.get("domain", []))
    planner.add_tenants(by_kind.get("tenant", []))
    planner.add_banks(by_kind.get("bank", []))
    return planner.plan()


class _Planner:
    """What is registered or planned so far, to hang the next artifact on."""

    def __init__(self, known: Snapshot, root: str) -> None:
        self._generation = known.generation
        self._root = root
        self._fingerprints = {base.name: base.fingerprint for base in known.bases}
        self._paths = {one.path for one in known.domains}
        self._roots = {(one.base, one.domain): one.path for one in known.domains if one.parent_id is None}
        self._named = set(known.given)
        self._bases: list[BaseRecord] = []
        self._domains: list[NewDomain] = []
        self._tenants: list[NewTenant] = []
        self._skipped: list[Skipped] = []

    def plan(self) -> AdoptPlan:
        """All that was added."""
        parts = tuple(self._bases), tuple(self._domains), tuple(self._tenants), tuple(self._skipped)
        return AdoptPlan(self._generation, *parts)

    def skip(self, card: Card, why: str) -> None:
        self._skipped.append(Skipped(card.found.path, why))

    def add_bases(self, cards: Iterable[Card]) -> None:
        for card in cards:
            name = card.found.parts[1]
            if name in self._fingerprints:
                self.skip(card, f"base {name!r} is registered elsewhere")
                continue
            self._fingerprints[name] = card.base
            self._bases.append(BaseRecord(name, card.base, card.found.path))

    def add_roots(self, cards: Iterable[Card]) -> None:
        for card in cards:
            if base := self._base_of(card):
                name, path = card.found.parts[1], card.found.path
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
                waiting[card.found.path] = card, parent
        while ready := [path for path, (_, parent) in waiting.items() if parent in self._paths]:
            for path in ready:
                card, parent = waiting.pop(path)
                _, base, name, _ = card.found.parts
                if (base, name) in self._roots:
                    self.skip(card, f"PLOT {name!r} of the same base has its name")
                    continue
                self._paths.add(path)
                self._domains.append(NewDomain(base, name, card.found.number, path, parent, card.about or {}))
        for card, parent in waiting.values():
            self.skip(card, f"it stands on {parent}, which is not registered and cannot be")

    def add_tenants(self, cards: Sequence[Card]) -> None:
        numbered = {(card.found.parts[1], card.found.number) for card in cards if len(card.found.parts) == 3}
        for card in cards:
            name, number = card.found.parts[1], card.found.number
            if len(card.found.parts) == 2 and (name, 1) in numbered:
                self.skip(card, f"its version 1 is in {card.found.path}/1")
            elif domain := self._domain_of(card):
                self._tenants.append(NewTenant(name, number, card.found.path, domain, card.about or {}))
        self._named |= {f"tenant:{one.name}" for one in self._tenants}

    def add_banks(self, cards: Iterable[Card]) -> None:
        # A tenant of several banks is served from the newest.
        for card in sorted(cards, key=lambda card: -card.made_s):
            new = [name for name in card.members if f"tenant:{name}" not in self._named]
            if not new:
                self.skip(card, "all its tenants are registered elsewhere")
            elif domain := self._domain_of(card):
                self._tenants += [NewTenant(name, 1, card.found.path, domain, {}) for name in new]
                self._named.update(f"tenant:{name}" for name in new)

    def _base_of(self, card: Card) -> str:
        """Name of the base that an artifact was made over, "" where it is not there (and the artifact is skipped)."""
        names = sorted(name for name, fingerprint in self._fingerprints.items() if fingerprint == card.base)
        if card.found.kind == "domain":
            names = [name for name in names if name == card.found.parts[1]]
        if not names:
            self.skip(card, f"it was made over base {card.base}, which is not in the store")
        return names[0] if names else ""

    def _parent_of(self, card: Card, base: str) -> str:
        """Path of the domain version that an artifact stands on, "" where it cannot be told (and it is skipped)."""
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
        """As `_parent_of`, for a tenant or bank."""
        if not (base := self._base_of(card)) or not (path := self._parent_of(card, base)):
            return ""
        if path not in self._paths:
            self.skip(card, f"its domain is {path}, which is not registered and cannot be")
            return ""
        return path


def _subject(one: Found) -> str:
    """The subject of the jobs that make such an artifact, or what is left of it; no job's where it is of another kind.

    On a network file system the lock of a folder that another machine fills is not seen here.
    """
    of_tenant = one.parts[0] == "tenants"
    return f"tenant:{one.parts[1]}" if of_tenant else f"{one.parts[0].removesuffix('s')}:{'/'.join(one.parts[1:3])}"
