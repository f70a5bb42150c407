"""Text to token ids, with the character offsets that tagging answers need.

A request has one text, or two: a pair, which the base's tokenizer joins as `[CLS] a [SEP] b [SEP]`. Characters and words of
a pair count on: they are those of the two texts with one character between them.
"""

from __future__ import annotations

import os
import re
import unicodedata
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Tokenizer

from hplm.errors import CorruptArtifactError, EmptyTextError, TextCountError, TextEncodingError, TextTooLargeError

# All combining marks are among these, and little else of what Europeans write.
MAY_BE_MARKS = re.compile("[\u0300-\U0010ffff]")
SPECIAL_TOKENS = 2  # [CLS] and [SEP] of a single text
TextOrPair = str | tuple[str, str]


@dataclass(frozen=True)
class EncodedText:
    """`ids` int64 `[T]`; `tokens` int32 `[T, 3]` of start character, end character and word number (-1: special token).

    `is_empty`: a text, or one of a pair, gave no token at all.
    """

    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    truncated: bool
    is_empty: bool


def tokenise_in_one_thread() -> None:
    """For this process: else each batch of texts wakes a thread a core, whose waking costs more than a few short texts do."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextEncoder:
    """A base's tokenizer, cutting at `max_tokens` (special tokens included)."""

    def __init__(self, tokenizer_json: Path, max_tokens: int) -> None:
        try:
            self._tokenizer = Tokenizer.from_file(str(tokenizer_json))
        except Exception as error:  # the library raises bare Exception
            raise CorruptArtifactError(f"{tokenizer_json} is not a tokenizer: {error}") from error
        self._tokenizer.no_padding()
        self._tokenizer.no_truncation()
        self._max_tokens = max_tokens
        self._single_special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        # Without a separator, n-gram windows would reach from one text into the other.
        self.takes_pairs = self._tokenizer.num_special_tokens_to_add(is_pair=True) > self._single_special
        # Not how many tokens it has: added ones may leave gaps.
        self.highest_id = max(self._tokenizer.get_vocab().values(), default=-1)

    def encode(self, texts: Sequence[TextOrPair]) -> list[EncodedText]:
        """Tokenise a batch. A text of nothing but white space gives only special tokens; see `check_not_empty`.

        A text that is too long is cut at its end; of a pair the longer text first, until both are equally long. Pairs need
        `takes_pairs`.
        """
        encodings = self._tokenizer.encode_batch(list(texts))
        return [self._encoded(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]

    def _encoded(self, text: TextOrPair, encoding: Encoding) -> EncodedText:
        ids = np.array(encoding.ids, dtype=np.int64)
        tokens = np.empty((len(ids), 3), dtype=np.int32)
        tokens[:, :2] = np.array(encoding.offsets).reshape(-1, 2)
        tokens[:, 2] = [-1 if word is None else word for word in encoding.word_ids]
        if isinstance(text, str):
            tokens = _with_marks(text, tokens)
        is_empty = len(ids) <= self._single_special
        truncated = len(ids) > self._max_tokens
        if truncated or isinstance(text, tuple):
            # Which text each token is of, -1 for special tokens: only asked for where it matters, for it takes a while.
            of_text = np.array([-1 if number is None else number for number in encoding.sequence_ids])
            if isinstance(text, tuple):
                first, second = of_text == 0, of_text == 1
                is_empty = not (first.any() and second.any())
                tokens[first], tokens[second] = (
                    _with_marks(text[0], tokens[first]),
                    _with_marks(text[1], tokens[second]),
                )
                tokens[second] += (len(text[0]) + 1, len(text[0]) + 1, tokens[first, 2].max(initial=-1) + 1)
            if truncated:
                kept = _kept(of_text, self._max_tokens)
                ids, tokens = ids[kept], tokens[kept]
        return EncodedText(ids, tokens, truncated, is_empty)


def _with_marks(text: str, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Tokens that end behind the combining accents that follow them: a tokenizer that drops those ends before them."""
    if not MAY_BE_MARKS.search(text):
        return tokens
    spans, next_start = tokens[:, :2].tolist(), len(text)
    for span in reversed(spans):
        start, end = span
        if start < end:
            while end < next_start and unicodedata.category(text[end]) == "Mn":
                end += 1
            span[1], next_start = end, start
    tokens[:, :2] = spans
    return tokens


def _kept(of_text: npt.NDArray[np.int64], max_tokens: int) -> npt.NDArray[np.int64]:
    """Positions that stay of too many tokens: all special ones, and the beginning of each text, the longer one cut first."""
    first, second = np.flatnonzero(of_text == 0), np.flatnonzero(of_text == 1)
    special = np.flatnonzero(of_text < 0)
    room = max(0, max_tokens - len(special))
    shorter = min(len(first), len(second), room // 2)
    most = (shorter, room - shorter) if len(first) < len(second) else (room - shorter, shorter)
    kept: npt.NDArray[np.int64] = np.sort(np.concatenate([special, first[: most[0]], second[: most[1]]]))
    return kept


def decode_texts(raw: Sequence[bytes], max_text_bytes: int) -> TextOrPair:
    """The text or pair of a request. Raises TextCountError and what `decode_utf8` raises."""
    if len(raw) not in (1, 2):
        raise TextCountError(f"{len(raw)} texts came: send one text, or two as a pair")
    if (num_bytes := sum(map(len, raw))) > max_text_bytes:
        raise TextTooLargeError(f"{num_bytes} bytes of text came, at most {max_text_bytes} are accepted")
    first, *rest = (decode_utf8(one, max_text_bytes) for one in raw)
    return (first, rest[0]) if rest else first


def decode_utf8(raw: bytes, max_text_bytes: int) -> str:
    """One text. Raises TextTooLargeError, TextEncodingError or EmptyTextError."""
    if len(raw) > max_text_bytes:
        raise TextTooLargeError(f"the text has {len(raw)} bytes, at most {max_text_bytes} are accepted")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextEncodingError(f"the text is not valid UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise EmptyTextError("the text is empty")
    return text


def check_text_count(given: TextOrPair, wanted: int) -> TextOrPair:
    """Raises TextCountError where a tenant that was trained on `wanted` texts got another number of them."""
    if isinstance(given, tuple) != (wanted == 2):
        raise TextCountError(
            "this tenant was trained on pairs: send two texts"
            if wanted == 2
            else "this tenant was trained on single texts: send one, not a pair"
        )
    return given


def check_not_empty(encoded: EncodedText) -> EncodedText:
    """Raises EmptyTextError where the tokenizer found nothing, as in a text of control characters."""
    if encoded.is_empty:
        raise EmptyTextError("the text holds nothing but white space and control characters")
    return encoded
