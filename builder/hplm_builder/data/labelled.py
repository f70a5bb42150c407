"""Labelled data of one task."""

from __future__ import annotations

import hashlib
import json
import math
from dataclasses import astuple, dataclass, field
from pathlib import Path

from hplm.adapters.tenant import Task
from hplm.core.text import TextOrPair


@dataclass(frozen=True)
class Entity:
    """A typed stretch of characters, end exclusive."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class LabelledText:
    """One example: a `label` for classification, a number in `label` for regression, `entities` for tagging.

    `pair` is the second text where the task is about two. `where` it stood, and whether its label `is_score` by the name of its
    column, are for errors. One with a label that `is_tagged` has been given entities too, or the empty list of them. Whether
    the label `is_literal`, a number or truth of JSON, tells how it is spelled as a class.
    """

    text: str
    label: str | None = None
    entities: tuple[Entity, ...] = ()
    pair: str | None = None
    where: str = field(default="", compare=False, repr=False)
    is_score: bool = field(default=False, compare=False, repr=False)
    is_tagged: bool = field(default=False, compare=False, repr=False)
    is_literal: bool = field(default=False, compare=False, repr=False)

    @property
    def text_or_pair(self) -> TextOrPair:
        """What a request would send."""
        return self.text if self.pair is None else (self.text, self.pair)

    @property
    def value(self) -> float:
        """The label of a regression."""
        return float(str(self.label))


@dataclass(frozen=True)
class LabelledData:
    """Checked examples of one task. `labels` are classes, the tags O, B-x, I-x of a tagging, or REGRESSION_LABEL.

    `unlabelled` are texts of the same kind that nobody has labelled.
    """

    task: Task
    labels: tuple[str, ...]
    train: list[LabelledText]
    dev: list[LabelledText]
    test: list[LabelledText]
    unlabelled: list[LabelledText] = field(default_factory=list)

    @property
    def labelled(self) -> dict[str, list[LabelledText]]:
        """The parts that have labels, by name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}

    @property
    def counts(self) -> dict[str, int]:
        """How many examples each part has; unlabelled texts only where there are some."""
        more = {"unlabelled": len(self.unlabelled)} if self.unlabelled else {}
        return {part: len(examples) for part, examples in self.labelled.items()} | more

    @property
    def sha256(self) -> str:
        """Of the labelled examples in their order, whatever files they came in."""
        values = [
            [(one.text, one.label, [astuple(entity) for entity in one.entities], one.pair) for one in part]
            for part in self.labelled.values()
        ]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @property
    def texts(self) -> int:
        """1, or 2 where every example is a pair."""
        return 1 if self.train[0].pair is None else 2


@dataclass(frozen=True)
class LabelledFile:
    """A file that errors name by its `name`, which says the format too, and not by where it lies.

    More than `most_bytes` of it are never read.
    """

    path: Path
    name: str
    most_bytes: float = math.inf
