"""Files of labelled data, read row by row: what no row of any task may be is refused here."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Callable, Sequence
from contextlib import closing
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

from hplm.adapters.tenant import Task
from hplm.errors import DataError
from hplm_builder.data import whole_task
from hplm_builder.data.labelled import Entity, LabelledData, LabelledFile, LabelledText
from hplm_builder.data.labelled_checks import check_data, check_texts
from hplm_builder.data.rows import READERS, Row, read_rows

LONGEST_LABEL = 200
# Controls, ends of lines and paragraphs, and what turns the direction of text around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# Of a file. Each takes some hundred bytes of memory beside its text, and days to train on.
MOST_EXAMPLES = 1_000_000
# Categories of Unicode that tokenizers drop: control and format characters, private ones, accents without a letter. Not those
# that are not assigned: an emoji may be newer than the tables here.
DROPPED = ("Cc", "Cf", "Co", "Mn")


def read_data(
    train: Path | LabelledFile,
    dev: Path | LabelledFile | None = None,
    test: Path | LabelledFile | None = None,
    unlabelled: Path | LabelledFile | None = None,
    *,
    task: Task | None = None,
    expected_labels: Sequence[str] | None = None,
    seed: int = 0,
) -> LabelledData:
    """Read and check the files of one task. Raises DataError saying which file and line, and what was expected.

    Labels that `unlabelled` may have are not read. The rest is as for `check_data`.
    """
    parts = [read_file(one, partial(_example, task=task)) if one is not None else [] for one in (train, dev, test)]
    data = check_data(*parts, task=task, expected_labels=expected_labels, seed=seed)
    return data if unlabelled is None else with_unlabelled(data, read_file(unlabelled, _text))


def with_unlabelled(data: LabelledData, texts: Sequence[LabelledText]) -> LabelledData:
    """The same with the `texts` that are in none of its parts, each once. Raises DataError where none is left."""
    check_texts("unlabelled texts", texts, is_pair=data.texts == 2)
    labelled = {one.asked for part in data.labelled.values() for one in part}
    left = [one for one in {one.asked: one for one in texts}.values() if one.asked not in labelled]
    if not left:
        raise DataError("the unlabelled data holds no text that is not in the labelled data already")
    return replace(data, unlabelled=left)


def read_folder(folder: Path) -> LabelledData:
    """The task of a folder with files `train.*`, and `dev.*` and `test.*` where it has them, or with all of it in
    `data_full.json`, see `hplm_builder.data.whole_task`. Raises DataError.
    """
    train, dev, test = (_file_of(folder, part) for part in ("train", "dev", "test"))
    if train is None and (folder / whole_task.NAME).is_file():
        rows = whole_task.read_parts(folder / whole_task.NAME)
        return check_data(*([_example(where, row) for where, row in part] for part in rows))
    return read_data(train or folder / "train.jsonl", dev, test)


def _file_of(folder: Path, part: str) -> Path | None:
    """Raises DataError for two: which is meant nobody can tell."""
    found = sorted(folder.glob(f"{part}.*"))
    # Others, as a note or a backup, only where there is none of them: they are refused by name then.
    readable = [path for path in found if path.suffix.lower() in READERS]
    if len(readable) > 1:
        raise DataError(f"{folder} has both {readable[0].name} and {readable[1].name}: leave one of them there")
    return next(iter(readable or found), None)


def read_file(
    file: Path | LabelledFile, example: Callable[[str, Row], LabelledText] | None = None
) -> list[LabelledText]:
    """Examples of one file; `example` makes one of a row and where it stands. Raises DataError."""
    example = example or _example
    if not isinstance(file, LabelledFile):
        file = LabelledFile(file, str(file))
    name = file.name
    # Closed here: whoever holds the error of a bad row would hold the file open with it.
    with closing(read_rows(file.path, name, file.most_bytes)) as rows:
        examples = [example(where, row) for where, row in itertools.islice(rows, MOST_EXAMPLES + 1)]
    if not examples:
        raise DataError(f"{name} holds no example")
    if len(examples) > MOST_EXAMPLES:
        raise DataError(f"{name} holds more than {MOST_EXAMPLES:,} examples: give a part of them")
    return examples


def _text(where: str, row: Row) -> LabelledText:
    """A text or pair without its label."""
    keys = ("sentence1", "sentence2") if "sentence1" in row else ("text" if "text" in row else "sentence", "text_pair")
    if keys[0] not in row:
        raise DataError(
            f"{where}: no column `text` or `sentence`, of pairs `text` and `text_pair` or `sentence1` and `sentence2`; "
            f"{_columns(row)}"
        )
    if keys[0] == "sentence1" and "sentence2" not in row:
        raise DataError(f"{where}: `sentence1` without `sentence2`")
    text = _checked(where, "text", row[keys[0]])
    pair = _checked(where, "second text", row[keys[1]]) if row.get(keys[1]) is not None else None
    return LabelledText(text, pair=pair, where=where)


def _example(where: str, row: Row, task: Task | None = None) -> LabelledText:
    """An example of a `task`; where that is open, a row that has both keeps its label beside its entities."""
    found = _text(where, row)
    label = row.get("label", row.get("score"))
    if "entities" in row and (task == "tagging" or label is None):
        return replace(found, entities=_entities(where, found.text, row["entities"]))
    if label is None:
        is_null = "label" in row or "score" in row
        raise DataError(f"{where}: no `label`" + (", it is null" if is_null else f" or `score`; {_columns(row)}"))
    if task is None and row.get("entities"):
        found = replace(found, entities=_entities(where, found.text, row["entities"]))
    return replace(
        found,
        is_score="label" not in row,
        is_tagged="entities" in row,
        is_literal=isinstance(label, int | float),
        label=_checked_label(where, str(label) if isinstance(label, int | float) else label),
    )


def _columns(row: Row) -> str:
    return f"there are {', '.join(map(ascii, row))[:200] or 'none'}"


def may_be_dropped(character: str) -> bool:
    """Whether it is one that tokenizers drop; one that keeps accents does not drop those."""
    return character.isspace() or unicodedata.category(character) in DROPPED


def _checked(where: str, what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: the {what} is empty or no text")
    if all(map(may_be_dropped, value)):
        raise DataError(f"{where}: the {what} holds nothing but white space and control characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(f"{where}: the {what} has a lone surrogate at character {error.start}: it is no text") from None
    if "\0" in value:
        raise DataError(f"{where}: the {what} holds a NUL character")
    return value


def _checked_label(where: str, value: Any) -> str:
    label = _checked(where, "label", value)
    if (length := len(stripped := label.strip())) > LONGEST_LABEL:
        raise DataError(f"{where}: the label has {length} characters, at most {LONGEST_LABEL} are accepted")
    if _CONTROL.search(stripped):
        # Labels stand in logs and on terminals: none may begin a line of its own there, colour or turn what follows.
        raise DataError(f"{where}: the label {stripped!a} has a line break or another control character")
    return label


def _entities(where: str, text: str, rows: Any) -> tuple[Entity, ...]:
    try:
        entities = [Entity(_checked_label(where, row["label"]), row["start"], row["end"]) for row in rows]
    except (TypeError, KeyError):
        raise DataError(f"{where}: entities must be a list of objects with label, start and end") from None
    for entity in entities:
        if {type(entity.start), type(entity.end)} != {int}:
            raise DataError(f"{where}: start and end of an entity are numbers of characters")
        if not 0 <= entity.start < entity.end <= len(text):
            raise DataError(
                f"{where}: entity {entity.start}-{entity.end} lies outside the text of {len(text)} characters"
            )
    entities.sort(key=lambda entity: entity.start)
    for first, second in itertools.pairwise(entities):
        if second.start < first.end:
            raise DataError(
                f"{where}: entities {first.start}-{first.end} and {second.start}-{second.end} overlap: a word has one tag"
            )
    return tuple(entities)
