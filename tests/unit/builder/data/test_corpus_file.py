"""Reading an uploaded corpus, sound or broken."""

from __future__ import annotations

import gzip
import json
from pathlib import Path

import pytest
from hplm_builder.data.corpus_file import read_corpus

from hplm.errors import DataError


def corpus(folder: Path, name: str, data: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(data.encode() if isinstance(data, str) else data)
    return path


@pytest.mark.parametrize(
    ("name", "data", "documents"),
    [
        ("a.txt", "one\r\n two \nthree", ["one", "two", "three"]),
        ("one-long.txt", "one", ["one"]),
        ("ends-blank.txt", "one\ntwo\n\n\n", ["one", "two"]),
        ("starts-blank.txt", "\n\none\ntwo\n", ["one", "two"]),
        ("paragraphs.txt", "one\ntwo\n \n\nthree\nfour\n", ["one two", "three four"]),
        ("no-ending", "\ufeffone\ntwo\n", ["one", "two"]),
        ("twice.txt", "one\ntwo\none\n", ["one", "two"]),
        ("CAPITALS.JSONL.GZ", gzip.compress(b'{"text": "one"}\n'), ["one"]),
        ("a.jsonl", '{"text": "one\\ntwo", "id": 1}\n\n{"text": " "}\n{"text": "three"}', ["one\ntwo", "three"]),
        ("a.txt.gz", gzip.compress(b"one\ntwo\n"), ["one", "two"]),
        ("carriage-returns.txt", "one\rtwo\r", ["one", "two"]),
        ("utf-16.txt.gz", gzip.compress("one\r\n\r\ntwö\r\nthree".encode("utf-16")), ["one", "twö three"]),
        ("list.jsonl", '[\n{"text": "one"},\n{"text": "two", "score": NaN}]\n', ["one", "two"]),
        ("a.jsonl.gz", gzip.compress(b'{"text": "one"}'), ["one"]),
    ],
    ids=lambda value: value if isinstance(value, str) and len(value) < 20 else "",
)
def test_a_corpus_gives_its_distinct_documents(
    tmp_path: Path, name: str, data: str | bytes, documents: list[str]
) -> None:
    assert read_corpus(corpus(tmp_path, name, data)) == documents


def test_an_overlong_paragraph_becomes_several_documents(tmp_path: Path) -> None:
    lines = [f"line {number} " + "x" * 90_000 for number in range(25)]
    found = read_corpus(corpus(tmp_path, "a.txt", "first\n\n" + "\n".join(lines)))
    assert found[0] == "first"
    assert " ".join(found[1:]) == " ".join(lines)
    assert max(map(len, found)) < 1_200_000


def test_half_of_a_surrogate_pair_in_json_becomes_a_question_mark(tmp_path: Path) -> None:
    assert read_corpus(corpus(tmp_path, "a.jsonl", json.dumps({"text": "a \ud800"}))) == ["a ?"]


@pytest.mark.parametrize(
    ("name", "data", "words"),
    [
        ("a.pdf", b"x", "a.pdf: the name of a corpus must end in .txt, .jsonl, .txt.gz"),
        ("a.txt", b"", "a.txt holds no text"),
        ("a.txt", b" \n\n", "a.txt holds no text"),
        ("a.txt", "gr\u00fcn\nrot\nwei\u00df".encode("latin-1"), "a.txt, line 1 is not UTF-8 at byte 2"),
        ("a.txt", b"one\ntwo\n\xff\n", "a.txt, line 3 is not UTF-8 at byte 0"),
        ("a.txt", "one".encode("utf-16-le"), "line 1 holds a NUL byte"),
        ("a.txt", b"one\n" + b"x" * 1_000_001, "a.txt, line 2: more than 1,000,000 bytes without an end"),
        ("a.txt", b"word\n" * 30_000, "a.txt has more than the 100,000 bytes"),
        ("a.jsonl", b"1", 'a.jsonl, line 1: expected an object with a string "text"'),
        (
            "a.jsonl",
            b'[{"text": "one"},\n {"id": 1}]',
            'a.jsonl, line 2, entry 2: expected an object with a string "text"',
        ),
        ("a.txt", "one".encode("utf-32"), "a.txt is UTF-32: save it as UTF-8"),
        ("a.jsonl", b'{"text": "one"}\n{"text": 1}', 'a.jsonl, line 2: expected an object with a string "text"'),
        ("a.jsonl", b'{"text": "one"}\n\n{"text', "a.jsonl, line 3 is not JSON"),
        ("a.jsonl", b'{"a":' * 20_000, "a.jsonl, line 1 is not JSON"),
        ("a.txt.gz", b"one\ntwo\n", "a.txt.gz is not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"one\ntwo\n" * 1000)[:-9], "a.txt.gz is not a whole gzip file"),
        ("a.txt.gz", gzip.compress(b"word\n" * 1_000_000), "more than the 100,000 bytes"),
        ("a.txt.gz", gzip.compress(b"x" * 5_000_000), "more than 1,000,000 bytes without an end"),
        ("a.txt.gz", gzip.compress(b"\n" * 5_000_000), "more than the 100,000 bytes"),
    ],
    ids=lambda value: "" if isinstance(value, bytes) else value,
)
def test_a_broken_corpus_is_refused_with_the_line(tmp_path: Path, name: str, data: bytes, words: str) -> None:
    path = corpus(tmp_path, name, data)
    most_bytes = 2_000_000 if "without an end" in words else 100_000
    with pytest.raises(DataError) as error:
        read_corpus(path, most_bytes=most_bytes)
    assert words in str(error.value)
    assert str(tmp_path) not in str(error.value)


@pytest.mark.parametrize("name", ["a.txt", "a.jsonl"])
def test_blank_lines_count_as_lines_of_a_corpus(tmp_path: Path, name: str) -> None:
    document = b'{"text": "one"}\n'
    most = corpus(tmp_path, name, document + b"\n" * 99)
    assert len(read_corpus(most, most_lines=100)) == 1
    for data in (b"\n" * 101, document + b"\n" * 100):
        with pytest.raises(DataError, match=f"{name} has more than the 100 lines"):
            read_corpus(corpus(tmp_path, name, data), most_lines=100)


def test_a_missing_corpus_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"none\.txt cannot be read: No such file"):
        read_corpus(tmp_path / "none.txt")
