"""Reading files of labelled data. Rows that no task accepts are refused here."""

from __future__ import annotations

import itertools
import re
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hplm.core.characters import trimmed
from hplm.core.columns import USUAL_COLUMNS, Columns, check_use
from hplm.core.text import text_key
from hplm.errors import DataError
from hplm.tasks.examples import Entity, LabelledText, may_be_dropped
from hplm.tasks.task_loader import task_named
from hplm_builder.data import single_file_task
from hplm_builder.data.label_values import check_error_values
from hplm_builder.data.labelled import LabelledData, LabelledFile
from hplm_builder.data.labelled_checks import check_data, check_texts
from hplm_builder.data.row_readers import READERS, Row, read_rows

LONGEST_LABEL = 200  # characters
# Control characters, ends of lines and paragraphs, and characters that change the direction of text.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# A word's tag, which somebody gave instead of an entity's type.
_TAGGED = re.compile("[BI]-|O$")
# Examples in a file. Each takes some hundred bytes of memory beside its text, and training on more would take days.
MOST_EXAMPLES = 1_000_000


def read_data(
    train: Path | LabelledFile,
    dev: Path | LabelledFile | None = None,
    test: Path | LabelledFile | None = None,
    unlabelled: Path | LabelledFile | None = None,
    *,
    task: str | None = None,
    expected_labels: Sequence[str] | None = None,
    seed: int = 0,
    columns: Columns = USUAL_COLUMNS,
    test_name: str = "test",
) -> LabelledData:
    """Read and check the files of one task. Raises DataError with the file, the line and what was expected.

    The named `columns` must be in all files. Labels in the `unlabelled` file are not read. For `task`, `expected_labels`,
    `seed` and `test_name` see `check_data`.
    """
    files = [_named(file) for file in (train, dev, test, unlabelled) if file is not None]
    check_use(columns, [file.name for file in files])
    parts = [read_file(file, columns, task=task) if file is not None else [] for file in (train, dev, test)]
    data = check_data(*parts, task=task, expected_labels=expected_labels, seed=seed, test_name=test_name)
    if unlabelled is None:
        return data
    return with_unlabelled(data, read_file(unlabelled, columns, is_labelled=False))


def with_unlabelled(data: LabelledData, texts: Sequence[LabelledText]) -> LabelledData:
    """Return `data` with the distinct `texts` that are in none of its parts. Raises DataError if no text remains."""
    check_texts("unlabelled texts", texts, is_pair=data.texts == 2)
    check_error_values({"unlabelled": [*texts]})
    labelled = {text_key(example.text_or_pair) for part in data.labelled.values() for example in part}
    distinct = {text_key(text.text_or_pair): text for text in texts}
    remaining = [text for key, text in distinct.items() if key not in labelled]
    if not remaining:
        raise DataError("the unlabelled data holds no text that is not in the labelled data already")
    return replace(data, unlabelled=remaining)


def read_folder(folder: Path) -> LabelledData:
    """Read the task in a folder: `train.*` with optional `dev.*` and `test.*`, or `data_full.json`. Raises DataError.

    `hplm_builder.data.single_file_task` describes `data_full.json`.
    """
    train, dev, test = (file_of(folder, part) for part in ("train", "dev", "test"))
    if train is None and (folder / single_file_task.NAME).is_file():
        rows = single_file_task.read_parts(folder / single_file_task.NAME)
        return check_data(*([_example(where, row, USUAL_COLUMNS) for where, row in part] for part in rows))
    return read_data(train or folder / "train.jsonl", dev, test)


def file_of(folder: Path, part: str) -> Path | None:
    """Return the file of a part, None if there is none. Raises DataError for two, because either may be meant."""
    files = sorted(folder.glob(f"{part}.*"))
    # A file of another kind, as a note or a backup, is taken only if it is the only one: reading it then names its ending.
    readable = [path for path in files if path.suffix.lower() in READERS]
    if len(readable) > 1:
        raise DataError(f"{folder} has both {readable[0].name} and {readable[1].name}: keep only one of them")
    return next(iter(readable or files), None)


def _named(file: Path | LabelledFile) -> LabelledFile:
    return file if isinstance(file, LabelledFile) else LabelledFile(file, str(file))


def read_file(
    file: Path | LabelledFile, columns: Columns = USUAL_COLUMNS, *, task: str | None = None, is_labelled: bool = True
) -> list[LabelledText]:
    """Read the examples of one file, without their labels unless `is_labelled`. Raises DataError."""
    file = _named(file)
    # Close the generator here, because the traceback of a bad row's error would keep the file open.
    with closing(read_rows(file, columns, is_labelled=is_labelled)) as rows:
        examples = [
            _example(where, row, columns, task) if is_labelled else _text(where, row, columns)
            for where, row in itertools.islice(rows, MOST_EXAMPLES + 1)
        ]
    if not examples:
        raise DataError(f"{file.name} holds no example")
    if len(examples) > MOST_EXAMPLES:
        raise DataError(f"{file.name} holds more than {MOST_EXAMPLES:,} examples: send only some of them")
    return examples


def _text(where: str, row: Row, columns: Columns, *, is_labelled: bool = False) -> LabelledText:
    """Return a text or pair without its label."""
    named = columns.find(tuple(row), where, is_labelled=is_labelled)
    text = _checked(where, "text", row[named.text])
    second = row[named.pair] if named.pair is not None else None
    return LabelledText(text, pair=None if second is None else _checked(where, "second text", second), where=where)


def _example(where: str, row: Row, columns: Columns, task: str | None = None) -> LabelledText:
    """Return an example of a `task`. If `task` is None, a row with a label and entities keeps both."""
    example = _text(where, row, columns, is_labelled=True)
    named = columns.find(tuple(row), where, is_labelled=True)
    label = None if named.label is None else row[named.label]
    if named.entities is None and _are_entities(label):
        # Annotation tools write entities in the label's column.
        return replace(example, entities=_entities(where, example.text, label))
    entities = None if named.entities is None else row[named.entities]
    if named.entities is not None and (label is None or (task is not None and task_named(task).takes_entities)):
        return replace(example, entities=_entities(where, example.text, entities))
    if label is None:
        raise DataError(f"{where}: `{named.label}` is null, a label is expected")
    if task is None and entities:
        example = replace(example, entities=_entities(where, example.text, entities))
    return replace(
        example,
        is_score=(named.label or "").casefold() == "score",
        is_tagged=named.entities is not None,
        is_literal=isinstance(label, int | float),
        label=_checked_label(where, str(label) if isinstance(label, int | float) else label),
    )


def _are_entities(label: Any) -> bool:
    """Return whether a label is a list of entities, perhaps an empty one."""
    return isinstance(label, list) and all(isinstance(entry, list | dict) for entry in label)


def _checked(where: str, what: str, value: Any) -> str:
    if not isinstance(value, str) or not value.strip():
        raise DataError(f"{where}: the {what} is empty or not a string")
    if all(map(may_be_dropped, value)):
        raise DataError(f"{where}: the {what} holds nothing but white space and control characters")
    try:
        value.encode()
    except UnicodeEncodeError as error:
        raise DataError(
            f"{where}: the {what} has a lone surrogate at character {error.start}, which is not valid Unicode"
        ) from None
    if "\0" in value:
        raise DataError(f"{where}: the {what} holds a NUL character")
    return value


def _checked_label(where: str, value: Any) -> str:
    if isinstance(value, list):
        raise DataError(
            f"{where}: the label is a list of {len(value)}, but a text has one label: write it without brackets"
        )
    label = _checked(where, "label", value)
    if (length := len(stripped := trimmed(label))) > LONGEST_LABEL:
        raise DataError(f"{where}: the label has {length} characters, at most {LONGEST_LABEL} are accepted")
    if _CONTROL.search(stripped):
        # Labels are shown in logs and on terminals, where such characters could fake lines, colours or the order of text.
        raise DataError(f"{where}: the label {stripped!a} has a line break or another control character")
    return label


def _parts(entity: Any) -> tuple[Any, Any, Any]:
    if isinstance(entity, list):
        start, end, label = entity
        return start, end, label
    return entity["start"], entity["end"], entity["label"]


def _checked_type(where: str, value: Any) -> str:
    """Return an entity's type. Raises DataError for a tag, because the type `B-PER` would give the tag `B-B-PER`."""
    kind = _checked_label(where, value)
    if _TAGGED.match(trimmed(kind)):
        raise DataError(
            f"{where}: the entity's label {kind!a} is the tag of a word: give the type of the whole entity, for example PER "
            "for words tagged B-PER and I-PER, and leave words tagged O out"
        )
    return kind


def _entities(where: str, text: str, rows: Any) -> tuple[Entity, ...]:
    try:
        entities = [Entity(_checked_type(where, label), start, end) for start, end, label in map(_parts, rows)]
    except (TypeError, KeyError, ValueError):
        raise DataError(
            f"{where}: entities must be a list of objects with label, start and end, or of lists [start, end, label]"
        ) from None
    for entity in entities:
        if {type(entity.start), type(entity.end)} != {int}:
            raise DataError(f"{where}: start and end of an entity must be whole numbers of characters")
        if not 0 <= entity.start < entity.end <= len(text):
            raise DataError(
                f"{where}: entity {entity.start}-{entity.end} is not within the text of {len(text)} characters"
            )
    entities.sort(key=lambda entity: entity.start)
    for first, second in itertools.pairwise(entities):
        if second.start < first.end:
            raise DataError(
                f"{where}: entities {first.start}-{first.end} and {second.start}-{second.end} overlap, but a word can have "
                "only one tag"
            )
    return tuple(entities)
