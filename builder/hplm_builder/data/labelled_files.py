"""Files of labelled data, read row by row: what no row of any task may be is refused here."""

from __future__ import annotations

import itertools
import re
import unicodedata
from collections.abc import Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import Any

from hplm.adapters.tenant import Task
from hplm.core.columns import Columns, check_use
from hplm.errors import DataError
from hplm_builder.data import single_file_task
from hplm_builder.data.labelled import Entity, LabelledData, LabelledFile, LabelledText
from hplm_builder.data.labelled_checks import check_data, check_texts
from hplm_builder.data.row_readers import READERS, Row, read_rows

LONGEST_LABEL = 200
# Controls, ends of lines and paragraphs, and what turns the direction of text around.
_CONTROL = re.compile("[\x00-\x1f\x7f-\x9f\u2028-\u202e\u2066-\u2069]")
# A tag where the type of an entity is expected.
_TAGGED = re.compile("[BI]-|O$")
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
    columns: Columns | None = None,
) -> LabelledData:
    """Read and check the files of one task. Raises DataError saying which file and line, and what was expected.

    All files have the `columns` that are named. Labels that `unlabelled` may have are not read. The rest: see `check_data`.
    """
    columns = columns or Columns()
    files = [_named(one) for one in (train, dev, test, unlabelled) if one is not None]
    check_use(columns, [file.name for file in files])
    parts = [read_file(one, columns, task=task) if one is not None else [] for one in (train, dev, test)]
    data = check_data(*parts, task=task, expected_labels=expected_labels, seed=seed)
    if unlabelled is None:
        return data
    return with_unlabelled(data, read_file(unlabelled, columns, is_labelled=False))


def with_unlabelled(data: LabelledData, texts: Sequence[LabelledText]) -> LabelledData:
    """The same with the `texts` that are in none of its parts, each once. Raises DataError where none is left."""
    check_texts("unlabelled texts", texts, is_pair=data.texts == 2)
    labelled = {one.text_or_pair for part in data.labelled.values() for one in part}
    left = [one for one in {one.text_or_pair: one for one in texts}.values() if one.text_or_pair not in labelled]
    if not left:
        raise DataError("the unlabelled data holds no text that is not in the labelled data already")
    return replace(data, unlabelled=left)


def read_folder(folder: Path) -> LabelledData:
    """The task of a folder with files `train.*`, and `dev.*` and `test.*` where it has them, or with all of it in
    `data_full.json`, see `hplm_builder.data.single_file_task`. Raises DataError.
    """
    train, dev, test = (_file_of(folder, part) for part in ("train", "dev", "test"))
    if train is None and (folder / single_file_task.NAME).is_file():
        rows = single_file_task.read_parts(folder / single_file_task.NAME)
        return check_data(*([_example(where, row, Columns()) for where, row in part] for part in rows))
    return read_data(train or folder / "train.jsonl", dev, test)


def _file_of(folder: Path, part: str) -> Path | None:
    """Raises DataError for two: which is meant nobody can tell."""
    found = sorted(folder.glob(f"{part}.*"))
    # Others, as a note or a backup, only where there is none of them: they are refused by name then.
    readable = [path for path in found if path.suffix.lower() in READERS]
    if len(readable) > 1:
        raise DataError(f"{folder} has both {readable[0].name} and {readable[1].name}: leave one of them there")
    return next(iter(readable or found), None)


def _named(file: Path | LabelledFile) -> LabelledFile:
    return file if isinstance(file, LabelledFile) else LabelledFile(file, str(file))


def read_file(
    file: Path | LabelledFile,
    columns: Columns | None = None,
    *,
    task: Task | None = None,
    is_labelled: bool = True,
) -> list[LabelledText]:
    """Read the examples of one file; if it is not `is_labelled`, its texts or pairs alone. Raises DataError."""
    file, columns = _named(file), columns or Columns()
    name = file.name
    # Closed here, because the traceback of a bad row's error would keep the file open.
    with closing(read_rows(file.path, name, file.most_bytes, columns, is_labelled=is_labelled)) as rows:
        examples = [
            _example(where, row, columns, task) if is_labelled else _text(where, row, columns)
            for where, row in itertools.islice(rows, MOST_EXAMPLES + 1)
        ]
    if not examples:
        raise DataError(f"{name} holds no example")
    if len(examples) > MOST_EXAMPLES:
        raise DataError(f"{name} holds more than {MOST_EXAMPLES:,} examples: give a part of them")
    return examples


def _text(where: str, row: Row, columns: Columns, *, is_labelled: bool = False) -> LabelledText:
    """Return a text or pair without its label."""
    found = columns.find(tuple(row), where, is_labelled=is_labelled)
    text = _checked(where, "text", row[found.text])
    second = row[found.pair] if found.pair is not None else None
    return LabelledText(text, pair=None if second is None else _checked(where, "second text", second), where=where)


def _example(where: str, row: Row, columns: Columns, task: Task | None = None) -> LabelledText:
    """Return an example of a `task`. If that is open, a row that has both keeps its label beside its entities."""
    example = _text(where, row, columns, is_labelled=True)
    found = columns.find(tuple(row), where, is_labelled=True)
    label = None if found.label is None else row[found.label]
    if found.entities is None and _are_entities(label):
        # As annotation tools write them.
        return replace(example, entities=_entities(where, example.text, label))
    entities = None if found.entities is None else row[found.entities]
    if found.entities is not None and (task == "tagging" or label is None):
        return replace(example, entities=_entities(where, example.text, entities))
    if label is None:
        raise DataError(f"{where}: no `{found.label}`, it is null")
    if task is None and entities:
        example = replace(example, entities=_entities(where, example.text, entities))
    return replace(
        example,
        is_score=(found.label or "").casefold() == "score",
        is_tagged=found.entities is not None,
        is_literal=isinstance(label, int | float),
        label=_checked_label(where, str(label) if isinstance(label, int | float) else label),
    )


def _are_entities(label: Any) -> bool:
    """Whether what stands as a label is a list of entities, which is empty for a text without any."""
    return isinstance(label, list) and all(isinstance(one, list | dict) for one in label)


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
    if isinstance(value, list):
        raise DataError(
            f"{where}: the label is a list of {len(value)}, and a text has one label: give that without brackets"
        )
    label = _checked(where, "label", value)
    if (length := len(stripped := label.strip())) > LONGEST_LABEL:
        raise DataError(f"{where}: the label has {length} characters, at most {LONGEST_LABEL} are accepted")
    if _CONTROL.search(stripped):
        # Labels stand in logs and on terminals: none may begin a line of its own there, colour or turn what follows.
        raise DataError(f"{where}: the label {stripped!a} has a line break or another control character")
    return label


def _parts(entity: Any) -> tuple[Any, Any, Any]:
    if isinstance(entity, list):
        start, end, label = entity
        return start, end, label
    return entity["start"], entity["end"], entity["label"]


def _checked_type(where: str, value: Any) -> str:
    """Return the type of an entity. Raises DataError for a tag: tags are made of types, and `B-PER` would become `B-B-PER`."""
    kind = _checked_label(where, value)
    if _TAGGED.match(kind.strip()):
        raise DataError(
            f"{where}: the entity's label {kind!a} is the tag of a word: give the type of the whole entity, as PER for words "
            "tagged B-PER and I-PER, and no entity where the tag is O"
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
