"""Converting a pretrained model: train lower encoder and upper layers together to match its hidden states.

A model taken off the shelf never saw a text in n-grams. Cut at a layer and fed with the vectors of n-grams, it loses much
of its quality. Conversion distils the model into itself on unlabelled text. The loss is the squared error of the last hidden
states and, with less weight, of the hidden states from the cut on, each relative to the variance of the original's.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn

from hplm.core.settings import BaseConfig, at_least
from hplm.engine.lower_layers import make_lower
from hplm.errors import ConfigError, DataError
from hplm.models.device import choose_dtype, computing_in
from hplm.models.layers import OriginalEncoder, TransformerLayer, UpperLayers
from hplm.models.lower import merged_ngrams
from hplm.plot.ngrams import Ids, fragment, middle, text_ngrams, vectors_of
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.learning_rate import triangle

CHECKPOINT_STEPS = 50
# Tokens of a batch in which the distance is measured.
MEASURED_TOKENS = 8192


@dataclass(frozen=True)
class ConvertSettings:
    """Settings of a conversion. `total_tokens` decides the time: about 1,500 tokens/s on two cores for 3 + 3 layers.

    Muon trains the matrices of the layers at twice `learning_rate`, AdamW the rest at `learning_rate`. A share of the n-grams
    is cut to the bigram or unigram of the back-off, so that the back-off works too.
    """

    total_tokens: int = 5_000_000
    batch_tokens: int = 8192
    learning_rate: float = 1e-3
    warmup_share: float = 0.03
    inner_weight: float = 0.25
    backoff_share: float = 0.1
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"the learning rate must be a number above 0, got {self.learning_rate}")
        at_least(self, 0, "seed")


@dataclass(frozen=True)
class PackedText:
    """Token ids of passages, one after another: `ids` `[sum(lengths)]`, `lengths` `[passages]`."""

    ids: Ids
    lengths: Ids

    @property
    def num_tokens(self) -> int:
        return len(self.ids)


class Converted(nn.Module):
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

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that conversion changes: all but the word embeddings."""
        return {name: p for name, p in self.named_parameters() if p.requires_grad}


def batches(text: PackedText, batch_tokens: int, rng: np.random.Generator) -> Iterator[tuple[Ids, list[int]]]:
    """Yield packed batches of passages of similar length, in random order, without end."""
    starts = np.concatenate([[0], np.cumsum(text.lengths)[:-1]])
    while True:
        order = np.argsort(text.lengths * rng.uniform(0.9, 1.1, len(text.lengths)))
        bounds = np.searchsorted(np.cumsum(text.lengths[order]), np.arange(batch_tokens, text.num_tokens, batch_tokens))
        groups = [group for group in np.split(order, bounds) if len(group)]
        for index in rng.permutation(len(groups)):
            members = groups[index][np.argsort(text.lengths[groups[index]], kind="stable")]
            yield (
                np.concatenate([text.ids[starts[m] : starts[m] + text.lengths[m]] for m in members]),
                [int(text.lengths[m]) for m in members],
            )


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


def relative_errors(states: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Return the mean squared error of each state over the variance of its target."""
    return [
        (s.float() - t.float()).square().mean() / t.float().var(0).mean() for s, t in zip(states, targets, strict=True)
    ]


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


def make_optimizers(model: Converted) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices of the layers, AdamW for the rest."""
    linear_weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    trained = model.trainable().values()
    matrices = [p for p in trained if id(p) in linear_weights]
    others = [p for p in trained if id(p) not in linear_weights]
    return [
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]


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
    dtype = choose_dtype("auto", device)
    steps = max(1, settings.total_tokens // settings.batch_tokens)
    optimizers = make_optimizers(model)
    source = batches(text, settings.batch_tokens, np.random.default_rng(settings.seed))
    run = {"settings": asdict(settings), "config": asdict(model.config), "source": source_of(original, text)}
    run |= {"started_from": started_from} if started_from else {}
    checkpoint, first = Checkpoint(path, run), 0
    if (saved := checkpoint.load(device)) is not None:
        first = saved["step"]
        model.load_state_dict(saved["model"], strict=False)
        for optimizer, state in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(state)
    elif path.is_file():
        raise DataError(f"{path} is of another model, text or settings, or damaged: remove it to start anew")
    for _ in range(first):
        next(source)
    bar = progress.add_task("convert", total=steps, completed=first)
    for step in range(first, steps):
        rate = settings.learning_rate * triangle(step, steps, settings.warmup_share)
        for optimizer, factor in zip(optimizers, (1.0, 2.0), strict=True):
            for group in optimizer.param_groups:
                group["lr"] = rate * factor
        ids, lengths = next(source)
        rng = np.random.default_rng([settings.seed, step])
        grams, exists = ngram_batch(ids, lengths, model.config, settings.backoff_share, rng)
        with computing_in(dtype, device):
            with torch.no_grad():
                targets = original(torch.from_numpy(ids).to(device), lengths)[-len(model.upper.layers) - 1 :]
            errors = relative_errors(model.states(grams.to(device), exists.to(device), lengths), targets)
            loss = errors[-1] + settings.inner_weight * torch.stack(errors[:-1]).sum()
        for optimizer in optimizers:
            optimizer.zero_grad(set_to_none=True)
        loss.backward()
        nn.utils.clip_grad_norm_(list(model.trainable().values()), 1.0)
        for optimizer in optimizers:
            optimizer.step()
        progress.update(bar, advance=1, description=f"convert (relative error {errors[-1].item():.3f})")
        if (step + 1) % CHECKPOINT_STEPS == 0 or step + 1 == steps:
            weights = {name: p.detach() for name, p in model.trainable().items()}
            states = [optimizer.state_dict() for optimizer in optimizers]
            checkpoint.save({"model": weights, "optimizers": states, "step": step + 1})


def source_of(original: nn.Module, text: PackedText) -> str:
    """Return what a training starts from: a digest of the original's weights and of the text."""
    digest = hashlib.sha256(text.ids.tobytes())
    for _, value in sorted(original.state_dict().items()):
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()
