"""A trained level of a tenant, opened as it is served: it answers texts, is calibrated, and its answers are judged."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from types import TracebackType

import numpy as np
import numpy.typing as npt
import torch

from hplm.adapters.tenant import Tenant
from hplm.cascade.calibration import fit_temperature
from hplm.cascade.dispatch import word_importances
from hplm.cascade.level_outputs import Flags, LevelOutputs
from hplm.core.text import EncodedText, TextOrPair
from hplm.core.wire import LabelledSpan
from hplm.engine.encode import EncodeEngine, EngineRequest
from hplm.engine.open_domain import Domain
from hplm.engine.token_domain import Features
from hplm.errors import DataError
from hplm.models.base import Base
from hplm.models.device import CPU, choose_dtype
from hplm.tasks.entity_scores import gold_entities
from hplm.tasks.examples import LabelledText
from hplm.tasks.task import Logits, Tokens
from hplm.tasks.task_loader import task_named

# Tokens of a batch, about as many as a batch of the encode stage has under load.
BATCH_TOKENS = 4096
# Texts that are tokenised and looked up together.
CHUNK = 256
# Temperatures of taggings are fitted on so many sentences, evenly from all: each likelihood takes half a millisecond.
MOST_FITTED_SENTENCES = 400
# The importance of words that was not asked for.
NO_WORDS = np.zeros((0, 3), np.float32)


@dataclass(frozen=True)
class LevelInput:
    """A trained level of a tenant: the tenant over a base, and the domain that gives its features.

    `base_name` is the base's name in the store, which the plan gets.
    """

    base: Base
    domain: Domain
    tenant: Tenant
    base_name: str


@dataclass(frozen=True)
class Answered:
    """A level's outputs for one text: the head's outputs, the text's tokens `[T, 3]`, and the importance of its words.

    `importance` is `[words, 3]`, see `hplm.cascade.pruning.prune`; `[0, 3]` if it was not asked for.
    """

    outputs: Logits
    tokens: Tokens
    importance: npt.NDArray[np.float32]


class Level(AbstractContextManager["Level"]):
    """A level with its engine, in the number format that `dtype: auto` serves in on `device`."""

    def __init__(self, level: LevelInput, device: torch.device = CPU) -> None:
        base, tenant = level.base, level.tenant
        self.base_name = level.base_name
        self.tenant = tenant
        self.task = task_named(tenant.card.task)
        self.labels = tenant.card.labels
        self._label_ids = {label: number for number, label in enumerate(self.labels)}
        self._domain = level.domain
        self._encoder = base.load_text_encoder()
        self._engine = EncodeEngine(
            base.config,
            base.load_upper(),
            # A slot for each student, and one for the identity.
            num_slots=1 + tenant.card.students,
            reduced_size=tenant.packed.reduced_size,
            device=device,
            dtype=choose_dtype("auto", device),
        )

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._engine.close()

    def answer(
        self,
        texts: Sequence[TextOrPair],
        *,
        wants_importance: bool = False,
        tick: Callable[[int], None] = lambda count: None,
    ) -> list[Answered]:
        """Return the outputs for each text, in order. `tick` is called with the number of texts of each batch.

        Raises DataError if a text has no token.
        """
        answered: list[Answered | None] = [None] * len(texts)
        # By length, so that texts of a batch are about equally long.
        order = sorted(range(len(texts)), key=lambda i: len("".join(texts[i])))
        batch: list[tuple[int, EncodedText, Features]] = []

        def run() -> None:
            requests = [
                EngineRequest(self.tenant, features, students=self.tenant.card.students) for _, _, features in batch
            ]
            if wants_importance:
                for (number, encoded, _), (outputs, received) in zip(
                    batch, self._engine.run_with_importance(requests), strict=True
                ):
                    words = word_importances(received, encoded.tokens)
                    answered[number] = Answered(outputs, encoded.tokens, words)
            else:
                for (number, encoded, _), outputs in zip(batch, self._engine.run(requests), strict=True):
                    answered[number] = Answered(outputs, encoded.tokens, NO_WORDS)
            tick(len(batch))
            batch.clear()

        tokens = 0
        for start in range(0, len(order), CHUNK):
            numbers = order[start : start + CHUNK]
            encoded_texts = self._encoder.encode([texts[number] for number in numbers])
            if empty := [number for number, text in zip(numbers, encoded_texts, strict=True) if text.is_empty]:
                raise DataError(f"a text holds nothing but white space and control characters: {texts[empty[0]]!r:.80}")
            every_features: Sequence[Features] = self._domain.features(encoded_texts)
            for number, text, features in zip(numbers, encoded_texts, every_features, strict=True):
                batch.append((number, text, features))
                tokens += len(text.ids)
                if tokens >= BATCH_TOKENS:
                    run()
                    tokens = 0
        if batch:
            run()
        return [one for one in answered if one is not None]

    def calibrate(self, answered: Sequence[Answered], examples: Sequence[LabelledText], right: Flags) -> float:
        """Return the temperature that calibrates the level's answers, see `fit_temperature`."""
        most = MOST_FITTED_SENTENCES if self.task.reads_tokens else len(examples)
        numbers = [i * len(examples) // most for i in range(most)] if most < len(examples) else [*range(len(examples))]
        targets = {i: self.task.targets(examples[i], answered[i].tokens, self._label_ids).numpy() for i in numbers}

        def log_likelihood(temperature: float) -> float:
            return sum(
                self.task.log_likelihood(
                    answered[i].outputs,
                    self.labels,
                    answered[i].tokens,
                    targets[i],
                    self.tenant.head.transitions,
                    temperature,
                )
                for i in numbers
            )

        return fit_temperature(log_likelihood, right)

    def judge(self, answered: Sequence[Answered], examples: Sequence[LabelledText], temperature: float) -> LevelOutputs:
        """Return the answers to `examples` with their confidence, and whether they are right.

        The texts that were answered may be the examples' texts after pruning.
        """
        card, head = self.tenant.card, self.tenant.head
        decoded = [self.task.decode(one.outputs, card.labels, one.tokens, head.transitions) for one in answered]
        confidences = [
            self.task.confidence(one.outputs, card.labels, one.tokens, head.transitions, temperature)
            for one in answered
        ]
        spans = [answer for answer, _ in decoded]
        entities = np.zeros((len(answered), 0), np.int64)
        answers: tuple[tuple[LabelledSpan, ...], ...] = ()
        if self.task.takes_entities:
            entities = np.array(
                [_count_entities(*each) for each in zip(spans, examples, answered, strict=True)], np.int64
            ).reshape(-1, 3)
            right = (entities[:, 0] == entities[:, 1]) & (entities[:, 0] == entities[:, 2])
            logits = np.zeros((len(answered), 0), np.float32)
            answers = tuple(map(tuple, spans))
        else:
            right = np.array(
                [answer[0].label == example.label for answer, example in zip(spans, examples, strict=True)], bool
            )
            logits = np.concatenate([one.outputs for one in answered]).astype(np.float32)
        return LevelOutputs(
            logits,
            np.array(confidences, np.float32),
            right,
            np.array([len(one.tokens) for one in answered], np.int64),
            entities,
            answers,
        )

    def gold(self, examples: Sequence[LabelledText]) -> npt.NDArray[np.int64]:
        """Return the number of each example's label, -1 of a tagging."""
        return np.array([self._label_ids.get(str(example.label), -1) for example in examples], np.int64)


def _count_entities(spans: Sequence[LabelledSpan], example: LabelledText, answered: Answered) -> tuple[int, int, int]:
    """Return the numbers of right, answered and labelled entities of a sentence."""
    gold = {(entity.label, entity.start, entity.end) for entity in gold_entities(example, answered.tokens)}
    found = {(span.label, span.start, span.end) for span in spans}
    return len(gold & found), len(found), len(gold)
