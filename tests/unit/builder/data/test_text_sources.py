"""Named sources hold text, and no dev or test text of the tasks."""

from __future__ import annotations

import os
from pathlib import Path

import numpy as np
import pytest
from hplm_builder.convert.mixture import SHARES
from hplm_builder.data.evaluated_texts import is_evaluated
from hplm_builder.data.labelled_files import read_folder
from hplm_builder.data.text_sources import FILM_WORDS, SOURCES, passages
from hplm_builder.fleet.demo import TENANTS, demo_data

# Folders with clinc150, sst-2 and so on; by default a folder beside the checkout.
DATA = Path(os.environ.get("HPLM_TASKS") or Path(__file__).parents[5] / "shared" / "data")
SHORT = ("drugs", "chat", "sentences", "messages", "machine-learning", "phenotype-names", "icd-names")


def cut(source: str) -> list[str]:
    return list(passages(SOURCES[source](), np.random.default_rng(0)))


@pytest.fixture(scope="module")
def short_passages() -> list[str]:
    return [text for source in SHORT for text in cut(source)]


def test_a_conversion_takes_a_share_of_every_source() -> None:
    assert SHARES.keys() == SOURCES.keys()


@pytest.mark.parametrize("source", SHORT)
def test_a_source_of_short_texts_has_thousands_and_no_empty_one(source: str) -> None:
    texts = list(SOURCES[source]())
    assert len(texts) > 3_000
    assert all(text.strip() for text in texts)


@pytest.mark.parametrize(("tenant", "sources"), [("spam", ["messages"]), ("icd10", ["icd", "icd-names"])])
def test_a_source_holds_no_dev_or_test_text_of_the_demo_task(tenant: str, sources: list[str]) -> None:
    (demo,) = (demo for demo in TENANTS if demo.name == tenant)
    data = demo_data(demo)
    texts = {text for source in sources for text in SOURCES[source]()}
    assert texts.isdisjoint(example.text for example in (*data.dev, *data.test))


def test_film_reviews_have_no_sentence_of_which_sst_2_is_made() -> None:
    assert min(len(text.split(" ")) for text in SOURCES["films"]()) == FILM_WORDS


@pytest.mark.parametrize(
    ("text", "expected"), [("Turn it off!", True), ("what do you do with your free time", True), ("", False)]
)
def test_a_text_of_the_evaluation_is_known_by_its_words(text: str, expected: bool) -> None:
    assert is_evaluated(text) is expected


@pytest.mark.skipif(not DATA.is_dir(), reason="the tasks of the evaluation are not on this machine")
@pytest.mark.parametrize("task", ["clinc150", "sst-2", "sciie", "NCBI-disease", "chemprot", "sci-cite"])
def test_no_short_passage_of_a_conversion_is_a_dev_or_test_text_of_the_evaluation(
    task: str, short_passages: list[str]
) -> None:
    data = read_folder(DATA / task)
    evaluated = {example.text.lower() for example in (*data.dev, *data.test)}
    assert evaluated.isdisjoint(text.lower() for text in short_passages if not is_evaluated(text))
