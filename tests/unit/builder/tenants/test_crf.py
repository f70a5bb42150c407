"""The loss of whole sequences of tags, beside a sum over all sequences."""

from __future__ import annotations

import itertools

import pytest
import torch
from hplm_builder.tenants.crf import sequence_loss
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor


def by_enumeration(logits: Tensor, targets: Tensor, lengths: list[int], transitions: Tensor) -> float:
    """The slow twin: the likelihood of every sequence of every text."""
    loss = 0.0
    for emissions, gold in zip(logits.split(lengths), targets.split(lengths), strict=True):

        def total(path: tuple[int, ...], emissions: Tensor = emissions) -> float:
            moves = zip([0, *(1 + tag for tag in path)], path, strict=False)
            return float(sum(emissions[t, tag] for t, tag in enumerate(path)) + sum(transitions[m] for m in moves))

        paths = itertools.product(range(logits.shape[1]), repeat=len(emissions))
        every = torch.tensor([total(path) for path in paths], dtype=torch.float64)
        loss += float(every.logsumexp(0)) - total(tuple(gold.tolist()))
    return loss / len(targets)


@given(st.lists(st.integers(1, 4), min_size=1, max_size=4), st.integers(1, 3), st.integers(0, 2**31))
def test_the_loss_is_that_of_a_sum_over_all_sequences(lengths: list[int], labels: int, seed: int) -> None:
    generator = torch.Generator().manual_seed(seed)
    logits = torch.randn(sum(lengths), labels, generator=generator)
    targets = torch.randint(labels, (sum(lengths),), generator=generator)
    transitions = torch.randn(1 + labels, labels, generator=generator)
    found = sequence_loss(logits, targets, lengths, transitions)
    assert float(found) == pytest.approx(by_enumeration(logits, targets, lengths, transitions), abs=1e-4)


def test_what_is_forbidden_has_no_likelihood_and_leaves_gradients_finite() -> None:
    logits = torch.zeros(3, 2, requires_grad=True)
    transitions = torch.zeros(3, 2)
    transitions[1, 1] = -1e4  # tag 1 never after tag 0
    loss = sequence_loss(logits, torch.tensor([1, 1, 0]), [3], transitions)
    loss.backward()
    # Of the 8 sequences 4 are left: 000, 100, 110, 111.
    assert loss.item() == pytest.approx(torch.tensor(4.0).log().item() / 3)
    assert logits.grad is not None
    assert logits.grad.isfinite().all()
