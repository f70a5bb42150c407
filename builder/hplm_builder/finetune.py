"""Fine-tuning a tenant: adapters and a head over the PLOT features that serving will see (HMI 5.2).

The same loop trains the two comparisons of the evaluation: all upper layers, and the whole unconverted model.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F
from rich.progress import Progress
from torch import Tensor, nn

from hplm.adapters.packed import Adapter
from hplm.adapters.tenant import Head, Task
from hplm.decode import decode_classification, decode_tagging, word_ranges
from hplm.errors import ConfigError
from hplm.nn.dtype import bfloat16_is_fast, computing_in
from hplm.nn.encoder import OriginalEncoder, UpperEncoder
from hplm.nn.upper import in_dtype, pool
from hplm.text import EncodedText, TextEncoder
from hplm.wire import LabelledSpan
from hplm_builder.labelled import LabelledData, LabelledText
from hplm_builder.scores import accuracy, entity_f1, macro_f1

IGNORED = -100


@dataclass(frozen=True)
class TrainSettings:
    """How to fine-tune. Of several learning rates the one with the best dev score stays."""

    epochs: int = 10
    learning_rates: tuple[float, ...] = (2e-3,)
    batch_tokens: int = 1024
    warmup_share: float = 0.1
    weight_decay: float = 0.01
    dropout: float = 0.1
    pooling: str = "mean"
    seed: int = 0

    def __post_init__(self) -> None:
        if self.epochs < 1 or not self.learning_rates or min(self.learning_rates) <= 0:
            raise ConfigError("epochs must be at least 1 and learning rates above 0")
        if self.pooling not in ("cls", "mean"):
            raise ConfigError(f"pooling must be cls or mean, got {self.pooling!r}")


@dataclass(frozen=True)
class Prepared:
    """One example ready to train on: `features` `[T, H]` float16 or ids `[T]`, `targets` `[1]` or `[T]`, and its source."""

    features: Tensor
    targets: Tensor
    tokens: npt.NDArray[np.int32]
    source: LabelledText


Featurise = Callable[[list[EncodedText]], list[Tensor]]


def prepare(
    examples: Sequence[LabelledText], data: LabelledData, encoder: TextEncoder, featurise: Featurise
) -> list[Prepared]:
    """Tokenise, align labels with tokens, and take the features of every example."""
    label_ids = {label: index for index, label in enumerate(data.labels)}
    prepared = []
    for start in range(0, len(examples), 256):
        chunk = examples[start : start + 256]
        encoded = encoder.encode([example.text for example in chunk])
        for example, one, features in zip(chunk, encoded, featurise(encoded), strict=True):
            if data.task == "tagging":
                targets = tag_targets(example, one.tokens, label_ids)
            else:
                targets = torch.tensor([label_ids[str(example.label)]])
            prepared.append(Prepared(features, targets, one.tokens, example))
    return prepared


def tag_targets(example: LabelledText, tokens: npt.NDArray[np.int32], label_ids: dict[str, int]) -> Tensor:
    """The tag of each word at its first token, IGNORED elsewhere: `[T]`."""
    targets = torch.full((len(tokens),), IGNORED)
    for first, _ in word_ranges(tokens):
        start = int(tokens[first, 0])
        tag = "O"
        for entity in example.entities:
            if entity.start <= start < entity.end:
                tag = f"{'B' if start == entity.start else 'I'}-{entity.label}"
        targets[first] = label_ids.get(tag, label_ids["O"])
    return targets


class AdapterModel(nn.Module):
    """Frozen upper layers with one trainable adapter each."""

    def __init__(self, upper: UpperEncoder, reduction_factor: int) -> None:
        super().__init__()
        config = upper.config
        layers, hidden, reduced = (
            config.upper_layers,
            config.hidden_size,
            max(1, config.hidden_size // reduction_factor),
        )
        self._upper = [upper.requires_grad_(False)]  # in a list: not a parameter of this module
        # Small random down, zero up: training starts from the identity.
        self.down = nn.Parameter(torch.randn(layers, reduced, hidden) * hidden**-0.5)
        self.down_bias = nn.Parameter(torch.zeros(layers, reduced))
        self.up = nn.Parameter(torch.zeros(layers, hidden, reduced))
        self.up_bias = nn.Parameter(torch.zeros(layers, hidden))

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden: Tensor = self._upper[0](features.float(), lengths, self._adapt)
        return hidden

    def _adapt(self, layer: int, attended: Tensor) -> Tensor:
        reduced = F.relu(F.linear(attended, self.down[layer], self.down_bias[layer]))
        return attended + F.linear(reduced, self.up[layer], self.up_bias[layer])

    def adapter(self) -> Adapter:
        """The trained weights."""
        return Adapter(*(p.detach().numpy().copy() for p in (self.down, self.down_bias, self.up, self.up_bias)))


class UpperModel(nn.Module):
    """All upper layers trainable, over PLOT features."""

    def __init__(self, upper: UpperEncoder) -> None:
        super().__init__()
        self.upper = upper

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        hidden: Tensor = self.upper(features.float(), lengths)
        return hidden


class FullModel(nn.Module):
    """The unconverted model, everything trainable, over token ids."""

    def __init__(self, original: OriginalEncoder) -> None:
        super().__init__()
        self.original = original

    def forward(self, features: Tensor, lengths: Sequence[int]) -> Tensor:
        return self.original(features, lengths)[-1]


@dataclass(frozen=True)
class Trained:
    """The best of the runs by dev score: `body` and `head` hold its weights."""

    body: nn.Module
    head: Head
    scores: dict[str, float]
    learning_rate: float
    best_epoch: int
    dev_by_rate: dict[float, float]


def fine_tune(
    make_body: Callable[[], nn.Module],
    hidden_size: int,
    data: LabelledData,
    train: list[Prepared],
    dev: list[Prepared],
    test: list[Prepared],
    settings: TrainSettings,
    progress: Progress,
    description: str,
) -> Trained:
    """Train once a learning rate, keep the epoch with the best dev score, report dev and test."""
    metric = "f1" if data.task == "tagging" else "accuracy"
    best: Trained | None = None
    dev_by_rate: dict[float, float] = {}
    total = len(settings.learning_rates) * settings.epochs * sum(len(p.tokens) for p in train)
    bar = progress.add_task(description, total=total)
    for rate in settings.learning_rates:
        torch.manual_seed(settings.seed)
        body = make_body()
        head = nn.Linear(hidden_size, len(data.labels))
        found = _run(body, head, data, train, dev, settings, rate, progress, bar, metric)
        dev_by_rate[rate] = found[0]
        if best is None or found[0] > best.scores[f"dev_{metric}"]:
            dev_score, epoch, body_state, head_state = found
            body.load_state_dict(body_state)
            kept = Head(head_state["weight"].numpy().copy(), head_state["bias"].numpy().copy())
            best = Trained(body, kept, {f"dev_{metric}": dev_score}, rate, epoch, dev_by_rate)
    assert best is not None
    scores = {f"dev_{k}": v for k, v in score(best.body, best.head, data, dev, settings.pooling).items()}
    if test:
        scores |= {f"test_{k}": v for k, v in score(best.body, best.head, data, test, settings.pooling).items()}
    progress.update(bar, completed=total)
    return Trained(best.body, best.head, scores, best.learning_rate, best.best_epoch, dev_by_rate)


def _run(
    body: nn.Module,
    head: nn.Linear,
    data: LabelledData,
    train: list[Prepared],
    dev: list[Prepared],
    settings: TrainSettings,
    rate: float,
    progress: Progress,
    bar: Any,
    metric: str,
) -> tuple[float, int, dict[str, Tensor], dict[str, Tensor]]:
    rng = np.random.default_rng(settings.seed)
    params = [p for p in [*body.parameters(), *head.parameters()] if p.requires_grad]
    optimizer = torch.optim.AdamW(params, lr=rate, weight_decay=settings.weight_decay, fused=True)
    batches_per_epoch = len(_batches(train, settings.batch_tokens, rng))
    steps = batches_per_epoch * settings.epochs
    warmup = max(1, int(steps * settings.warmup_share))
    step = 0
    best: tuple[float, int, dict[str, Tensor], dict[str, Tensor]] = (-1.0, 0, {}, {})
    for epoch in range(1, settings.epochs + 1):
        for batch in _batches(train, settings.batch_tokens, rng):
            for group in optimizer.param_groups:
                group["lr"] = rate * min((step + 1) / warmup, max(0.0, (steps - step) / max(1, steps - warmup)))
            loss = _loss(body, head, data.task, batch, settings)
            optimizer.zero_grad(set_to_none=True)
            loss.backward()
            nn.utils.clip_grad_norm_(params, 1.0)
            optimizer.step()
            step += 1
            progress.update(bar, advance=sum(len(p.tokens) for p in batch))
        as_head = Head(head.weight.detach().numpy(), head.bias.detach().numpy())
        found = score(body, as_head, data, dev, settings.pooling)[metric]
        if found > best[0]:
            best = (found, epoch, copy_state(body), copy_state(head))
    return best


def copy_state(module: nn.Module) -> dict[str, Tensor]:
    """The module's weights as they are now."""
    return {name: value.detach().clone() for name, value in module.state_dict().items()}


def _batches(examples: list[Prepared], batch_tokens: int, rng: np.random.Generator) -> list[list[Prepared]]:
    """Packed batches of about `batch_tokens`, similar lengths together, in random order."""
    lengths = np.array([len(p.tokens) for p in examples]) * rng.uniform(0.8, 1.25, len(examples))
    order = np.argsort(lengths)
    batches: list[list[Prepared]] = [[]]
    tokens = 0
    for index in order:
        if tokens >= batch_tokens:
            batches.append([])
            tokens = 0
        batches[-1].append(examples[index])
        tokens += len(examples[index].tokens)
    return [sorted(batches[i], key=lambda p: len(p.tokens)) for i in rng.permutation(len(batches))]


def _loss(body: nn.Module, head: nn.Linear, task: Task, batch: list[Prepared], settings: TrainSettings) -> Tensor:
    lengths = [len(p.tokens) for p in batch]
    features = torch.cat([p.features for p in batch])
    with computing_in(*_fast()):
        hidden = body(features, lengths)
    pooled = torch.cat([pool(task, settings.pooling, part) for part in hidden.float().split(lengths)])
    logits = head(F.dropout(pooled, settings.dropout))
    return F.cross_entropy(logits, torch.cat([p.targets for p in batch]), ignore_index=IGNORED)


def predict(
    body: nn.Module, head: Head, data: LabelledData, examples: Sequence[Prepared], pooling: str
) -> list[list[LabelledSpan]]:
    """Decoded answers, in the order of `examples`."""
    answers: list[list[LabelledSpan]] = [[] for _ in examples]
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    decoder = decode_tagging if data.task == "tagging" else decode_classification
    weight, bias = torch.from_numpy(head.weight), torch.from_numpy(head.bias)
    for start in range(0, len(order), 64):
        chunk = order[start : start + 64]
        lengths = [len(examples[i].tokens) for i in chunk]
        features = torch.cat([examples[i].features for i in chunk])
        with torch.no_grad(), computing_in(*_fast()):
            hidden = body(features, lengths).float()
        for i, part in zip(chunk, hidden.split(lengths), strict=True):
            logits = (pool(data.task, pooling, part) @ weight.T + bias).numpy()
            answers[i] = decoder(logits, data.labels, examples[i].tokens)
    return answers


def score(
    body: nn.Module, head: Head, data: LabelledData, examples: Sequence[Prepared], pooling: str
) -> dict[str, float]:
    """`accuracy` and `macro_f1` of a classification, entity `f1` of a tagging."""
    found = predict(body, head, data, examples, pooling)
    if data.task == "tagging":
        return {"f1": entity_f1([p.source.entities for p in examples], found)}
    gold, got = [str(p.source.label) for p in examples], [spans[0].label for spans in found]
    return {"accuracy": accuracy(gold, got), "macro_f1": macro_f1(gold, got)}


def _fast() -> tuple[torch.dtype, torch.device]:
    return torch.bfloat16 if bfloat16_is_fast() else torch.float32, torch.device("cpu")


def adapter_body(upper: UpperEncoder, reduction_factor: int) -> Callable[[], nn.Module]:
    """Makes a fresh `AdapterModel` over upper layers prepared once."""
    frozen = in_dtype(upper, _fast()[0])
    return lambda: AdapterModel(frozen, reduction_factor)
