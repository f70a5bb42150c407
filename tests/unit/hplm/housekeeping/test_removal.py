"""What is found in a store, and what is removed from it."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from dataclasses import replace
from pathlib import Path

import pytest

from hplm.adapters import bank_file
from hplm.adapters import tenant as tenants
from hplm.errors import MissingArtifactError
from hplm.housekeeping import garbage_collection
from hplm.housekeeping.garbage_collection import Removed
from hplm.housekeeping.inventory import StoreEntry, list_entries
from hplm.housekeeping.removal_plan import Finding, Removal, plan_removal
from hplm.models import base_folder
from hplm.plot import table
from hplm.registry.records import DomainVersion, Snapshot
from hplm.registry.registry import Registry
from hplm.store import domain_version
from hplm.store.layout import Store
from tests.unit.hplm.housekeeping.stores import NOTHING, found, paths, publish
from tests.unit.hplm.registry.making import NOW_S, publish_root, put, put_bank, put_domain, put_plot, put_tenant

GRACE_S = 120.0
NOTHING_TO_REMOVE = Removal((), ())
STRAY_S = 86_400.0


def collect(store: Store, registry: Registry, after_s: float = GRACE_S + 1) -> Removed:
    """As if `after_s` had gone by since the files were written."""
    return garbage_collection.collect(store, registry, time.time() + after_s, grace_s=GRACE_S)


def planned(*what: StoreEntry, known: Snapshot = NOTHING, collectable: tuple[str, ...] = ()) -> Removal:
    return plan_removal(what, known, collectable, now_s=NOW_S, grace_s=GRACE_S, stray_s=STRAY_S)


def test_the_kinds_are_those_that_the_artifacts_are_published_as() -> None:
    assert (
        *("base", "plot-table", "lower"),
        *("tenant", "bank"),
    ) == (base_folder.KIND, table.KIND, domain_version.LOWER_KIND, tenants.KIND, bank_file.KIND)


def test_everything_in_a_store_is_found_in_its_place(store: Store, base: str) -> None:
    put_domain(store, "domains/b/law/2", base)
    for path in ("tenants/old/1", "tenants/old/2", "tenants/new/1"):
        put_tenant(store, path, base)
    put_bank(store, "fleet", base, ["a"])
    store.upload("1f").mkdir(parents=True)
    for place in ("bases", "plots/general", "domains/b/law", "tenants/new", "banks"):
        (store.root / place / f".x.{'0' * 32}.partial").mkdir()
    (store.root / "tenants" / "notes.txt").touch()
    (store.root / "tenants" / "new" / "mine").mkdir()
    assert sorted((one.kind, one.path) for one in list_entries(store) if one.kind != "leftover") == [
        ("bank", "banks/fleet"),
        ("base", "bases/b"),
        ("domain", "domains/b/law/2"),
        ("plot", "plots/general"),
        ("tenant", "tenants/new/1"),
        ("tenant", "tenants/old/1"),
        ("tenant", "tenants/old/2"),
        ("upload", "uploads/1f"),
    ]
    assert sum(one.kind == "leftover" for one in list_entries(store)) == 5


def test_leftovers_go_when_they_are_old_and_nobody_fills_them() -> None:
    old = found("tenants/a/.1.x.partial", "leftover")
    assert planned(old).leftovers == (old,)
    assert planned(found("tenants/t", "leftover", age_s=60)) == NOTHING_TO_REMOVE
    assert planned(found("tenants/t", "leftover", held=True)) == NOTHING_TO_REMOVE
    # Another machine's lock is not seen on every file system, its job is.
    busy = replace(NOTHING, busy_subjects=frozenset({"tenant:a"}))
    assert planned(old, known=busy) == NOTHING_TO_REMOVE
    assert len(planned(found("tenants/b/.1.x.partial", "leftover"), known=busy).leftovers) == 1


def test_versions_without_a_row_go_only_where_their_name_has_one() -> None:
    known = replace(NOTHING, last_numbers={"tenant:a": 3, "domain:b/law": 3})
    tenant, domain = found("tenants/a/3", "tenant"), found("domains/b/law/3", "domain")
    others = (
        found("tenants/x/1", "tenant"),
        found("domains/c/law/1", "domain"),
        found("bases/b", "base"),
        found("plots/p", "plot"),
        found("banks/f", "bank"),
    )
    assert planned(tenant, domain, *others, known=known).leftovers == (tenant, domain)
    assert (
        planned(tenant, domain, known=replace(known, paths=frozenset({tenant.path, domain.path}))) == NOTHING_TO_REMOVE
    )
    busy = replace(known, busy_subjects=frozenset({"tenant:a", "domain:b/law"}))
    assert planned(tenant, domain, known=busy) == NOTHING_TO_REMOVE


def test_files_of_retired_versions_go_unless_something_new_has_their_path() -> None:
    assert planned(found("banks/f", "bank"), collectable=("banks/f", "gone")).retired == ("banks/f", "gone")
    assert planned(found("banks/f", "bank", age_s=5), collectable=("banks/f",)).retired == ()


def test_uploads_without_a_row_go() -> None:
    stray = found("uploads/x", "upload", STRAY_S + 1)
    # A younger one may be of a server that has another registry.
    young = found("uploads/z", "upload", STRAY_S - 1)
    assert planned(
        stray, young, found("uploads/y", "upload", STRAY_S + 1), known=replace(NOTHING, uploads=frozenset("y"))
    ).leftovers == (stray,)


def test_retired_versions_are_removed_after_the_grace_and_live_ones_never(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    old, live = publish(store, registry, base, "films"), publish(store, registry, base, "films", 1)
    gone = publish(store, registry, base, "books")
    now_s = time.time()
    registry.retire(1, now_s, base="b")
    registry.delete_tenant("books", now_s)
    assert collect(store, registry, GRACE_S - 60).removed == ()
    assert set(collect(store, registry).removed) == {Finding(old, "retired"), Finding(gone, "retired")}
    assert paths(store) == {"bases/b", "plots/general", live}
    assert registry.snapshot().paths == {"bases/b", "plots/general", live}
    assert not (store.root / "tenants" / "books").exists()
    assert collect(store, registry).removed == ()
    assert garbage_collection.verify(store, registry, now_s).problems == ()


def test_what_killed_processes_left_is_removed_and_what_a_living_one_fills_is_not(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    publish(store, registry, base, "films")
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom hplm.store import artifact\n"
        "with artifact.replacing(Path(sys.argv[1])) as partial:\n"
        "    (partial / 'half').touch()\n    print('ready', flush=True)\n    time.sleep(600)\n"
    )
    folder = store.tenant_version("films", 2)
    with subprocess.Popen([sys.executable, "-c", code, str(folder)], stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        assert process.stdout.readline() == "ready\n"
        assert collect(store, registry).removed == ()
        process.kill()
    (left,) = collect(store, registry).removed
    assert left.what == "left over"
    assert paths(store) == {"bases/b", "plots/general", "tenants/films/1"}


def test_a_version_that_was_placed_and_not_published_is_removed_once_no_job_makes_it(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    job = registry.submit_job("tenant.create", "tenant:films", {}, NOW_S)
    registry.claim_job("w", NOW_S, 30.0)
    registry.next_number("films")
    put_tenant(store, "tenants/films/1", base)
    assert collect(store, registry).removed == ()
    registry.finish_job(job.id, "w", NOW_S, cancelled=True)
    assert collect(store, registry).removed == (Finding("tenants/films/1", "left over"),)
    assert not (store.root / "tenants" / "films").exists()


def test_leftovers_of_a_command_that_was_killed_go_once_its_job_counts_as_lost(
    store: Store, registry: Registry
) -> None:
    lease_s, began_s = 30.0, time.time()
    job = registry.start_local_job("tenant.create", "tenant:acme", {"dry_run": False}, "killed", began_s, lease_s)
    leftover = store.root / "tenants" / "acme" / f".1.{'0' * 32}.partial"
    leftover.mkdir(parents=True)
    lost_after_s = lease_s + garbage_collection.LOST_LOCAL_JOB_S
    garbage_collection.collect(store, registry, began_s + lost_after_s - 1, grace_s=GRACE_S)
    assert (leftover.exists(), registry.job(job.id).state) == (True, "running")
    garbage_collection.collect(store, registry, began_s + lost_after_s + 1, grace_s=GRACE_S)
    assert (leftover.exists(), registry.job(job.id).state) == (False, "failed")


@pytest.mark.parametrize("end", ["queued", "cancelled"])
def test_what_a_registry_that_is_an_older_copy_knows_from_a_job_alone_is_adopted_and_never_removed(
    store: Store, registry: Registry, base: str, root: DomainVersion, end: str
) -> None:
    job = registry.submit_job("tenant.create", "tenant:films", {}, NOW_S)
    if end == "cancelled":
        registry.cancel_job(job.id, NOW_S)
    put_tenant(store, "tenants/films/1", base)
    assert collect(store, registry).removed == ()
    garbage_collection.adopt(store, registry, NOW_S)
    assert registry.snapshot().tenants == {"tenants/films/1": {"films"}}


def test_a_job_is_forgotten_a_month_after_its_end_and_never_before_it(store: Store, registry: Registry) -> None:
    ended = registry.submit_job("tenant.create", "tenant:films", {}, NOW_S)
    registry.cancel_job(ended.id, NOW_S)
    waiting = registry.submit_job("tenant.create", "tenant:books", {}, NOW_S)
    garbage_collection.collect(store, registry, NOW_S + garbage_collection.JOB_S - 1)
    assert registry.job(ended.id).state == "cancelled"
    garbage_collection.collect(store, registry, NOW_S + garbage_collection.JOB_S + 1)
    assert [job.id for job in registry.jobs()] == [waiting.id]


def test_a_bank_built_again_while_its_old_tenants_are_collected_stays(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    put_bank(store, "fleet", base, ["a"])
    registry.publish_tenants(root.id, "banks/fleet", ["a"], NOW_S)
    registry.delete_tenant("a", NOW_S)
    put_bank(store, "fleet", base, ["a", "b"])
    assert collect(store, registry, 0).removed == ()
    registry.publish_tenants(root.id, "banks/fleet", ["a", "b"], NOW_S)
    assert collect(store, registry).removed == ()
    assert garbage_collection.verify(store, registry, NOW_S).problems == ()


def test_versions_that_an_older_copy_of_the_registry_never_gave_out_stay(
    store: Store, registry: Registry, base: str, root: DomainVersion
) -> None:
    first = publish(store, registry, base, "acme")
    for later in ("tenants/acme/2", "tenants/acme/3"):
        put_tenant(store, later, base)
    assert not collect(store, registry).removed
    assert {first, "tenants/acme/2", "tenants/acme/3"} <= paths(store)


@pytest.mark.usefixtures("patience")
def test_two_may_collect_at_once(store: Store, registry: Registry, base: str, root: DomainVersion) -> None:
    for number in range(20):
        publish(store, registry, base, f"t{number}")
        registry.delete_tenant(f"t{number}", NOW_S)
    with ThreadPoolExecutor(4) as pool:
        list(pool.map(lambda _: collect(store, registry), range(4)))
    assert paths(store) == registry.snapshot().paths == {"bases/b", "plots/general"}


def test_uploads_go_when_they_are_old_and_no_job_waits_for_them(store: Store, registry: Registry) -> None:
    started = [registry.start_upload(1, "a", NOW_S) for _ in range(2)]
    for upload in started:
        registry.receive(upload.id, 1)
        registry.complete_upload(upload.id)
    used, unused = (registry.upload(upload.id) for upload in started)
    for name in (used.id, unused.id, "stray"):
        store.upload(name).mkdir(parents=True)
        (store.upload(name) / "data.csv").touch()
    registry.submit_job("tenant.create", "tenant:a", {"data": {"train": {"upload": used.id}}}, NOW_S)
    removed = garbage_collection.collect(store, registry, time.time() + STRAY_S - 600, grace_s=GRACE_S, upload_s=1e12)
    assert removed.removed == ()
    removed = collect(store, registry, STRAY_S + 1)
    assert removed.removed == (
        Finding("uploads/stray", "left over"),
        Finding(f"uploads/{unused.id}", "not used in time"),
    )
    assert paths(store) == {f"uploads/{used.id}"}
    assert registry.uploads() == [used]


def test_with_another_stores_registry_nothing_is_removed(store: Store, base: str, tmp_path: Path) -> None:
    other = Store(tmp_path / "other")
    with closing(Registry.open(store, create=True)) as registry:
        publish_root(registry)
        for expected in (None, 1, 2):
            publish(store, registry, base, "acme", expected)
        put_tenant(other, "tenants/acme/2", base)
        other.path("plots/general").mkdir(parents=True)  # as most stores have one
        foreign = Store(other.root, f"sqlite:///{store.root}/registry.sqlite")
        with (
            closing(Registry.open(foreign)) as opened,
            pytest.raises(MissingArtifactError, match="paths that the registry names"),
        ):
            collect(other, opened)
        assert "tenants/acme/2" in paths(other)
        collect(store, registry)
        assert {f"tenants/acme/{number}" for number in (1, 2, 3)} < paths(store)


def test_what_cannot_be_removed_keeps_nothing_else(store: Store, registry: Registry) -> None:
    # Too long a name to be renamed out of the way.
    stuck = f"uploads/{'x' * 250}"
    for path in (stuck, "uploads/other"):
        store.path(path).mkdir(parents=True)
    removed = collect(store, registry, STRAY_S + 1)
    assert removed.removed == (Finding("uploads/other", "left over"),)
    assert [problem.where for problem in removed.stuck] == [stuck]
    assert "File name too long" in removed.stuck[0].what


@pytest.mark.parametrize("point", ["collect.removed", "collect.forgotten", "collect.removed:2"])
def test_a_collection_that_was_killed_goes_on_at_the_next(
    store: Store, registry: Registry, base: str, root: DomainVersion, point: str
) -> None:
    for name in ("a", "b", "c"):
        publish(store, registry, base, name)
    registry.delete_tenant("a", NOW_S)
    registry.delete_tenant("b", NOW_S)
    code = (
        "import sys, time\nfrom pathlib import Path\nfrom hplm.housekeeping import garbage_collection\n"
        "from hplm.store.layout import Store\nfrom hplm.registry.registry import Registry\n"
        "store = Store(Path(sys.argv[1]))\n"
        "garbage_collection.collect(store, Registry.open(store), time.time() + 1000)\n"
    )
    done = subprocess.run([sys.executable, "-c", code, str(store.root)], env={"HPLM_CRASH_AT": point}, check=False)
    assert done.returncode == 137
    collect(store, registry)
    assert paths(store) == registry.snapshot().paths == {"bases/b", "plots/general", "tenants/c/1"}
    assert list((store.root / "tenants").iterdir()) == [store.path("tenants/c")]


def test_a_leftover_that_grows_deep_within_is_not_old(store: Store, registry: Registry) -> None:
    partial = store.root / "domains" / "b" / "law" / f".5.{'0' * 32}.partial"
    inner = partial / ".branch.partial"
    inner.mkdir(parents=True)
    (inner / "values.f16").write_bytes(b"1")
    old_s = time.time() - 1000
    for path in (partial, inner, inner / "values.f16"):
        os.utime(path, (old_s, old_s))
    # Its change time cannot be set back: seen from a time ahead of it.
    (inner / "values.f16").write_bytes(b"12")
    ahead_s = time.time() + 1000
    os.utime(inner / "values.f16", (ahead_s, ahead_s))
    assert garbage_collection.collect(store, registry, time.time() + 1000).removed == ()
    removed = garbage_collection.collect(store, registry, ahead_s + 1000).removed
    assert removed == (Finding(f"domains/b/law/{partial.name}", "left over"),)


def test_a_base_that_is_built_again_under_a_deleted_bases_name_stays(store: Store, registry: Registry) -> None:
    put_plot(store, "again", put(store, "bases/c", "base", name="c").fingerprint)
    put(store, "bases/gone", "base", name="gone")
    garbage_collection.adopt(store, registry, NOW_S)
    for base in ("c", "gone"):
        registry.delete_base(base, time.time())
    time.sleep(0.05)  # more than a tick of the clock of file systems
    put_plot(store, "again", put(store, "bases/c", "base", name="c").fingerprint)
    removed = garbage_collection.collect(store, registry, time.time() + 10 * GRACE_S).removed
    # Nothing stands on the new base yet, so only its files say that it is not the deleted base.
    assert [finding.where for finding in removed] == ["bases/gone"]
