"""Killed at any point of any change: the store opens sound, serves the old version or the new one, and leaks nothing."""

from __future__ import annotations

import ast
import itertools
import json
import shutil
import signal
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import closing
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from hplm.adapters import tenant as tenants
from hplm.engine.open_domain import open_lineage
from hplm.housekeeping import garbage_collection
from hplm.manage.service import ManageService
from hplm.models import base as bases
from hplm.registry.jobs import MOST_ATTEMPTS
from hplm.registry.registry import Registry
from hplm.runtime.crash_points import CRASH_POINTS
from hplm.store.layout import Store
from tests.unit.hplm.manage.making import (
    QUICK,
    QUICK_DOMAIN,
    ask,
    colours,
    corpus,
    create_domain,
    create_tenant,
    files_below,
    make_service,
    update,
    upload,
    work,
)
from tests.unit.hplm.manage.nursery import ROOT, Nursery

# What the times are taken of is done 24 times before the first test that needs them.
pytestmark = pytest.mark.timeout(900)
KILLED = 137
# Of each change and of each deletion: times by chance, one in each such part of what it takes.
PARTS, DELETION_PARTS = 24, 12
# Later than a dead worker's lease; later than any grace.
LEASE_S, LONG_S = 120.0, 200_000.0

OF_JOBS = (
    "job.claimed",
    "job.reported",
    "job.reported:3",
    "job.trained",
    "artifact.written",
    "artifact.durable",
    "artifact.placed",
    "publish.before",
    "publish.committing",
    "publish.after",
    "job.retired",
    "job.finished",
    "job.consumed",
)
PUBLISHED = ("publish.after", "job.retired", "job.finished", "job.consumed")
OF_REQUESTS = (
    "upload.written",
    "job.submitted",
    "rollback.before",
    "rollback.after",
    "delete.before",
    "delete.after",
    "collect.removed",
    "collect.forgotten",
)


@pytest.fixture(scope="module")
def grown_store(made_store: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """`made_store` with a domain `law` and a tenant `acme` on it, of one version each."""
    root = tmp_path_factory.mktemp("grown") / "store"
    shutil.copytree(made_store, root)
    with closing(make_service(Store(root))) as service:
        create_domain(service, "law")
        work(Store(root))
        create_tenant(service, "acme", domain="law")
        work(Store(root))
    return root


@pytest.fixture
def store(grown_store: Path, tmp_path: Path) -> Store:
    shutil.copytree(grown_store, tmp_path / "store")
    return Store(tmp_path / "store")


def create_a_tenant(service: ManageService) -> str:
    return create_tenant(service, "new", domain="law")


def update_a_tenant(service: ManageService) -> str:
    return update(service, "acme", colours(is_swapped=True))


def create_a_domain(service: ManageService) -> str:
    return create_domain(service, "new", parent="law")


def update_a_domain(service: ManageService) -> str:
    source = {"upload": upload(service, corpus(seed=2), "c.txt")}
    return str(ask(service, "domain.update", domain="law", corpus=source, settings=QUICK_DOMAIN)["job"])


@dataclass(frozen=True)
class Change:
    """A job, and what its outcome is told by: how many versions there are before it."""

    submit: Callable[[ManageService], str]
    kind: str
    name: str
    before: int

    def versions(self, registry: Registry) -> int:
        """How many there are now, 0 of what does not exist."""
        snapshot = registry.snapshot()
        if self.kind == "tenant":
            return sum(self.name in names for names in snapshot.tenants.values())
        return sum(version.domain == self.name for version in snapshot.domains)


CHANGES = {
    "create-tenant": Change(create_a_tenant, "tenant", "new", 0),
    "update-tenant": Change(update_a_tenant, "tenant", "acme", 1),
    "create-domain": Change(create_a_domain, "domain", "new", 0),
    "update-domain": Change(update_a_domain, "domain", "law", 1),
}


# What must go before it, and the request itself.
DELETIONS: dict[str, tuple[tuple[dict[str, str], ...], dict[str, str]]] = {
    "tenant": ((), {"action": "tenant.delete", "tenant": "acme"}),
    "domain": (({"action": "tenant.delete", "tenant": "acme"},), {"action": "domain.delete", "domain": "law"}),
}


@dataclass(frozen=True)
class Timed:
    """What each thing that is killed takes here when nobody kills it: jobs, deletions, and collecting what they leave."""

    job_s: dict[str, float]
    deletion_s: dict[str, float]
    collection_s: dict[str, float]


@pytest.fixture(scope="module")
def timed(grown_store: Path, nursery: Nursery, tmp_path_factory: pytest.TempPathFactory) -> Timed:
    def shortest_s(prepare: Callable[[ManageService], object], run: Callable[[Path], int]) -> float:
        """Of three times, each in a store of its own: so most are killed before they are done."""
        took = []
        for _ in range(3):
            store = Store(tmp_path_factory.mktemp("timed") / "store")
            shutil.copytree(grown_store, store.root)
            with closing(make_service(store)) as service:
                prepare(service)
            start = time.monotonic()
            assert run(store.root) == 0
            took.append(time.monotonic() - start)
        return min(took)

    def asked(requests: Sequence[dict[str, str]]) -> Callable[[ManageService], object]:
        return lambda service: [ask(service, **request) for request in requests]

    return Timed(
        {name: shortest_s(one.submit, nursery.work) for name, one in CHANGES.items()},
        {
            kind: shortest_s(asked(before), lambda root, one=one: nursery.ask(root, **one))
            for kind, (before, one) in DELETIONS.items()
        },
        {
            kind: shortest_s(asked([*before, one]), lambda root: nursery.work(root, later_s=LONG_S))
            for kind, (before, one) in DELETIONS.items()
        },
    )


def check_sound(store: Store, registry: Registry) -> None:
    """Whatever the registry names is whole, and opens as serving opens it."""
    assert garbage_collection.verify(store, registry, time.time()).problems == ()
    base = bases.load(store.base("tiny"))
    for record in registry.tenants():
        folder = store.path(record.current.path)
        tenants.load(folder, fingerprint=base.fingerprint, name=record.name)
        lineage = registry.lineage(record.current.domain_version_id)
        open_lineage(store, base, [above.path for above in lineage])


def check_clean(store: Store, registry: Registry) -> None:
    """Nothing lies there that the registry does not name."""
    work(store, later_s=LONG_S)
    verdict = garbage_collection.verify(store, registry, time.time() + LONG_S)
    assert (verdict.problems, verdict.loose) == ((), ())
    named = registry.snapshot().paths
    for path in files_below(store):
        # A command that was killed goes on from its checkpoint.
        is_kept = path.startswith("jobs/local-") and path.endswith(".pt")
        assert is_kept or any(path.startswith(f"{folder}/") for folder in named), path


def test_every_crash_point_is_tried_here_and_met_somewhere() -> None:
    assert {point.partition(":")[0] for point in (*OF_JOBS, *OF_REQUESTS)} == set(CRASH_POINTS)
    met = set()
    for folder in ("src", "builder"):
        for path in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(path.read_text())):
                if isinstance(node, ast.Call) and getattr(node.func, "id", "") == "crash_point":
                    assert isinstance(node.args[0], ast.Constant)
                    met.add(node.args[0].value)
    assert met == set(CRASH_POINTS)


@pytest.mark.parametrize("point", OF_JOBS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_worker_killed_anywhere_leaves_one_version_or_the_other_and_another_worker_finishes(
    store: Store, nursery: Nursery, change: str, point: str
) -> None:
    one = CHANGES[change]
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        job = one.submit(service)
        assert nursery.work(store.root, point) == KILLED
        check_sound(store, registry)
        assert one.versions(registry) == one.before + (point in PUBLISHED)
        work(store, later_s=LEASE_S)
        done = registry.job(job)
        assert (done.state, done.error) == ("done", None)
        assert one.versions(registry) == one.before + 1
        check_sound(store, registry)
        check_clean(store, registry)


@pytest.mark.parametrize("point", OF_JOBS)
@pytest.mark.parametrize("change", CHANGES)
def test_a_build_killed_anywhere_leaves_one_version_or_the_other_and_no_worker_takes_its_job(
    store: Store, nursery: Nursery, change: str, point: str
) -> None:
    one, has_published = CHANGES[change], point in PUBLISHED
    with closing(Registry.open(store)) as registry:
        before = {job.id for job in registry.jobs()}
        assert nursery.build(store.root, change, point) == KILLED
        check_sound(store, registry)
        assert one.versions(registry) == one.before + has_published
        work(store, later_s=LEASE_S)
        (job,) = [registry.job(job.id) for job in registry.jobs() if job.id not in before]
        assert job.state == ("done" if has_published else "failed")
        if job.error is not None:
            assert job.error["code"] == "WORKER_LOST"
        assert one.versions(registry) == one.before + has_published
        check_clean(store, registry)
        # The command is run again.
        assert nursery.build(store.root, change) == 0
        assert one.versions(registry) == one.before + has_published + 1
        check_sound(store, registry)
        check_clean(store, registry)


@pytest.mark.parametrize("part", range(PARTS))
@pytest.mark.parametrize("change", CHANGES)
def test_workers_killed_at_any_time_leave_one_version_or_the_other_and_another_worker_finishes(
    store: Store, nursery: Nursery, timed: Timed, change: str, part: int
) -> None:
    rng = np.random.default_rng([part, list(CHANGES).index(change)])
    # Once early, once late.
    shares = (np.array(sorted([part, PARTS - 1 - part])) + rng.uniform(size=2)) / PARTS
    assert len(shares) == MOST_ATTEMPTS - 1
    kill_and_finish(store, nursery, CHANGES[change], timed.job_s[change] * shares)


def kill_and_finish(store: Store, nursery: Nursery, one: Change, killed_after_s: Iterable[float]) -> None:
    """Each attempt is killed after its time where it is not done by then, the last is left to a worker that lives."""
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        job = one.submit(service)
        for attempt, kill_after_s in enumerate(killed_after_s):
            killed = nursery.work(store.root, later_s=attempt * LEASE_S, kill_after_s=float(kill_after_s))
            assert killed in (0, -signal.SIGKILL)
            check_sound(store, registry)
            assert one.versions(registry) in (one.before, one.before + 1)
        work(store, later_s=MOST_ATTEMPTS * LEASE_S)
        assert registry.job(job).state == "done"
        assert one.versions(registry) == one.before + 1
        check_sound(store, registry)
        check_clean(store, registry)


@pytest.mark.parametrize("point", ["job.trained", "job.finished", "job.consumed"])
def test_an_update_that_learns_nothing_publishes_nothing_wherever_it_is_killed(
    store: Store, nursery: Nursery, point: str
) -> None:
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        job = update(service, "acme", colours(), settings={"epochs": 1, "learning_rates": [1e-7]})
        assert nursery.work(store.root, point) == KILLED
        check_sound(store, registry)
        work(store, later_s=LEASE_S)
        done = registry.job(job)
        assert (done.state, done.error) == ("done", None)
        assert done.result is not None
        assert (done.result["version"], done.result["published"]) == (1, False)
        assert [version.number for version in registry.tenant_versions("acme")] == [1]
        check_clean(store, registry)


@pytest.mark.parametrize("ending", ["cancelled", "given-up", "released"])
@pytest.mark.parametrize("change", ["update-tenant", "create-domain"])
def test_a_job_that_has_published_is_done_whatever_befalls_it_then(
    store: Store, nursery: Nursery, change: str, ending: str
) -> None:
    one = CHANGES[change]
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        job = one.submit(service)
        earlier = MOST_ATTEMPTS - 1 if ending == "given-up" else 0
        for attempt in range(earlier):
            assert nursery.work(store.root, "job.claimed", later_s=attempt * LEASE_S) == KILLED
        assert nursery.work(store.root, "publish.after", later_s=earlier * LEASE_S) == KILLED
        if ending == "released":
            # As by a worker that must leave at once.
            registry.release_job(job, "w", time.time())
        if ending != "given-up":
            ask(service, "job.cancel", job=job)
        work(store, later_s=MOST_ATTEMPTS * LEASE_S)
        done = registry.job(job)
        assert (done.state, done.error) == ("done", None)
        assert done.result is not None
        assert done.result["version"] == one.before + 1
        assert one.versions(registry) == one.before + 1
        check_clean(store, registry)


@pytest.mark.parametrize(
    "point", ["artifact.written:2", "artifact.durable:2", "artifact.placed:2", "artifact.durable:3"]
)
def test_a_domain_killed_between_its_two_artifacts_is_made_again(store: Store, nursery: Nursery, point: str) -> None:
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        job = create_domain(service, "new")
        assert nursery.work(store.root, point) == KILLED
        check_sound(store, registry)
        work(store, later_s=LEASE_S)
        assert registry.job(job).state == "done"
        check_sound(store, registry)
        check_clean(store, registry)


@pytest.mark.parametrize("point", ["rollback.before", "rollback.after"])
def test_a_roll_back_killed_is_done_or_not(store: Store, nursery: Nursery, point: str) -> None:
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        update_a_tenant(service)
        work(store)
        assert nursery.ask(store.root, point, action="tenant.rollback", tenant="acme") == KILLED
        assert registry.tenant("acme").current.number == (2 if point == "rollback.before" else 1)
        check_sound(store, registry)
        check_clean(store, registry)


def is_there(registry: Registry, kind: str) -> bool:
    """The tenant `acme`, or the domain `law`."""
    return registry.tenant_count() == 1 if kind == "tenant" else len(registry.domains()) == 2


@pytest.mark.parametrize("point", ["delete.before", "delete.after"])
@pytest.mark.parametrize("kind", DELETIONS)
def test_a_deletion_killed_is_done_or_not_and_its_files_go(
    store: Store, nursery: Nursery, kind: str, point: str
) -> None:
    gone = point == "delete.after"
    before, request = DELETIONS[kind]
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        for one in before:
            ask(service, **one)
        assert nursery.ask(store.root, point, **request) == KILLED
        assert is_there(registry, kind) != gone
        check_sound(store, registry)
        check_clean(store, registry)
        assert any(path.startswith("domains/") for path in files_below(store)) == (kind == "tenant" or not gone)


@pytest.mark.parametrize("part", range(DELETION_PARTS))
@pytest.mark.parametrize("kind", DELETIONS)
def test_a_deletion_killed_at_any_time_is_done_or_not_and_killed_while_collected_its_files_go(
    store: Store, nursery: Nursery, timed: Timed, kind: str, part: int
) -> None:
    before, request = DELETIONS[kind]
    shares = (part + np.random.default_rng([part, list(DELETIONS).index(kind)]).uniform(size=2)) / DELETION_PARTS
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        for one in before:
            ask(service, **one)
        killed = nursery.ask(store.root, kill_after_s=timed.deletion_s[kind] * float(shares[0]), **request)
        assert killed in (0, -signal.SIGKILL)
        check_sound(store, registry)
        if is_there(registry, kind):
            assert killed != 0
            ask(service, **request)
        assert not is_there(registry, kind)
        killed = nursery.work(store.root, later_s=LONG_S, kill_after_s=timed.collection_s[kind] * float(shares[1]))
        assert killed in (0, -signal.SIGKILL)
        check_sound(store, registry)
        check_clean(store, registry)
        assert not [path for path in files_below(store) if path.startswith(f"{kind}s/")]


@pytest.mark.parametrize("point", ["collect.removed", "collect.removed:2", "collect.forgotten", "collect.forgotten:2"])
def test_a_collection_killed_is_gone_on_with(store: Store, nursery: Nursery, point: str) -> None:
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        ask(service, "tenant.delete", tenant="acme")
        ask(service, "domain.delete", domain="law")
        assert nursery.work(store.root, point, later_s=LONG_S) == KILLED
        check_sound(store, registry)
        check_clean(store, registry)
        assert not [path for path in files_below(store) if path.startswith(("tenants/", "domains/"))]


def test_a_submission_killed_before_its_answer_is_a_job_like_any_other(store: Store, nursery: Nursery) -> None:
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        request = {
            "action": "tenant.create",
            "tenant": "new",
            "data": {"train": {"upload": upload(service, colours())}},
            "settings": QUICK,
        }
        assert nursery.ask(store.root, "job.submitted", **request) == KILLED
        work(store)
        assert registry.tenant("new").current.number == 1
        check_clean(store, registry)


def test_a_chunk_killed_before_it_counts_is_sent_again(store: Store, nursery: Nursery) -> None:
    with closing(make_service(store)) as service, closing(Registry.open(store)) as registry:
        start = {
            "bytes": 4,
            "sha256": "9f86d081884c7d659a2feaa0c55ad015a3bf4f1b2b0b822cd15d6c15b0f00a08",
            "name": "a.csv",
        }
        started = ask(service, "upload.start", **start)["upload"]
        chunk = {"action": "upload.chunk", "upload": started, "offset": 0, "data": "dGVzdA=="}
        assert nursery.ask(store.root, "upload.written", **chunk) == KILLED
        assert registry.upload(started).received == 0
        assert service.handle(json.dumps(chunk).encode())["received"] == 4
        ask(service, "upload.finish", upload=started)
        check_clean(store, registry)


def test_two_hundred_were_killed_before_this(
    nursery: Nursery, grown_store: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    asked = [str(getattr(item, "originalname", "")) for item in request.session.items if item.path == request.path]
    timed = test_workers_killed_at_any_time_leave_one_version_or_the_other_and_another_worker_finishes.__name__
    if asked.count(timed) < PARTS * len(CHANGES) or not {name for name in globals() if name.startswith("test_")} <= {
        *asked
    }:
        pytest.skip("only some of the kills were asked for")
    # Where the machine has become much quicker than it was when times were taken, many were done first: some more, early.
    for number, change in zip(range(PARTS * len(CHANGES)), itertools.cycle(CHANGES.values()), strict=False):
        if nursery.killed >= 200:
            break
        root = tmp_path / str(number)
        shutil.copytree(grown_store, root)
        kill_and_finish(Store(root), nursery, change, np.random.default_rng(number).uniform(0, 0.05, size=2))
    assert nursery.killed >= 200
