"""The loss of whole sequences of tags, beside a sum over all sequences."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hplm.tasks.tag_sequences import sequence_loss
from hplm.tasks.task import IGNORED, Scale
from hplm.tasks.task_loader import TASKS
from hplm.tasks.words import word_logits, word_ranges

WORDS = ((0, 0, 1, 2, 2), (0,))


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


@pytest.mark.parametrize("window", [1, 3])
def test_training_reads_the_same_logits_of_words_as_serving(window: int) -> None:
    # Two texts: [CLS] and three words of two, one and two tokens; [CLS] and one word.
    texts = [np.array([(0, 0, -1), *((i, i + 1, word) for i, word in enumerate(words))], np.int32) for words in WORDS]
    lengths = [len(tokens) for tokens in texts]
    generator = torch.Generator().manual_seed(0)
    outputs = torch.randn(sum(lengths), window * 3, generator=generator)
    transitions = torch.randn(4, 3, generator=generator)
    tags = [torch.tensor([1, 2, 0]), torch.tensor([1])]
    targets = torch.full((sum(lengths),), IGNORED)
    served = []
    for at, tokens, of_text, gold in zip((0, lengths[0]), texts, outputs.split(lengths), tags, strict=True):
        firsts = [first for first, _ in word_ranges(tokens)]
        targets[[at + first for first in firsts]] = gold
        served.append(torch.from_numpy(word_logits(of_text.numpy(), 3, tokens)[firsts]))
    loss = TASKS["tagging"].loss(outputs, targets, texts, Scale(), transitions)
    expected = sequence_loss(torch.cat(served), torch.cat(tags), [3, 1], transitions)
    assert float(loss) == pytest.approx(float(expected), abs=1e-5)
