"""Words of a text: the tokens of each, and logits of words from outputs of tokens."""

from __future__ import annotations

import itertools

import numpy as np

from hplm.tasks.task import Logits, Tokens


def word_ranges(tokens: Tokens) -> list[tuple[int, int]]:
    """Return the first and one past the last token of each word of `[T, 3]` tokens; special tokens are no words."""
    words = tokens[:, 2]
    edges = np.flatnonzero(np.diff(words, prepend=-2, append=-2))
    return [(int(a), int(b)) for a, b in itertools.pairwise(edges) if words[a] >= 0]


def word_logits(outputs: Logits, num_labels: int, tokens: Tokens) -> Logits:
    """Return each word's logits at each of the word's tokens: `outputs` `[T, n * labels]` -> `[T, labels]`.

    With n 1 these are the outputs. Otherwise a token has outputs on n words, its own word in the middle. The outputs on a word
    are averaged over the tokens of one word, and these means are summed. Tokens of no word have zeros.
    """
    window = outputs.shape[1] // num_labels
    if window == 1:
        return outputs
    logits = np.zeros((len(outputs), num_labels), np.float32)
    words = np.array(word_ranges(tokens), np.int64).reshape(-1, 2)
    if not len(words):
        return logits
    sizes = words[:, 1] - words[:, 0]
    # `reduceat` sums from each word's first token to one past its last, and from there to the next word, which is left out.
    # The row of zeros lies one past the last token.
    sums = np.add.reduceat(np.concatenate([outputs, np.zeros_like(outputs[:1])]), words.ravel())[::2]
    means = (sums / np.float32(sizes[:, None])).reshape(len(words), window, num_labels)
    # Zeros beyond the ends of the text.
    padded = np.zeros((len(words) + window - 1, window, num_labels), np.float32)
    padded[window // 2 : window // 2 + len(words)] = means
    totals = np.sum([padded[place : place + len(words), place] for place in range(window)], axis=0)
    logits[tokens[:, 2] >= 0] = np.repeat(totals, sizes, axis=0)
    return logits
