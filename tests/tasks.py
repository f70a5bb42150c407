"""Small tasks that a tiny base can learn, 220 / 40 / 40 examples each."""

from __future__ import annotations

import numpy as np
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_checks import check_data

from hplm.tasks.examples import Entity, LabelledText


def colour_data() -> LabelledData:
    """Class: the colour that the text names."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(300):
        words = list(rng.choice(["the", "cat", "runs", "fast"], 4))
        colour = rng.choice(["red", "blue"])
        words.insert(int(rng.integers(0, 5)), colour)
        examples.append(LabelledText(" ".join(words), str(colour)))
    return check_data(examples[:220], examples[220:260], examples[260:])


def place_data() -> LabelledData:
    """Entities: names of places; names of people are none."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(300):
        words, entities, position = [], [], 0
        for word in rng.choice(["the", "cat", "Anna", "Paris", "Berlin", "Bob", "runs"], 6):
            if word in ("Paris", "Berlin"):
                entities.append(Entity("PLACE", position, position + len(word)))
            words.append(str(word))
            position += len(word) + 1
        examples.append(LabelledText(" ".join(words), None, tuple(entities)))
    return check_data(examples[:220], examples[220:260], examples[260:])


def count_data(*, pairs: bool = False) -> LabelledData:
    """Value: 100 and a half for each `red` among the words, of a pair less those of its second text."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(300):
        first, second = (rng.choice(["red", "cat", "the"], 5) for _ in range(2))
        value = 100 + 0.5 * int((first == "red").sum()) - (0.5 * int((second == "red").sum()) if pairs else 0)
        pair = " ".join(second) if pairs else None
        examples.append(LabelledText(" ".join(first), f"{value}", (), pair))
    return check_data(examples[:220], examples[220:260], examples[260:])


def seen_data() -> LabelledData:
    """Class of a pair: whether its second text names a colour; the first one is there to mislead."""
    rng = np.random.default_rng(0)
    examples = []
    for _ in range(300):
        first, second = (" ".join(rng.choice(["the", "cat", "runs", "red"], 3)) for _ in range(2))
        examples.append(LabelledText(first, "yes" if "red" in second else "no", (), second))
    return check_data(examples[:220], examples[220:260], examples[260:])
