"""The first weights of a new head: fitted alone, to the hidden states of the untrained body."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from torch import Tensor, nn

from hplm.tasks.task import Scale
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.judging import read_states
from hplm_builder.tenants.prepared import Prepared

# The least dev score of a fitted head that is kept. If a fitted head does well, the body needs little change, and one to three
# points are gained. If the body must change, adapters lose as much by beginning at a wrong head: docs/decisions.md.
LEAST_SCORE = 0.7
# The most examples a head is fitted to: more teach a linear head little and take long.
MOST_EXAMPLES = 10_000
MOST_STEPS = 200
# The factor of the sum of squared weights, beside the mean loss of an example. With a tenth of it, 150 labels gain less; with
# ten times as much they gain nothing.
DECAY = 1e-2


def may_be_fitted(data: LabelledData) -> bool:
    """Return whether the head may be fitted first: a random row for each of many labels would mislead the body for epochs."""
    return task_named(data.task).may_fit_head_first(data.labels)


def examples_to_fit(train: list[Prepared], seed: int) -> list[Prepared]:
    """Return all examples, or MOST_EXAMPLES drawn by `seed`."""
    if len(train) <= MOST_EXAMPLES:
        return train
    return [train[i] for i in np.random.default_rng(seed).permutation(len(train))[:MOST_EXAMPLES]]


def fit_head(
    head: nn.Linear,
    body: nn.Module,
    data: LabelledData,
    examples: list[Prepared],
    pooling: str,
    tick: Callable[[int], None] = lambda tokens: None,
    scale: Scale | None = None,
) -> None:
    """Minimise the head's loss over `examples`, with values in `scale`, and change nothing in the body.

    `tick` is called as `read_states` calls it, and with 0 at each step.
    """
    device, task = head.weight.device, task_named(data.task)
    states = torch.empty(len(examples), head.in_features)
    for place, of_text in read_states(body, data, examples, pooling, tick, device):
        states[place] = of_text[0]
    states, targets = states.to(device), torch.cat([example.targets for example in examples]).to(device)
    texts = [example.tokens for example in examples]
    minimise(head, lambda: task.loss(head(states), targets, texts, scale or Scale(), None), tick)


def minimise(
    head: nn.Linear,
    loss: Callable[[], Tensor],
    tick: Callable[[int], None] = lambda tokens: None,
    most_steps: int = MOST_STEPS,
) -> None:
    """Minimise the sum of `loss` and the weight decay over all parameters of `head`. `tick` is called with 0 at each step."""
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=most_steps, line_search_fn="strong_wolfe")

    def closure() -> Tensor:
        tick(0)  # all steps may take a minute, and a job that is cancelled ends at the next tick
        optimizer.zero_grad()
        total = loss() + DECAY * head.weight.square().sum()
        total.backward()
        return total

    optimizer.step(closure)
