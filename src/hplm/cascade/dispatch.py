"""The dispatcher: which texts a level answers itself, and which go to the next level (Tabi, section 4.1).

`DispatchInput` is what a request tells a level, and `DispatchAnswer` is what the level has decided. The numbers are float32 on
their way, and the rule is computed from float32 numbers, so that every server and every offline computation decides alike.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import blake2b

import numpy as np
import numpy.typing as npt

from hplm.cascade.plan import Dispatch
from hplm.errors import BadInputError

Numbers = npt.NDArray[np.float64]
# The number of values of DISPATCH.
DISPATCH_SIZE = 5
# A cut-off that no confidence is below: the last level of a cascade re-routes nothing.
NEVER = -1.0
# A draw that no probability is above: a level answers every text whose confidence is above the cut-off.
DETERMINISTIC = 1.0
# Bits of a draw, as many as float32 holds exactly. A draw that float32 rounds could become 1.
DRAW_BITS = 24


def reroute_probability(confidence: npt.ArrayLike, cut_off: float, slope: float) -> Numbers:
    """Return the probability of eq. 4 that a text of this confidence goes to the next level, for each confidence.

    It is 1 up to `cut_off` c. Above c it falls with `slope` k, from 1 / (1 + exp(-k / 2)) to 1 / (1 + exp(k / 2)).
    """
    confidences = np.asarray(confidence, np.float64)
    norm = (confidences - cut_off) / (1 - cut_off) - 0.5
    # 1 / (1 + exp(x)) without an overflow.
    falling = 0.5 * (1 - np.tanh(slope * norm / 2))
    return np.where(confidences <= cut_off, 1.0, falling)


def draw_of(tenant: str, version: int, *texts: bytes, level: int = 1) -> float:
    """Return a number in [0, 1), the same on every server: the draw that decides on the text above the cut-off.

    `texts` are the request's text or pair in UTF-8, before any pruning. `level` counts from 1. Each level draws anew, because
    texts that a small draw sent to the second level would else go on to the third too often.
    """
    found = blake2b(digest_size=8)
    for part in (tenant.encode(), str(version).encode(), str(level).encode(), *texts):
        # With the lengths, no two requests are the same bytes.
        found.update(len(part).to_bytes(8, "big"))
        found.update(part)
    return (int.from_bytes(found.digest(), "big") >> (64 - DRAW_BITS)) / 2**DRAW_BITS


@dataclass(frozen=True)
class DispatchInput:
    """How a level decides on one text: the dispatcher's numbers, the text's draw, and whether importances are wanted.

    `cut_off` NEVER re-routes nothing. `draw` DETERMINISTIC re-routes only texts whose confidence is at most the cut-off.
    All numbers are values of float32.
    """

    temperature: float
    cut_off: float
    slope: float
    draw: float
    wants_importance: bool

    @classmethod
    def of(
        cls, dispatch: Dispatch, draw: float, *, is_last: bool = False, wants_importance: bool = False
    ) -> DispatchInput:
        """Return the input for a level of a cascade; `is_last`: the level answers whatever its confidence is."""
        cut_off = NEVER if is_last else dispatch.cut_off
        given = (dispatch.temperature, cut_off, dispatch.slope, draw)
        temperature, cut_off, slope, draw = np.array(given, np.float32).tolist()
        return cls(temperature, cut_off, slope, draw, wants_importance)

    @classmethod
    def from_array(cls, values: npt.NDArray[np.float32]) -> DispatchInput:
        """Parse `[DISPATCH_SIZE]` values of the wire. Raises BadInputError, which says what was expected."""
        if values.shape != (DISPATCH_SIZE,):
            raise BadInputError(
                f"DISPATCH has the shape {list(values.shape)} for a text, [{DISPATCH_SIZE}] was expected"
            )
        temperature, cut_off, slope, draw, wants = values.tolist()
        is_sound = (
            0 < temperature < np.inf
            and (cut_off == NEVER or 0 <= cut_off < 1)
            and 0 <= slope < np.inf
            and 0 <= draw <= DETERMINISTIC
            and wants in (0, 1)
        )
        if not is_sound:
            raise BadInputError(
                "DISPATCH needs a temperature above 0, a cut-off in [0, 1) or -1, a slope of 0 or more, a draw in [0, 1], "
                f"and 0 or 1 for whether importances are wanted; {values.tolist()} came"
            )
        return cls(temperature, cut_off, slope, draw, wants == 1)

    def to_array(self) -> npt.NDArray[np.float32]:
        """Return the values of the wire: float32 `[DISPATCH_SIZE]`."""
        numbers = (self.temperature, self.cut_off, self.slope, self.draw, self.wants_importance)
        return np.array(numbers, np.float32)

    def is_rerouted(self, confidence: float) -> bool:
        """Return whether a text of this confidence, rounded to float32, goes to the next level."""
        confidence = float(np.float32(confidence))
        if self.cut_off == NEVER:
            return False
        if confidence <= self.cut_off:
            return True
        return self.draw < float(reroute_probability(confidence, self.cut_off, self.slope))


@dataclass(frozen=True)
class DispatchAnswer:
    """A level's decision on one text.

    `importance` float32 `[words, 3]` has the first character, the end and the importance of each word, see `word_importances`.
    It has no words unless the text is re-routed and importances are wanted.
    """

    confidence: float
    is_rerouted: bool
    importance: npt.NDArray[np.float32] = field(default_factory=lambda: np.empty((0, 3), np.float32))


def parse_dispatch(values: npt.NDArray[np.float32] | None, count: int) -> Sequence[DispatchInput | None]:
    """Return what a request of `count` texts tells a level, from DISPATCH `[count, DISPATCH_SIZE]`; None if it was not sent.

    Raises BadInputError.
    """
    return [None] * count if values is None else [DispatchInput.from_array(row) for row in values]


def word_importances(importance: npt.NDArray[np.float32], tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.float32]:
    """Return the first character, the end and the importance of each word of a text or pair, in order: float32 `[words, 3]`.

    `importance` `[T]` is that of each token of `tokens` `[T, 3]`. A word has the importance of its most important token, as a
    multiple of the mean over the tokens of all words. Special tokens are no words.
    """
    own, numbers = tokens[tokens[:, 2] >= 0], importance[tokens[:, 2] >= 0]
    if not len(own):
        return np.empty((0, 3), np.float32)
    first = np.flatnonzero(np.diff(own[:, 2], prepend=-1))
    columns = (
        np.minimum.reduceat(own[:, 0], first),
        np.maximum.reduceat(own[:, 1], first),
        np.maximum.reduceat(numbers, first) / numbers.mean(),
    )
    return np.stack(columns, 1).astype(np.float32)
