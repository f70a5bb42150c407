"""Checks a store, removes files that are no longer used, and registers artifacts that the registry does not know."""

from __future__ import annotations

import shutil
import uuid
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby
from pathlib import Path

from hplm.errors import ArtifactError, CorruptArtifactError, MissingArtifactError, WrongBaseError
from hplm.housekeeping import removal_plan
from hplm.housekeeping.inventory import StoreEntry, bank_members, is_unchanged, list_entries, read_card
from hplm.housekeeping.removal_plan import AdoptPlan, Removal
from hplm.registry.records import Snapshot
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store import artifact
from hplm.store.artifact import Artifact
from hplm.store.layout import Store, levels

GRACE_S = 120.0  # seconds that retired files stay: longer than any request takes
UPLOAD_S = 86_400.0  # age at which an upload expires that no job waits for
UNBEGUN_UPLOAD_S = 1_800.0  # age at which an upload without its first chunk expires: its client has gone
UNFINISHED_UPLOAD_S = 6 * 3_600.0  # age at which an unfinished upload expires: its size is reserved
LOST_LOCAL_JOB_S = (
    3_600.0  # seconds after the end of its lease at which a local job counts as killed, whatever the clock did
)
JOB_S = 30 * 86_400.0  # seconds that the record of a job stays after the job's end


@dataclass(frozen=True)
class Problem:
    """A fault, and where it is: at a path of the store, or in the registry itself."""

    where: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """The result of `verify`: `problems` will make requests fail, `loose` files are unused and are for `gc` or `adopt`."""

    problems: tuple[Problem, ...]
    loose: tuple[Problem, ...]


@dataclass(frozen=True)
class Removed(Removal):
    """The files that were removed, with the ids of expired `uploads`. `stuck` could not be removed."""

    uploads: tuple[str, ...]
    stuck: tuple[Problem, ...]

    @property
    def count(self) -> int:
        return super().count + len(self.uploads)


def check_is_its_registry(store: Store, known: Snapshot, entries: Iterable[StoreEntry]) -> None:
    """Raise MissingArtifactError if most of the paths that the registry names are not among the store's `entries`.

    Another store's registry has other numbers under the same names: served files would be removed as leftovers. Roots
    count only if the registry names nothing else, because most stores have a root of the same name.
    """
    roots = {domain.path for domain in known.domains if domain.parent_id is None}
    named = {domain.path for domain in known.domains} | {tenant.path for tenant in known.tenants}
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
    plan = removal_plan.plan_removal(
        entries,
        known,
        registry.collectable(now_s - grace_s),
        now_s=now_s,
        grace_s=grace_s,
        stray_s=upload_s,
    )
    by_path = {entry.path: entry for entry in entries}
    retired, loose, stuck = [], [], []

    def try_remove(path: str) -> bool:
        try:
            remove(store, path)
        except OSError as error:
            # One folder that another user owns must not keep the other folders from being removed.
            stuck.append(Problem(path, f"cannot be removed: {error.strerror}"))
            return False
        return True

    for path in plan.retired:
        is_new = path in by_path and not is_unchanged(store, by_path[path])
        # Only a bank's path is ever published again. If that happened after the plan was made, the bank must stay.
        is_published = path.startswith("banks/") and path not in registry.collectable(now_s - grace_s)
        if not is_new and not is_published and try_remove(path):
            crash_point("collect.removed")
            registry.forget(path)
            crash_point("collect.forgotten")
            retired.append(path)
    for entry in (*plan.leftovers, *plan.strays):
        is_held = entry.kind == "leftover" and artifact.is_held(store.path(entry.path))
        if is_unchanged(store, entry) and not is_held and try_remove(entry.path):
            loose.append(entry)
    expired = drop_expired(registry, now_s, upload_s)
    for upload_id in expired:
        try_remove(f"uploads/{upload_id}")
    registry.forget_jobs(now_s - JOB_S)
    return Removed(
        tuple(retired),
        tuple(entry for entry in loose if entry.kind not in ("upload", "scratch")),
        tuple(entry for entry in loose if entry.kind in ("upload", "scratch")),
        uploads=tuple(expired),
        stuck=tuple(stuck),
    )


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
    problems = [Problem("registry", fault) for fault in registry.faults()]
    if broken := {problem.where for problem in _broken(store, known)}:
        problems += _broken(store, registry.snapshot(), only=broken)
    entries = tuple(entry for entry in entries if is_unchanged(store, entry))
    plan = removal_plan.plan_removal(entries, known, (), now_s=now_s, grace_s=grace_s, stray_s=UPLOAD_S)
    loose = [Problem(entry.path, "left over; `hplm store gc` removes it") for entry in (*plan.leftovers, *plan.strays)]
    loose += [
        Problem(entry.path, "not registered; `hplm store adopt` registers it")
        for entry in entries
        if removal_plan.is_unknown(entry, known)
    ]
    loose += [
        Problem(entry.path, "made under a newer registry than this one: restore that registry, or remove the folder")
        for entry in entries
        if removal_plan.is_later(entry, known)
    ]
    return Verdict(tuple(problems), tuple(loose))


def _broken(store: Store, known: Snapshot, only: Collection[str] | None = None) -> Iterator[Problem]:
    """Yield files that are missing, damaged, or not what the registry says; of all paths, or `only` of these."""
    fingerprints = {base.name: base.fingerprint for base in known.bases}
    checks: list[tuple[str, Callable[[Path], None]]] = [
        (base.path, partial(_check_base, fingerprint=base.fingerprint)) for base in known.bases
    ]
    for version in known.domains:
        check_of = _check_root if version.parent_id is None else partial(_check_domain, parts=("branch", "lower"))
        checks.append((version.path, partial(check_of, fingerprint=fingerprints[version.base])))
    by_path = sorted(known.tenants, key=lambda tenant: tenant.path)
    for path, group in groupby(by_path, key=lambda tenant: tenant.path):
        check = _check_bank if path.startswith("banks/") else _check_tenant
        names = {tenant.tenant for tenant in group}
        checks.append((path, partial(check, names=names, bases=set(fingerprints.values()))))
    for path, run in checks:
        if only is not None and path not in only:
            continue
        try:
            run(store.path(path))
        except (ArtifactError, OSError, KeyError, TypeError) as error:
            yield Problem(path, f"{error.code}: {error}" if isinstance(error, ArtifactError) else repr(error))


def _check_base(folder: Path, fingerprint: str) -> None:
    opened = artifact.read(folder, "base")
    opened.verify()
    if opened.fingerprint != fingerprint:
        raise WrongBaseError(f"{folder} is {opened.fingerprint}, the registry says {fingerprint}")


def _check_root(folder: Path, fingerprint: str) -> None:
    _check_domain(folder, levels(artifact.read(folder / "root", "plot-table").meta["size"]), fingerprint)


def _check_domain(folder: Path, parts: Sequence[str], fingerprint: str) -> None:
    for part in parts:
        opened = artifact.read(folder / part, "lower" if part == "lower" else "plot-table")
        opened.verify()
        if opened.meta["base"] != fingerprint:
            raise WrongBaseError(f"{folder / part} was made over {opened.meta['base']}, the base is {fingerprint}")


def _check_tenant(folder: Path, names: set[str], bases: set[str]) -> None:
    opened = artifact.read(folder, "tenant")
    opened.verify()
    if {opened.meta["name"]} != names:
        raise CorruptArtifactError(
            f"{folder} holds {opened.meta['name']!r}, the registry says {', '.join(sorted(names))}"
        )
    _check_over(opened, bases)


def _check_bank(folder: Path, names: set[str], bases: set[str]) -> None:
    opened = artifact.read(folder, "bank")
    opened.verify()
    if missing := sorted(names - set(bank_members(folder))):
        raise CorruptArtifactError(f"{folder} lacks {len(missing)} tenants: {', '.join(missing[:20])}")
    _check_over(opened, bases)


def _check_over(opened: Artifact, bases: set[str]) -> None:
    if opened.meta["base"] not in bases:
        raise WrongBaseError(f"{opened.folder} was made over base {opened.meta['base']}, which is not registered")
