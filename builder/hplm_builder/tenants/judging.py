"""Answers of a trained model, their scores, and where they go wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Head
from hplm.core.wire import LabelledSpan
from hplm.engine.encode import pool
from hplm.models.device import CPU, computing_in
from hplm.tasks.task_loader import task_named
from hplm_builder.data.labelled import LabelledData
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.dev_scores import DevScore
from hplm_builder.tenants.prepared import Prepared

# Texts that are computed together.
BATCH = 64


def predict(
    body: nn.Module,
    head: Head,
    data: LabelledData,
    examples: Sequence[Prepared],
    pooling: str,
    tick: Callable[[int], None] = lambda tokens: None,
    device: torch.device = CPU,
) -> list[list[LabelledSpan]]:
    """Return answers in the order of `examples`. `body` is on `device`. `tick` is called with each batch's number of tokens."""
    task = task_named(data.task)
    answers: list[list[LabelledSpan]] = [[] for _ in examples]
    weight, bias = torch.from_numpy(head.weight), torch.from_numpy(head.bias)
    for i, states in read_states(body, data, examples, pooling, tick, device):
        outputs = (states @ weight.T + bias).numpy()
        answers[i], _ = task.decode(outputs, data.labels, examples[i].tokens, head.transitions)
    return answers


def read_states(
    body: nn.Module,
    data: LabelledData,
    examples: Sequence[Prepared],
    pooling: str,
    tick: Callable[[int], None],
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """Give the hidden states that a head reads of each example, float32 on the CPU, with the example's place.

    `tick` is called with each batch's number of tokens.
    """
    task = task_named(data.task)
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    for start in range(0, len(order), BATCH):
        chunk = order[start : start + BATCH]
        lengths = [len(examples[i].tokens) for i in chunk]
        features = torch.cat([examples[i].features for i in chunk]).to(device)
        with torch.no_grad(), computing_in(*fastest_format(device)):
            hidden = body(features, lengths).float().cpu()
        for i, part in zip(chunk, hidden.split(lengths), strict=True):
            yield i, pool(task, pooling, part)
        tick(sum(lengths))


def scores_of(
    data: LabelledData, examples: Sequence[Prepared], answers: Sequence[Sequence[LabelledSpan]]
) -> dict[str, float]:
    """Return the task's scores by name."""
    sources, texts = [example.source for example in examples], [example.tokens for example in examples]
    return task_named(data.task).scores(sources, texts, answers)


def dev_score_of(
    data: LabelledData, examples: Sequence[Prepared], answers: Sequence[Sequence[LabelledSpan]]
) -> DevScore:
    """Return the score that epochs are kept by, with its chance."""

    def score(numbers: list[int]) -> float:
        chosen = [examples[i] for i in numbers], [answers[i] for i in numbers]
        return scores_of(data, *chosen)[task_named(data.task).metric]

    return DevScore.of(score, len(examples))


def mistakes_of(
    data: LabelledData, examples: Sequence[Prepared], answers: Sequence[Sequence[LabelledSpan]]
) -> dict[str, Any]:
    """Return where answers go wrong, by the task's names: `confusion` of classes, `types` of entities, nothing of values."""
    sources, texts = [example.source for example in examples], [example.tokens for example in examples]
    return task_named(data.task).mistakes(sources, texts, answers)
