"""Distillation on unlabelled text: a module is trained to give the hidden states that another model gives.

A conversion (`hplm_builder.convert.training`) and a trunk (`hplm_builder.convert.trunk`) are trained by the same loop. It
writes checkpoints, and an interrupted training continues from its last checkpoint.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from rich.progress import Progress
from torch import Tensor, nn

from hplm.core.settings import at_least
from hplm.errors import ConfigError
from hplm.models.device import choose_dtype, computing_in
from hplm.plot.ngrams import Ids
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.learning_rate import triangle

# Tokens of a batch in which the distance is measured.
MEASURED_TOKENS = 8192
# Computes a batch's loss from packed ids `[N]`, the lengths of its passages, and a generator for what is random. The second
# value is the error that the progress shows.
BatchLoss = Callable[[Ids, list[int], np.random.Generator], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class DistillSettings:
    """Settings of a distillation. `total_tokens` decides the time.

    Muon trains the matrices of the layers at twice `learning_rate`, AdamW the rest at `learning_rate`.
    """

    total_tokens: int = 5_000_000
    batch_tokens: int = 8192
    learning_rate: float = 1e-3
    warmup_share: float = 0.03
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 < self.learning_rate < math.inf:
            raise ConfigError(f"the learning rate must be a number above 0, got {self.learning_rate}")
        at_least(self, 1, "total_tokens", "batch_tokens")
        at_least(self, 0, "seed")


@dataclass(frozen=True)
class PackedText:
    """Token ids of passages, one after another: `ids` `[sum(lengths)]`, `lengths` `[passages]`."""

    ids: Ids
    lengths: Ids

    @property
    def num_tokens(self) -> int:
        return len(self.ids)

    @property
    def digest(self) -> str:
        """A digest of the ids in hexadecimal digits, which tells texts apart."""
        return hashlib.sha256(self.ids.tobytes()).hexdigest()


class Distilled(nn.Module):
    """A module in distillation. Parameters that do not train have `requires_grad` off."""

    def trainable(self) -> dict[str, nn.Parameter]:
        """Return the parameters that distillation changes."""
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


def relative_errors(states: list[Tensor], targets: list[Tensor]) -> list[Tensor]:
    """Return the mean squared error of each state over the variance of its target."""
    return [
        (s.float() - t.float()).square().mean() / t.float().var(0).mean() for s, t in zip(states, targets, strict=True)
    ]


def make_optimizers(model: Distilled) -> list[torch.optim.Optimizer]:
    """Make Muon for the matrices of the layers, AdamW for the rest."""
    linear_weights = {id(module.weight) for module in model.modules() if isinstance(module, nn.Linear)}
    trained = model.trainable().values()
    matrices = [p for p in trained if id(p) in linear_weights]
    others = [p for p in trained if id(p) not in linear_weights]
    return [
        torch.optim.AdamW(others, betas=(0.9, 0.98), weight_decay=0.0),
        torch.optim.Muon(matrices, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
    ]


def distil(
    model: Distilled,
    batch_loss: BatchLoss,
    text: PackedText,
    settings: DistillSettings,
    checkpoint: Checkpoint,
    device: torch.device,
    progress: Progress,
    title: str,
) -> None:
    """Train in place. Raises DataError if there is a checkpoint of another run.

    Training goes on from the checkpoint of its own run and leaves the last checkpoint there: a caller that keeps the result
    removes it. `title` names the progress bar.
    """
    dtype = choose_dtype("auto", device)
    steps = max(1, settings.total_tokens // settings.batch_tokens)
    optimizers = make_optimizers(model)
    source = batches(text, settings.batch_tokens, np.random.default_rng(settings.seed))
    first = 0
    if (saved := checkpoint.load(device)) is not None:
        first = saved["step"]
        model.load_state_dict(saved["model"], strict=False)
        for optimizer, of_optimizer in zip(optimizers, saved["optimizers"], strict=True):
            optimizer.load_state_dict(of_optimizer)
    done = first

    def state() -> dict[str, Any]:
        weights = {name: p.detach() for name, p in model.trainable().items()}
        return {"model": weights, "optimizers": [optimizer.state_dict() for optimizer in optimizers], "step": done}

    for _ in range(first):
        next(source)
    bar = progress.add_task(title, total=steps, completed=first)
    with checkpoint.keeping(state):
        for step in range(first, steps):
            rate = settings.learning_rate * triangle(step, steps, settings.warmup_share)
            for optimizer, factor in zip(optimizers, (1.0, 2.0), strict=True):
                for group in optimizer.param_groups:
                    group["lr"] = rate * factor
            ids, lengths = next(source)
            with computing_in(dtype, device):
                loss, error = batch_loss(ids, lengths, np.random.default_rng([settings.seed, step]))
            for optimizer in optimizers:
                optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(list(model.trainable().values()), 1.0)
            for optimizer in optimizers:
                optimizer.step()
            done = step + 1
            progress.update(bar, advance=1, description=f"{title} (relative error {error.item():.3f})")
            checkpoint.reached()
    checkpoint.save(state())


def source_of(original: nn.Module, text: PackedText) -> str:
    """Return what a training starts from: a digest of the original's weights and of the text."""
    digest = hashlib.sha256(text.ids.tobytes())
    for _, value in sorted(original.state_dict().items()):
        digest.update(value.cpu().numpy().tobytes())
    return digest.hexdigest()
