"""Labelled data."""

from __future__ import annotations

from pathlib import Path

import pytest
from hplm_builder.labelled import Entity, read_data, read_file
from hplm_builder.scores import accuracy, entity_f1, macro_f1

from hplm.errors import DataError


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def test_the_three_formats_read_alike(tmp_path: Path) -> None:
    jsonl = read_file(
        write(tmp_path, "a.jsonl", '{"text": "one, two", "label": "x"}\n\n{"text": "three", "label": 7}\n')
    )
    csv = read_file(write(tmp_path, "a.csv", 'label,text\nx,"one, two"\n7,three\n'))
    tsv = read_file(write(tmp_path, "a.tsv", "sentence\tlabel\none, two\tx\nthree\t7\n"))
    assert jsonl == csv == tsv


def test_conll_tags_become_entities_over_characters(tmp_path: Path) -> None:
    text = "Anna NN O B-PER\nLee NN O I-PER\nof NN O O\nRome NN O I-LOC\n\nso NN O O\n"
    first, second = read_file(write(tmp_path, "a.conll", text))
    assert first.text == "Anna Lee of Rome"
    assert first.entities == (Entity("PER", 0, 8), Entity("LOC", 12, 16))
    assert second.entities == ()


@pytest.mark.parametrize(
    ("name", "content", "words"),
    [
        ("a.txt", "x", "ending must be one of"),
        ("a.jsonl", "", "no example"),
        ("a.jsonl", '{"text": "a", "label": "x"}\n{"text"', "line 2 is not JSON"),
        ("a.jsonl", '["a"]', "line 1: expected an object"),
        ("a.jsonl", '{"label": "x"}', "no column `text`"),
        ("a.jsonl", '{"text": " ", "label": "x"}', "the text is empty"),
        ("a.jsonl", '{"text": "a"}', "no `label`"),
        ("a.jsonl", '{"text": "a", "entities": [{"label": "x", "start": 0, "end": 9}]}', "outside the text"),
        ("a.jsonl", '{"text": "a", "entities": [1]}', "must be a list of objects"),
        ("a.csv", 'text,label\n"open,x\n', "not valid CSV"),
        ("a.csv", "text,label\na,b,c\n", "columns of the header"),
        ("a.csv", "text,label\na\n", "columns of the header"),
        ("a.csv", b"text,label\n\xff\xfe,x\n", "not UTF-8 at byte 11"),
        ("a.conll", "Anna\n", "expected a token and an IOB tag"),
        ("a.conll", "Anna NN PER\n", "expected a token and an IOB tag"),
    ],
)
def test_a_broken_file_says_what_and_where(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_file(write(tmp_path, name, content))


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv cannot be read"):
        read_file(tmp_path / "gone.csv")


@pytest.mark.parametrize(
    ("train", "dev", "words"),
    [
        ("a,x\nb,x\n", "c,x\n", "one class \\('x'\\)"),
        ("a,x\nb,y\n", "c,z\n", "labels that the train data lacks: z"),
    ],
)
def test_data_that_teaches_nothing_is_refused(tmp_path: Path, train: str, dev: str, words: str) -> None:
    paths = [write(tmp_path, name, "text,label\n" + rows) for name, rows in (("t.csv", train), ("d.csv", dev))]
    with pytest.raises(DataError, match=words):
        read_data(*paths)


def test_scores_agree_with_a_count_by_hand() -> None:
    assert accuracy(["a", "b", "b"], ["a", "b", "a"]) == pytest.approx(2 / 3)
    assert macro_f1(["a", "b", "b"], ["a", "b", "a"]) == pytest.approx((2 / 3 + 2 / 3) / 2)
    from hplm.wire import LabelledSpan

    gold = [[Entity("X", 0, 3), Entity("Y", 4, 6)], []]
    found = [[LabelledSpan("X", 0.9, 0, 3), LabelledSpan("Y", 0.9, 4, 7)], []]
    assert entity_f1(gold, found) == pytest.approx(0.5)


def test_odd_line_separators_inside_a_field_stay_inside(tmp_path: Path) -> None:
    (one,) = read_file(write(tmp_path, "a.csv", "label,text\npos,good film\u2028bad\x0cfilm\n"))
    assert one.text == "good film\u2028bad\x0cfilm"
