"""Text to token ids, with the character offsets that tagging answers need.

A request has one text or a pair of texts, which the base's tokenizer joins as `[CLS] a [SEP] b [SEP]`. Character offsets of a
pair are those of the two texts with one character between them. Word numbers of the second text follow the last word of the
first text that is read.
"""

from __future__ import annotations

import json
import os
import re
import unicodedata
from bisect import bisect_left
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

import numpy as np
import numpy.typing as npt
from tokenizers import Encoding, Regex, Tokenizer, pre_tokenizers
from tokenizers.models import WordPiece
from tokenizers.pre_tokenizers import BertPreTokenizer

from hplm.core.long_texts import LAST_SPACE, MOST_CHARACTERS, splits_at_spaces, unsure_words
from hplm.core.words import find_words
from hplm.errors import CorruptArtifactError, EmptyTextError, TextCountError, TextEncodingError, TextTooLargeError

# Contains all combining marks, and few other characters of European texts.
MAY_BE_MARKS = re.compile("[\u0300-\U0010ffff]")
SPECIAL_TOKENS = 2  # [CLS] and [SEP] of a single text
# A text with more characters for each token that is kept is tokenised in portions until enough is read. English has 4 to 5
# characters a token.
CHARACTERS_PER_TOKEN = 8
# Ends the refusal of a wrong number of texts.
SHAPES = "n texts have the shape [n, 1], n pairs [n, 2], and TENANT [n, 1] with either"
TextOrPair = str | tuple[str, str]
Ids = npt.NDArray[np.int64]
Tokens = npt.NDArray[np.int32]


@dataclass(frozen=True)
class EncodedText:
    """`ids` int64 `[T]`; `tokens` int32 `[T, 3]` of start character, end character and word number (-1: special token).

    `types` int64 `[T]`: the token types that the tokenizer gives a pair, 0 for all tokens of a single text.
    `is_empty`: the text, or a text of the pair, has no token.
    """

    ids: Ids
    tokens: Tokens
    types: Ids
    truncated: bool
    is_empty: bool


def tokenise_in_one_thread() -> None:
    """Make tokenizers of this process use one thread, because waking a thread for each core costs more than short texts."""
    os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


class TextEncoder:
    """A base's tokenizer that cuts texts at `max_tokens`, special tokens included."""

    def __init__(self, tokenizer_json: Path, max_tokens: int) -> None:
        self._tokenizer = _read_tokenizer(tokenizer_json)
        self._unsure_words = unsure_words(self._tokenizer)
        self._splits_at_spaces = self._unsure_words is None and splits_at_spaces(self._tokenizer)
        self._has_berts_words = isinstance(self._tokenizer.pre_tokenizer, BertPreTokenizer)
        _set_apart(self._tokenizer)
        self.max_tokens = max_tokens
        self._single_special = self._tokenizer.num_special_tokens_to_add(is_pair=False)
        # Without a separator, n-gram windows would span both texts.
        self.takes_pairs = self._tokenizer.num_special_tokens_to_add(is_pair=True) > self._single_special
        # This is not the number of tokens, because added tokens may leave gaps.
        self.highest_id = max(self._tokenizer.get_vocab().values(), default=-1)
        # Characters that are tokenised at once of a text that is longer.
        self._portion = CHARACTERS_PER_TOKEN * max_tokens
        if self._unsure_words is None and not self._splits_at_spaces:
            self._portion = MOST_CHARACTERS

    @cached_property
    def unknown_id(self) -> int | None:
        """The id of what the vocabulary lacks; None if it lacks nothing, as a vocabulary of bytes."""
        model = json.loads(self._tokenizer.to_str())["model"]
        if model.get("unk_id") is not None:
            return int(model["unk_id"])
        return self._tokenizer.token_to_id(model.get("unk_token") or "")

    def encode(self, texts: Sequence[TextOrPair]) -> list[EncodedText]:
        """Tokenise a batch. A text of white space alone gives only special tokens, see `check_not_empty`.

        A text that is too long is cut at its end. Of a pair the longer text is cut first, until both are equally long. Pairs
        need `takes_pairs`. The part that is cut off is not tokenised, which could take a hundred times as long as the rest.
        Nothing is read beyond MOST_CHARACTERS, so the time is bounded for a text of any length and any tokenizer.
        """
        long = {index for index, text in enumerate(texts) if self._is_long(text)}
        if not long:
            encodings = self._tokenizer.encode_batch(list(texts))
            return [self._encoded(text, encoding) for text, encoding in zip(texts, encodings, strict=True)]
        short = iter(self.encode([text for index, text in enumerate(texts) if index not in long]))
        return [self._encoded_long(text) if index in long else next(short) for index, text in enumerate(texts)]

    def _is_long(self, text: TextOrPair) -> bool:
        return any(len(part) > self._portion for part in _texts_of(text))

    def _encoded(self, text: TextOrPair, encoding: Encoding) -> EncodedText:
        ids, tokens = _arrays(encoding)
        if isinstance(text, str) and len(ids) <= self.max_tokens:
            return EncodedText(
                ids, self._exact(text, tokens), np.zeros_like(ids), False, len(ids) <= self._single_special
            )
        # Read only for pairs and cut texts, because `sequence_ids` is slow.
        of_text = np.array([-1 if number is None else number for number in encoding.sequence_ids])
        for number, part in enumerate(_texts_of(text)):
            tokens[of_text == number] = self._exact(part, tokens[of_text == number])
        return self._cut(text, ids, tokens, of_text, np.array(encoding.type_ids), is_read=True)

    def _encoded_long(self, text: TextOrPair) -> EncodedText:
        texts = _texts_of(text)
        read = [self._read(part[:MOST_CHARACTERS]) for part in texts]
        # Short texts show the special tokens around and between them, which are the same for all texts.
        form = self._tokenizer.encode(*"a" * len(texts))
        parts: list[tuple[Ids, Tokens]] = []
        of_text, types, before = list[int](), list[int](), None
        for token, number, kind in zip(form.ids, form.sequence_ids, form.type_ids, strict=True):
            # The short text may have several tokens. All tokens of the long text take their place.
            if number is None or number != before:
                special = (np.array([token]), np.array([(0, 0, -1)], np.int32))
                parts.append(special if number is None else read[number])
                of_text.append(-1 if number is None else number)
                types.append(kind)
            before = number
        sizes = [len(ids) for ids, _ in parts]
        ids, tokens = (np.concatenate(arrays) for arrays in zip(*parts, strict=True))
        is_read = all(len(part) <= MOST_CHARACTERS for part in texts)
        return self._cut(text, ids, tokens, np.repeat(of_text, sizes), np.repeat(types, sizes), is_read=is_read)

    def _read(self, text: str) -> tuple[Ids, Tokens]:
        """Return all tokens of a text, or more than `max_tokens` of its first ones."""
        start, first_word, size, count = 0, 0, self._portion, 0
        parts: list[tuple[Ids, Tokens]] = []
        while True:
            end = start + size
            if end < len(text) and self._splits_at_spaces:
                last_space = LAST_SPACE.match(text, start, end)
                if last_space is None:
                    size *= 4
                    continue
                end = last_space.end()
            portion = text[start:end]
            ids, tokens = _arrays(self._tokenizer.encode(portion, add_special_tokens=False))
            if self._unsure_words is None:
                enough = self._enough(portion, tokens)
                ids, tokens = ids[:enough], tokens[:enough]
            tokens = self._exact(portion, tokens)
            is_all = end >= len(text)
            sure = len(ids) if is_all or self._splits_at_spaces else self._count_sure(tokens)
            parts.append((ids[:sure], tokens[:sure] + np.array((start, start, first_word), np.int32)))
            count += sure
            if is_all or count > self.max_tokens:
                break
            if self._splits_at_spaces:
                start, first_word = end, first_word + int(tokens[:, 2].max(initial=-1)) + 1
            elif sure:
                # The next portion begins with a word, so the text before it does not matter. Portions double, because if
                # words are long, tokenising the last words again is expensive.
                start, first_word = start + int(tokens[sure, 0]), first_word + int(tokens[sure, 2])
                size = 2 * self._portion
            else:
                size *= 4
        all_ids, all_tokens = zip(*parts, strict=True)
        return np.concatenate(all_ids), np.concatenate(all_tokens)

    def _enough(self, text: str, tokens: Tokens) -> int:
        """Return how many tokens decide the words of those that are kept: the token behind them has a character."""
        for place in range(self.max_tokens, len(tokens)):
            start, end, _ = tokens[place].tolist()
            if text[start:end].strip():
                return place + 1
        return len(tokens)

    def _count_sure(self, tokens: Tokens) -> int:
        """Return how many tokens of a text's beginning stay as they are, whatever text follows."""
        assert self._unsure_words is not None
        last_sure = tokens[:, 2].max(initial=-1) - self._unsure_words
        sure = int(np.searchsorted(tokens[:, 2], last_sure, side="right"))
        # A character that the normalizer decomposes may be part of two words. The next portion begins before both.
        while 0 < sure < len(tokens) and tokens[sure, 0] < tokens[sure - 1, 1]:
            sure = int(np.searchsorted(tokens[:, 2], tokens[sure - 1, 2]))
        return sure

    def _exact(self, text: str, tokens: Tokens) -> Tokens:
        """Return the tokens of one text with the characters and words that answers have."""
        return _with_marks(text, tokens if self._has_berts_words else find_words(text, tokens))

    def _cut(
        self, text: TextOrPair, ids: Ids, tokens: Tokens, of_text: Ids, types: Ids, *, is_read: bool
    ) -> EncodedText:
        """Cut the tokens to `max_tokens`. `of_text` `[T]` has the number of each token's text, -1 for special tokens.

        `is_read`: no text has characters beyond those that are read.
        """
        texts = _texts_of(text)
        is_empty = not all((of_text == number).any() for number in range(len(texts)))
        truncated = len(ids) > self.max_tokens or not is_read
        if len(ids) > self.max_tokens:
            kept = _kept(of_text, self.max_tokens, len(texts[0]) >= len(texts[-1]))
            ids, tokens, of_text, types = ids[kept], tokens[kept], of_text[kept], types[kept]
        if len(texts) == 2:
            before = len(texts[0]) + 1
            tokens[of_text == 1] += np.array((before, before, tokens[of_text == 0, 2].max(initial=-1) + 1), np.int32)
        return EncodedText(ids, tokens, types, truncated, is_empty)


def load_tokenizer(tokenizer_json: Path) -> Tokenizer:
    """Return the tokenizer that `TextEncoder` uses, for callers that need all of a long text. Raises CorruptArtifactError.

    `Tokenizer.from_file` alone would give other tokens: the file does not say which characters are set apart.
    """
    tokenizer = _read_tokenizer(tokenizer_json)
    _set_apart(tokenizer)
    return tokenizer


def _read_tokenizer(tokenizer_json: Path) -> Tokenizer:
    try:
        tokenizer = Tokenizer.from_file(str(tokenizer_json))
    except Exception as error:  # the library raises bare Exception
        raise CorruptArtifactError(f"{tokenizer_json} is not a tokenizer: {error}") from error
    tokenizer.no_padding()
    tokenizer.no_truncation()
    return tokenizer


def _set_apart(tokenizer: Tokenizer) -> None:
    """Set characters apart that would hide the word beside them. Only a WordPiece that splits texts as BERT does is changed.

    WordPiece turns a whole word into one `[UNK]` if the vocabulary lacks one of its characters. Three kinds are set apart:

    - A run of characters that no piece contains is one word, hence one `[UNK]`. An emoji with its joiners, skin tones and
      variation selectors is such a run, and so is a word in an unknown script.
    - A symbol that the vocabulary has (category S, such as a heart) is a word, unless a longer piece contains the symbol too
      (such as the pound sign, because `£10` is a piece of MiniLM).
    - Any other character that no piece has behind its first place begins a word.

    Other letters, marks and numbers of the vocabulary stay in their word, because they make another word of it. Offsets are
    not changed, nor is `tokenizer.json`: the fingerprints of bases, tables and tenants stay valid.
    """
    model = tokenizer.model
    if not isinstance(model, WordPiece) or not isinstance(tokenizer.pre_tokenizer, BertPreTokenizer):
        return
    first, later, longer = set[str](), set[str](), set[str]()
    for piece in tokenizer.get_vocab(with_added_tokens=False):
        body = piece.removeprefix(model.continuing_subword_prefix)
        # A piece such as [unused1] never matches, because the pre-tokenizer splits at ASCII punctuation.
        if len(body) > 1 and any(one.isascii() and not one.isalnum() for one in body):
            continue
        first |= set(body[:1] if body == piece else "")
        later |= set(body[1:] if body == piece else body)
        longer |= set(body if len(body) > 1 else "")
    symbols = {one for one in first - longer if not one.isascii() and unicodedata.category(one)[0] == "S"}
    beginnings = {one for one in first - later - symbols if one.isalnum() or not one.isascii()}
    # The blank is no match, because each match takes time.
    known = first | later | {" "}
    kinds = [f"[^{_code_points(known)}]+"]
    if symbols:
        kinds.append(f"[{_code_points(symbols)}]")
    if beginnings:
        kinds.append(f"[{_code_points(beginnings)}][{_code_points(known - symbols - beginnings)}]*")
    # Before BERT's splitting, not behind it: one search of a text takes less time than one of each word.
    apart = pre_tokenizers.Split(Regex("|".join(kinds)), "isolated")
    tokenizer.pre_tokenizer = pre_tokenizers.Sequence([apart, tokenizer.pre_tokenizer])


def _code_points(characters: Iterable[str]) -> str:
    """Return the inside of a regex's brackets that match these characters."""
    return "".join(f"\\x{{{ord(one):x}}}" for one in sorted(characters))


def text_key(text: TextOrPair) -> TextOrPair:
    """Return a text or pair in the form by which statistics compare it, because a near-copy is no new evidence.

    Case, white space, compatible forms of characters (Unicode NFKC) and characters without width do not count.
    """
    if isinstance(text, tuple):
        first, second = text
        return _key(first), _key(second)
    return _key(text)


def _key(text: str) -> str:
    if not text.isascii():
        text = unicodedata.normalize("NFKC", text)
        text = "".join(one for one in text if unicodedata.category(one) != "Cf")
        # Once more, because folding may leave characters that NFKC composes.
        text = unicodedata.normalize("NFKC", text.casefold())
    return " ".join(text.casefold().split())


def _texts_of(text: TextOrPair) -> tuple[str, ...]:
    return text if isinstance(text, tuple) else (text,)


def _arrays(encoding: Encoding) -> tuple[Ids, Tokens]:
    """Return ids and tokens as in `EncodedText`, but with the second text of a pair counted from 0."""
    ids = np.array(encoding.ids, dtype=np.int64)
    tokens = np.empty((len(ids), 3), dtype=np.int32)
    tokens[:, :2] = np.array(encoding.offsets).reshape(-1, 2)
    tokens[:, 2] = [-1 if word is None else word for word in encoding.word_ids]
    return ids, tokens


def _with_marks(text: str, tokens: npt.NDArray[np.int32]) -> npt.NDArray[np.int32]:
    """Extend tokens to the combining accents that follow them. A tokenizer that drops accents ends tokens before them."""
    if not len(tokens) or not MAY_BE_MARKS.search(text):
        return tokens
    spans = tokens[:, :2].tolist()
    starts = [*(start for start, end in spans if start < end), len(text)]
    for span in spans:
        start, end = span
        if start < end:
            # The end must not pass the next token's start; several tokens may share one character.
            until = starts[bisect_left(starts, end)]
            while end < until and unicodedata.category(text[end]) == "Mn":
                end += 1
            span[1] = end
    tokens[:, :2] = spans
    return tokens


def _kept(of_text: Ids, max_tokens: int, first_is_longer: bool) -> Ids:
    """Return the positions of tokens that stay: all special tokens, and the beginning of each text. The longer is cut first.

    `first_is_longer` decides if each text has more tokens than there is room, because then not all were tokenised.
    """
    first, second = np.flatnonzero(of_text == 0), np.flatnonzero(of_text == 1)
    special = np.flatnonzero(of_text < 0)
    room = max(0, max_tokens - len(special))
    shorter = min(len(first), len(second), room // 2)
    if min(len(first), len(second)) <= room:
        first_is_longer = len(first) >= len(second)
    most = (room - shorter, shorter) if first_is_longer else (shorter, room - shorter)
    return np.sort(np.concatenate([special, first[: most[0]], second[: most[1]]]))


def decode_texts(raw: Sequence[bytes], max_text_bytes: int) -> TextOrPair:
    """Return the text or the pair of a request. Raises TextCountError, TextTooLargeError and the errors of `decode_utf8`."""
    if len(raw) not in (1, 2):
        raise TextCountError(f"{len(raw)} texts came in one row of TEXT: {SHAPES}")
    if (num_bytes := sum(map(len, raw))) > max_text_bytes:
        raise TextTooLargeError(f"{num_bytes} bytes of text came, at most {max_text_bytes} are accepted")
    if len(raw) == 1:
        return decode_utf8(raw[0], max_text_bytes)
    first, second = raw
    return (
        decode_utf8(first, max_text_bytes, "the first text of the pair"),
        decode_utf8(second, max_text_bytes, "the second text of the pair"),
    )


def decode_utf8(raw: bytes, max_text_bytes: int, name: str = "the text") -> str:
    """Return one text; errors call it `name`. Raises TextTooLargeError, TextEncodingError or EmptyTextError."""
    if len(raw) > max_text_bytes:
        raise TextTooLargeError(f"{name} has {len(raw)} bytes, at most {max_text_bytes} are accepted")
    try:
        text = raw.decode("utf-8")
    except UnicodeDecodeError as error:
        raise TextEncodingError(f"{name} is not valid UTF-8 at byte {error.start}") from None
    if not text.strip():
        raise EmptyTextError(f"{name} is empty")
    return text


def check_text_count(given: TextOrPair, wanted: int) -> TextOrPair:
    """Return the text or pair unchanged. Raises TextCountError if the tenant was trained on another number of texts."""
    if isinstance(given, tuple) != (wanted == 2):
        trained, came = ("pairs", "one text") if wanted == 2 else ("single texts", "two texts")
        raise TextCountError(f"this tenant was trained on {trained}, and {came} came in one row of TEXT: {SHAPES}")
    return given


def check_not_empty(encoded: EncodedText) -> EncodedText:
    """Return the text unchanged. Raises EmptyTextError if it has no token, for example only control characters."""
    if encoded.is_empty:
        raise EmptyTextError(
            "the text, or one text of the pair, has only white space, control characters or lone accents"
        )
    return encoded
