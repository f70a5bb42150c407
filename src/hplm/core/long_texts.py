"""Places at which a long text may be cut before it is tokenised: the tokens of both parts are those of the whole text."""

from __future__ import annotations

import json
import re
from typing import Any

from tokenizers import Tokenizer
from tokenizers.models import WordPiece
from tokenizers.normalizers import BertNormalizer
from tokenizers.pre_tokenizers import BertPreTokenizer

# A text is read up to this number of characters. Tokenising as many takes up to 0.1 s.
MOST_CHARACTERS = 65_536
# The last single space between two letters or digits of a part of a text.
LAST_SPACE = re.compile(r".*[^\W_](?= [^\W_])", re.DOTALL)
# Types in tokenizer.json: parts that change characters or split words, but never join text across such a space.
LOCAL_NORMALIZERS = ("BertNormalizer", "Lowercase", "NFC", "NFD", "NFKC", "NFKD", "Nmt", "Precompiled", "StripAccents")
LOCAL_PRE_TOKENIZERS = ("Digits", "Punctuation", "UnicodeScripts")
SPLITTING_PRE_TOKENIZERS = ("BertPreTokenizer", "Whitespace", "WhitespaceSplit")


def unsure_words(tokenizer: Tokenizer) -> int | None:
    """Return how many of a text's last words may change if more text follows, None if that is unknown.

    BERT's tokenizer looks at single characters to split words, so more text may continue the last word. The words before it
    may be the beginning of an added token, which has at least one character for each word.
    """
    added = tokenizer.get_added_tokens_decoder().values()
    steps = (tokenizer.normalizer, tokenizer.pre_tokenizer, tokenizer.model)
    is_known = tuple(map(type, steps)) == (BertNormalizer, BertPreTokenizer, WordPiece)
    # A `single_word` token depends on the text before it too.
    if not is_known or any(token.single_word for token in added):
        return None
    contents = [token.content for token in added]
    return max(map(len, [*contents, *map(tokenizer.normalizer.normalize_str, contents)]), default=1)


def splits_at_spaces(tokenizer: Tokenizer) -> bool:
    """Return whether a text may be cut before any single space between two letters or digits.

    This holds for the tokenizers of RoBERTa (bytes) and XLM-RoBERTa (SentencePiece). The second part begins with the space, so
    that no tokenizer adds a space of its own. A tokenizer with unknown parts gives False.
    """
    normalizer = [] if tokenizer.normalizer is None else _parts(tokenizer.normalizer, "normalizers")
    pre_tokenizer = [] if tokenizer.pre_tokenizer is None else _parts(tokenizer.pre_tokenizer, "pretokenizers")
    added = tokenizer.get_added_tokens_decoder().values()
    return (
        all(map(_is_local, normalizer))
        and any(map(_splits, pre_tokenizer))
        and all(_splits(part) or part["type"] in LOCAL_PRE_TOKENIZERS for part in pre_tokenizer)
        and not any(token.rstrip or " " in token.content for token in added)
    )


def _parts(component: Any, key: str) -> list[dict[str, Any]]:
    """Return a component of a tokenizer as tokenizer.json has it; of a sequence, its parts."""
    return _flat(json.loads(component.__getstate__()), key)


def _flat(part: dict[str, Any], key: str) -> list[dict[str, Any]]:
    return [one for inner in part[key] for one in _flat(inner, key)] if part["type"] == "Sequence" else [part]


def _is_local(normalizer: dict[str, Any]) -> bool:
    if normalizer["type"] == "Strip":
        return not normalizer["strip_left"]
    if normalizer["type"] == "Replace":
        # SentencePiece's: several spaces become one.
        return bool(normalizer["pattern"] == {"Regex": " {2,}"})
    return normalizer["type"] in LOCAL_NORMALIZERS


def _splits(pre_tokenizer: dict[str, Any]) -> bool:
    if pre_tokenizer["type"] == "ByteLevel":
        return bool(pre_tokenizer["use_regex"])
    if pre_tokenizer["type"] == "Metaspace":
        return bool(pre_tokenizer["split"])
    return pre_tokenizer["type"] in SPLITTING_PRE_TOKENIZERS
