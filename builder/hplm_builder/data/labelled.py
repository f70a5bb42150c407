"""Types of labelled data: an example, the data of one task, a file of it."""

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
    """A typed range of characters; `end` is exclusive."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class LabelledText:
    """One example: a `label` for classification, a number in `label` for regression, `entities` for tagging.

    `pair` is the second text of a task over pairs. The rest describes the row that the example was read from:
    `where` is its file and line, for errors. `is_score` says that the label's column is called `score`.
    `is_tagged` says that the row has a list of entities, perhaps an empty one, beside its label.
    `is_literal` says that the label is a JSON number or truth value, which decides how a class of that name is spelled.
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
        """The text, or both texts of a pair, as a request sends them."""
        return self.text if self.pair is None else (self.text, self.pair)

    @property
    def value(self) -> float:
        """The label as a number, for a regression."""
        return float(str(self.label))


@dataclass(frozen=True)
class LabelledData:
    """Checked examples of one task.

    `labels` are the classes, or the tags O, B-x and I-x of a tagging, or REGRESSION_LABEL. `unlabelled` holds further texts
    without labels.
    """

    task: Task
    labels: tuple[str, ...]
    train: list[LabelledText]
    dev: list[LabelledText]
    test: list[LabelledText]
    unlabelled: list[LabelledText] = field(default_factory=list)

    @property
    def labelled(self) -> dict[str, list[LabelledText]]:
        """The parts with labels, by name."""
        return {"train": self.train, "dev": self.dev, "test": self.test}

    @property
    def counts(self) -> dict[str, int]:
        """The number of examples in each part; `unlabelled` is left out if it is empty."""
        more = {"unlabelled": len(self.unlabelled)} if self.unlabelled else {}
        return {part: len(examples) for part, examples in self.labelled.items()} | more

    @property
    def sha256(self) -> str:
        """A checksum over the labelled examples in their order, independent of file names and formats."""
        values = [
            [
                (example.text, example.label, [astuple(entity) for entity in example.entities], example.pair)
                for example in part
            ]
            for part in self.labelled.values()
        ]
        return hashlib.sha256(json.dumps(values).encode()).hexdigest()

    @property
    def texts(self) -> int:
        """The number of texts in each example: 2 for pairs, else 1."""
        return 1 if self.train[0].pair is None else 2


@dataclass(frozen=True)
class LabelledFile:
    """A file whose errors show `name` instead of its path. The ending of `name` says the format.

    A file of more than `most_bytes` is refused.
    """

    path: Path
    name: str
    most_bytes: float = math.inf
