"""Heads on frozen states, cross-validated, tell what an encoder is worth to tenants."""

from __future__ import annotations

import csv
import itertools
import json
from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest
import torch
from hplm_builder.data.labelled import LabelledFile
from hplm_builder.domains import domain_build
from hplm_builder.domains.benefit import LEAST_EXAMPLES, DevExamples, DevSet, compare_answers
from hplm_builder.domains.verdict import Verdict

from hplm.engine.lower_layers import load_lower
from hplm.errors import DataError, JobCancelledError
from hplm.models.base import WORDS, Base
from hplm.models.lower import LowerEncoder
from hplm.store.layout import Store

CPU = torch.device("cpu")
ROOT = "plots/general"
COUNT = 60


def write_classes(path: Path) -> LabelledFile:
    """Write texts whose class is their first word."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "label"])
        for number, words in enumerate(rng.permutation([*itertools.product(("cat", "dog", "runs"), repeat=4)])[:COUNT]):
            colour = ("red", "blue")[number % 2]
            rows.writerow([" ".join([colour, *words]), colour])
    return LabelledFile(path, path.name)


def write_numbers(path: Path) -> LabelledFile:
    """Write texts whose value is their number of cats."""
    rng = np.random.default_rng(0)
    with path.open("w", newline="") as file:
        rows = csv.writer(file)
        rows.writerow(["text", "score"])
        for words in rng.permutation([*itertools.product(("cat", "dog"), repeat=6)])[:COUNT]:
            rows.writerow([" ".join(words), (words == "cat").sum() + 0.5])
    return LabelledFile(path, path.name)


def write_entities(path: Path) -> LabelledFile:
    """Write texts with a name somewhere: upper layers know positions, whatever the lower encoder sees."""
    rng, rows = np.random.default_rng(0), []
    for number in range(COUNT // 2):  # a step on a tagging takes long
        name = ("Anna", "Bob", "Eve")[number % 3]
        words = [*rng.choice(["cat", "runs", "fast", "hill"], 4)]
        words.insert(int(rng.integers(0, 5)), name)
        start = len(" ".join([*words[: words.index(name)], ""]))
        rows.append({"text": " ".join(words), "entities": [[start, start + len(name), "PER"]]})
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    return LabelledFile(path, path.name)


def publish(store: Store, base: Base, name: str, change: Callable[[LowerEncoder], object]) -> str:
    """Publish a domain without a table, whose encoder is the base's after a change."""
    lower = load_lower(base)
    with torch.no_grad():
        change(lower)
    folder = store.domain("tiny", name, 1)
    domain_build.publish(folder, base, lower, np.zeros((0, base.config.window), np.int64), {})
    return store.relative(folder)


def blind(lower: LowerEncoder) -> None:
    """Let an encoder give the same vector for every n-gram."""
    for name, parameter in lower.named_parameters():
        if name != WORDS:
            parameter.zero_()


@pytest.fixture
def store(tmp_path: Path, tiny_store: Store) -> Store:
    """The tiny store, to which domains may be added."""
    copy = Store(tmp_path / "store")
    copy.root.mkdir()
    for part in ("bases", "plots"):
        (copy.root / part).symlink_to(tiny_store.root / part)
    return copy


@pytest.mark.parametrize(
    ("write", "file", "metric"),
    [
        (write_classes, "a.csv", "accuracy"),
        (write_numbers, "a.csv", "pearson"),
        (write_entities, "a.jsonl", "f1"),
    ],
    ids=["classification", "regression", "tagging"],
)
def test_an_encoder_that_sees_nothing_hurts(
    store: Store, tiny_base: Base, tmp_path: Path, write: Callable[[Path], LabelledFile], file: str, metric: str
) -> None:
    examples = DevExamples(store, tiny_base, [DevSet.read(write(tmp_path / file))], CPU)
    blinded, told = publish(store, tiny_base, "blind", blind), list[float]()
    results = compare_answers(*(examples.answer(lineage, told.append) for lineage in ([ROOT], [blinded, ROOT])))
    assert told.count(1.0) == 2
    (result,) = results
    assert (result.file, result.metric, result.examples) == (file, metric, COUNT // 2 if metric == "f1" else COUNT)
    assert result.scores.change < -0.3
    assert Verdict("d", "general", None, results).outcome == "hurts"


def test_the_parents_own_encoder_without_a_table_makes_no_difference(
    store: Store, tiny_base: Base, tmp_path: Path
) -> None:
    examples = DevExamples(store, tiny_base, [DevSet.read(write_classes(tmp_path / "a.csv"))], CPU)
    same = publish(store, tiny_base, "same", lambda lower: None)
    parent, again, child = (examples.answer(lineage, lambda done: None) for lineage in ([ROOT], [ROOT], [same, ROOT]))
    assert [one.answers for one in parent] == [one.answers for one in again]
    assert Verdict("d", "general", None, compare_answers(parent, child)).outcome == "makes no difference"


def test_nothing_is_opened_if_there_are_no_examples(tmp_path: Path, tiny_base: Base) -> None:
    nothing = DevExamples(Store(tmp_path), tiny_base, [], CPU)
    assert nothing.answer(["nowhere"], lambda done: None) == []
    assert nothing.num_tokens == 0


def test_answering_ends_when_the_job_is_cancelled(store: Store, tiny_base: Base, tmp_path: Path) -> None:
    examples = DevExamples(store, tiny_base, [DevSet.read(write_classes(tmp_path / "a.csv"))], CPU)

    def cancel(done: float) -> None:
        if done > 0.5:  # a fold was answered
            raise JobCancelledError("no more")

    with pytest.raises(JobCancelledError):
        examples.answer([ROOT], cancel)


def test_a_file_of_too_few_examples_is_refused_by_name(tmp_path: Path) -> None:
    path = write_classes(tmp_path / "few.csv").path
    path.write_text("\n".join(path.read_text().splitlines()[: LEAST_EXAMPLES - 1]) + "\n")
    with pytest.raises(
        DataError, match=rf"few\.csv holds {LEAST_EXAMPLES - 2} distinct texts: {LEAST_EXAMPLES} are needed"
    ):
        DevSet.read(LabelledFile(path, "few.csv"))
