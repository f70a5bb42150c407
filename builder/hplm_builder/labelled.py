"""Labelled data: JSON lines, CSV or TSV, and CoNLL, checked before anything is trained on it."""

from __future__ import annotations

import csv
import io
import json
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hplm.adapters.tenant import Task
from hplm.errors import DataError


@dataclass(frozen=True)
class Entity:
    """A typed stretch of characters, end exclusive."""

    label: str
    start: int
    end: int


@dataclass(frozen=True)
class LabelledText:
    """One example: a `label` for classification, `entities` for tagging."""

    text: str
    label: str | None = None
    entities: tuple[Entity, ...] = ()


@dataclass(frozen=True)
class LabelledData:
    """Checked examples of one task. `labels` are classes, or the tags O, B-x, I-x of a tagging."""

    task: Task
    labels: tuple[str, ...]
    train: list[LabelledText]
    dev: list[LabelledText]
    test: list[LabelledText]


def read_data(train: Path, dev: Path, test: Path | None = None) -> LabelledData:
    """Read and check the files of one task. Raises DataError saying which file and line, and what was expected."""
    return check_data(read_file(train), read_file(dev), read_file(test) if test else [])


def check_data(train: list[LabelledText], dev: list[LabelledText], test: list[LabelledText]) -> LabelledData:
    """Examples of one task. Raises DataError for one class, no examples, or dev labels that train lacks."""
    for name, part in (("train", train), ("dev", dev)):
        if not part:
            raise DataError(f"the {name} data holds no example")
    if all(example.label is None for example in train):
        kinds = sorted({entity.label for example in train for entity in example.entities})
        if not kinds:
            raise DataError("the train data holds no entity: there is nothing to learn")
        labels = ("O", *(f"{prefix}-{kind}" for kind in kinds for prefix in ("B", "I")))
        return LabelledData("tagging", labels, train, dev, test)
    counts = Counter(example.label for example in train)
    if None in counts:
        raise DataError(f"{counts[None]} of {len(train)} train examples have no label")
    if len(counts) < 2:
        only = next(iter(counts))
        raise DataError(f"the train data has one class ({only!r}): a classification needs at least two")
    for name, part in (("dev", dev), ("test", test)):
        if unknown := sorted({str(example.label) for example in part} - {str(label) for label in counts}):
            raise DataError(f"the {name} data has labels that the train data lacks: {', '.join(unknown[:5])}")
    return LabelledData("classification", tuple(sorted(str(label) for label in counts)), train, dev, test)


def read_file(path: Path) -> list[LabelledText]:
    """Examples of one file; its ending says the format: .jsonl, .csv, .tsv, .conll."""
    readers = {".jsonl": _jsonl, ".csv": _csv, ".tsv": _csv, ".conll": _conll}
    if path.suffix not in readers:
        raise DataError(f"{path}: the ending must be one of {', '.join(readers)}")
    try:
        text = path.read_text(encoding="utf-8-sig")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None
    examples = list(readers[path.suffix](path, text))
    if not examples:
        raise DataError(f"{path} holds no example")
    return examples


def _jsonl(path: Path, text: str) -> Iterator[LabelledText]:
    for number, line in enumerate(text.split("\n"), 1):
        if not line.strip():
            continue
        where = f"{path}, line {number}"
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{where} is not JSON: {error}") from None
        if not isinstance(row, dict):
            raise DataError(f"{where}: expected an object")
        body = _text_of(where, row)
        if "entities" in row:
            yield LabelledText(body, None, _entities_of(where, body, row["entities"]))
        else:
            yield LabelledText(body, _label_of(where, row))


def _entities_of(where: str, body: str, rows: Any) -> tuple[Entity, ...]:
    try:
        entities = tuple(Entity(str(row["label"]), int(row["start"]), int(row["end"])) for row in rows)
    except (TypeError, KeyError, ValueError):
        raise DataError(f"{where}: entities must be a list of objects with label, start and end") from None
    for entity in entities:
        if not 0 <= entity.start < entity.end <= len(body):
            raise DataError(
                f"{where}: entity {entity.start}-{entity.end} lies outside the text of {len(body)} characters"
            )
    return entities


def _csv(path: Path, text: str) -> Iterator[LabelledText]:
    delimiter = "\t" if path.suffix == ".tsv" else ","
    csv.field_size_limit(1 << 24)
    # TSV files of this kind do not quote: a lone quote is a character.
    quotes: dict[str, Any] = {"quoting": csv.QUOTE_NONE if path.suffix == ".tsv" else csv.QUOTE_MINIMAL}
    reader = csv.DictReader(io.StringIO(text, newline=""), delimiter=delimiter, strict=True, **quotes)
    try:
        for row in reader:
            where = f"{path}, line {reader.line_num}"
            if None in row or None in row.values():
                raise DataError(f"{where} has not the {len(reader.fieldnames or [])} columns of the header")
            yield LabelledText(_text_of(where, row), _label_of(where, row))
    except csv.Error as error:
        raise DataError(f"{path}, line {reader.line_num} is not valid CSV: {error}") from None


def _text_of(where: str, row: dict[str, Any]) -> str:
    for key in ("text", "sentence"):
        if key in row:
            if not isinstance(row[key], str) or not row[key].strip():
                raise DataError(f"{where}: the text is empty")
            return str(row[key])
    raise DataError(f"{where}: no column `text` or `sentence`; there are {', '.join(map(str, row)) or 'none'}")


def _label_of(where: str, row: dict[str, Any]) -> str:
    if "label" not in row or row["label"] in ("", None):
        raise DataError(f"{where}: no `label`")
    return str(row["label"])


def _conll(path: Path, text: str) -> Iterator[LabelledText]:
    """Columns by white space, the token first, its IOB tag last; a blank line ends a sentence."""
    tokens: list[tuple[str, str]] = []
    for number, line in enumerate([*text.split("\n"), ""], 1):
        columns = line.split()
        if columns and columns[0] != "-DOCSTART-":
            tag = columns[-1]
            if len(columns) < 2 or not (tag == "O" or tag[:2] in ("B-", "I-")):
                raise DataError(f"{path}, line {number}: expected a token and an IOB tag, got {line!r}")
            tokens.append((columns[0], tag))
        elif tokens:
            yield _sentence(tokens)
            tokens = []


def _sentence(tokens: list[tuple[str, str]]) -> LabelledText:
    entities: list[Entity] = []
    position, previous = 0, "O"
    for token, tag in tokens:
        end = position + len(token)
        if tag != "O":
            goes_on = tag[0] == "I" and previous != "O" and previous[2:] == tag[2:]
            if goes_on:
                entities[-1] = Entity(tag[2:], entities[-1].start, end)
            else:
                entities.append(Entity(tag[2:], position, end))
        previous, position = tag, end + 1
    return LabelledText(" ".join(token for token, _ in tokens), None, tuple(entities))
