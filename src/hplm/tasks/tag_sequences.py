"""Sequences of tags B-, I- and O: a linear-chain CRF over the logits of a text's words (Lafferty et al., 2001)."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from typing import TYPE_CHECKING

import numpy as np
import numpy.typing as npt

from hplm.tasks.task import Logits

if TYPE_CHECKING:
    from torch import Tensor

Probabilities = npt.NDArray[np.float64]
# Logits; in float64 if their sums need it.
Scores = Logits | npt.NDArray[np.float64]
FORBIDDEN = -1e4
# The largest logit whose exponents float64 holds with room for products: its smallest number is about exp(-745).
LARGEST_LOGIT = 150.0


@lru_cache(maxsize=64)
def forbidden_transitions(labels: tuple[str, ...]) -> Logits:
    """Return `[1 + labels, labels]`: FORBIDDEN for an I- tag unless its B- tag or the same I- tag is before it, otherwise 0.

    Row 0 is for the first word's tag, row 1 + i for a tag after tag i. An I- tag whose type has no B- tag may stand anywhere.
    """
    moves = np.zeros((1 + len(labels), len(labels)), np.float32)
    for to, label in enumerate(labels):
        prefix, _, kind = label.partition("-")
        if prefix == "I" and f"B-{kind}" in labels:
            moves[:, to] = FORBIDDEN
            moves[[1 + labels.index(before) for before in (f"B-{kind}", label)], to] = 0.0
    moves.flags.writeable = False
    return moves


def best_path(emissions: Scores, moves: Logits) -> list[int]:
    """Return the sequence of tags with the highest sum (Viterbi).

    `emissions` are `[words, labels]`, and `moves`, the transitions, are `[1 + labels, labels]`.
    """
    to_from = np.ascontiguousarray(moves[1:].T)
    tags = np.arange(len(to_from))
    best = emissions[0] + moves[0]
    came_from = []
    for emission in emissions[1:]:
        sums = to_from + best
        came_from.append(sums.argmax(1))
        best = sums[tags, came_from[-1]] + emission
    path = [int(best.argmax())]
    for before in reversed(came_from):
        path.append(int(before[path[-1]]))
    return path[::-1]


def marginals(emissions: Scores, moves: Logits) -> Probabilities:
    """Return the probability `[words, labels]` of each word's tag, summed over all sequences (forward-backward)."""
    # Several times as fast as with logarithms, which few logits need.
    if are_moderate(emissions):
        with np.errstate(invalid="ignore"):
            probabilities = _marginals_of_exponents(emissions, moves)
        if np.isfinite(probabilities).all():
            return probabilities
    return marginals_in_logarithms(emissions, moves)


def marginals_in_logarithms(emissions: Scores, moves: Logits) -> Probabilities:
    """Return the same as `marginals` does, for all finite logits."""
    each, between = emissions.astype(np.float64), moves[1:].astype(np.float64)
    forward, backward = np.empty_like(each), np.zeros_like(each)
    forward[0] = each[0] + moves[0]
    for t in range(1, len(each)):
        forward[t] = _log_sum(forward[t - 1][:, None] + between, 0) + each[t]
    for t in range(len(each) - 2, -1, -1):
        backward[t] = _log_sum(between + each[t + 1] + backward[t + 1], 1)
    both = forward + backward
    return np.exp(both - _log_sum(both, 1)[:, None])


def path_log_probability(
    emissions: Scores,
    labels: tuple[str, ...],
    transitions: Logits | None,
    path: Sequence[int],
    temperature: float = 1.0,
) -> float:
    """Return the logarithm of the probability of a sequence of tags among all sequences.

    `temperature` divides `emissions` `[words, labels]` and `transitions` `[1 + labels, labels]`. Transitions that no answer
    makes stay forbidden at every temperature.
    """
    each = emissions.astype(np.float64) / temperature
    moves = forbidden_transitions(labels).astype(np.float64)
    if transitions is not None:
        moves = moves + transitions / temperature
    tags = np.asarray(path)
    score = each[np.arange(len(tags)), tags].sum() + moves[np.concatenate([[0], 1 + tags[:-1]]), tags].sum()
    total = moves[0] + each[0]
    for emission in each[1:]:
        total = _log_sum(total[:, None] + moves[1:], 0) + emission
    # Rounding must not give a probability above 1.
    return min(0.0, float(score - _log_sum(total[:, None], 0)[0]))


def _log_sum(logarithms: Probabilities, axis: int) -> Probabilities:
    """Return the logarithm of the sum of each row or column; `np.logaddexp.reduce` takes five times as long."""
    most = logarithms.max(axis, keepdims=True)
    return np.log(np.exp(logarithms - most).sum(axis)) + most.squeeze(axis)


def are_moderate(emissions: Scores) -> bool:
    """Return whether sums of the logits are finite in float32, and probabilities need no logarithms."""
    return bool(np.abs(emissions).max() <= LARGEST_LOGIT)


def _marginals_of_exponents(emissions: Scores, moves: Logits) -> Probabilities:
    # Not with np.float64(), which makes a number of an array of one element.
    likely = np.exp((emissions - emissions.max(1, keepdims=True)).astype(np.float64))
    between = np.exp((moves[1:] - moves.max()).astype(np.float64))
    forward = np.empty_like(likely)
    forward[0] = likely[0] * np.exp((moves[0] - moves.max()).astype(np.float64))
    # Only ratios matter: rows that sum to 1 keep products from becoming 0.
    forward[0] /= forward[0].sum()
    for t in range(1, len(likely)):
        forward[t] = (forward[t - 1] @ between) * likely[t]
        forward[t] /= forward[t].sum()
    backward = np.ones_like(likely)
    for t in range(len(likely) - 2, -1, -1):
        backward[t] = between @ (likely[t + 1] * backward[t + 1])
        backward[t] /= backward[t].sum()
    both = forward * backward
    return both / both.sum(1, keepdims=True)


def sequence_loss(logits: Tensor, targets: Tensor, lengths: Sequence[int], transitions: Tensor) -> Tensor:
    """Return the negative log-likelihood of whole sequences, divided by the number of words.

    `logits` `[words, labels]` and `targets` `[words]` are of texts of `lengths` words, one text after another, each with at
    least one word. `transitions` are `[1 + labels, labels]`.
    """
    import torch

    # Longest first: the texts that have a word `t` are the first `longer`.
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    emissions = logits.split(list(lengths))
    steps = torch.nn.utils.rnn.pad_sequence([emissions[i] for i in order])
    between = transitions[1:]
    # The logarithm of the summed likelihoods of all sequences so far, by their last tag: `[texts, labels]`.
    total = transitions[0] + steps[0]
    ended = []
    for t in range(1, len(steps)):
        longer = sum(lengths[i] > t for i in order)
        ended.append(total[longer:])
        total = torch.logsumexp(total[:longer, :, None] + between, dim=1) + steps[t, :longer]
    ended.append(total)
    every = torch.cat(ended).logsumexp(1).sum()
    gold = logits.gather(1, targets[:, None]).sum()
    before = torch.cat([torch.cat([tags.new_zeros(1), tags[:-1] + 1]) for tags in targets.split(list(lengths))])
    gold = gold + transitions[before, targets].sum()
    return (every - gold) / len(targets)
