"""Dev and test texts of the evaluation's six tasks that named sources hold too: conversions leave them out.

Most are phrases that occur everywhere, such as greetings, because longer overlaps are cut at the source. The tasks are not
part of hplm, so `evaluated_texts.txt` has digests instead of texts: the result of `digests_in_sources`.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Iterable
from pathlib import Path

from hplm_builder.data.text_sources import SENTENCE_END, SOURCES

_DIGESTS = frozenset(Path(__file__).with_suffix(".txt").read_text().split())
_WORD = re.compile(r"[^\W_]+")


def is_evaluated(text: str) -> bool:
    """Tell whether the words of a text are those of an evaluated text, in any case and with any punctuation."""
    return _digest(text) in _DIGESTS


def digests_in_sources(evaluated: Iterable[str]) -> list[str]:
    """Return the sorted digests of the evaluated texts that are a document or a sentence of a named source. Takes a minute."""
    digests = {_digest(text) for text in evaluated}
    found: set[str] = set()
    for documents in SOURCES.values():
        for document in documents():
            found |= digests & {_digest(text) for text in (document, *SENTENCE_END.split(document))}
    return sorted(found)


def _digest(text: str) -> str:
    words = " ".join(_WORD.findall(text.lower()))
    return hashlib.blake2b(words.encode(), digest_size=8).hexdigest()
