"""A tenant's job with texts that nobody has labelled."""

from __future__ import annotations

import pytest

from hplm.jobs.lease import JobLease
from hplm.manage.service import ManageService
from hplm.registry.registry import Registry
from hplm.store.layout import Store
from tests.unit.hplm.manage.making import LEARNING, ask, colours, files_below, upload, work

STEPS = ["read", "features", "unlabelled", "teacher", "label", "fine-tune", "baseline", "publish"]
# In so many epochs a teacher of the tiny base learns the colours.
ENOUGH = {"epochs": 12}
MORE = "text\n" + "".join(f"the {'red' if i % 2 else 'blue'} cat runs {i} times\n" for i in range(40))


def submit(service: ManageService, content: str, **values: object) -> str:
    data = {
        "train": {"upload": upload(service, colours(60))},
        "unlabelled": {"upload": upload(service, content, "more.csv")},
    }
    return str(ask(service, "tenant.create", tenant="acme", data=data, settings=ENOUGH, **values)["job"])


def test_a_tenant_is_made_from_both_and_updated(service: ManageService, store: Store, registry: Registry) -> None:
    job = submit(service, MORE)
    work(store)
    assert registry.job(job).error is None
    about = ask(service, "tenant.show", tenant="acme")["tenant"]["about"]
    assert about["examples"]["unlabelled"] == 40
    assert about["teacher"]["scores"].keys() >= {"dev_accuracy"}
    data = {
        name: {"upload": upload(service, rows, "more.csv")}
        for name, rows in (("train", colours(60, is_swapped=True)), ("unlabelled", MORE))
    }
    ask(service, "tenant.update", tenant="acme", data=data, settings=LEARNING)
    work(store)
    assert registry.tenant("acme").current.number == 2
    assert not registry.uploads()
    assert not [path for path in files_below(store) if path.startswith(("uploads/", "jobs/"))]


def test_progress_goes_through_all_steps_and_never_back(
    service: ManageService, store: Store, registry: Registry, monkeypatch: pytest.MonkeyPatch
) -> None:
    told: list[tuple[str, float]] = []
    really = JobLease.report

    def report(job: JobLease, step: str, progress: float) -> None:
        told.append((step, progress))
        really(job, step, progress)

    monkeypatch.setattr(JobLease, "report", report)
    submit(service, MORE)
    work(store)
    assert list(dict.fromkeys(step for step, _ in told)) == STEPS
    made = [progress for step, progress in told if step in STEPS[1:-1]]
    assert made == sorted(made)
    assert 0 < made[0] < made[-1] == 1.0


def test_a_dry_run_counts_them(service: ManageService, store: Store, registry: Registry) -> None:
    job = submit(service, MORE, dry_run=True)
    work(store)
    found = registry.job(job).result
    assert found is not None
    assert found["plan"]["examples"]["unlabelled"] == 40


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (colours(60), "no text that is not in the labelled data"),
        ("text,text_pair\na,b\n", "1 of 1 unlabelled texts are not single texts"),
        ("label\nred\n", "more.csv, line 1: no column `text`"),
    ],
)
def test_what_cannot_be_learned_from_is_refused(
    service: ManageService, store: Store, registry: Registry, content: str, words: str
) -> None:
    job = submit(service, content)
    work(store)
    found = registry.job(job)
    assert found.state == "failed"
    assert found.error is not None
    assert words in str(found.error)
    assert not registry.uploads()
