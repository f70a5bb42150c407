"""Several processes at one registry, some of them killed, on both databases."""

from __future__ import annotations

import os
import random
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, contextmanager

import pytest

from hplm.errors import ConflictError
from hplm.registry.records import DomainVersion
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.registry.making import NOW_S, publish

JOBS = 60


Process = subprocess.Popen[str]


@contextmanager
def start(function: str, store: Store, *arguments: object, **environment: str) -> Iterator[Process]:
    """Run a function of this module in another process."""
    code = (
        f"import sys\nfrom pathlib import Path\nfrom {__name__} import *\n"
        f"{function}(Store(Path(sys.argv[1]), sys.argv[2]), *sys.argv[3:])"
    )
    with subprocess.Popen(
        [sys.executable, "-c", code, str(store.root), store.registry, *map(str, arguments)],
        stdout=subprocess.PIPE,
        stdin=subprocess.PIPE,
        text=True,
        env={**os.environ, **environment},
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def wait_ready(process: Process) -> None:
    """Until it waits in `say_ready`."""
    assert process.stdout is not None
    assert process.stdout.readline() == "ready\n"


def go(process: Process) -> None:
    """Let it go on from `say_ready`."""
    assert process.stdin is not None
    process.stdin.write("go\n")
    process.stdin.flush()


def say_ready() -> None:
    """Wait until all processes of a race are ready."""
    print("ready", flush=True)
    sys.stdin.readline()


def race(store: Store, function: str, each: Sequence[object]) -> list[list[str]]:
    """Let a process for each argument run the function from `say_ready` on at once; what each printed."""
    with ExitStack() as stack:
        processes = [stack.enter_context(start(function, store, one)) for one in each]
        for process in processes:
            wait_ready(process)
        for process in processes:
            go(process)
        printed = [process.communicate(timeout=120)[0].split() for process in processes]
        assert [process.returncode for process in processes] == [0] * len(processes)
    return printed


def work_off(store: Store, worker: str) -> None:
    with closing(Registry.open(store)) as registry:
        # Its first before the race, in which the other may do all there is.
        job = registry.claim_job(worker, NOW_S, 30.0)
        say_ready()
        while job is not None:
            print(job.id)
            time.sleep(0.005)  # its work, in which the other gets its turn
            registry.finish_job(job.id, worker, NOW_S, result={})
            job = registry.claim_job(worker, NOW_S, 30.0)


def publish_once(store: Store, number: str) -> None:
    with closing(Registry.open(store)) as registry:
        say_ready()
        try:
            registry.publish_tenant("films", 1, "p", NOW_S, about={}, number=int(number), expected=1)
            print("published")
        except ConflictError:
            print("conflict")


def make(store: Store, _: str) -> None:
    say_ready()
    with closing(Registry.open(store, create=True)) as registry:
        print(registry.generation())


def publish_next(store: Store) -> None:
    """The version after the first, of a tenant and of a domain."""
    with closing(Registry.open(store)) as registry:
        publish(registry, "films", registry.current_domain("b", "general"), 1)
        registry.publish_domain("b", "general", "p", NOW_S, parent_id=None, about={}, expected=1)


def hold_a_half_written_publication(store: Store) -> None:
    with closing(Registry.open(store)) as registry, registry._database.writing() as connection:
        connection.exec_driver_sql("UPDATE tenant_bases SET current_id = NULL")
        connection.exec_driver_sql("DELETE FROM tenant_versions")
        say_ready()


def publish_for_ever(store: Store) -> None:
    with closing(Registry.open(store)) as registry:
        root = registry.current_domain("b", "general")
        say_ready()
        current = registry.tenant("films").current.number
        while True:
            current = publish(registry, "films", root, current).number
            registry.publish_tenants(root.id, "banks/fleet", [f"t{n}" for n in range(100)], NOW_S)
            registry.retire(2, NOW_S, base="b")


def publish_first(store: Store) -> None:
    with closing(Registry.open(store)) as registry:
        publish(registry, "films", registry.current_domain("b", "general"))


def test_each_job_is_claimed_by_one_of_several_workers(registry: Registry, store: Store) -> None:
    submitted = [registry.submit_job("tenant.create", f"tenant:t{n}", {}, NOW_S).id for n in range(JOBS)]
    done = race(store, "work_off", ["x", "y"])
    assert Counter(done[0] + done[1]) == Counter(submitted)
    assert all(done)


def test_of_two_that_publish_over_the_same_version_one_is_told(
    registry: Registry, store: Store, root: DomainVersion
) -> None:
    publish(registry, "films", root)
    said = race(store, "publish_once", [2, 3])
    assert sorted(said) == [["conflict"], ["published"]]
    assert len(registry.tenant_versions("films")) == 2


def test_a_registry_that_several_processes_make_at_once_is_made_once(store: Store) -> None:
    generations = race(store, "make", range(4))
    assert len({one for (one,) in generations}) == 1


def test_a_process_that_dies_before_its_commit_has_published_nothing(
    registry: Registry, store: Store, root: DomainVersion
) -> None:
    first = publish(registry, "films", root)
    before = registry.generation()
    for point, versions in (("publish.committing", (1, 1)), ("publish.committing:2", (2, 1))):
        with start("publish_next", store, HPLM_CRASH_AT=point) as process:
            assert process.wait(60) == 137
        found = len(registry.tenant_versions("films")), len(registry.domain_versions("b", "general"))
        assert found == versions
        if versions == (1, 1):
            assert registry.tenant("films").current == first
            assert registry.generation() == before


def test_a_process_killed_inside_a_write_leaves_what_was_before(
    registry: Registry, store: Store, root: DomainVersion
) -> None:
    first = publish(registry, "films", root)
    with start("hold_a_half_written_publication", store) as writer:
        wait_ready(writer)
        assert registry.tenant("films").current == first
        writer.kill()
    assert registry.tenant("films").current == first
    # And its lock is gone with it.
    assert publish(registry, "films", root, 1).number == 2


def test_killed_at_any_time_a_publisher_leaves_whole_versions(
    registry: Registry, store: Store, root: DomainVersion
) -> None:
    publish(registry, "films", root)
    rng = random.Random(0)
    for _ in range(8):
        with start("publish_for_ever", store) as writer:
            wait_ready(writer)
            go(writer)
            time.sleep(rng.random() * 0.2)
            writer.kill()
        with closing(Registry.open(store)) as opened:
            assert opened.faults() == []
            current = opened.tenant("films").current
            assert current == opened.tenant_versions("films")[-1]
            fleet = [one.current for one in opened.tenants(prefix="t")]
            assert len(fleet) in (0, 100)
            assert len({one.number for one in fleet}) <= 1
            served = opened.changes_since(0)
            assert {one.version_id for one in served.published} == {current.id} | {one.id for one in fleet}


@pytest.mark.usefixtures("patience")
def test_threads_share_a_registry(registry: Registry, root: DomainVersion) -> None:
    def publish_some(thread: int) -> int:
        for number in range(5):
            publish(registry, f"t{thread}-{number}", root)
            registry.changes_since(0)
        return thread

    with ThreadPoolExecutor(8) as pool:
        assert list(pool.map(publish_some, range(8))) == list(range(8))
    assert registry.tenant_count() == 40
    assert len({one.version_id for one in registry.changes_since(0).published}) == 40


def test_another_process_sees_a_version_as_soon_as_it_is_published(
    registry: Registry, store: Store, root: DomainVersion
) -> None:
    with closing(Registry.open_read_only(store)) as reader:
        seen = reader.generation()
        with start("publish_first", store) as process:
            assert process.wait(60) == 0
        assert [one.name for one in reader.changes_since(seen).published] == ["films"]
