"""What the registry knows of uploads, on both databases."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
from sqlalchemy import event

from hplm.errors import UnknownUploadError, UploadError
from hplm.registry.registry import Registry
from tests.unit.hplm.registry.making import NOW_S


def test_an_upload_grows_to_its_size_and_is_complete(registry: Registry) -> None:
    upload = registry.start_upload(3 << 30, "a" * 64, NOW_S)
    assert (upload.bytes, upload.sha256, upload.received, upload.complete) == (3 << 30, "a" * 64, 0, False)
    with pytest.raises(UploadError, match="has 0 of 3221225472 bytes: send the rest first"):
        registry.complete_upload(upload.id)
    registry.receive(upload.id, 1)
    assert registry.receive(upload.id, 3 << 30).received == 3 << 30
    assert registry.complete_upload(upload.id).complete
    assert registry.upload(upload.id).complete


@pytest.mark.parametrize("received", [4, 11], ids=["back", "too-many"])
def test_bytes_neither_go_back_nor_beyond_the_size(registry: Registry, received: int) -> None:
    upload = registry.start_upload(10, "a", NOW_S)
    registry.receive(upload.id, 5)
    with pytest.raises(UploadError, match="has 5 of 10 bytes"):
        registry.receive(upload.id, received)
    assert registry.upload(upload.id).received == 5


def test_a_dropped_upload_is_unknown(registry: Registry) -> None:
    upload = registry.start_upload(10, "a", NOW_S)
    assert registry.drop_uploads(ids=[upload.id]) == [upload.id]
    assert registry.drop_uploads(ids=[upload.id]) == []
    for ask in (registry.upload, registry.complete_upload, lambda one: registry.receive(one, 1)):
        with pytest.raises(UnknownUploadError):
            ask(upload.id)


def test_uploads_are_listed_oldest_first_and_page_by_page(registry: Registry) -> None:
    made = [registry.start_upload(1, "a", NOW_S + after_s) for after_s in (2, 1, 1, 1, 0)]
    listed = sorted(made, key=lambda one: (one.created_s, one.id))
    assert registry.uploads() == listed
    assert registry.uploads(limit=2) == listed[:2]
    for place, one in enumerate(listed):
        assert registry.uploads(after=one.id, limit=2) == listed[place + 1 :][:2]
    registry.drop_uploads(ids=[listed[1].id])
    with pytest.raises(UnknownUploadError):
        registry.uploads(after=listed[1].id)


def test_more_uploads_go_at_once_than_one_query_may_name(registry: Registry, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hplm.registry.uploads.IN_ONE_QUERY", 3)
    made = [registry.start_upload(1, "a", NOW_S).id for _ in range(7)]
    named = []
    with registry._database.reading() as connection:
        engine = connection.engine

    @event.listens_for(engine, "before_cursor_execute")
    def note(_: Any, __: Any, statement: str, parameters: Any, *___: Any) -> None:
        if statement.startswith("DELETE"):
            named.append(len(parameters))

    assert sorted(registry.drop_uploads(before_s=NOW_S + 1)) == sorted(made)
    assert registry.uploads() == []
    assert named == [3, 3, 1]


def test_an_upload_that_a_job_waits_for_is_not_dropped_until_the_job_ends(registry: Registry) -> None:
    used, unused, young = (registry.start_upload(1, "a", NOW_S + after_s) for after_s in (0, 1, 100))
    request = {"data": {"train": {"upload": used.id}, "test": {"path": "x"}}}
    job = registry.submit_job("tenant.create", "tenant:a", request, NOW_S)
    assert registry.drop_uploads(before_s=NOW_S + 50) == [unused.id]
    assert registry.drop_uploads(ids=[used.id]) == []
    registry.cancel_job(job.id, NOW_S)
    assert registry.drop_uploads(before_s=NOW_S + 50) == [used.id]
    assert registry.uploads() == [young]


def test_an_upload_that_another_job_is_still_to_read_does_not_go_with_the_job_whose_worker_is_lost(
    registry: Registry,
) -> None:
    shared, own = (registry.start_upload(1, "a", NOW_S) for _ in range(2))
    data = {"train": {"upload": shared.id}, "dev": {"upload": own.id}}
    job = registry.submit_job("tenant.create", "tenant:a", {"data": data, "drop_uploads": True}, NOW_S)
    other = registry.submit_job("tenant.create", "tenant:b", {"data": {"train": {"upload": shared.id}}}, NOW_S)
    assert registry.uploads_in_use([own.id, shared.id]) == {own.id: [job.id], shared.id: [job.id, other.id]}
    registry.claim_job("worker", NOW_S, 10)
    registry.cancel_job(job.id, NOW_S)
    assert registry.claim_job("another", NOW_S + 60, 10).id == other.id
    assert {one.id: one.created_s for one in registry.uploads()} == {own.id: 0.0, shared.id: NOW_S}
    assert registry.uploads_in_use([own.id, shared.id]) == {shared.id: [other.id]}


@pytest.mark.parametrize(
    "request_of",
    [
        lambda u: {"data": {"train": {"upload": u}}},
        lambda u: {"corpus": {"upload": u}},
        lambda u: {"corpus": {"path": "c.txt"}, "dev": [{"upload": u}]},
    ],
)
def test_no_job_waits_for_an_upload_that_is_gone(
    registry: Registry, request_of: Callable[[str], dict[str, Any]]
) -> None:
    upload = registry.start_upload(1, "a", NOW_S)
    registry.drop_uploads()
    with pytest.raises(UnknownUploadError):
        registry.submit_job("tenant.create", "tenant:a", request_of(upload.id), NOW_S)
    assert registry.jobs() == []


@pytest.mark.parametrize("count", [1, 30])
def test_of_many_uploads_those_that_jobs_wait_for_stay(registry: Registry, count: int) -> None:
    waited, free = ([registry.start_upload(9, "a", NOW_S).id for _ in range(count)] for _ in range(2))
    for number, upload in enumerate(waited):
        registry.receive(upload, 5)
        request = {"data": {"train": {"upload": upload}}}
        registry.submit_job("tenant.create", f"tenant:t{number}", request, NOW_S)
    assert registry.count_uploads() == (2 * count, 18 * count, 13 * count)
    assert sorted(registry.drop_uploads(ids=[*waited, *free])) == sorted(free)
    assert sorted(one.id for one in registry.uploads()) == sorted(waited)
