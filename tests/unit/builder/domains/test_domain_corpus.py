"""Preparing a domain's corpus piece by piece, and counting its n-grams."""

from __future__ import annotations

from collections import Counter

import numpy as np
import pytest
from hplm_builder.data import tokenising
from hplm_builder.data.text_sources import passages
from hplm_builder.data.tokenising import tokenise_in_batches
from hplm_builder.domains.domain_corpus import prepare_corpus
from hplm_builder.tables.plot_tables import count_grams, count_packed
from rich.progress import Progress

from hplm.core.text import load_tokenizer
from hplm.errors import CorpusTooSmallError, DataError
from hplm.models.base import Base
from hplm.plot import keys
from hplm.plot.ngrams import text_ngrams
from hplm.reporting.progress import silent
from hplm.store.layout import Store
from tests import tiny


@pytest.fixture(scope="module")
def base(tmp_path_factory: pytest.TempPathFactory) -> Base:
    return tiny.make_base(Store(tmp_path_factory.mktemp("store")), tiny.config())


def test_a_corpus_of_one_passage_is_refused(base: Base) -> None:
    with pytest.raises(DataError, match="a single passage"):
        prepare_corpus(["the cat sleeps"], base, 0, 0, silent)


@pytest.mark.parametrize("documents", [[], [""], ["", ""]], ids=len)
def test_a_corpus_without_a_token_is_too_small(base: Base, documents: list[str]) -> None:
    with pytest.raises(CorpusTooSmallError, match="has 0 tokens, a domain needs 1: 1 more"):
        prepare_corpus(documents, base, 0, 0, silent)


def test_a_document_longer_than_a_text_may_be_is_read_to_its_end(base: Base) -> None:
    words = " ".join(tiny.WORDS * 20)
    found = prepare_corpus([words], base, 0, 0, silent)
    assert found.tokens == len(words.split())
    assert max(*found.text.lengths, *found.held_out.lengths) == base.config.max_tokens


def test_tables_and_training_read_a_word_beside_an_emoji_as_serving_does(base: Base) -> None:
    glued, apart = ["the red cat\U0001f44e", "a dog"], ["the red cat \U0001f44e", "a dog"]
    served = base.load_text_encoder().encode([glued[0]])[0].ids.tolist()
    counted = [count_grams(documents, base, Progress(disable=True)) for documents in (glued, apart)]
    assert counted[0].grams.tolist() == counted[1].grams.tolist()
    (trained,) = tokenise_in_batches(glued[:1], load_tokenizer(base.tokenizer_path), 40)
    assert trained[0].tolist() == served
    corpora = [prepare_corpus(documents, base, 0, 0, silent) for documents in (glued, apart)]
    assert corpora[0].token_counts.tolist() == corpora[1].token_counts.tolist()
    assert corpora[0].token_counts[served].all()


def test_a_root_counts_a_text_without_ends_of_sentences_to_its_end_too(base: Base) -> None:
    # As in transcripts and in non-Latin scripts.
    words = " ".join(tiny.WORDS * 20)
    counted = count_grams([*passages([words], np.random.default_rng(0))], base, Progress(disable=True))
    parts = -(-20 * len(tiny.WORDS) // (base.config.max_tokens - 2))
    assert counted.counts.sum() == 20 * len(tiny.WORDS) + 2 * parts


def test_however_it_is_cut_into_pieces_a_corpus_is_the_same(base: Base, monkeypatch: pytest.MonkeyPatch) -> None:
    documents = tiny.sentences(80, words=(3, 60))
    whole = prepare_corpus(documents, base, 0, 0, silent)
    told: list[float] = []
    monkeypatch.setattr(tokenising, "BATCH_CHARACTERS", 300)
    pieces = prepare_corpus(documents, base, 0, 0, lambda step, done: told.append(done))
    assert len(told) > 20
    assert told == sorted(told)
    assert told[-1] == 1.0
    for one, other in ((whole.text, pieces.text), (whole.held_out, pieces.held_out)):
        np.testing.assert_array_equal(one.ids, other.ids)
        np.testing.assert_array_equal(one.lengths, other.lengths)
        assert one.lengths.sum() == len(one.ids)
    np.testing.assert_array_equal(whole.grams.grams, pieces.grams.grams)
    assert whole.summary() == pieces.summary()
    assert whole.held_out.num_tokens >= 0.05 * (whole.text.num_tokens + whole.held_out.num_tokens) > 0


@pytest.mark.parametrize("packs", [True, False], ids=["keys", "rows"])
def test_n_grams_are_counted_as_a_plain_counter_does(base: Base, monkeypatch: pytest.MonkeyPatch, packs: bool) -> None:
    if not packs:
        monkeypatch.setattr("hplm_builder.tables.plot_tables.fits", lambda n, vocab_size: False)
    assert keys.fits(base.config.window, base.config.vocab_size)
    rng = np.random.default_rng(0)
    parts = []
    for _ in range(3):
        lengths = rng.integers(1, 9, 40).tolist()
        parts.append((rng.integers(1, 6, sum(lengths)), lengths))
    found = count_packed(parts, base.config)
    plain = Counter(
        tuple(gram) for ids, lengths in parts for gram in text_ngrams(ids, lengths, base.config)[0].tolist()
    )
    wanted = sorted(plain.items(), key=lambda one: (-one[1], one[0]))
    assert [(tuple(gram), int(count)) for gram, count in zip(found.grams.tolist(), found.counts, strict=True)] == wanted
