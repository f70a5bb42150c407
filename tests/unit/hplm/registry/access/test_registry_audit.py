"""The audit log in the registry, on both databases."""

from __future__ import annotations

from dataclasses import replace

from hplm.registry.access.audit import KEEP_S, AuditEntry
from hplm.registry.registry import Registry
from tests.unit.hplm.registry.making import NOW_S

CHANGES = ({"key.create"}, {"tenant.delete", "tenant.update"})


def entry(number: int, key: str | None = "k", action: str = "tenant.delete", at_s: float = NOW_S) -> AuditEntry:
    return AuditEntry(at_s, key, "admin", action, f"tenant:t{number}", "ok", times=number + 1)


def subjects(registry: Registry, **which: object) -> list[str]:
    return [found.subject for found in registry.audit(**which)]  # type: ignore[arg-type]


def test_entries_are_listed_newest_first_as_they_were_added(registry: Registry) -> None:
    registry.add_audit([entry(0), entry(1)])
    registry.add_audit([])
    registry.add_audit([entry(2)])
    assert subjects(registry) == ["tenant:t2", "tenant:t1", "tenant:t0"]
    newest = registry.audit(limit=1)[0]
    assert vars(newest) == vars(entry(2)) | {"seq": newest.seq}


def test_entries_are_listed_by_pages_by_key_and_by_subject(registry: Registry) -> None:
    registry.add_audit([entry(number, key="ab"[number % 2]) for number in range(6)])
    page = registry.audit(limit=4)
    assert subjects(registry, before=page[-1].seq) == ["tenant:t1", "tenant:t0"]
    assert subjects(registry, key="a") == ["tenant:t4", "tenant:t2", "tenant:t0"]
    assert subjects(registry, subject="tenant:t3") == ["tenant:t3"]


def test_entries_are_kept_for_a_set_time(registry: Registry) -> None:
    registry.add_audit([entry(0, at_s=NOW_S), entry(1, at_s=NOW_S + 2)])
    registry.trim_audit(NOW_S + KEEP_S + 1, CHANGES)
    assert subjects(registry) == ["tenant:t1"]


def test_the_log_is_bounded_and_refused_requests_push_out_nothing_else(registry: Registry) -> None:
    refused = replace(entry(50), outcome="FORBIDDEN", subject="refused")
    registry.add_audit([entry(30 + number, action="key.create") for number in range(4)])
    registry.add_audit([entry(number) for number in range(4)])
    registry.add_audit([refused] * 20)
    registry.add_audit([entry(number, action="tenant.show") for number in range(40, 60)])
    registry.add_audit([entry(number, key=None, action="-") for number in range(10, 20)])
    for _ in range(2):
        registry.trim_audit(NOW_S, CHANGES, most_changes=3, most_others=1, most_refused=2)
        assert subjects(registry) == [
            *("tenant:t19", "tenant:t18"),
            "tenant:t59",
            *("tenant:t3", "tenant:t2", "tenant:t1"),
            *("tenant:t33", "tenant:t32", "tenant:t31"),
        ]
