"""Text to token ids, with the character offsets that tagging answers need."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Tokenizer

from hplm.errors import CorruptArtifactError, EmptyTextError, TextEncodingError, TextTooLargeError

SPECIAL_TOKENS = 2  # [CLS] and [SEP]


@dataclass(frozen=True)
class EncodedText:
    """`ids` int64 `[T]`; `tokens` int32 `[T, 3]` of start character, end character and word number (-1: special token)."""

    ids: npt.NDArray[np.int64]
    tokens: npt.NDArray[np.int32]
    truncated: bool


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

    def encode(self, texts: Sequence[str]) -> list[EncodedText]:
        """Tokenise a batch. A text of nothing but white space gives only special tokens; see `check_not_empty`."""
        encoded = []
        for encoding in self._tokenizer.encode_batch(list(texts)):
            ids = np.array(encoding.ids, dtype=np.int64)
            words = [-1 if word is None else word for word in encoding.word_ids]
            tokens = np.column_stack([np.array(encoding.offsets, dtype=np.int32), np.array(words, dtype=np.int32)])
            truncated = len(ids) > self._max_tokens
            if truncated:
                kept = [*range(self._max_tokens - 1), len(ids) - 1]
                ids, tokens = ids[kept], tokens[kept]
            encoded.append(EncodedText(ids, tokens, truncated))
        return encoded


def decode_utf8(raw: bytes, max_text_bytes: int) -> str:
    """The text of a request. Raises TextTooLargeError, TextEncodingError or EmptyTextError."""
    if len(raw) > max_text_bytes:
        raise TextTooLargeError(f"the text has {len(raw)} bytes, at most {max_text_bytes} are accepted")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextEncodingError(f"the text is not valid UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise EmptyTextError("the text is empty")
    return text


def check_not_empty(encoded: EncodedText) -> EncodedText:
    """Raises EmptyTextError where the tokenizer found nothing, as in a text of control characters."""
    if len(encoded.ids) <= SPECIAL_TOKENS:
        raise EmptyTextError("the text holds nothing but white space and control characters")
    return encoded
