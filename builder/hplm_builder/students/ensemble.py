"""Students with their multipliers (eq. 1), the representations that they give, and answers of each prefix of them."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Head
from hplm.core.wire import LabelledSpan
from hplm.models.device import CPU
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.students.student_bodies import StudentBody
from hplm_builder.tenants.judging import read_states
from hplm_builder.tenants.prepared import Prepared


class Ensemble(nn.Module):
    """m students and their multipliers, of which the first is 1. With `averages` a prefix is the mean of its students."""

    def __init__(self, students: Sequence[StudentBody], alphas: Sequence[float], *, averages: bool = False) -> None:
        super().__init__()
        self.students = nn.ModuleList(students)
        self.averages = averages
        self.first_alpha = alphas[0]
        # The first multiplier is no parameter, so that the first student alone is an ordinary tenant.
        self.later_alphas = nn.ParameterList(nn.Parameter(torch.tensor(alpha)) for alpha in alphas[1:])

    @property
    def alphas(self) -> Tensor:
        """The multipliers `[m]`."""
        return torch.stack([torch.tensor(self.first_alpha), *self.later_alphas])

    def prefixes(self, states: Tensor) -> Tensor:
        """Return the representations `[m, n, H]` of the prefixes k = 1..m, of those of each student, `[m, n, H]`."""
        sums = (self.alphas[: len(states), None, None] * states).cumsum(0)
        return sums / torch.arange(1, len(states) + 1)[:, None, None] if self.averages else sums


def pooled_states(
    body: nn.Module,
    data: LabelledData,
    examples: Sequence[Prepared],
    pooling: str,
    tick: Callable[[int], None] = lambda tokens: None,
) -> Tensor:
    """Return what a head reads of each example, `[n, H]` float32. `tick` is called as `read_states` calls it."""
    rows: list[Tensor] = [torch.empty(0)] * len(examples)
    for place, state in read_states(body, data, examples, pooling, tick, CPU):
        rows[place] = state[0]
    return torch.stack(rows)


def answers_of(
    states: Tensor, head: Head, data: LabelledData, examples: Sequence[Prepared]
) -> list[list[LabelledSpan]]:
    """Return the answers of a head to representations `[n, H]` of the examples."""
    task = task_named(data.task)
    outputs = (states @ torch.from_numpy(head.weight).T + torch.from_numpy(head.bias)).numpy()
    return [task.decode(outputs[i : i + 1], data.labels, example.tokens)[0] for i, example in enumerate(examples)]
