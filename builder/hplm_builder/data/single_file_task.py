"""Reader of a whole task in one JSON file: an object of lists of `[text, label]`, the format of CLINC150."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hplm.errors import DataError, unreadable
from hplm_builder.data.row_readers import Row

NAME = "data_full.json"
# CLINC150 also has `oos_train`, `oos_val` and `oos_test`: texts of no class, which its in-scope accuracy leaves out too.
PARTS = ("train", "val", "test")


def read_parts(path: Path) -> tuple[list[tuple[str, Row]], ...]:
    """Return the rows of train, dev and test, each with its place, as `read_rows` yields them. Raises DataError."""
    try:
        parts = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise unreadable(str(path), error) from error
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 at byte {error.start}") from None
    except (ValueError, RecursionError) as error:
        raise DataError(f"{path} is not JSON: {error}") from None
    if not isinstance(parts, dict) or any(not isinstance(parts.get(part), list) for part in PARTS):
        raise DataError(f"{path}: expected an object with the lists {', '.join(PARTS)}")
    return tuple(list(_rows(path, part, parts[part])) for part in PARTS)


def _rows(path: Path, part: str, pairs: list[Any]) -> Iterator[tuple[str, Row]]:
    for number, pair in enumerate(pairs, 1):
        where = f"{path}, {part} {number}"
        if not isinstance(pair, list) or len(pair) != 2:
            raise DataError(f"{where}: expected [text, label]")
        yield where, {"text": pair[0], "label": pair[1]}
