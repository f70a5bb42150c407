"""Decides about the texts of a failed call: some get the error, the others are sent once more."""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import NamedTuple

from hplm.errors import DeadlineError, HplmError, QueueFullError, StoppingError

# The words that a base's model puts before the error of one text among several (`hplm.errors.about_text`).
_ABOUT_TEXT = re.compile(r"text (\d+) of (\d+): ")


class Verdict(NamedTuple):
    """The indices of the texts that get `error`; all other texts of the call are sent once more."""

    refused: tuple[int, ...]
    error: HplmError


def judge(error: HplmError, tenants: Sequence[str]) -> Verdict:
    """Return which texts of a failed call get its error. `tenants`: the tenant of each text.

    A call ends with the first error of any of its texts, which says nothing about the other texts. If a text is refused
    because its tenant sends too much, the tenant's other texts in the call are refused too. An error that names no text of
    several is about all texts if it may pass, such as a full queue; else about no text, and each is tried alone.
    """
    everyone = tuple(range(len(tenants)))
    if len(tenants) == 1:
        return Verdict(everyone, error)
    named = _ABOUT_TEXT.match(str(error))
    if named is None:
        return Verdict(everyone if error.status == "UNAVAILABLE" else (), error)
    own = type(error)(str(error)[named.end() :])
    index = int(named[1]) - 1
    if isinstance(own, StoppingError) or not 0 <= index < len(tenants):
        return Verdict(everyone, own)
    if isinstance(own, QueueFullError | DeadlineError):
        return Verdict(tuple(i for i in everyone if tenants[i] == tenants[index]), own)
    return Verdict((index,), own)
