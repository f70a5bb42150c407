"""What goes into the products of a base's upper layers, or of lower ones: the ranges that `hplm.engine.kernels.int8` needs."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor

from hplm.core.text import TextOrPair
from hplm.engine.kernels.int8 import Ranges
from hplm.models.base import Base
from hplm.models.layers import UpperLayers, WindowEncoder, merge_windows
from hplm.plot.windows import windows

# Beside strings of any of the vocabulary's tokens, for bases of other languages.
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
STRINGS, STRING_TOKENS = 24, 32
# Texts and strings as long as a base reads, for the positions that lie behind a sentence.
LONG = 2
# With MiniLM 64 to 2,730 of them move vectors equally far (by hand); a domain's first request waits for them.
WINDOWS = 256


def measure_ranges(base: Base, upper: UpperLayers) -> list[Ranges]:
    """Ranges of each upper layer, `upper` of no tenant and on the CPU, on TEXTS, pairs of them and strings of random tokens.

    In float32 wherever bfloat16 is faster too: from start to start the same, whatever is tried there.
    """
    ids = _token_ids(base)
    lengths = [len(one) for one in ids]
    config = base.config
    grams, exists = windows(np.concatenate(ids), lengths, config.window, config.pad_id)
    with torch.inference_mode():
        merged = merge_windows(base.load_lower()(torch.from_numpy(grams)), torch.from_numpy(exists))
    return _ranges_of(upper, lambda: upper(merged, lengths))


def measure_window_ranges(base: Base, lower: WindowEncoder) -> list[Ranges]:
    """Ranges of each layer of `lower`, the base's or a domain's, on the CPU: on WINDOWS n-grams of the texts and strings."""
    ids = _token_ids(base)
    config = base.config
    grams, _ = windows(np.concatenate(ids), [len(one) for one in ids], config.window, config.pad_id)
    unique = np.unique(grams, axis=0)
    some = np.random.default_rng(0).permutation(len(unique))[:WINDOWS]
    return _ranges_of(lower, lambda: lower(torch.from_numpy(unique[some])))


def _ranges_of(encoder: UpperLayers | WindowEncoder, run: Callable[[], object]) -> list[Ranges]:
    """Ranges of each of its layers while `run` runs it."""
    # Kept whole the inputs would be as large as a batch of each layer.
    seen: dict[int, Tensor] = {}

    def see(number: int, given: Tensor) -> None:
        tokens = given.flatten(0, -2)
        seen[number] = torch.stack((tokens.abs().amax(0), tokens.amax(0))).float()

    with product_inputs(encoder, PRODUCTS, see), torch.inference_mode():
        run()
    layers = [[seen[first + i] for i in range(len(PRODUCTS))] for first in range(0, len(seen), len(PRODUCTS))]
    return [Ranges(attention[0], context[0], channels[0], inner[1]) for attention, context, channels, inner in layers]


@contextmanager
def product_inputs(
    encoder: UpperLayers | WindowEncoder, names: Sequence[str], see: Callable[[int, Tensor], None]
) -> Iterator[None]:
    """While it lasts, `see` gets what goes into the products of those names: the n of layer i are numbers n i and on."""
    products = [getattr(layer, name) for layer in encoder.layers for name in names]
    hooks = [
        product.register_forward_pre_hook(lambda _, given, number=number: see(number, given[0]))
        for number, product in enumerate(products)
    ]
    try:
        yield
    finally:
        for hook in hooks:
            hook.remove()


def _token_ids(base: Base) -> list[npt.NDArray[np.int64]]:
    config = base.config
    encoder = base.load_text_encoder()
    texts: list[TextOrPair] = [*TEXTS, *[" ".join(TEXTS[start:] * 8) for start in range(LONG)]]
    if encoder.takes_pairs:
        texts += zip(TEXTS[::2], TEXTS[1::2], strict=True)
    rng = np.random.default_rng(0)
    sizes = [min(STRING_TOKENS, config.max_tokens)] * STRINGS + [config.max_tokens] * LONG
    return [one.ids for one in encoder.encode(texts)] + [
        rng.integers(0, config.vocab_size, size).astype(np.int64) for size in sizes
    ]
