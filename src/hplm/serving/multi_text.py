"""Requests of several texts: each text is queued and computed by itself, and all answers leave together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic

import numpy as np
import numpy.typing as npt

from hplm.core import wire
from hplm.core.wire import LabelledSpan
from hplm.errors import HiddenStatesError, HplmError, about_text
from hplm.serving.request import Answer, Client, Item, Request

# The most bytes of filler in one tensor of answers. A long tagging beside a thousand labels would take 65 MB of shared memory.
MOST_FILLER_BYTES = 8_000_000


def submit_texts(
    submit: Callable[[Request[Item, Answer]], None],
    texts: Sequence[Request[Item, Answer]],
    client: Client[Sequence[Answer]],
    note: Callable[[Request[Any, Any]], Callable[[object], None]] = lambda text: _note_nothing,
) -> None:
    """Submit each text of a client's request. The client gets one reply: all answers in order, or the first error.

    After an error the other texts are over, see `Client.is_over`. An error that `submit` raises for a
    text is raised again, and there is no reply. `note` returns what takes note of the one answer or error of a text.
    """
    group = _TextGroup(len(texts), client)
    for index, text in enumerate(texts):
        if group.is_over:
            return
        note_answer = note(text)
        text.client = _TextClient(group, index, note_answer)
        try:
            submit(text)
        except HplmError as error:
            note_answer(error)
            if group.end():
                raise about_text(error, index, len(texts)) from None
        except Exception:
            group.end()
            raise


class _TextGroup(Generic[Answer]):
    """The answers of one client's texts so far. Safe to use from several threads."""

    def __init__(self, count: int, client: Client[Sequence[Answer]]) -> None:
        self.count = self._missing = count
        self.client = client
        self._answers: list[Any] = [None] * count
        self._lock = threading.Lock()
        self.is_over = False

    def take(self, index: int, answer: Answer | HplmError) -> None:
        """Take the one answer of text `index`."""
        if isinstance(answer, HplmError):
            if self.end():
                self.client.reply(about_text(answer, index, self.count))
            return
        with self._lock:
            if self.is_over:
                return
            self._answers[index] = answer
            self._missing -= 1
            is_last = self.is_over = not self._missing
        if is_last:
            self.client.reply(self._answers)

    def end(self) -> bool:
        """End the group because a text has an error. Returns False if the client has its reply already."""
        with self._lock:
            was_over, self.is_over = self.is_over, True
            if not was_over:
                # Texts that still wait keep the group in memory.
                self._answers = []
        return not was_over


class _TextClient(Client[Answer]):
    """The client of one text of a group."""

    def __init__(self, group: _TextGroup[Answer], index: int, note_answer: Callable[[object], None]) -> None:
        self._group = group
        self._index = index
        self._note_answer = note_answer

    @property
    def is_over(self) -> bool:
        return self._group.is_over

    @property
    def waits_for_others(self) -> bool:
        return self._group.count > 1

    def reply(self, answer: Answer | HplmError, *, is_last: bool = True) -> None:
        assert is_last, "a text has one answer"
        self._note_answer(answer)
        self._group.take(self._index, answer)

    def is_cancelled(self) -> bool:
        return self._group.client.is_cancelled()


def _note_nothing(answer: object) -> None:
    pass


def pack(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Pack tensors of texts, `[T_i, ...]` each, one behind the other into as many rows: `[texts, T, ...]`.

    Only the end of the last row is padded, if the tensors do not fill it.
    """
    if len(parts) == 1:
        return parts[0][None]
    tokens = sum(len(part) for part in parts)
    row = -(-tokens // len(parts))
    packed = np.zeros((len(parts) * row, *parts[0].shape[1:]), parts[0].dtype)
    np.concatenate(parts, out=packed[:tokens])
    return packed.reshape(len(parts), row, *parts[0].shape[1:])


def unpack(packed: npt.NDArray[Any], lengths: Sequence[int] | None) -> list[npt.NDArray[Any]]:
    """Return copies of the tensors that were packed. Without `lengths` each text has a whole row.

    Raises HiddenStatesError if the lengths do not fit the rows.
    """
    rows = packed.reshape(len(packed) * packed.shape[1], *packed.shape[2:])
    if lengths is None:
        lengths = [packed.shape[1]] * len(packed)
    elif min(lengths) < 1 or sum(lengths) > len(rows):
        raise HiddenStatesError(f"texts of {', '.join(map(str, lengths))} tokens cannot be in {len(rows)} rows")
    ends = np.cumsum(lengths)
    return [np.array(rows[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def labelled(answers: Sequence[Sequence[LabelledSpan]]) -> dict[str, npt.NDArray[Any]]:
    """Return the labels, scores and spans of a request's texts, by the names of their tensors."""
    labels = [np.array([span.label.encode() for span in spans], dtype=np.object_) for spans in answers]
    scores = [np.array([span.score for span in spans], dtype=np.float32) for spans in answers]
    places = [np.array([(span.start, span.end) for span in spans], dtype=np.int32).reshape(-1, 2) for spans in answers]
    return {wire.LABEL: fill_up(labels, b""), wire.SCORE: fill_up(scores, 0), wire.SPAN: fill_up(places, -1)}


def fill_up(parts: Sequence[npt.NDArray[Any]], filler: Any) -> npt.NDArray[Any]:
    """Put tensors of texts into one, `[texts, ...]`, as large as the largest of them in each dimension.

    The result is empty, `[texts, 0, ...]`, if it would hold more than MOST_FILLER_BYTES of filler.
    """
    if len(parts) == 1:
        return parts[0][None]
    shape = np.max([part.shape for part in parts], axis=0)
    filler_bytes = len(parts) * int(np.prod(shape)) * parts[0].itemsize - sum(part.nbytes for part in parts)
    if filler_bytes > MOST_FILLER_BYTES:
        return np.empty((len(parts), *[0] * len(shape)), parts[0].dtype)
    filled = np.full((len(parts), *shape), filler, parts[0].dtype)
    for place, part in zip(filled, parts, strict=True):
        place[tuple(map(slice, part.shape))] = part
    return filled
