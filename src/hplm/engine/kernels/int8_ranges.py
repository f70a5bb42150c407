"""Measuring the inputs of layers' products: the ranges that `hplm.engine.kernels.int8` needs."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hplm.core.text import TextOrPair
from hplm.engine.kernels.int8 import Ranges
from hplm.engine.token_domain import token_features
from hplm.models.base import Base
from hplm.models.layers import UpperLayers
from hplm.models.lower import LowerEncoder, merged_texts
from hplm.plot.ngrams import text_ngrams

# Sample texts. For bases of other languages, strings of random tokens of the vocabulary are measured beside them.
TEXTS = (
    "The council voted 7 to 2 on Tuesday to repair the old bridge before winter.",
    "A moving, beautifully acted film that never quite earns its final scene.",
    "Patients treated with 20 mg of the inhibitor showed a 35 % lower risk of relapse (p < 0.01).",
    "hi, my card was charged twice for the same order, can you please refund one of them?",
    "We propose a method for learning sentence representations from unlabelled text.",
    "Mutations of the BRCA1 gene are associated with hereditary breast and ovarian cancer.",
    "what's the weather going to be like in Lisbon this weekend",
    "lol that was the WORST ending ever!!! do not watch it :(",
    "Quarterly revenue rose to $4.2 billion, up from $3.9 billion a year earlier.",
    "This work extends the results of Smith et al. (2009) to the non-linear case.",
    "Set a timer for twenty-five minutes, then remind me to call my sister.",
    "Aspirin irreversibly inhibits cyclooxygenase and thereby the synthesis of thromboxane A2.",
    "It rained.",
    "The defendant shall deliver the goods within thirty (30) days of the date of this agreement.",
    "def area(r): return 3.14159 * r ** 2  # of a circle",
    "No, I have not been able to log in since the update; the page says 'error 503'.",
    "In 1868 the family moved to Vienna, where her father taught mathematics at a secondary school.",
    "Breaking: earthquake of magnitude 6.1 off the coast, no tsunami warning so far https://example.org",
    "Preheat the oven to 180 degrees, whisk three eggs with the sugar and fold in the flour.",
    "Funny, sad and wise.",
    "The receptor antagonist reduced dopamine-induced locomotion in mice but not in rats.",
    "How do I transfer money from my savings account to my brother's account abroad?",
    "Named entity recognition and relation extraction were evaluated on the ACE 2005 corpus.",
    "Huntington's disease is caused by an expanded CAG repeat in the HTT gene.",
)
FEED_FORWARD = ("ffn_in", "ffn_out")
PRODUCTS = ("qkv", "attention_out", *FEED_FORWARD)
# Number of random strings, and their length in tokens.
STRINGS, STRING_TOKENS = 24, 32
# Number of texts, and of strings, as long as a base reads: they reach the positions behind a sentence.
LONG = 2
# n-grams whose ranges are measured for a lower encoder. With MiniLM's windows, 64 to 2,730 of them move vectors equally far
# (measured by hand). A domain's first request waits for the measurement.
SAMPLE_NGRAMS = 256


def measure_ranges(base: Base, lower: LowerEncoder | None, upper: UpperLayers) -> list[Ranges]:
    """Measure the ranges of each upper layer without adapters, on the CPU: on sample texts, pairs of them and random strings.

    `lower` is the base's lower encoder; None for a whole base, whose token types are all taken as 0. All is computed in
    float32, even if bfloat16 is faster, so that every start measures the same ranges.
    """
    ids = sample_token_ids(base)
    lengths = [len(text) for text in ids]
    with torch.inference_mode():
        if lower is None:
            merged = torch.from_numpy(token_features(np.concatenate(ids)))
        else:
            merged = merged_texts(lower, np.concatenate(ids), lengths)
    return ranges_of(upper.layers, lambda: upper(merged, lengths))


def ranges_of(layers: Sequence[nn.Module] | nn.ModuleList, run: Callable[[], object]) -> list[Ranges]:
    """Measure the ranges of each of `layers`, TransformerLayers, while `run` runs them."""
    return [
        Ranges(attention[0], context[0], channels[0], inner[1])
        for attention, context, channels, inner in _largest_inputs(layers, PRODUCTS, run)
    ]


def block_ranges_of(blocks: Sequence[nn.Module] | nn.ModuleList, run: Callable[[], object]) -> list[Ranges]:
    """Measure the ranges of each of `blocks`, feed-forward halves without attention, while `run` runs them."""
    none = torch.zeros(0)
    return [Ranges(none, none, channels[0], inner[1]) for channels, inner in _largest_inputs(blocks, FEED_FORWARD, run)]


def _largest_inputs(
    layers: Sequence[nn.Module] | nn.ModuleList, names: Sequence[str], run: Callable[[], object]
) -> list[list[Tensor]]:
    """Return, for each layer and each product in `names`, the largest magnitudes and largest values of its inputs `[2, in]`."""
    # Only the largest values are kept: whole inputs would be as large as a batch of each layer.
    largest: dict[int, Tensor] = {}

    def see(number: int, inputs: Tensor) -> None:
        tokens = inputs.flatten(0, -2)
        largest[number] = torch.stack((tokens.abs().amax(0), tokens.amax(0))).float()

    with product_inputs(layers, names, see), torch.inference_mode():
        run()
    return [[largest[first + i] for i in range(len(names))] for first in range(0, len(largest), len(names))]


@contextmanager
def product_inputs(
    layers: Iterable[nn.Module], names: Sequence[str], see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """Call `see` with a number and the input of each product in `names`. Layer i's numbers begin at i * len(names)."""
    products = [getattr(layer, name) for layer in layers for name in names]
    hooks = [
        product.register_forward_pre_hook(lambda _, inputs, number=number: see(number, inputs[0]))
        for number, product in enumerate(products)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def sample_ngrams(base: Base) -> Tensor:
    """Return SAMPLE_NGRAMS n-grams of the sample texts, int64 `[SAMPLE_NGRAMS, n]`."""
    ids = sample_token_ids(base)
    grams, _ = text_ngrams(np.concatenate(ids), [len(text) for text in ids], base.config)
    unique = np.unique(grams, axis=0)
    return torch.from_numpy(unique[np.random.default_rng(0).permutation(len(unique))[:SAMPLE_NGRAMS]])


def sample_token_ids(base: Base) -> list[npt.NDArray[np.int64]]:
    """Return token ids of the sample texts, of pairs of them if the tokenizer takes pairs, and of random strings."""
    config = base.config
    encoder = base.load_text_encoder()
    texts: list[TextOrPair] = [*TEXTS, *[" ".join(TEXTS[start:] * 8) for start in range(LONG)]]
    if encoder.takes_pairs:
        texts += zip(TEXTS[::2], TEXTS[1::2], strict=True)
    rng = np.random.default_rng(0)
    lengths = [min(STRING_TOKENS, config.max_tokens)] * STRINGS + [config.max_tokens] * LONG
    return [encoded.ids for encoded in encoder.encode(texts)] + [
        rng.integers(0, config.vocab_size, length).astype(np.int64) for length in lengths
    ]
