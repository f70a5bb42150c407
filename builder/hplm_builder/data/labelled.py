"""Types of labelled data: the data of one task, and a file of examples."""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

from hplm.tasks.examples import LabelledText


@dataclass(frozen=True)
class LabelledData:
    """Checked examples of one task.

    `labels` are the classes, or the tags O, B-x and I-x of a tagging, or REGRESSION_LABEL. `unlabelled` holds further texts
    without labels. A text stands in `dev` and in `test` once, see `distinct_examples`; in `train` it may repeat. `repeats` says
    in a sentence, by the name of the part, what was left out of dev and test. `notes` say what was read otherwise than it is
    written.
    """

    task: str
    labels: tuple[str, ...]
    train: list[LabelledText]
    dev: list[LabelledText]
    test: list[LabelledText]
    unlabelled: list[LabelledText] = field(default_factory=list)
    repeats: Mapping[str, str] = field(default_factory=dict)
    notes: list[str] = field(default_factory=list)

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
