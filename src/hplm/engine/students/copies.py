"""The students of a batch's texts: a text with k students is k copies that differ by their student.

Copies are texts of the packed batch like any others. So the number of kernel calls grows with neither the students nor the
tenants.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hplm.adapters.tenant import Tenant
from hplm.tasks.task import Logits

if TYPE_CHECKING:
    from hplm.engine.encode import EngineRequest


def copies_of(request: EngineRequest) -> list[EngineRequest]:
    """Return a text's copies, one for each of its students. The first copy alone keeps attention.

    A student of the form `shared` is a tenant of its own, with its adapter. Copies of own layers all have the request's tenant.
    """
    assert 1 <= request.students <= request.tenant.card.students
    if request.tenant.students is None:
        return [request]
    is_own, tenant = request.has_own_layers, request.tenant
    members = (tenant,) * request.students if is_own else tenant.members[: request.students]
    first = replace(request, tenant=members[0], students=1)
    return [first, *(replace(first, tenant=member, keeps_attention=False) for member in members[1:])]


def cut(requests: Sequence[EngineRequest], order: Sequence[int], most: int) -> list[list[int]]:
    """Return the requests of `order`, which are sorted by length, in parts that need at most `most` slots.

    A student of a tenant needs a slot. If all need more, the requests are sorted by tenant and cut into parts, each again in
    the given order. All texts of a tenant are in one part.
    """
    wanted: dict[str, int] = {}
    for i in order:
        key = requests[i].tenant.key
        wanted[key] = max(wanted.get(key, 0), requests[i].students)
    if sum(wanted.values()) <= most:
        return [list(order)] if order else []
    assert max(wanted.values()) <= most
    parts: list[list[int]] = [[]]
    part_of: dict[str, list[int]] = {}
    room = most
    for key in sorted(wanted):
        if wanted[key] > room:
            parts.append([])
            room = most
        room -= wanted[key]
        part_of[key] = parts[-1]
    for i in order:
        part_of[requests[i].tenant.key].append(i)
    return parts


def weighted_logits(tenants: Sequence[Tenant], numbers: Sequence[int], pooled: npt.NDArray[np.float32]) -> list[Logits]:
    """Compute the logits `[1, labels]` of texts: the head over the sum of the students' representations times their alphas.

    `pooled` `[sum of numbers, H]` has the representations of the copies, `numbers[i]` of text i one after another.
    """
    answers = []
    first = 0
    for tenant, number in zip(tenants, numbers, strict=True):
        features = pooled[first : first + number]
        if number > 1:
            assert tenant.students is not None
            features = tenant.students.alphas[None, :number] @ features
        answers.append(features @ tenant.head.weight.T + tenant.head.bias)
        first += number
    return answers
