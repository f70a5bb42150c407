"""What a sequence of tags costs: a linear-chain CRF over the logits of a text's words (Lafferty et al., 2001)."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor


def sequence_loss(logits: Tensor, targets: Tensor, lengths: Sequence[int], transitions: Tensor) -> Tensor:
    """Mean over words of the negative log-likelihood of whole sequences.

    `logits` `[words, labels]` and `targets` `[words]` of texts of `lengths` words, one after another, each at least one;
    `transitions` `[1 + labels, labels]` as of `Head`.
    """
    # Longest first: at word `t` the texts that have one are the first `left`.
    order = sorted(range(len(lengths)), key=lambda i: -lengths[i])
    emissions = logits.split(list(lengths))
    steps = torch.nn.utils.rnn.pad_sequence([emissions[i] for i in order])
    between = transitions[1:]
    # log of the summed likelihoods of all sequences so far, by the last tag: `[texts, labels]`.
    total = transitions[0] + steps[0]
    ended = []
    for t in range(1, len(steps)):
        left = sum(lengths[i] > t for i in order)
        ended.append(total[left:])
        total = torch.logsumexp(total[:left, :, None] + between, dim=1) + steps[t, :left]
    ended.append(total)
    of_all = torch.cat(ended).logsumexp(1).sum()
    of_gold = logits.gather(1, targets[:, None]).sum()
    before = torch.cat([torch.cat([tags.new_zeros(1), tags[:-1] + 1]) for tags in targets.split(list(lengths))])
    of_gold = of_gold + transitions[before, targets].sum()
    return (of_all - of_gold) / len(targets)
