"""Several texts of one request: each is queued and computed by itself, and their answers leave together."""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from typing import Any, Generic, TypeVar

import numpy as np
import numpy.typing as npt

from hplm.core import wire
from hplm.core.wire import LabelledSpan
from hplm.errors import HiddenStatesError, HplmError, about_text

Input = TypeVar("Input")
Answer = TypeVar("Answer")
# Of answers that differ much in size: a long tagging beside a thousand labels would take 65 MB of shared memory.
MOST_FILLER_BYTES = 8_000_000


def submit_together(
    submit: Callable[[Input, Callable[[Answer | HplmError], None], Callable[[], bool], Callable[[], bool]], None],
    given: Sequence[Input],
    reply: Callable[[Sequence[Answer] | HplmError], None],
    is_cancelled: Callable[[], bool],
) -> None:
    """`submit` each of a request's texts; `reply` once, with all their answers in order, or with the first error of any.

    After an error nobody waits for the other texts: `submit` is handed how to ask for that too. As it does, raises the error of
    a text that is refused at once: there is no reply then.
    """
    together = _Together(len(given), reply)
    for index, one in enumerate(given):
        if together.is_over:
            return
        try:
            submit(one, together.taker(index), is_cancelled, lambda: together.is_over)
        except HplmError as error:
            if together.end():
                raise about_text(error, index, len(given)) from None
        except Exception:
            together.end()
            raise


class _Together(Generic[Answer]):
    """The answers of one request so far. Several threads give them."""

    def __init__(self, count: int, reply: Callable[[Sequence[Answer] | HplmError], None]) -> None:
        self._count = self._missing = count
        self._answers: list[Any] = [None] * count
        self._reply = reply
        self._giving = threading.Lock()
        self.is_over = False

    def taker(self, index: int) -> Callable[[Answer | HplmError], None]:
        """Takes the one answer of text `index`."""

        def take(answer: Answer | HplmError) -> None:
            if isinstance(answer, HplmError):
                if self.end():
                    self._reply(about_text(answer, index, self._count))
                return
            with self._giving:
                if self.is_over:
                    return
                self._answers[index] = answer
                self._missing -= 1
                is_last = self.is_over = not self._missing
            if is_last:
                self._reply(self._answers)

        return take

    def end(self) -> bool:
        """The request has an error; False where it has had its answer already."""
        with self._giving:
            was_over, self.is_over = self.is_over, True
            if not was_over:
                # Texts that still wait somewhere keep all of this.
                self._answers = []
        return not was_over


def pack(parts: Sequence[npt.NDArray[Any]]) -> npt.NDArray[Any]:
    """Tensors of texts, `[T_i, ...]` each, one behind the other in one of as many rows, `[texts, T, ...]`.

    Nothing is padded but the end, where they do not fill the last row.
    """
    if len(parts) == 1:
        return parts[0][None]
    tokens = sum(len(part) for part in parts)
    row = -(-tokens // len(parts))
    packed = np.zeros((len(parts) * row, *parts[0].shape[1:]), parts[0].dtype)
    np.concatenate(parts, out=packed[:tokens])
    return packed.reshape(len(parts), row, *parts[0].shape[1:])


def unpack(packed: npt.NDArray[Any], lengths: Sequence[int] | None) -> list[npt.NDArray[Any]]:
    """What was packed, copied; without `lengths` a text has a whole row. Raises HiddenStatesError where they cannot be."""
    rows = packed.reshape(len(packed) * packed.shape[1], *packed.shape[2:])
    if lengths is None:
        lengths = [packed.shape[1]] * len(packed)
    elif min(lengths) < 1 or sum(lengths) > len(rows):
        raise HiddenStatesError(f"texts of {', '.join(map(str, lengths))} tokens cannot be in {len(rows)} rows")
    ends = np.cumsum(lengths)
    return [np.array(rows[end - length : end]) for length, end in zip(lengths, ends, strict=True)]


def labelled(answers: Sequence[Sequence[LabelledSpan]]) -> dict[str, npt.NDArray[Any]]:
    """What the answers of a request's texts say, by the names of their tensors."""
    labels = [np.array([span.label.encode() for span in spans], dtype=np.object_) for spans in answers]
    scores = [np.array([span.score for span in spans], dtype=np.float32) for spans in answers]
    places = [np.array([(span.start, span.end) for span in spans], dtype=np.int32).reshape(-1, 2) for spans in answers]
    return {wire.LABEL: fill_up(labels, b""), wire.SCORE: fill_up(scores, 0), wire.SPAN: fill_up(places, -1)}


def fill_up(parts: Sequence[npt.NDArray[Any]], filler: Any) -> npt.NDArray[Any]:
    """Tensors of texts in one, `[texts, ...]`, as large as the largest of them in each dimension.

    Nothing of any, `[texts, 0, ...]`, where that takes more than MOST_FILLER_BYTES besides them.
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
