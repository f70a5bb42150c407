"""Converting a pretrained model: train lower encoder and upper layers together to match its hidden states.

A model taken off the shelf never saw a text in n-grams. Cut at a layer and fed with the vectors of n-grams, it loses much
of its quality. Conversion distils the model into itself on unlabelled text. The loss is the squared error of the last hidden
states and, with less weight, of the hidden states from the cut on, each relative to the variance of the original's.
"""

from __future__ import annotations

from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor

from hplm.core.settings import BaseConfig
from hplm.engine.lower_layers import make_lower
from hplm.models.device import choose_dtype, computing_in
from hplm.models.layers import OriginalEncoder, TransformerLayer, UpperLayers
from hplm.models.lower import merged_ngrams
from hplm.plot.ngrams import Ids, fragment, middle, text_ngrams, vectors_of
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.distillation import (
    MEASURED_TOKENS,
    Distilled,
    DistillSettings,
    PackedText,
    batches,
    distil,
    relative_errors,
    source_of,
)


@dataclass(frozen=True)
class ConvertSettings(DistillSettings):
    """Settings of a conversion: about 1,500 tokens/s on two cores for 3 + 3 layers.

    A share of the n-grams is cut to the bigram or unigram of the back-off, so that the back-off works too.
    """

    inner_weight: float = 0.25
    backoff_share: float = 0.1


class Converted(Distilled):
    """A base in conversion: both halves, trained together."""

    def __init__(self, config: BaseConfig, original: OriginalEncoder) -> None:
        super().__init__()
        self.config = config
        self.lower = make_lower(config)
        self.upper = UpperLayers(config)
        self._start_from(original)

    def _start_from(self, original: OriginalEncoder) -> None:
        depth = len(original.layers)
        self.lower.word_embeddings.load_state_dict(original.word_embeddings.state_dict())
        # Word embeddings do not train: they are half of a small model's bytes, and a shipped conversion leaves them out.
        self.lower.word_embeddings.requires_grad_(False)
        self.lower.start_from(original)
        for mine, theirs in zip(self.upper.layers, original.layers[depth - len(self.upper.layers) :], strict=True):
            mine.load_state_dict(theirs.state_dict())
        if original.relative is not None:
            assert self.upper.relative is not None
            self.upper.relative.load_state_dict(original.relative.state_dict())
        with torch.no_grad():
            # The layer below the cut ends in a LayerNorm; repeating its affine makes the merge's LayerNorm near neutral.
            below = original.layers[depth - len(self.upper.layers) - 1]
            assert isinstance(below, TransformerLayer)
            self.upper.position_embeddings.weight.zero_()
            self.upper.merge_norm.weight.fill_(float(below.ffn_norm.weight.mean()))
            self.upper.merge_norm.bias.fill_(float(below.ffn_norm.bias.mean()))

    def states(self, grams: Tensor, exists: Tensor, lengths: list[int]) -> list[Tensor]:
        """Compute the hidden states at the cut and after each upper layer, `[N, H]` each."""
        return self.upper.states(merged_ngrams(self.lower, grams, exists), lengths)


def ngram_batch(
    ids: Ids, lengths: list[int], config: BaseConfig, backoff_share: float, rng: np.random.Generator
) -> tuple[Tensor, Tensor]:
    """Return n-grams `[N, n]`, and which of their vectors exist `[N, v]`. A share is cut as for the back-off."""
    grams, exists = text_ngrams(ids, lengths, config)
    for size in sorted({1, min(2, config.window - 1)}):
        chosen = rng.random(len(grams)) < backoff_share / 2
        grams[chosen] = fragment(grams[chosen], size, config.pad_id)
        outside = np.ones(config.vectors_per_ngram, dtype=bool)
        outside[middle(vectors_of(size, config), config.vectors_per_ngram)] = False
        exists[np.ix_(chosen, outside)] = False
    return torch.from_numpy(grams), torch.from_numpy(exists)


def distance(model: Converted, original: OriginalEncoder, text: PackedText) -> dict[str, float]:
    """Measure how far the converted base is from the original on `text`, in the dtype that training uses.

    `mse`: mean squared error of the last hidden states. `relative`: that error over their variance. `relative_cut`: the same
    at the cut.
    """
    device = model.lower.device
    rng = np.random.default_rng(0)
    source = batches(text, MEASURED_TOKENS, rng)
    count = max(1, text.num_tokens // MEASURED_TOKENS)
    sums = np.zeros(3)
    with torch.no_grad(), computing_in(choose_dtype("auto", device), device):
        for _ in range(count):
            ids, lengths = next(source)
            grams, exists = (part.to(device) for part in ngram_batch(ids, lengths, model.config, 0.0, rng))
            states = model.states(grams, exists, lengths)
            targets = original(torch.from_numpy(ids).to(device), lengths)[-len(states) :]
            errors = relative_errors(states, targets)
            mse = (states[-1].float() - targets[-1].float()).square().mean()
            sums += [float(mse), float(errors[-1]), float(errors[0])]
    return dict(zip(("mse", "relative", "relative_cut"), (sums / count).tolist(), strict=True))


def train(
    model: Converted,
    original: OriginalEncoder,
    text: PackedText,
    settings: ConvertSettings,
    path: Path,
    progress: Progress,
    started_from: str = "",
) -> None:
    """Train in place. Raises DataError if there is a checkpoint at `path` of another run.

    Training goes on from the checkpoint of its own run and leaves the last checkpoint there: a caller that keeps the result
    removes it. `started_from`: fingerprint of the base whose weights the model has, "" if they are the original's.
    """
    device = model.lower.device
    run = {"settings": asdict(settings), "config": asdict(model.config), "source": source_of(original, text)}
    run |= {"started_from": started_from} if started_from else {}

    def batch_loss(ids: Ids, lengths: list[int], rng: np.random.Generator) -> tuple[Tensor, Tensor]:
        grams, exists = ngram_batch(ids, lengths, model.config, settings.backoff_share, rng)
        with torch.no_grad():
            targets = original(torch.from_numpy(ids).to(device), lengths)[-len(model.upper.layers) - 1 :]
        errors = relative_errors(model.states(grams.to(device), exists.to(device), lengths), targets)
        return errors[-1] + settings.inner_weight * torch.stack(errors[:-1]).sum(), errors[-1]

    checkpoint = Checkpoint(path, run, precious=True)
    distil(model, batch_loss, text, settings, checkpoint, device, progress, "convert")
