"""What is odd about labelled data that can be learned all the same: said by a dry run, by the job, in the tenant's card."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from hplm.decode import word_ranges
from hplm.errors import DataError
from hplm.text import TextEncoder
from hplm_builder.judging import gold_entities
from hplm_builder.labelled import LabelledData, LabelledText
from hplm_builder.prepared import chunks


def cautions(data: LabelledData, encoder: TextEncoder) -> list[str]:
    """Sentences. Raises DataError where none of a part's entities can ever be found."""
    return _of_entities(data, encoder) if data.task == "tagging" else []


def _of_entities(data: LabelledData, encoder: TextEncoder) -> list[str]:
    said = []
    for name, part in data.labelled.items():
        total = sum(len(one.entities) for one in part)
        lost = total - _to_be_found(part, encoder)
        why = f"begin or end within a word, or lie beyond the {encoder.max_tokens} tokens of a text that are read"
        if lost == total > 0:
            raise DataError(f"none of the {total:,} entities of the {name} data can be learned: they {why}")
        if lost:
            said.append(f"{lost:,} of {total:,} entities of the {name} data can never be found: they {why}")
    return said


def _to_be_found(part: Sequence[LabelledText], encoder: TextEncoder) -> int:
    """How many entities are whole words that are read."""
    count = 0
    for chunk in chunks(one for one in part if one.entities):
        for one, encoded in zip(chunk, encoder.encode([each.asked for each in chunk]), strict=True):
            starts, ends = _words(encoded.tokens)
            count += sum(entity.start in starts and entity.end in ends for entity in gold_entities(one, encoded.tokens))
    return count


def _words(tokens: npt.NDArray[np.int32]) -> tuple[set[int], set[int]]:
    """Where words begin and end."""
    ranges = word_ranges(tokens)
    return {int(tokens[first, 0]) for first, _ in ranges}, {int(tokens[last - 1, 1]) for _, last in ranges}
