"""The text that a domain of an evaluation is made of: a corpus file, a named source, or the task's own train text."""

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
OVERLAP_WORDS = 8
# Of characters in a line, each six bytes at most: the longest document of a text file would be refused as a line of JSON.
LONGEST = 160_000
_WORD = re.compile(r"[^\W_]+")


def without_test_texts(documents: Iterable[str], tasks: Iterable[EvalTask]) -> list[str]:
    """The documents without those that hold text of a task's test part: 8 words in a row of it.

    Shorter texts of a test part are not looked for. Named sources overlap with well-known tasks: the film reviews hold most
    of SST-2's test sentences.
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


def check_source(source: str) -> str:
    """Raises DataError for what is neither a file, nor a source's name, nor OWN."""
    if source != OWN and source not in SOURCES and not Path(source).is_file():
        raise DataError(f"{source!r} is neither a corpus file, nor `{OWN}`, nor one of {', '.join(SOURCES)}")
    return source


def source_by_task(tasks: Sequence[EvalTask], sources: Sequence[str]) -> dict[str, str]:
    """Which source each task's domain is made of: one for all, or one each in order. Raises ConfigError, DataError."""
    checked = [check_source(source) for source in sources] or [OWN]
    if len(checked) not in (1, len(tasks)):
        raise ConfigError(
            f"{len(checked)} --corpus for {len(tasks)} tasks: give one for all, or one each in their order"
        )
    return dict(zip((task.name for task in tasks), checked * (len(tasks) // len(checked)), strict=True))


def write_corpus(path: Path, task: EvalTask, source: str) -> Path:
    """The corpus as JSON lines, which a domain is built from: a task's own train text, or of other text what is `without_test_texts`."""
    if source == OWN:
        texts = [one for example in task.data.train for one in (example.text, example.pair) if one is not None]
    else:
        texts = without_test_texts(read_source(source), [task])
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w", encoding="utf-8") as file:
        for text in texts:
            for start in range(0, len(text), LONGEST):
                file.write(json.dumps({"text": text[start : start + LONGEST]}, ensure_ascii=False) + "\n")
    return path
