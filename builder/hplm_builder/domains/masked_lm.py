"""Masked language modelling: further pretraining of a base's lower encoder, upper layers frozen (HMI 5.1).

Bases have no head for it. A head tied to the word embeddings is warmed up first, with everything else frozen.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F
from torch import Tensor, nn

from hplm.core.settings import at_least
from hplm.errors import ConfigError
from hplm.models.device import choose_dtype, computing_in
from hplm.models.layers import UpperLayers
from hplm.models.lower import LowerEncoder, merged_texts
from hplm.plot.ngrams import Ids
from hplm.reporting.progress import Report
from hplm_builder.convert.checkpoint import Checkpoint
from hplm_builder.convert.distillation import PackedText, batches
from hplm_builder.convert.learning_rate import triangle
from hplm_builder.domains.held_out import HeldOut, HeldOutPair
from hplm_builder.domains.masking import Masked, Vocabulary, mask_tokens

HELD_OUT_ROUNDS = 4
HEAD_LEARNING_RATE, HEAD_PLACES = 2e-3, 64
RISE_SHARE = 0.06
WARM_UP, PRETRAIN = "warm up the head", "further pretrain"
# Measuring has steps of its own, so that progress does not show a training that has ended.
MEASURE_BEFORE, MEASURE_AFTER = "measure before", "measure after"


@dataclass(frozen=True)
class MaskedLmSettings:
    """Settings of a training: `warmup_tokens` for the head alone, then `total_tokens` for the lower layers and the head.

    The upper layers stay fitted to the parent's vectors. At ten times this `learning_rate` a domain's vectors move by more than
    they vary, and a tenant over it lost seven points (docs/decisions.md).
    """

    total_tokens: int = 2_000_000
    warmup_tokens: int = 400_000
    learning_rate: float = 5e-5
    batch_tokens: int = 2048
    seed: int = 0

    def __post_init__(self) -> None:
        at_least(self, 1, "total_tokens", "warmup_tokens", "batch_tokens")
        at_least(self, 0, "seed")
        if not 0 < self.learning_rate <= 1:
            raise ConfigError(f"learning_rate must be above 0 and at most 1, got {self.learning_rate:g}")

    @property
    def warmup_steps(self) -> int:
        return max(1, self.warmup_tokens // self.batch_tokens)

    @property
    def steps(self) -> int:
        """Steps of the head alone and of the lower layers, added up."""
        return self.warmup_steps + max(1, self.total_tokens // self.batch_tokens)


class MaskedLmHead(nn.Module):
    """A head that predicts tokens: dense, gelu, LayerNorm, then the word embeddings and a bias."""

    words: Tensor

    def __init__(self, words: Tensor, counts: Ids, eps: float, seed: int) -> None:
        """Make a head over the frozen `words` `[vocabulary, H]`. It first predicts as often as `counts` `[vocabulary]` says."""
        super().__init__()
        self.dense = nn.Linear(words.shape[1], words.shape[1])
        self.norm = nn.LayerNorm(words.shape[1], eps=eps)
        self.bias = nn.Parameter(torch.from_numpy(np.log((counts + 1) / (counts + 1).sum())).float())
        self.register_buffer("words", words, persistent=False)
        nn.init.normal_(self.dense.weight, std=0.02, generator=torch.Generator().manual_seed(seed))
        nn.init.zeros_(self.dense.bias)

    def forward(self, hidden: Tensor) -> Tensor:
        """Compute logits: `[M, H]` -> `[M, vocabulary]`."""
        return F.linear(self.norm(F.gelu(self.dense(hidden))), self.words, self.bias)


class MaskedLm(nn.Module):
    """A base with a head tied to its word embeddings.

    Only the lower encoder trains, without its word embeddings. So a domain needs no copy of them, and words that its corpus
    lacks keep their meaning.
    """

    def __init__(self, lower: LowerEncoder, upper: UpperLayers, counts: Ids, seed: int) -> None:
        """Put a new head over `lower` and `upper`. `counts` `[vocabulary]`: how often each token is in the corpus."""
        super().__init__()
        self.lower, self.upper = lower, upper.requires_grad_(False)
        words = lower.word_embeddings.requires_grad_(False).weight
        self.head = MaskedLmHead(words.detach(), counts, lower.config.layer_norm_eps, seed)

    def lower_parameters(self) -> list[nn.Parameter]:
        return [p for p in self.lower.parameters() if p is not self.lower.word_embeddings.weight]

    def forward(self, masked: Masked, lengths: list[int]) -> Tensor:
        """Compute the last hidden states of the places to predict `[M, H]`. A masked token is masked in all its n-grams."""
        places = torch.from_numpy(masked.places).to(self.head.bias.device)
        hidden: Tensor = self.upper(merged_texts(self.lower, masked.ids, lengths), lengths)[places]
        return hidden

    def trained(self) -> dict[str, Tensor]:
        """Return the weights that training may change."""
        return {
            name: value
            for name, value in self.state_dict().items()
            if not name.startswith("upper.") and name != "lower.word_embeddings.weight"
        }


def measure_held_out(
    model: MaskedLm, held_out: PackedText, vocabulary: Vocabulary, batch_tokens: int, report: Callable[[float], None]
) -> HeldOut:
    """Predict masked tokens over several maskings of the text, the same at every call.

    `report` is called before each batch with the share that is done. If it raises, the measurement ends.
    """
    device = model.head.bias.device
    right = 0
    # By a passage's token ids: its summed loss, and the number of its places. So a passage is one over all maskings.
    sums: dict[bytes, tuple[float, int]] = {}
    source = batches(held_out, batch_tokens, np.random.default_rng(0))
    total = HELD_OUT_ROUNDS * math.ceil(held_out.num_tokens / batch_tokens)
    for number in range(total):
        report(number / total)
        ids, lengths = next(source)
        masked = mask_tokens(ids, vocabulary, np.random.default_rng([0, number]))
        targets = torch.from_numpy(masked.targets).to(device)
        with torch.inference_mode(), computing_in(choose_dtype("auto", device), device):
            logits = model.head(model(masked, lengths)).float()
        losses = F.cross_entropy(logits, targets, reduction="none").double().cpu().numpy()
        right += int((logits.argmax(1) == targets).sum())
        ends = np.cumsum(lengths)
        owners = np.searchsorted(ends, masked.places, side="right")
        for passage, (end, length) in enumerate(zip(ends, lengths, strict=True)):
            own = losses[owners == passage]
            key = ids[end - length : end].tobytes()
            loss, count = sums.get(key, (0.0, 0))
            sums[key] = loss + float(own.sum()), count + len(own)
    measured = [entry for entry in sums.values() if entry[1]]
    return HeldOut(
        np.array([loss for loss, _ in measured]), np.array([count for _, count in measured], dtype=np.int64), right
    )


def learning_rates(step: int, settings: MaskedLmSettings) -> tuple[float, float]:
    """Return the rates of the head and of the lower layers at a step: in each phase they rise shortly, then fall to zero."""
    first = settings.warmup_steps
    if step < first:
        return HEAD_LEARNING_RATE * triangle(step, first, RISE_SHARE), 0.0
    rate = settings.learning_rate * triangle(step - first, settings.steps - first, RISE_SHARE)
    return rate, rate


def train(
    model: MaskedLm,
    text: PackedText,
    held_out: PackedText,
    vocabulary: Vocabulary,
    settings: MaskedLmSettings,
    report: Report,
    checkpoint: Checkpoint | None = None,
) -> HeldOutPair:
    """Train in place; return the held-out measurements with the head warmed up (`before`) and at the end (`after`).

    Training goes on from `checkpoint` and leaves the last checkpoint there: a caller that keeps the result removes it.
    """
    optimizer = make_optimizer(model)
    checkpoint = checkpoint or Checkpoint(None, {})
    saved = checkpoint.load(model.head.bias.device)
    first, before = 0, None
    if saved:
        first, before = saved["step"], HeldOut.from_tensors(saved["before"])
        model.load_state_dict(saved["model"], strict=False)
        optimizer.load_state_dict(saved["optimizer"])
    source = batches(text, settings.batch_tokens, np.random.default_rng(settings.seed))
    for _ in range(first):
        next(source)

    def measured(step: str) -> HeldOut:
        def report_batch(done: float) -> None:
            report(step, done)
            checkpoint.reached()

        return measure_held_out(model, held_out, vocabulary, settings.batch_tokens, report_batch)

    done = first

    def state() -> dict[str, Any]:
        weights = {"model": model.trained(), "optimizer": optimizer.state_dict()}
        return {**weights, "step": done, "before": before.to_tensors() if before else None}

    with checkpoint.keeping(state):
        for step in range(first, settings.steps):
            if step == settings.warmup_steps:
                before = measured(MEASURE_BEFORE)
            report(*progress_at(step, settings))
            for group, rate in zip(optimizer.param_groups, learning_rates(step, settings), strict=True):
                group["lr"] = rate
            ids, lengths = next(source)
            masked = mask_tokens(ids, vocabulary, np.random.default_rng([settings.seed, step]))
            if len(masked.places):
                (warmup_step if step < settings.warmup_steps else train_step)(model, optimizer, masked, lengths)
            done = step + 1
            checkpoint.reached()
        assert before is not None
        checkpoint.save(state())
        return HeldOutPair(before, measured(MEASURE_AFTER))


def make_optimizer(model: MaskedLm) -> torch.optim.Optimizer:
    """Make AdamW over the head and the lower layers, a group each."""
    groups: list[dict[str, Any]] = [{"params": [*model.head.parameters()]}, {"params": model.lower_parameters()}]
    return torch.optim.AdamW(groups, betas=(0.9, 0.98), eps=1e-6)


def warmup_step(model: MaskedLm, optimizer: torch.optim.Optimizer, masked: Masked, lengths: list[int]) -> None:
    """Train the head alone on one batch, in many steps of few places: all share the hidden states, which cost most."""
    device = model.head.bias.device
    with torch.no_grad(), computing_in(choose_dtype("auto", device), device):
        hidden = model(masked, lengths)
    targets = torch.from_numpy(masked.targets).to(device)
    for part, part_targets in zip(hidden.split(HEAD_PLACES), targets.split(HEAD_PLACES), strict=True):
        _learn(model, optimizer, part, part_targets)


def train_step(model: MaskedLm, optimizer: torch.optim.Optimizer, masked: Masked, lengths: list[int]) -> None:
    """Train lower layers and head for one step."""
    device = model.head.bias.device
    with computing_in(choose_dtype("auto", device), device):
        hidden = model(masked, lengths)
    _learn(model, optimizer, hidden, torch.from_numpy(masked.targets).to(device))


def _learn(model: MaskedLm, optimizer: torch.optim.Optimizer, hidden: Tensor, targets: Tensor) -> None:
    with computing_in(choose_dtype("auto", hidden.device), hidden.device):
        logits = model.head(hidden)
    optimizer.zero_grad(set_to_none=True)
    F.cross_entropy(logits.float(), targets).backward()
    nn.utils.clip_grad_norm_([p for p in model.parameters() if p.grad is not None], 1.0)
    optimizer.step()


def progress_at(step: int, settings: MaskedLmSettings) -> tuple[str, float]:
    """Return the phase of `train` at a step, and the share of the phase that is done."""
    first = settings.warmup_steps
    if step < first:
        return WARM_UP, step / first
    return PRETRAIN, (step - first) / (settings.steps - first)
