"""`hplm worker` as a process: told to stop, killed, orphaned, supervised."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from contextlib import closing
from datetime import UTC, datetime, timedelta
from pathlib import Path

import pytest

from hplm.core.settings import ManagerSettings
from hplm.errors import StartError
from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from hplm.runtime.process import end_with_parent
from hplm.store.layout import Store
from hplm_cli import supervisor
from hplm_cli.serve import start_worker
from hplm_cli.supervisor import Supervisor
from tests.unit.hplm.manage.making import ask, colours, files_below, upload, work
from tests.waiting import until
from tests.watching import runs

HPLM = Path(sys.executable).parent / "hplm"
LONG = {"epochs": 1000, "patience": 1000}


def long_job(service: ManageService) -> str:
    """A job that takes minutes where nobody stops it."""
    data = {"train": {"upload": upload(service, colours(400))}}
    return str(ask(service, "tenant.create", tenant="acme", data=data, settings=LONG)["job"])


def start(store: Store, *arguments: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([HPLM, "worker", "--store", str(store.root), *arguments], stderr=subprocess.DEVNULL)


def pid_of(kept: Supervisor) -> int | None:
    """Of the child that runs now."""
    with kept._changing:
        return kept._process.pid if kept._process is not None else None


def test_a_worker_told_to_stop_gives_its_job_back_and_one_killed_loses_it_to_another(
    service: ManageService, store: Store, registry: Registry
) -> None:
    job = long_job(service)
    first = start(store)
    until(lambda: registry.job(job).progress > 0)
    assert os.getpriority(os.PRIO_PROCESS, first.pid) == 19
    assert Path(f"/proc/{first.pid}/oom_score_adj").read_text() == "1000\n"
    first.send_signal(signal.SIGTERM)
    # 143: it was deep in a step.
    assert first.wait(60) in (0, 143)
    given_back = registry.job(job)
    assert (given_back.state, given_back.attempts) == ("queued", 0)

    second = start(store)
    until(lambda: registry.job(job).progress > 0)
    second.kill()
    second.wait()
    held = registry.job(job)
    assert (held.state, held.attempts) == ("running", 1)
    # Under its lease nobody takes it, and when that has run out somebody does.
    work(store)
    assert registry.job(job).worker == held.worker
    ask(service, "job.cancel", job=job)
    work(store, later_s=120)
    assert registry.job(job).state == "cancelled"
    assert not [path for path in files_below(store) if path.startswith(("tenants/", "jobs/"))]


def test_a_worker_is_heard_within_a_computation_that_never_comes_back(store: Store) -> None:
    code = f"""
import hashlib, sys
from hplm.jobs.worker_loop import Worker

def hang(self, until_idle):
    sys.modules["hplm_cli.worker"].STOP_S = 2.0
    print("begins", flush=True)
    hashlib.pbkdf2_hmac("sha256", b"", b"", 2**31 - 1)

Worker.run, Worker.give_back = hang, lambda self: print("given back", flush=True)
from hplm_cli import main
sys.argv = ["hplm", "worker", "--store", {str(store.root)!r}]
main()
"""
    with subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True) as child:
        assert child.stdout is not None
        assert child.stdout.readline() == "begins\n"
        child.send_signal(signal.SIGTERM)
        assert child.wait(30) == 143
        assert child.stdout.read() == "given back\n"


def test_a_worker_ends_when_there_is_nothing_left_where_it_is_told_to(store: Store) -> None:
    assert start(store, "--once").wait(60) == 0


def test_the_worker_of_a_server_that_was_killed_ends_too(store: Store, tmp_path: Path) -> None:
    code = f"""
import os, time
from pathlib import Path
from hplm_cli.supervisor import Supervisor
command = [{str(HPLM)!r}, "worker", "--store", {str(store.root)!r}, "--parent", str(os.getpid())]
kept = Supervisor(command, Path({str(tmp_path / "worker.log")!r}))
while kept._process is None:
    time.sleep(0.01)
print(kept._process.pid, flush=True)
time.sleep(100)
"""
    parent = subprocess.Popen([sys.executable, "-c", code], stdout=subprocess.PIPE, text=True)
    assert parent.stdout is not None
    child = int(parent.stdout.readline())
    until(lambda: "takes jobs" in (tmp_path / "worker.log").read_text())
    parent.kill()
    parent.wait()
    parent.stdout.close()
    until(lambda: not runs(child))


def test_a_child_whose_parent_is_gone_already_does_not_start() -> None:
    code = f"from hplm.runtime.process import end_with_parent; end_with_parent({os.getpid()})"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
    with pytest.raises(StartError, match="is gone"):
        end_with_parent(os.getpid())


def test_a_supervised_child_is_started_again_with_growing_pauses_and_stopped_for_good(tmp_path: Path) -> None:
    log = tmp_path / "child.log"
    # Not where this was started: Python would take modules from there.
    said = "import os; print('here' if os.getcwd() == '/' else os.getcwd())"
    dying = Supervisor([sys.executable, "-c", said], log, first_pause_s=0.05, longest_pause_s=0.2)
    until(lambda: log.exists() and log.read_text().count("here") >= 3)
    dying.stop()
    starts = log.read_text().count("here")
    time.sleep(0.5)
    assert log.read_text().count("here") == starts
    assert pid_of(dying) is None


def test_a_child_that_was_killed_is_replaced_and_a_deaf_one_is_killed_in_the_end(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    deaf = (
        "import signal, time; signal.signal(signal.SIGTERM, signal.SIG_IGN); print('deaf', flush=True); time.sleep(60)"
    )
    log = tmp_path / "child.log"
    kept = Supervisor([sys.executable, "-c", deaf], log, first_pause_s=0.05)
    until(lambda: log.exists() and log.read_text().count("deaf") == 1)
    first = pid_of(kept)
    assert first is not None
    os.kill(first, signal.SIGKILL)
    until(lambda: log.read_text().count("deaf") == 2)
    second = pid_of(kept)
    assert second is not None
    assert second != first
    kept.stop(timeout_s=0.2)
    kept.stop()
    assert not runs(second)
    # That it ended of itself is said, not that it was stopped.
    assert [record.getMessage() for record in caplog.records] == [
        f"the process that writes {log} has ended (killed by signal 9) and is started again"
    ]


def test_a_child_that_not_even_a_kill_ends_keeps_nobody_from_stopping(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(supervisor, "KILLED_S", 0.1)
    # As one that waits for a disk that is gone.
    kept = Supervisor([sys.executable, "-c", "import time; time.sleep(600)"], tmp_path / "child.log")
    until(lambda: pid_of(kept) is not None)
    child = kept._process
    assert child is not None
    with monkeypatch.context() as deaf:
        deaf.setattr(child, "send_signal", lambda number: None)
        deaf.setattr(child, "kill", lambda: None)
        kept.stop(timeout_s=0.1)
        assert runs(child.pid)
    child.kill()
    until(lambda: pid_of(kept) is None)


def test_a_command_that_cannot_be_started_is_tried_again_and_stops_no_server(tmp_path: Path) -> None:
    kept = Supervisor([str(tmp_path / "missing")], tmp_path / "child.log", first_pause_s=0.01)
    time.sleep(0.2)
    kept.stop()
    assert pid_of(kept) is None


def models_of(store: Store, folder: Path, **settings: object) -> Path:
    """A repository with nothing but the manager's settings."""
    version = folder / "models" / "manager" / "1"
    version.mkdir(parents=True)
    values = {"store": os.path.relpath(store.root, version), "base": "tiny", "domain": "general", **settings}
    (version / "settings.json").write_text(json.dumps(values))
    return folder / "models"


def test_a_server_starts_a_worker_for_its_store_whatever_registry_its_own_environment_names(
    store: Store, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("HPLM_REGISTRY", "postgresql+psycopg://nobody@127.0.0.1:1/elsewhere")
    kept = start_worker(models_of(store, tmp_path), wanted=None, log=tmp_path / "worker.log")
    assert kept is not None
    log = tmp_path / "worker.log"
    try:
        until(lambda: log.exists() and f"takes jobs of {store.root}" in log.read_text())
        with closing(Registry.open(store)) as registry:
            job = registry.submit_job(
                "tenant.create", "tenant:x", {"tenant": "x", "base": "tiny", "dry_run": False}, 0.0
            )
            until(lambda: registry.job(job.id).state == "failed")
        pid = pid_of(kept)
        assert pid is not None
    finally:
        kept.stop()
    assert not runs(pid)


def test_no_worker_is_started_where_none_is_wanted(store: Store, tmp_path: Path) -> None:
    models, log = models_of(store, tmp_path, worker=False), tmp_path / "worker.log"
    assert ManagerSettings("", "", "").worker
    assert start_worker(models, wanted=None, log=log) is None
    assert start_worker(models, wanted=False, log=log) is None
    assert start_worker(tmp_path, wanted=True, log=log) is None


def test_a_store_that_is_no_folder_is_named_at_once(tmp_path: Path) -> None:
    done = subprocess.run([HPLM, "worker", "--store", tmp_path / "typo"], capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert f"there is no folder {tmp_path / 'typo'}: give --store" in done.stderr


def test_the_log_is_in_utc_as_tritons_is(store: Store) -> None:
    command = [HPLM, "worker", "--store", store.root, "--once"]
    far = {**os.environ, "TZ": "Etc/GMT-14"}
    done = subprocess.run(command, env=far, capture_output=True, text=True, check=True)
    said = done.stderr.split(" INFO ")[0]
    told = datetime.strptime(said, "%Y-%m-%d %H:%M:%S,%fZ").replace(tzinfo=UTC)
    assert abs(datetime.now(UTC) - told) < timedelta(hours=1)
