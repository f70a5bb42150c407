"""Lines that tell people about a tenant's students: who taught them, and the dev score of each prefix."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any


def student_lines(about: Mapping[str, Any]) -> Iterator[str]:
    """Yield the lines for a tenant's card or a job's result, none for a tenant without students."""
    students = about.get("students")
    if not students:
        return
    prefixes, count = students["prefixes"], students["count"]
    yield (
        f"students: {count} of the form {students['form']}, the best prefix on dev of {len(prefixes)}; "
        f"taught by {students['teacher']['name']} (dev {students['teacher']['dev_score']:.3f})"
    )
    for prefix in prefixes:
        scores = ", ".join(f"{name} {score:.3f}" for name, score in prefix.items() if name != "students")
        place = " (the best, served)" if prefix["students"] == count else ""
        dropped = " (not served)" if prefix["students"] > count else ""
        yield f"  k = {prefix['students']}: {scores}{place}{dropped}"
