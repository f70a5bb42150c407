"""Tagging: entities in the text, by a tag B-, I- or O for each word."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, ClassVar

import numpy as np
import numpy.typing as npt

from hplm.core.text import text_key
from hplm.core.wire import LabelledSpan
from hplm.errors import DataError
from hplm.tasks.entity_scores import entity_f1, entity_types, gold_entities
from hplm.tasks.examples import Entity, Examples, LabelledText, Parts, quoted
from hplm.tasks.tag_sequences import (
    Scores,
    are_moderate,
    best_path,
    forbidden_transitions,
    marginals,
    path_log_probability,
    sequence_loss,
)
from hplm.tasks.task import IGNORED, Answers, Logits, Scale, Task, Tokenise, Tokens
from hplm.tasks.words import word_logits, word_ranges

if TYPE_CHECKING:
    from torch import Tensor

# The most types of entities: training looks at all pairs of tags at each word.
MOST_ENTITY_TYPES = 100
# The numbers of words, the word itself in the middle, whose outputs may say a word's tag, and the number for a new tenant:
# docs/decisions.md has what it gives over reading the word's first token alone.
WORD_WINDOWS = range(1, 10, 2)
WORD_WINDOW = 3
# The share of steps in which the learning rate rises. With 0.1, one tagging of three over a base of 768 learned nothing:
# docs/decisions.md.
WARMUP_SHARE = 0.3
# By how many standard errors a later epoch's dev score may be below the best score. Later epochs were trained at lower rates,
# and dev data have so few entities that the best of ten epochs is best by chance.
CHANCE = 2.0


class Tagging(Task):
    """Entities are the answer, each with the mean probability of its words' tags."""

    name: ClassVar[str] = "tagging"
    metric: ClassVar[str] = "f1"
    reads_tokens: ClassVar[bool] = True
    takes_pairs: ClassVar[bool] = False
    takes_entities: ClassVar[bool] = True
    has_confidence: ClassVar[bool] = True
    word_windows: ClassVar[Sequence[int]] = WORD_WINDOWS
    new_word_window: ClassVar[int] = WORD_WINDOW
    has_transitions: ClassVar[bool] = True
    warmup_share: ClassVar[float] = WARMUP_SHARE
    training_notes: ClassVar[Mapping[str, Any]] = {
        "head": f"with transitions, over {WORD_WINDOW} words",
        "warm-up": WARMUP_SHARE,
        "kept": f"the last epoch within {CHANCE:g} standard errors of the best",
    }

    def decode(
        self, outputs: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
    ) -> tuple[list[LabelledSpan], Logits]:
        logits = word_logits(outputs, len(labels), tokens)
        return entities_in(logits, labels, tokens, transitions), logits

    def confidence(
        self,
        outputs: Logits,
        labels: Sequence[str],
        tokens: Tokens,
        transitions: Logits | None = None,
        temperature: float = 1.0,
    ) -> float:
        """Return the probability of the whole answered sequence of tags among all sequences; see `Task.confidence`.

        A sentence is right only if every tag is right, so its confidence is not the mean of its entities' scores.
        """
        emissions = _emissions(word_logits(outputs, len(labels), tokens), tokens)
        if not len(emissions):
            return 1.0
        path = best_path(
            emissions, forbidden_transitions(tuple(labels)) + (0.0 if transitions is None else transitions)
        )
        return math.exp(path_log_probability(emissions, tuple(labels), transitions, path, temperature))

    def log_likelihood(
        self,
        outputs: Logits,
        labels: Sequence[str],
        tokens: Tokens,
        targets: npt.NDArray[np.int64],
        transitions: Logits | None = None,
        temperature: float = 1.0,
    ) -> float:
        emissions = _emissions(word_logits(outputs, len(labels), tokens), tokens)
        if not len(emissions):
            return 0.0
        path = targets[targets != IGNORED].tolist()
        return path_log_probability(emissions, tuple(labels), transitions, path, temperature)

    def describe(self, labels: Sequence[str]) -> str:
        kinds = len(self.label_names(labels))
        return f"tagging of {kinds} kind{'s' * (kinds != 1)} of entities"

    def is_meant_by(self, train: Examples) -> bool:
        return train[0].label is None

    def labels_of(self, parts: Parts) -> tuple[str, ...]:
        kinds = sorted(_types(parts["train"]))
        if not kinds:
            raise DataError("the train data holds no entity, so nothing can be learned")
        if len(kinds) > MOST_ENTITY_TYPES:
            raise DataError(
                f"the train data holds {len(kinds):,} types of entities, at most {MOST_ENTITY_TYPES} can be learned"
            )
        for name, part in parts.items():
            if unknown := sorted(_types(part) - set(kinds)):
                raise DataError(
                    f"the {name} data has types of entities that the train data lacks: {quoted(unknown, kinds)}"
                )
        return ("O", *(f"{prefix}-{kind}" for kind in kinds for prefix in ("B", "I")))

    def check_split(self, train: Examples, dev: Examples) -> None:
        if not _types(dev):
            # A model that finds nothing would score best.
            raise DataError(
                "the dev data holds no entity, so it cannot tell a good model from a bad one; give more dev data"
            )

    def stratum(self, example: LabelledText) -> str:
        return str(sorted({entity.label for entity in example.entities}))

    def gold(self, example: LabelledText) -> object:
        # Without places, because copies of a text may differ in white space.
        return tuple((entity.label, text_key(example.text[entity.start : entity.end])) for entity in example.entities)

    def label_names(self, labels: Sequence[str]) -> Sequence[str]:
        return sorted({tag.partition("-")[2] for tag in labels if tag != "O"})

    def warnings(self, parts: Parts, labels: Sequence[str], tokenise: Tokenise, max_tokens: int) -> list[str]:
        why = f"begin or end inside a word, or are beyond the first {max_tokens} tokens of a text, which are read"
        sentences = []
        for name, part in parts.items():
            total = sum(len(example.entities) for example in part)
            lost = total - _count_answerable(part, tokenise)
            if name != "test" and lost == total > 0:
                raise DataError(f"none of the {total:,} entities of the {name} data can be learned: they {why}")
            if lost:
                sentences.append(f"{lost:,} of {total:,} entities of the {name} data can never be found: they {why}")
        return sentences

    def test_warnings(self, test: Examples) -> list[str]:
        is_empty = bool(test) and not _types(test)
        return ["the test data holds no entity: a model that finds nothing scores best there"] if is_empty else []

    def reduction_factor(self, slot_factor: int) -> int:
        # Wide adapters help named entities by more than dev examples can show: docs/decisions.md.
        return slot_factor

    def forbidden_transitions(self, labels: Sequence[str]) -> Logits:
        return forbidden_transitions(tuple(labels))

    def targets(self, example: LabelledText, tokens: Tokens, label_ids: Mapping[str, int]) -> Tensor:
        """Return the tag of each word at its first token, IGNORED elsewhere: `[T]`."""
        import torch

        targets = torch.full((len(tokens),), IGNORED)
        before = None
        for first, _ in word_ranges(tokens):
            start = int(tokens[first, 0])
            entity = next((one for one in reversed(example.entities) if one.start <= start < one.end), None)
            # The word before decides, not where the entity starts, which may be within a word or within another entity.
            tag = "O" if entity is None else f"{'I' if entity is before else 'B'}-{entity.label}"
            targets[first] = label_ids[tag]
            before = entity
        return targets

    def loss(
        self, outputs: Tensor, targets: Tensor, texts: Sequence[Tokens], scale: Scale, transitions: Tensor | None
    ) -> Tensor:
        import torch

        assert transitions is not None
        parts = outputs.split([len(tokens) for tokens in texts])
        logits = [
            _word_logits(part, transitions.shape[1], word_ranges(tokens))
            for part, tokens in zip(parts, texts, strict=True)
        ]
        counts = [len(part) for part in logits]
        return sequence_loss(torch.cat(logits), targets[targets != IGNORED], counts, transitions)

    def late_epoch_tolerance(self, best_score: float, dev: Examples) -> float | None:
        entities = max(1, sum(len(example.entities) for example in dev))
        return CHANCE * math.sqrt(best_score * (1 - best_score) / entities)

    def scores(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, float]:
        return {"f1": entity_f1(_gold(examples, texts), answers)}

    def mistakes(self, examples: Examples, texts: Sequence[Tokens], answers: Answers) -> dict[str, Any]:
        return {"types": entity_types(_gold(examples, texts), answers)}

    def labelled_as(self, example: LabelledText, answer: Sequence[LabelledSpan]) -> LabelledText:
        return replace(example, entities=tuple(Entity(span.label, span.start, span.end) for span in answer))


def entities_in(
    logits: Logits, labels: Sequence[str], tokens: Tokens, transitions: Logits | None = None
) -> list[LabelledSpan]:
    """Return the entities of the best sequence of tags: `logits` `[T, labels]`, of each word at its first token.

    The best sequence has the highest sum of logits and `transitions` (`[1 + labels, labels]`, None for zeros) among those in
    which entities begin with their B- tag. An entity's score is the mean over its words of the tag's probability among all
    sequences.
    """
    words = word_ranges(tokens)
    if not words:
        return []
    emissions = _emissions(logits, tokens)
    moves = forbidden_transitions(tuple(labels)) + (0.0 if transitions is None else transitions)
    path = best_path(emissions, moves)
    if not any("-" in labels[tag] for tag in path):
        return []
    probabilities = marginals(emissions, moves)
    entities: list[LabelledSpan] = []
    open_type, scores, start, end = "", [0.0], 0, 0

    def close() -> None:
        if open_type:
            entities.append(LabelledSpan(open_type, float(np.mean(scores)), start, end))

    for word, ((first, last), tag) in enumerate(zip(words, path, strict=True)):
        prefix, _, kind = labels[tag].partition("-")
        score = float(probabilities[word, tag])
        if prefix == "I" and kind == open_type:
            scores.append(score)
        else:
            close()
            open_type, scores, start = kind, [score], int(tokens[first, 0])
        end = int(tokens[last - 1, 1])
    close()
    return entities


def _emissions(logits: Logits, tokens: Tokens) -> Scores:
    """Return each word's logits `[words, labels]`, from those at each token; in float64 if sums of logits need it."""
    emissions = logits[[first for first, _ in word_ranges(tokens)]]
    # Sums of the largest float32 numbers are infinite in float32.
    return emissions if not len(emissions) or are_moderate(emissions) else emissions.astype(np.float64)


def _types(part: Examples) -> set[str]:
    return {entity.label for example in part for entity in example.entities}


def _gold(examples: Examples, texts: Sequence[Tokens]) -> list[list[Entity]]:
    return [gold_entities(example, tokens) for example, tokens in zip(examples, texts, strict=True)]


def _count_answerable(part: Examples, tokenise: Tokenise) -> int:
    """Return how many entities are whole words that are read."""
    count = 0
    for example, tokens in tokenise(example for example in part if example.entities):
        ranges = word_ranges(tokens)
        starts = {int(tokens[first, 0]) for first, _ in ranges}
        ends = {int(tokens[last - 1, 1]) for _, last in ranges}
        count += sum(entity.start in starts and entity.end in ends for entity in gold_entities(example, tokens))
    return count


def _word_logits(outputs: Tensor, num_labels: int, words: Sequence[tuple[int, int]]) -> Tensor:
    """Return what `word_logits` does, for training and for the words alone: `[T, n * labels]` -> `[words, labels]`."""
    import torch
    import torch.nn.functional as F

    window = outputs.shape[1] // num_labels
    if window == 1:
        return outputs[[first for first, _ in words]]
    sizes = torch.tensor([last - first for first, last in words], device=outputs.device)
    means = torch.segment_reduce(outputs[words[0][0] : words[-1][1]], "mean", lengths=sizes)
    # Zeros beyond the ends of the text.
    padded = F.pad(means.view(len(words), window, -1), (0, 0, 0, 0, window // 2, window // 2))
    return torch.stack([padded[place : place + len(words), place] for place in range(window)]).sum(0)
