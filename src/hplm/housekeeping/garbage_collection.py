"""Acting on a store: check it, remove what may go, register what is not."""

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
from hplm.housekeeping.inventory import Found, again, bank_members, look, read_card
from hplm.housekeeping.removal_plan import AdoptPlan, Removal
from hplm.registry.records import Snapshot
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import crash_point
from hplm.store import artifact
from hplm.store.artifact import Artifact
from hplm.store.layout import Store, levels

GRACE_S = 120.0  # longer than any request that may still hold what was retired
UPLOAD_S = 86_400.0
UNBEGUN_UPLOAD_S = 1_800.0  # its client has gone: the first chunk needs no longer
UNFINISHED_UPLOAD_S = 6 * 3_600.0  # what was announced counts against the room for uploads, sent or not
JOB_S = 30 * 86_400.0  # what became of a job can be asked so long


@dataclass(frozen=True)
class Problem:
    """What is wrong, and where: a path in the store, or the registry itself."""

    where: str
    what: str


@dataclass(frozen=True)
class Verdict:
    """`problems` are what requests will run into; `loose` is what nobody uses: for `gc` or `adopt`."""

    problems: tuple[Problem, ...]
    loose: tuple[Problem, ...]


@dataclass(frozen=True)
class Removed(Removal):
    """What went, expired `uploads` by id too; `stuck` is what could not be removed."""

    uploads: tuple[str, ...]
    stuck: tuple[Problem, ...]

    @property
    def count(self) -> int:
        return super().count + len(self.uploads)


def check_is_its_registry(store: Store, known: Snapshot, found: Iterable[Found]) -> None:
    """Raises MissingArtifactError where most of what the registry names is not among what was `found` in the store.

    Another store's registry has other numbers under the same names: what is served here would be removed as left over. Roots
    tell nothing where there is more, for most stores have one of the same name.
    """
    roots = {one.path for one in known.domains if one.parent_id is None}
    named = {one.path for one in known.domains} | {one.path for one in known.tenants}
    named = named - roots or roots
    missing = sorted(path for path in named - {one.path for one in found} if not store.path(path).exists())
    if 2 * len(missing) > len(named):
        raise MissingArtifactError(
            f"{len(missing):,} of {len(named):,} paths that the registry names, as {missing[0]}, are not in {store.root}: it "
            "is another store's registry (--registry, HPLM_REGISTRY), or the store is not mounted, or they are lost: "
            "`hplm store verify` lists them, put them back or delete those tenants and domains"
        )


def collect(
    store: Store, registry: Registry, now_s: float, *, grace_s: float = GRACE_S, upload_s: float = UPLOAD_S
) -> Removed:
    """Remove what nobody uses; returns what went. Killed at any point, the next call goes on.

    Raises MissingArtifactError where the registry is another store's.
    """
    found = look(store)
    known = registry.snapshot()
    check_is_its_registry(store, known, found)
    plan = removal_plan.plan_removal(
        found,
        known,
        registry.collectable(now_s - grace_s),
        now_s=now_s,
        grace_s=grace_s,
        stray_s=upload_s,
    )
    by_path = {one.path: one for one in found}
    retired, loose, stuck = [], [], []

    def removed(path: str) -> bool:
        try:
            remove(store, path)
        except OSError as error:
            # One folder that another user owns must not keep all the others.
            stuck.append(Problem(path, f"cannot be removed: {error.strerror}"))
            return False
        return True

    for path in plan.retired:
        changed = path in by_path and not again(store, by_path[path])
        # Only a bank's path is ever published again; where that was done since the plan was made, it must stay.
        published = path.startswith("banks/") and path not in registry.collectable(now_s - grace_s)
        if not changed and not published and removed(path):
            crash_point("collect.removed")
            registry.forget(path)
            crash_point("collect.forgotten")
            retired.append(path)
    for one in (*plan.leftovers, *plan.strays):
        held = one.kind == "leftover" and artifact.is_held(store.path(one.path))
        if again(store, one) and not held and removed(one.path):
            loose.append(one)
    expired = drop_expired(registry, now_s, upload_s)
    for upload_id in expired:
        removed(f"uploads/{upload_id}")
    registry.forget_jobs(now_s - JOB_S)
    return Removed(
        tuple(retired),
        tuple(one for one in loose if one.kind not in ("upload", "scratch")),
        tuple(one for one in loose if one.kind in ("upload", "scratch")),
        uploads=tuple(expired),
        stuck=tuple(stuck),
    )


def remove(store: Store, path: str) -> None:
    """Remove an artifact or upload at once for all who look, then its bytes. One that is gone already is fine."""
    target, depth = store.path(path), len(path.split("/"))
    if target.is_file():
        target.unlink()
    elif path.startswith("tenants/") and depth == 2:
        # A tenant's first version may lie in the folder that its later ones are in, or are being made in. Its manifest
        # goes last, so that what is left of it, if we are killed here, is still known for what it is.
        for name in sorted((child.name for child in _files(target)), key=lambda name: name == artifact.MANIFEST):
            (target / name).unlink(missing_ok=True)
        _remove_empty([target])
    elif target.is_dir():
        gone = target
        if not target.name.startswith("."):
            gone = target.with_name(f".{target.name}.{uuid.uuid4().hex}.old")
            with suppress(FileNotFoundError):  # two may collect at once
                target.rename(gone)
        # Two may collect at once: what the other removes meanwhile is no failure.
        while gone.is_dir():
            with suppress(FileNotFoundError):
                shutil.rmtree(gone)
    # The folder of a tenant or domain goes with its last version.
    _remove_empty(target.parents[: max(0, depth - 2)])


def adopt(store: Store, registry: Registry, now_s: float, *, root: str = "") -> AdoptPlan:
    """Register what lies in the store under names that the registry does not know; returns what was done.

    Doing it again does nothing. What was rolled back is at its newest version again: which one was served is known to the
    registry alone. Raises ConflictError where somebody publishes at the same time.
    """
    found = look(store)
    known = registry.snapshot()
    cards = [read_card(store, one) for one in found if removal_plan.is_unknown(one, known)]
    plan = removal_plan.plan_adoption(cards, known, root=root)
    plan = replace(plan, skipped=(*plan.skipped, *removal_plan.given_up(found, known)))
    if plan.bases or plan.domains or plan.tenants:
        registry.adopt(plan.generation, plan.bases, plan.domains, plan.tenants, now_s)
    return plan


def drop_expired(registry: Registry, now_s: float, upload_s: float = UPLOAD_S) -> Sequence[str]:
    """Forget uploads that have expired and that no job waits for; returns their ids."""
    return registry.drop_uploads(
        before_s=now_s - upload_s,
        unfinished_before_s=now_s - min(upload_s, UNFINISHED_UPLOAD_S),
        unbegun_before_s=now_s - min(upload_s, UNBEGUN_UPLOAD_S),
    )


def verify(store: Store, registry: Registry, now_s: float, *, grace_s: float = GRACE_S) -> Verdict:
    """Hold every file that the registry names against its manifest, and look for what it does not name.

    It may take long, and the store is in use: what came meanwhile is not looked at, what went is no problem.
    """
    # In this order: what is published between the two is known.
    found = look(store)
    known = registry.snapshot()
    problems = [Problem("registry", fault) for fault in registry.faults()]
    if broken := {one.where for one in _broken(store, known)}:
        problems += _broken(store, registry.snapshot(), only=broken)
    found = tuple(one for one in found if again(store, one))
    plan = removal_plan.plan_removal(found, known, (), now_s=now_s, grace_s=grace_s, stray_s=UPLOAD_S)
    loose = [Problem(one.path, "left over; `hplm store gc` removes it") for one in (*plan.leftovers, *plan.strays)]
    loose += [
        Problem(one.path, "not registered; `hplm store adopt` does that")
        for one in found
        if removal_plan.is_unknown(one, known)
    ]
    loose += [
        Problem(one.path, "of a registry that went on longer than this one: restore that, or remove the folder")
        for one in found
        if removal_plan.is_later(one, known)
    ]
    return Verdict(tuple(problems), tuple(loose))


def _files(folder: Path) -> list[Path]:
    return [child for child in folder.iterdir() if child.is_file()] if folder.is_dir() else []


def _remove_empty(folders: Sequence[Path]) -> None:
    for folder in folders:
        try:
            folder.rmdir()
        except OSError:  # gone, or not empty
            break


def _broken(store: Store, known: Snapshot, only: Collection[str] | None = None) -> Iterator[Problem]:
    """Files that are missing, damaged, or not what the registry takes them for; of all paths, or of `only` these."""
    fingerprints = {base.name: base.fingerprint for base in known.bases}
    checks: list[tuple[str, Callable[[Path], None]]] = [
        (base.path, partial(_check_base, fingerprint=base.fingerprint)) for base in known.bases
    ]
    for version in known.domains:
        check_of = _check_root if version.parent_id is None else partial(_check_domain, parts=("branch", "lower"))
        checks.append((version.path, partial(check_of, fingerprint=fingerprints[version.base])))
    by_path = sorted(known.tenants, key=lambda claim: claim.path)
    for path, claims in groupby(by_path, key=lambda claim: claim.path):
        check = _check_bank if path.startswith("banks/") else _check_tenant
        checks.append(
            (path, partial(check, names={claim.tenant for claim in claims}, bases=set(fingerprints.values())))
        )
    for path, run in checks:
        if only is not None and path not in only:
            continue
        try:
            run(store.path(path))
        except (ArtifactError, OSError, KeyError, TypeError) as error:
            yield Problem(path, f"{error.code}: {error}" if isinstance(error, ArtifactError) else repr(error))


def _check_base(folder: Path, fingerprint: str) -> None:
    found = artifact.read(folder, "base")
    found.verify()
    if found.fingerprint != fingerprint:
        raise WrongBaseError(f"{folder} is {found.fingerprint}, the registry says {fingerprint}")


def _check_root(folder: Path, fingerprint: str) -> None:
    _check_domain(folder, levels(artifact.read(folder / "root", "plot-table").meta.get("size", 3)), fingerprint)


def _check_domain(folder: Path, parts: Sequence[str], fingerprint: str) -> None:
    for part in parts:
        found = artifact.read(folder / part, "lower" if part == "lower" else "plot-table")
        found.verify()
        if found.meta["base"] != fingerprint:
            raise WrongBaseError(f"{folder / part} was made over {found.meta['base']}, the base is {fingerprint}")


def _check_tenant(folder: Path, names: set[str], bases: set[str]) -> None:
    found = artifact.read(folder, "tenant")
    found.verify()
    if {found.meta["name"]} != names:
        raise CorruptArtifactError(
            f"{folder} holds {found.meta['name']!r}, the registry says {', '.join(sorted(names))}"
        )
    _check_over(found, bases)


def _check_bank(folder: Path, names: set[str], bases: set[str]) -> None:
    found = artifact.read(folder, "bank")
    found.verify()
    if missing := sorted(names - set(bank_members(folder))):
        raise CorruptArtifactError(f"{folder} lacks {len(missing)} tenants: {', '.join(missing[:20])}")
    _check_over(found, bases)


def _check_over(found: Artifact, bases: set[str]) -> None:
    if found.meta["base"] not in bases:
        raise WrongBaseError(f"{found.folder} was made over base {found.meta['base']}, which is not registered")
