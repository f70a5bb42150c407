"""Small tokenizers of the kinds that pretrained models have, trained in milliseconds."""

from __future__ import annotations

from collections.abc import Callable, Mapping

from tokenizers import AddedToken, Regex, Tokenizer, models, normalizers, pre_tokenizers, processors, trainers

from tests import tiny

SPECIAL = ["<s>", "<pad>", "</s>", "<unk>"]
TEXTS = [
    " ".join(tiny.WORDS),
    "the cat's red-brown dog, and 12 rivers!",
    "na\u00efve caf\u00e9s d\u00e9j\u00e0 vu \u4e2d \u6587",
] * 4


def roberta(*, add_prefix_space: bool = False, trim_offsets: bool = True) -> Tokenizer:
    """Return a byte-level BPE. A token holds the space before its word."""
    made = Tokenizer(models.BPE())
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=add_prefix_space)
    alphabet = pre_tokenizers.ByteLevel.alphabet()
    made.train_from_iterator(
        TEXTS,
        trainers.BpeTrainer(vocab_size=400, special_tokens=SPECIAL, initial_alphabet=alphabet, show_progress=False),
    )
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    made.post_processor = processors.RobertaProcessing(("</s>", 2), ("<s>", 0), trim_offsets, add_prefix_space)
    return made


def xlm_roberta() -> Tokenizer:
    """Return a SentencePiece unigram model whose words are what stands between white space."""
    return _unigram(
        normalizers.NFKC(), pre_tokenizers.Sequence([pre_tokenizers.WhitespaceSplit(), pre_tokenizers.Metaspace()])
    )


def spaces_as_words() -> Tokenizer:
    """Return a SentencePiece unigram model that has spaces as tokens, as newer conversions of SentencePiece are."""
    steps = [normalizers.NFKC(), normalizers.Strip(left=False), normalizers.Replace(Regex(" {2,}"), " ")]
    return _unigram(normalizers.Sequence(steps), pre_tokenizers.Metaspace())


def _unigram(normalizer: normalizers.Normalizer, pre_tokenizer: pre_tokenizers.PreTokenizer) -> Tokenizer:
    made = Tokenizer(models.Unigram())
    made.normalizer, made.pre_tokenizer = normalizer, pre_tokenizer
    made.train_from_iterator(
        TEXTS,
        trainers.UnigramTrainer(vocab_size=150, special_tokens=SPECIAL, unk_token="<unk>", show_progress=False),
    )
    made.add_special_tokens([AddedToken("<mask>", lstrip=True)])
    made.post_processor = processors.TemplateProcessing(
        single="<s> $A </s>",
        pair="<s> $A </s> </s> $B </s>",
        special_tokens=[("<s>", 0), ("</s>", 2)],
    )
    return made


KINDS: Mapping[str, Callable[[], Tokenizer]] = {
    "bert": tiny.tokenizer,
    "roberta": roberta,
    "roberta-prefix": lambda: roberta(add_prefix_space=True),
    "roberta-untrimmed": lambda: roberta(trim_offsets=False),
    "xlm-roberta": xlm_roberta,
    "spaces-as-words": spaces_as_words,
}
