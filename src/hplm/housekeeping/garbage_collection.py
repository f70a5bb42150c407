"""Checks a store, removes files that are no longer used, and registers artifacts that the registry does not know."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Collection, Iterable, Iterator, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, replace
from pathlib import Path

from hplm.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, WrongBaseError
from hplm.housekeeping import removal_plan
from hplm.housekeeping.inventory import (
    Kind,
    StoreEntry,
    bank_members,
    is_unchanged,
    list_entries,
    read_card,
    read_parts,
)
from hplm.housekeeping.removal_plan import AdoptPlan, Finding
from hplm.registry.records import Snapshot
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store import artifact
from hplm.store.cascade_outputs import read_outputs
from hplm.store.layout import Store

GRACE_S = 120.0  # seconds that retired files stay: longer than any request takes
UPLOAD_S = 86_400.0  # age at which an upload expires that no job waits for
UNBEGUN_UPLOAD_S = 1_800.0  # age at which an upload without its first chunk expires: its client has gone
UNFINISHED_UPLOAD_S = 6 * 3_600.0  # age at which an unfinished upload expires: its size is reserved
# Seconds after the end of its lease at which a local job counts as killed, whatever the clock did.
LOST_LOCAL_JOB_S = 3_600.0
# Paths under which another artifact may be built and published later. The path of a version of a domain or tenant is used once.
PUBLISHED_AGAIN = ("banks/", "bases/", "plots/")
# Of these, the paths that are registered only when the first tenant or domain stands on the artifact, maybe hours later.
REGISTERED_LATE = ("bases/", "plots/")
JOB_S = 30 * 86_400.0  # seconds that the record of a job stays after the job's end


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`: `problems` will make requests fail, `loose` files are unused and are for `gc` or `adopt`."""

    problems: tuple[Finding, ...]
    loose: tuple[Finding, ...]


@dataclass(frozen=True)
class Removed:
    """The files that were `removed`, and why. `stuck` files could not be removed."""

    removed: tuple[Finding, ...]
    stuck: tuple[Finding, ...]


def check_is_its_registry(store: Store, known: Snapshot, entries: Iterable[StoreEntry]) -> None:
    """Raise MissingArtifactError if most of the paths that the registry names are not among the store's `entries`.

    Another store's registry has other numbers under the same names: served files would be removed as leftovers. Roots
    count only if the registry names nothing else, because most stores have a root of the same name.
    """
    roots = {domain.path for domain in known.domains if domain.parent_id is None}
    named = {domain.path for domain in known.domains} | known.tenants.keys()
    named = named - roots or roots
    missing = sorted(path for path in named - {entry.path for entry in entries} if not store.path(path).exists())
    if 2 * len(missing) > len(named):
        raise MissingArtifactError(
            f"{len(missing):,} of {len(named):,} paths that the registry names, as {missing[0]}, are not in {store.root}: it "
            "is another store's registry (--registry, HPLM_REGISTRY), or the store is not mounted, or the files are lost: "
            "`hplm store verify` lists them, put them back or delete those tenants and domains"
        )


def collect(
    store: Store, registry: Registry, now_s: float, *, grace_s: float = GRACE_S, upload_s: float = UPLOAD_S
) -> Removed:
    """Remove files that are no longer used, and return what was removed. If this is killed, the next call continues.

    Raises MissingArtifactError if the registry belongs to another store.
    """
    entries = list_entries(store)
    # The leftovers of a command that was killed are removed only when its job has ended.
    registry.end_lost_local_jobs(now_s - LOST_LOCAL_JOB_S, now_s)
    known = registry.snapshot()
    check_is_its_registry(store, known, entries)
    collectable = registry.collectable(now_s - grace_s)
    plan = removal_plan.plan_removal(entries, known, collectable, now_s=now_s, grace_s=grace_s, stray_s=upload_s)
    by_path = {entry.path: entry for entry in entries}
    removed: list[Finding] = []
    stuck: list[Finding] = []

    def try_remove(path: str, why: str) -> bool:
        try:
            remove(store, path)
        except OSError as error:
            # One folder that another user owns must not keep the other folders from being removed.
            stuck.append(Finding(path, f"cannot be removed: {error.strerror}"))
            return False
        removed.append(Finding(path, why))
        return True

    for path in plan.retired:
        is_new = path in by_path and not is_unchanged(store, by_path[path])
        # If such a path was published again after the plan was made, its files must stay.
        is_published = path.startswith(PUBLISHED_AGAIN) and path not in registry.collectable(now_s - grace_s)
        # A base that was built again under the name of a deleted base is not the retired base.
        is_rebuilt = (
            path in by_path
            and path.startswith(REGISTERED_LATE)
            and by_path[path].changed_s > registry.last_retired_s(path)
        )
        if not (is_new or is_published or is_rebuilt) and try_remove(path, "retired"):
            crash_point("collect.removed")
            registry.forget(path)
            crash_point("collect.forgotten")
    for entry in plan.leftovers:
        is_held = entry.kind == "leftover" and artifact.is_held(store.path(entry.path))
        if is_unchanged(store, entry) and not is_held:
            try_remove(entry.path, "left over")
    for upload_id in drop_expired(registry, now_s, upload_s):
        try_remove(f"uploads/{upload_id}", "not used in time")
    registry.forget_jobs(now_s - JOB_S)
    return Removed(tuple(removed), tuple(stuck))


def remove(store: Store, path: str) -> None:
    """Remove an artifact or upload: at once for all readers, then its bytes. Does nothing if it is gone already."""
    target, depth = store.path(path), len(path.split("/"))
    if target.is_file():
        target.unlink()
    elif target.is_dir():
        renamed = target
        if not target.name.startswith("."):
            renamed = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old")
            with suppress(FileNotFoundError):  # another process may collect at the same time
                target.rename(renamed)
        # What another process removes at the same time is no failure.
        while renamed.is_dir():
            with suppress(FileNotFoundError):
                shutil.rmtree(renamed)
    # The folder of a tenant or domain goes with its last version.
    for folder in target.parents[: max(0, depth - 2)]:
        try:
            folder.rmdir()
        except OSError:  # gone, or not empty
            break


def adopt(store: Store, registry: Registry, now_s: float, *, root: str = "") -> AdoptPlan:
    """Register artifacts under names that the registry does not know; return what was done. Doing it again does nothing.

    Each tenant and domain is at its newest version, even one that was rolled back: only the registry knew the served
    version. Raises ConflictError if another process publishes at the same time.
    """
    entries = list_entries(store)
    known = registry.snapshot()
    cards = [read_card(store, entry) for entry in entries if removal_plan.is_unknown(entry, known)]
    plan = removal_plan.plan_adoption(cards, known, root=root)
    plan = replace(plan, skipped=(*plan.skipped, *removal_plan.given_up(entries, known)))
    if plan.bases or plan.domains or plan.tenants:
        registry.adopt(plan.generation, plan.bases, plan.domains, plan.tenants, now_s)
    return plan


def drop_expired(registry: Registry, now_s: float, upload_s: float = UPLOAD_S) -> Sequence[str]:
    """Delete the rows of expired uploads that no job waits for; return their ids."""
    return registry.drop_uploads(
        before_s=now_s - upload_s,
        unfinished_before_s=now_s - min(upload_s, UNFINISHED_UPLOAD_S),
        unbegun_before_s=now_s - min(upload_s, UNBEGUN_UPLOAD_S),
    )


def drop_uploads(store: Store, registry: Registry, ids: Collection[str]) -> None:
    """Drop uploads that were used or can never be used, except those that another job waits for."""
    if ids:
        remove_uploads(store, registry.drop_uploads(ids=ids))


def remove_uploads(store: Store, ids: Iterable[str]) -> None:
    """Remove the bytes of uploads whose rows are gone. Bytes that stay, because the disk refuses, are collected later."""
    for upload_id in ids:
        with suppress(OSError):
            remove(store, f"uploads/{upload_id}")


def verify(store: Store, registry: Registry, now_s: float, *, grace_s: float = GRACE_S) -> Verdict:
    """Check every file that the registry names against its manifest, and list files that the registry does not name.

    This may take long while the store is in use: files that come meanwhile are not checked, and files that go are no
    problem.
    """
    # In this order: a version that is published between the two is in the snapshot.
    entries = list_entries(store)
    known = registry.snapshot()
    problems = [Finding("registry", fault) for fault in registry.faults()]
    if broken := {problem.where for problem in _broken(store, known)}:
        problems += _broken(store, registry.snapshot(), only=broken)
    entries = tuple(entry for entry in entries if is_unchanged(store, entry))
    plan = removal_plan.plan_removal(entries, known, (), now_s=now_s, grace_s=grace_s, stray_s=UPLOAD_S)
    loose = [Finding(entry.path, "left over; `hplm store gc` removes it") for entry in plan.leftovers]
    for entry in entries:
        if removal_plan.is_unknown(entry, known):
            loose.append(Finding(entry.path, "not registered; `hplm store adopt` registers it"))
        elif removal_plan.is_later(entry, known):
            what = "made under a newer registry than this one: restore that registry, or remove the folder"
            loose.append(Finding(entry.path, what))
    return Verdict(tuple(problems), tuple(loose))


def _broken(store: Store, known: Snapshot, only: Collection[str] | None = None) -> Iterator[Finding]:
    """Yield files that are missing, damaged, or not what the registry says; of all paths, or `only` of these."""
    fingerprints = {base.name: base.fingerprint for base in known.bases}
    checks: list[tuple[str, Kind, Set[str], Set[str]]] = [
        (base.path, "base", {base.fingerprint}, frozenset()) for base in known.bases
    ]
    of_bases = {path for path, *_ in checks}
    for version in known.domains:
        if version.path in of_bases:
            # The root of a whole base has no files but the base's.
            continue
        kind: Kind = "plot" if version.parent_id is None else "domain"
        checks.append((version.path, kind, {fingerprints[version.base]}, frozenset()))
    for path, names in sorted(known.tenants.items()):
        kind = "bank" if path.startswith("banks/") else "tenant"
        checks.append((path, kind, set(fingerprints.values()), names))
    for path, kind, bases, names in checks:
        if only is not None and path not in only:
            continue
        try:
            _check(store.path(path), kind, bases, names)
        except (ArtifactError, OSError, KeyError, TypeError) as error:
            yield Finding(path, f"{error.code}: {error}" if isinstance(error, ArtifactError) else repr(error))


def _check(folder: Path, kind: Kind, bases: Set[str], names: Set[str]) -> None:
    """Check the files of an artifact: checksums, one of the fingerprints `bases`, and the `names` of its tenants."""
    for opened in read_parts(folder, kind):
        opened.verify()
        base = opened.fingerprint if kind == "base" else opened.meta["base"]
        if base not in bases:
            raise WrongBaseError(f"{opened.folder} is of base {base}, the registry says {', '.join(sorted(bases))}")
        if kind == "tenant" and {opened.meta["name"]} != names:
            raise CorruptArtifactError(
                f"{folder} holds {opened.meta['name']!r}, the registry says {', '.join(sorted(names))}"
            )
    if kind == "tenant" and (outputs := read_outputs(folder)) is not None:
        outputs.verify()
    if kind == "bank" and (missing := sorted(names - set(bank_members(folder)))):
        raise CorruptArtifactError(f"{folder} lacks {len(missing)} tenants: {', '.join(missing[:20])}")
