"""What a trained model answers, how good that is, and where it goes wrong."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
from torch import Tensor, nn

from hplm.adapters.tenant import Head
from hplm.core.wire import LabelledSpan
from hplm.engine.encode import pool
from hplm.models.device import CPU, computing_in
from hplm.tasks.decode import answer_of
from hplm_builder.data.labelled import Entity, LabelledData, LabelledText
from hplm_builder.data.labelled_files import may_be_dropped
from hplm_builder.tenants.bodies import fastest_format
from hplm_builder.tenants.prepared import Prepared
from hplm_builder.tenants.scores import accuracy, confusion, entity_f1, entity_types, macro_f1, pearson, spearman


def predict(
    body: nn.Module,
    head: Head,
    data: LabelledData,
    examples: Sequence[Prepared],
    pooling: str,
    tick: Callable[[int], None] = lambda tokens: None,
    device: torch.device = CPU,
) -> list[list[LabelledSpan]]:
    """Decoded answers, in the order of `examples`; `tick` hears how many tokens each batch had. `body` is on `device`."""
    answers: list[list[LabelledSpan]] = [[] for _ in examples]
    weight, bias = torch.from_numpy(head.weight), torch.from_numpy(head.bias)
    for i, pooled in pooled_states(body, data, examples, pooling, tick, device):
        found = (pooled @ weight.T + bias).numpy()
        answers[i], _ = answer_of(data.task, found, data.labels, examples[i].tokens, head.transitions)
    return answers


def pooled_states(
    body: nn.Module,
    data: LabelledData,
    examples: Sequence[Prepared],
    pooling: str,
    tick: Callable[[int], None],
    device: torch.device,
) -> Iterator[tuple[int, Tensor]]:
    """What a head sees of each example, float32 on the CPU, with the example's place; `tick` as `predict` has it."""
    order = sorted(range(len(examples)), key=lambda i: len(examples[i].tokens))
    for start in range(0, len(order), 64):
        chunk = order[start : start + 64]
        lengths = [len(examples[i].tokens) for i in chunk]
        features = torch.cat([examples[i].features for i in chunk]).to(device)
        with torch.no_grad(), computing_in(*fastest_format(device)):
            hidden = body(features, lengths).float().cpu()
        for i, part in zip(chunk, hidden.split(lengths), strict=True):
            yield i, pool(data.task, pooling, part)
        tick(sum(lengths))


def scores_of(
    data: LabelledData, examples: Sequence[Prepared], answers: Sequence[Sequence[LabelledSpan]]
) -> dict[str, float]:
    """`accuracy` and `macro_f1` of a classification, entity `f1` of a tagging, `pearson` and `spearman` of a regression."""
    if data.task == "tagging":
        return {"f1": entity_f1([gold_of(one) for one in examples], answers)}
    if data.task == "regression":
        values, found = [one.source.value for one in examples], [spans[0].score for spans in answers]
        return {"pearson": pearson(values, found), "spearman": spearman(values, found)}
    gold, got = [str(one.source.label) for one in examples], [spans[0].label for spans in answers]
    return {"accuracy": accuracy(gold, got), "macro_f1": macro_f1(gold, got)}


def gold_of(one: Prepared) -> list[Entity]:
    """Its entities as answers may have them."""
    return gold_entities(one.source, one.tokens)


def gold_entities(source: LabelledText, tokens: npt.NDArray[np.int32]) -> list[Entity]:
    """Entities of a text, of `tokens` `[T, 3]`, without what the tokenizer dropped at their ends, as an accent that is a
    character of its own: answers are from the beginning of a token to the end of one.

    Ends within a word and behind the last token of a text that was cut stay where they are: those are misses.
    """

    def is_dropped(place: int) -> bool:
        if not may_be_dropped(source.text[place]):
            return False
        return not bool(((tokens[:, 0] <= place) & (place < tokens[:, 1])).any())

    found = []
    for entity in source.entities:
        start, end = entity.start, entity.end
        while start < end and is_dropped(start):
            start += 1
        while start < end and is_dropped(end - 1):
            end -= 1
        found.append(replace(entity, start=start, end=end))
    return found


def mistakes_of(
    data: LabelledData, examples: Sequence[Prepared], answers: Sequence[Sequence[LabelledSpan]]
) -> dict[str, Any]:
    """The `confusion` of a classification, the `types` of a tagging; nothing of a regression."""
    if data.task == "tagging":
        return {"types": entity_types([gold_of(one) for one in examples], answers)}
    if data.task == "regression":
        return {}
    return {"confusion": confusion([str(one.source.label) for one in examples], [spans[0].label for spans in answers])}
