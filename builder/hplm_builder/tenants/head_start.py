"""Where a new classification's head begins: fitted alone first, to what the body says before it is trained."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.judging import pooled_states
from hplm_builder.tenants.prepared import Prepared

# Of two or three labels nothing is gained.
LEAST_LABELS = 10
# Of dev texts right by the fitted head alone. Where it does well the body needs little change, and one to three points are
# gained; where the body must change, adapters lose as much by beginning at a head that is wrong: docs/decisions.md.
LEAST_ACCURACY = 0.7
# More would tell a linear head little, and take long.
MOST_EXAMPLES = 10_000
MOST_STEPS = 200
# Of the sum of squared weights beside the mean loss of an example: with a tenth of it 150 labels gain less, with ten times as
# much nothing.
DECAY = 1e-2


def may_be_fitted(data: LabelledData) -> bool:
    """Whether a head is tried: from nothing one of many rows takes most of few epochs, and meanwhile it misleads the body."""
    return data.task == "classification" and len(data.labels) >= LEAST_LABELS


def examples_to_fit(train: list[Prepared], seed: int) -> list[Prepared]:
    """All, or as many as are enough."""
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
) -> None:
    """Minimise the head's loss over `examples`, the body as it is and where the head is.

    `tick` as `pooled_states` has it, with 0 at each step.
    """
    device = head.weight.device
    pooled = torch.empty(len(examples), head.in_features)
    for place, states in pooled_states(body, data, examples, pooling, tick, device):
        pooled[place] = states[0]
    pooled, targets = pooled.to(device), torch.cat([one.targets for one in examples]).to(device)
    optimizer = torch.optim.LBFGS(head.parameters(), max_iter=MOST_STEPS, line_search_fn="strong_wolfe")

    def loss() -> Tensor:
        tick(0)  # may take a minute, and whoever cancels does not wait for it
        optimizer.zero_grad()
        found = F.cross_entropy(head(pooled), targets) + DECAY * head.weight.square().sum()
        found.backward()
        return found

    optimizer.step(loss)
