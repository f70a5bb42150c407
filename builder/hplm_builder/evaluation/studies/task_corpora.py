"""The corpus of each task's domain in a study: a corpus file, a named source, or the task's own train text."""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from hplm.errors import ConfigError, DataError
from hplm_builder.convert.mixture import read_source
from hplm_builder.data.text_sources import SOURCES
from hplm_builder.evaluation.search.eval_task import EvalTask

OWN = "own"
OVERLAP_WORDS = 8  # words in a row that a document and a test text may not share
# Characters in a line of the corpus. A character takes at most six bytes, and a line of JSON may take 1 MB.
LONGEST = 160_000
_WORD = re.compile(r"[^\W_]+")


def without_test_texts(documents: Iterable[str], tasks: Iterable[EvalTask]) -> list[str]:
    """Return the documents that share no 8 words in a row with a test text of the tasks. Shorter test texts are ignored.

    Named sources overlap with well-known tasks: for example, the film reviews hold most of SST-2's test sentences.
    """
    tests = {
        gram
        for task in tasks
        for example in task.data.test
        for text in (example.text, example.pair)
        if text is not None
        for gram in _grams(text)
    }
    return [document for document in documents if tests.isdisjoint(_grams(document))]


def _grams(text: str) -> Iterator[tuple[str, ...]]:
    words = _WORD.findall(text.lower())
    return zip(*(words[first:] for first in range(OVERLAP_WORDS)), strict=False)


def source_by_task(tasks: Sequence[EvalTask], sources: Sequence[str]) -> dict[str, str]:
    """Return the source for each task's name: one for all tasks, or one each in order. Raises ConfigError, DataError."""
    for source in sources:
        if source != OWN and source not in SOURCES and not Path(source).is_file():
            raise DataError(f"{source!r} is neither a corpus file, nor `{OWN}`, nor one of {', '.join(SOURCES)}")
    chosen = list(sources) or [OWN]
    if len(chosen) not in (1, len(tasks)):
        raise ConfigError(
            f"{len(chosen)} --corpus for {len(tasks)} tasks: give one for all tasks, or one for each in the order of the tasks"
        )
    return dict(zip((task.name for task in tasks), chosen * (len(tasks) // len(chosen)), strict=True))


def write_corpus(path: Path, task: EvalTask, source: str) -> Path:
    """Write the corpus of a task's domain as JSON lines: its own train text, or other text without its test texts."""
    if source == OWN:
        texts = [text for example in task.data.train for text in (example.text, example.pair) if text is not None]
    else:
        texts = without_test_texts(read_source(source), [task])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            for start in range(0, len(text), LONGEST):
                file.write(json.dumps({"text": text[start : start + LONGEST]}, ensure_ascii=False) + "\n")
    return path
