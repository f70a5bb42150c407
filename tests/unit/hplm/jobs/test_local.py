"""Local jobs: what a command records about a job that it ran itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from hplm.errors import CorruptArtifactError, RegistryUnavailableError
from hplm.jobs.context import JobContext
from hplm.jobs.lease import JobTimings
from hplm.jobs.local import run_local_job
from hplm.registry.records import Job
from hplm.registry.registry import Registry
from hplm.store.layout import Store


def run(store: Store, registry: Registry, work: Any) -> dict[str, Any]:
    return run_local_job(
        *(store, registry, "tenant.create", "tenant:acme", {}, work),
        scratch=store.scratch("acme"),
        on_progress=lambda step, share: None,
        timings=JobTimings(lease_s=5.0, report_every_s=0.05),
    )


def done(job: Job, context: JobContext) -> dict[str, Any]:
    return {"version": 1, "published": True}


def test_a_job_whose_end_was_recorded_but_not_confirmed_is_done(
    store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    finish, calls = registry.finish_job, []

    def lose_the_first_answer(*args: Any, **kwargs: Any) -> None:
        calls.append(args)
        finish(*args, **kwargs)
        if len(calls) == 1:
            raise RegistryUnavailableError("the connection was lost")

    monkeypatch.setattr(registry, "finish_job", lose_the_first_answer)
    assert run(store, registry, done) == {"version": 1, "published": True}
    assert len(calls) == 2
    assert registry.jobs()[0].state == "done"


@pytest.mark.parametrize("kind", [CorruptArtifactError, PermissionError])
def test_the_record_of_a_failed_job_shows_no_path_of_the_server(
    store: Store, registry: Registry, kind: type[Exception]
) -> None:
    def fail(job: Job, context: JobContext) -> dict[str, Any]:
        raise kind(f"{store.root}/plots/general/values.f16 is damaged")

    with pytest.raises(kind, match=str(store.root)):
        run(store, registry, fail)
    error = registry.jobs()[0].error
    assert error is not None
    assert str(store.root) not in error["message"]
    assert error["message"] in (
        "the store/plots/general/values.f16 is damaged",
        "the command failed; its output says why",
    )


def test_the_error_of_a_job_is_raised_even_if_the_registry_has_lost_the_job(
    store: Store, registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(job: Job, context: JobContext) -> dict[str, Any]:
        finish = registry.finish_job
        monkeypatch.setattr(registry, "finish_job", lambda _, *args, **kwargs: finish("gone", *args, **kwargs))
        raise CorruptArtifactError("the table is damaged")

    with pytest.raises(CorruptArtifactError, match="the table is damaged"):
        run(store, registry, fail)
