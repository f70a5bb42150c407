"""Labelled requests of a file, which `hplm eval cascade --requests` writes."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, fields
from pathlib import Path

import numpy as np

from hplm.errors import DataError
from hplm_loadtest.workloads.load_plan import Requests


@dataclass(frozen=True)
class LabelledRequest:
    """A text of a task, the tenant that answers it, and the right label."""

    task: str
    tenant: str
    text: str
    label: str


def read_labelled_requests(path: Path) -> list[LabelledRequest]:
    """Read a file of JSON lines with the keys `task`, `tenant`, `text` and `label`. Raises DataError with the line."""
    names = {field.name for field in fields(LabelledRequest)}
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path} cannot be read: {error}") from None
    requests = []
    for number, line in enumerate(lines, 1):
        if not line.strip():
            continue
        try:
            values = json.loads(line)
        except ValueError:
            values = None
        is_request = isinstance(values, dict) and values.keys() == names
        if not is_request or not all(isinstance(value, str) and value for value in values.values()):
            raise DataError(
                f"{path}, line {number}: a JSON object with the texts {', '.join(sorted(names))} was expected"
            )
        requests.append(LabelledRequest(**values))
    if not requests:
        raise DataError(f"{path} has no requests: `hplm eval cascade --requests` writes such a file")
    return requests


def as_load(requests: Sequence[LabelledRequest]) -> Requests:
    """Return the requests as a load without deadlines."""
    tenants, texts = [request.tenant for request in requests], [request.text for request in requests]
    return Requests(tenants, texts, np.full(len(requests), np.nan))
