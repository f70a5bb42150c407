"""Labelled data: what is read, what is refused and why."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hplm_builder.data import labelled_files
from hplm_builder.data.labelled import Entity, LabelledFile, LabelledText
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.labelled_files import read_data, read_file, read_folder
from hplm_builder.data.rows import LONGEST_RECORD

from hplm.errors import DataError
from tests.open_files import open_files


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(*labels: str | float) -> list[LabelledText]:
    return [LabelledText(f"text {i}", str(label)) for i, label in enumerate(labels)]


def test_the_three_formats_read_alike(tmp_path: Path) -> None:
    jsonl = read_file(
        write(tmp_path, "a.jsonl", '{"text": "one, two", "label": "x"}\n\n{"text": "three", "label": 7}\n')
    )
    csv = read_file(write(tmp_path, "A.CSV", 'label,text\nx,"one, two"\n7,three\n'))
    tsv = read_file(write(tmp_path, "a.tsv", "sentence\tlabel\none, two\tx\nthree\t7\n"))
    assert jsonl == csv == tsv


def test_pairs_read_alike_under_both_names_of_their_columns(tmp_path: Path) -> None:
    jsonl = read_file(write(tmp_path, "a.jsonl", '{"text": "one", "text_pair": "two", "label": 3.5}\n'))
    tsv = read_file(write(tmp_path, "a.tsv", "sentence1\tsentence2\tscore\none\ttwo\t3.5\n"))
    assert jsonl == tsv == [LabelledText("one", "3.5", (), "two")]
    assert jsonl[0].asked == ("one", "two")


def test_conll_tags_become_entities_over_characters(tmp_path: Path) -> None:
    text = "Anna NN O B-PER\nLee NN O I-PER\nof NN O O\nRome NN O I-LOC\n\nso NN O O\n"
    first, second = read_file(write(tmp_path, "a.conll", text))
    assert first.text == "Anna Lee of Rome"
    assert first.entities == (Entity("PER", 0, 8), Entity("LOC", 12, 16))
    assert second.entities == ()


def test_conll_words_may_hold_spaces_between_tabs_and_others_than_asciis_anywhere(tmp_path: Path) -> None:
    text = "New York\tB-LOC\nhas  \tNN\tO\r\n100\u00a0000 B-NUM\nBad \u3000 O\n\u00a0\nso\tO \n"
    first, second = read_file(write(tmp_path, "a.conll", text))
    assert first.text == "New York has 100\u00a0000 Bad"
    assert first.entities == (Entity("LOC", 0, 8), Entity("NUM", 13, 20))
    assert second.text == "so"


BROKEN: list[tuple[str, str | bytes, str]] = [
    ("a.txt", "x", "ending must be one of"),
    ("a.jsonl", "", "no example"),
    ("a.jsonl", '{"text": "a", "label": "x"}\n{"text"', "line 2 is not JSON"),
    ("a.jsonl", "[" * 100_000, "line 1 is not JSON"),
    ("a.jsonl", '["a"]', "line 1: expected an object"),
    ("a.jsonl", '{"label": "x"}', "no column `text`"),
    ("a.jsonl", '{"text": " ", "label": "x"}', "the text is empty"),
    ("a.jsonl", '{"text": 7, "label": "x"}', "the text is empty or no text"),
    (
        "a.jsonl",
        '{"text": " \u200b\ufeff\ufe0f", "label": "x"}',
        "line 1: the text holds nothing but white space and control",
    ),
    ("a.jsonl", '{"text": "a", "text_pair": "\u200b", "label": "x"}', "line 1: the second text holds nothing but"),
    ("a.jsonl", r'{"text": "\ud800", "label": "x"}', "line 1: the text has a lone surrogate"),
    ("a.jsonl", r'{"text": "a\u0000", "label": "x"}', "line 1: the text holds a NUL"),
    ("a.jsonl", '{"text": "a"}', "no `label` or `score`; there are 'text'"),
    ("a.jsonl", '{"text": "a", "label": null}', "no `label`, it is null"),
    ("a.csv", "text,Label\na,x\n", "no `label` or `score`; there are 'text', 'Label'"),
    ("a.csv", "text;label\na, b;x\n", "line 1: columns are divided by commas, in .tsv by tabs"),
    ("a.tsv", "text;label\na, b;x\n", "line 1: columns are divided by commas, in .tsv by tabs"),
    ("a.jsonl", '{"text": "a", "label": ["x"]}', "the label is empty or no text"),
    ("a.jsonl", '{"text": "a", "label": "' + "x" * 201 + '"}', "the label has 201 characters"),
    ("a.jsonl", r'{"text": "a", "label": "x\ny"}', "has a line break or another control character"),
    ("a.jsonl", r'{"text": "a", "label": "\u001b[31mx"}', "has a line break or another control character"),
    ("a.jsonl", r'{"text": "a", "label": "x\u202ey"}', "has a line break or another control character"),
    ("a.conll", "cat B-\x1b[2J\n", "has a line break or another control character"),
    ("a.jsonl", '{"text": "a", "text_pair": "", "label": "x"}', "the second text is empty"),
    ("a.jsonl", '{"text": "a", "entities": [{"label": "x", "start": 0, "end": 9}]}', "outside the text"),
    (
        "a.jsonl",
        '{"text": "a", "entities": [{"label": "x", "start": 0, "end": Infinity}]}',
        "line 1 is not JSON: Infinity is no number",
    ),
    ("a.jsonl", '{"text": "a", "score": 1}\n{"text": "a", "score": NaN}', "line 2 is not JSON: NaN is no number"),
    ("a.jsonl", '{"text": "a", "score": 1e999}', "line 1 is not JSON: 1e999 is no number"),
    ("a.jsonl", '{"text": "a", "entities": [1]}', "must be a list of objects"),
    ("a.jsonl", '{"text": "ab", "entities": [{"label": "x", "start": "0", "end": 1}]}', "are numbers of characters"),
    ("a.jsonl", '{"text": "ab", "entities": [{"label": "x", "start": 0, "end": true}]}', "are numbers of characters"),
    (
        "a.jsonl",
        '{"text": "a b c", "entities": [{"label": "x", "start": 2, "end": 5}, {"label": "y", "start": 0, "end": 3}]}',
        "entities 0-3 and 2-5 overlap",
    ),
    ("a.csv", 'text,label\n"open,x\n', "not valid CSV"),
    ("a.csv", "text,label\na,b,c\n", "columns of the header"),
    ("a.csv", "text,label\na\n", "columns of the header"),
    ("a.csv", "sentence1,label\na,b\n", "`sentence1` without `sentence2`"),
    ("a.csv", b"text,label\n\xff\xfe,x\n", "line 2 is not UTF-8 at byte 0"),
    ("a.csv", "text,label\na,x\n".encode("utf-16"), "line 1 holds a NUL byte"),
    ("a.csv", b"text,label\na,x\nb\0,x\n", "line 3 holds a NUL byte"),
    ("a.conll", "Anna\n", "expected a token and an IOB tag"),
    ("a.conll", "Anna NN PER\n", "expected a token and an IOB tag"),
    ("a.conll", "Anna NN B-\n", "expected a token and an IOB tag"),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[f"{words[:30]}" for *_, words in BROKEN])
def test_a_broken_file_says_what_and_where(tmp_path: Path, name: str, content: str | bytes, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_file(write(tmp_path, name, content))


@pytest.mark.parametrize(
    ("name", "head", "repeated"),
    [
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": "', b"x" * 1000),
        ("a.csv", b"text,label\na,b\n", b"x" * 1000),
        # Every line is short, but the quotes never let the record end.
        ("a.csv", b'text,label\na,b\n"', b"x\n" * 500),
        ("a.csv", b'text,label\na,b\n"', b'","\n' * 250),
        ("a.conll", b"", b"word O\n" * 150),
    ],
    ids=["json-line", "csv-line", "quoted-lines", "quoted-fields", "conll-sentence"],
)
def test_an_example_without_an_end_is_refused_before_it_is_in_memory(
    tmp_path: Path, name: str, head: bytes, repeated: bytes
) -> None:
    path = write(tmp_path, name, head + repeated * 30_000)
    assert path.stat().st_size > 20 * LONGEST_RECORD
    tracemalloc.start()
    with pytest.raises(DataError, match="without an end"):
        read_file(path)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The words of one sentence are many small strings; all of the file would be hundreds of MB of them.
    assert most_bytes < 30 * LONGEST_RECORD


def test_who_holds_the_error_of_a_bad_row_does_not_hold_the_file_open(tmp_path: Path) -> None:
    path = write(tmp_path, "train.csv", "words,label\na,x\n")
    with pytest.raises(DataError) as raised:
        read_file(path)
    assert raised.traceback
    assert path not in open_files()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv cannot be read"):
        read_file(tmp_path / "gone.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="is not a file"):
        read_file(tmp_path / "folder.csv")


def test_an_upload_is_read_and_refused_under_its_own_name(tmp_path: Path) -> None:
    path = write(tmp_path, "0123abcd", "text,label\na,x\nb,y\n")
    assert len(read_file(LabelledFile(path, "mine.csv"))) == 2
    with pytest.raises(DataError) as caught:
        read_file(LabelledFile(path, "mine.jsonl"))
    assert str(caught.value).startswith("mine.jsonl, line 1 is not JSON")
    assert str(tmp_path) not in str(caught.value)


@pytest.mark.parametrize(
    ("train", "dev", "words"),
    [
        ("a,x\nb,x\n", "c,x\n", "one class \\('x'\\)"),
        ("a,x\n", "c,x\n", "holds 1 example: at least two"),
        ("a,x\nb,y\n", "c,z\n", "labels that the train data lacks: z"),
    ],
)
def test_data_that_teaches_nothing_is_refused(tmp_path: Path, train: str, dev: str, words: str) -> None:
    paths = [write(tmp_path, name, "text,label\n" + rows) for name, rows in (("t.csv", train), ("d.csv", dev))]
    with pytest.raises(DataError, match=words):
        read_data(*paths)


def test_a_type_of_entity_that_nothing_teaches_is_refused() -> None:
    known, other = (LabelledText("a b", None, (Entity(kind, 0, 1),)) for kind in ("T", "U"))
    for dev, test, name in (([other], [], "dev"), ([known], [known, other], "test")):
        with pytest.raises(DataError, match=f"the {name} data has types of entities that the train data lacks: U"):
            check_data([known] * 4, dev, test)


def test_a_column_of_free_text_is_no_label() -> None:
    with pytest.raises(DataError, match="1200 different labels"):
        check_data(texts(*(f"label {i}" for i in range(1200))), texts("label 1"), [])


def test_pairs_and_single_texts_do_not_mix_nor_do_labels_and_entities() -> None:
    pairs = [LabelledText("a", label, (), "b") for label in ("x", "y")]
    tagged = LabelledText("a b", None, (Entity("T", 0, 1),))
    for train, dev, words in (
        ([*pairs, *texts("x")], pairs, "1 of 3 train examples are not pairs; the first of those begins"),
        (pairs, texts("x"), "1 of 1 dev examples are not pairs"),
        ([*texts("x", "y"), tagged], texts("x"), "1 of 3 train examples have no label"),
        (texts("x", "y"), [tagged], "1 of 1 dev examples have no label"),
        ([LabelledText("a", None, (Entity("T", 0, 1),), "b")] * 2, [], "a tagging of pairs"),
    ):
        with pytest.raises(DataError, match=words):
            check_data(train, dev, [])
    assert check_data(pairs * 10, pairs, []).texts == 2
    assert check_data(texts("x", "y"), texts("x"), []).texts == 1


def test_numbers_are_a_regression_when_one_is_no_integer_or_when_asked() -> None:
    assert check_data(texts(0, 1, 2), texts(0, 1), []).task == "classification"
    assert check_data(texts("0.0", "1.0"), texts("0.0"), []).task == "classification"
    assert check_data(texts(0, 1, 2.5), texts(0, 1), []).task == "regression"
    assert check_data(texts(0, 1, 2), texts(0, 1), [], task="regression").labels == ("score",)
    assert check_data(texts("0.5", "1.5"), texts("0.5"), [], task="classification").labels == ("0.5", "1.5")
    assert check_data(texts("0.5", "nan"), texts("0.5"), []).task == "classification"


def test_a_few_labels_that_are_no_numbers_make_no_classes_of_all_others(tmp_path: Path) -> None:
    rows = [f"text {i},{'n/a' if i == 5 else i % 30 + 0.5}" for i in range(60)]
    bad = write(tmp_path, "train.csv", "text,label\n" + "\n".join(rows))
    with pytest.raises(DataError, match=r"1 of 60 labels .* no numbers.*train.csv, line 7: 'n/a'.*--task"):
        read_data(bad)
    assert read_data(bad, task="classification").task == "classification"
    with pytest.raises(DataError, match=r"train.csv, line 7: label 'n/a' is not a number"):
        read_data(bad, task="regression")
    # Few different ones may well be names.
    assert check_data(texts(*"1234567890" * 5, "x", "y"), texts(1), []).task == "classification"


def test_a_score_is_a_number(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"text {i}", "score": "high" if i % 2 else 1}) + "\n" for i in range(6))
    bad = write(tmp_path, "train.jsonl", rows)
    with pytest.raises(DataError, match=r"3 of 6 labels .*train.jsonl, line 2: 'high'; .*line 4: 'high'"):
        read_data(bad)
    assert read_data(bad, task="classification").labels == ("1", "high")


def test_the_task_says_whether_labels_or_entities_are_read_where_there_are_both(tmp_path: Path) -> None:
    def file(name: str, *entities: object) -> Path:
        rows = [{"text": f"text {i}", "label": "ab"[i % 2], "entities": entities[i % len(entities)]} for i in range(20)]
        return write(tmp_path, name, "".join(json.dumps(row) + "\n" for row in rows))

    name = {"label": "T", "start": 0, "end": 4}
    empty, both = file("empty.jsonl", []), file("both.jsonl", [name], [name], [])
    assert (read_data(empty).task, read_data(both).task) == ("classification", "tagging")
    assert read_data(both, task="classification").labels == ("a", "b")
    assert read_data(both, task="tagging") == read_data(both)
    assert {one.label for one in read_data(both).train} == {None}
    assert {one.entities for one in read_data(both, task="classification").train} == {()}
    with pytest.raises(DataError, match="the train data holds no entity"):
        read_data(empty, task="tagging")
    # What the task does not ask for may be anything.
    assert read_data(file("odd.jsonl", "none", 7), task="classification").task == "classification"
    assert read_data(empty, empty, both).task == "classification"


def test_labels_that_differ_in_nothing_that_is_seen_are_one(tmp_path: Path) -> None:
    def labels(*labels: object) -> tuple[str, ...]:
        rows = [{"text": f"text {i}", "label": label} for i, label in enumerate([*labels, "other"] * 20)]
        return read_data(write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows))).labels

    assert labels("a", "a ", "\u00a0a") == ("a", "other")
    assert labels("caf\u00e9", "cafe\u0301") == ("caf\u00e9", "other")
    assert labels(1, 1.0, "1", 2) == ("1", "2", "other")
    assert labels(True, "true", False) == ("false", "other", "true")
    assert labels("True", "1.0") == ("1.0", "True", "other")
    kinds = [LabelledText("a b", None, (Entity(kind, 0, 1),)) for kind in ("T", "T ", " T")]
    assert check_data(kinds, kinds, []).labels == ("O", "B-T", "I-T")


def test_labels_of_an_earlier_version_are_first_looked_for_as_they_are() -> None:
    def train(*labels: str) -> list[str | None]:
        before = [LabelledText(f"text {i}", label) for i, label in enumerate(labels)]
        return [one.label for one in check_data(before, before, [], expected_labels=known).train]

    known = ("a", "a ", "e\u0301", "True", "1.0")
    assert train("a", "a ", "e\u0301", "True", "1.0") == ["a", "a ", "e\u0301", "True", "1.0"]
    assert train(" a", "a ", "\u00e9", "True", "1.0") == ["a", "a ", "e\u0301", "True", "1.0"]


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.jsonl", f'{{"text": "a", "score": 1e{"9" * 900_000}}}'),
        ("a.csv", f"{'x' * 400_000},{'x' * 400_000}\n"),
        ("a.conll", f"{'x' * 900_000}\n"),
        ("a.jsonl", f'{{"text": "a", "{"x" * 900_000}": 1}}'),
        ("a.jsonl", f'{{"text": "a", "label": "\\u0007{"x" * 900_000}"}}'),
    ],
    ids=["number", "columns", "line", "key", "label"],
)
def test_what_a_refusal_quotes_is_short(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(DataError) as refused:
        read_file(write(tmp_path, name, content))
    assert len(str(refused.value)) < 500


def test_a_headers_names_are_without_blanks_and_stand_there_once(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "a.csv", "text , label,,\nhello,x,,\n")) == [LabelledText("hello", "x")]
    with pytest.raises(DataError, match=r"a\.csv, line 1: the header has the column 'label' more than once"):
        read_file(write(tmp_path, "a.csv", "text,label,label\nhello,x,y\n"))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (",".join(f"c{number}" for number in range(100_000)), "line 2: no column `text`.* there are 'c0', 'c1', "),
        (",".join("c" * 100_000), "line 1: the header has the column 'c' more than once"),
    ],
    ids=["distinct", "alike"],
)
def test_a_header_of_100_000_columns_is_refused_in_few_words_and_no_more_is_read_than_they_tell_of(
    tmp_path: Path, header: str, words: str
) -> None:
    row = f"{',' * 99_999}\n"
    path = write(tmp_path, "a.csv", f"{header}\n{row * 20}")
    # One more row would be told as too much.
    most_bytes = len(header) + 1 + len(row)
    with pytest.raises(DataError, match=rf"a\.csv, {words}") as found:
        read_file(LabelledFile(path, "a.csv", most_bytes))
    assert len(str(found.value)) < 500


def test_a_regression_whose_differences_float32_would_lose_is_refused_with_what_helps() -> None:
    steps = [0.5, 7.5, 3.5, 12.5]
    assert check_data(texts(*(1e5 + step for step in steps)), texts(1, 2), [], task="regression")
    assert check_data(texts(*(step * 1e-20 for step in steps)), texts(1, 2), [], task="regression")
    with pytest.raises(DataError, match=r"as large as 1\.7e\+09 .* is only 4\.5.*subtract an offset"):
        check_data(texts(*(1.7e9 + step for step in steps)), texts(1, 2), [], task="regression")
    with pytest.raises(DataError, match=r"too small for float32: multiply"):
        check_data(texts(*(step * 1e-38 for step in steps)), texts(1, 2), [], task="regression")


def test_a_regression_whose_one_other_value_went_to_dev_has_nothing_to_learn() -> None:
    rows = [LabelledText(f"text {number}", "1.0") for number in range(29)] + [LabelledText("other", "2.5")]
    said = set()
    for seed in range(30):
        try:
            check_data(rows, [], [], task="regression", seed=seed)
        except DataError as error:
            said.add(str(error).partition(":")[0])
    assert said == {"the train data has one value (1.0)", "the dev data holds one value only"}


@pytest.mark.parametrize(
    ("train", "dev", "words"),
    [
        (("1.5", "high"), ("1", "2"), "train example 2: label 'high' is not a number"),
        (("1.5", "2"), ("1", "inf"), "dev example 2: label 'inf' is not a number"),
        (("1.5", "1e39"), ("1", "2"), "train example 2: label '1e39' is not a number, or none that float32 holds"),
        (("1.5", "1.5"), ("1", "2"), "one value"),
        (("1.5", "2"), ("1", "1"), "the dev data holds one value"),
    ],
)
def test_a_regression_that_cannot_be_is_refused(train: tuple[str, ...], dev: tuple[str, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_data(texts(*train), texts(*dev), [], task="regression")


def test_a_task_that_the_data_is_not_of_is_refused() -> None:
    tagged = [LabelledText("a b", None, (Entity("T", 0, 1),))] * 20
    with pytest.raises(DataError, match="classification is expected, but the data has entities"):
        check_data(tagged, tagged, [], task="classification")
    many = [LabelledText("a b", None, (Entity(f"T{i}", 0, 1),)) for i in range(101)]
    with pytest.raises(DataError, match="101 types of entities, at most 100"):
        check_data(many, many[:1], [])
    with pytest.raises(DataError, match="tagging is expected, but the data has labels"):
        check_data(texts("x", "y"), texts("x"), [], task="tagging")


def test_labels_of_an_update_are_those_of_the_first_version_in_its_order() -> None:
    data = check_data(texts("a", "b", "c"), texts("a"), [], expected_labels=("c", "a", "b"))
    assert data.labels == ("c", "a", "b")
    with pytest.raises(DataError, match=r"not those of the first version \(new: c; missing: d\)"):
        check_data(texts("a", "b", "c"), texts("a"), [], expected_labels=("a", "b", "d"))


def test_without_dev_data_a_tenth_of_every_class_is_split_off_the_same_for_a_seed() -> None:
    train = texts(*(["a"] * 200 + ["b"] * 50 + ["c"]))
    data = check_data(train, [], [], seed=1)
    assert Counter(example.label for example in data.dev) == {"a": 20, "b": 5}
    assert sorted(example.text for example in [*data.train, *data.dev]) == sorted(example.text for example in train)
    assert check_data(train, [], [], seed=1).dev == data.dev
    assert check_data(train, [], [], seed=2).dev != data.dev


def test_dev_data_split_off_a_tagging_has_some_of_the_few_texts_with_entities() -> None:
    plain = [LabelledText(f"text {i}") for i in range(60)]
    tagged = [LabelledText(f"Anna {i}", None, (Entity("PER", 0, 4),)) for i in range(5)]
    for seed in range(3):
        dev = check_data([*plain, *tagged], [], [], seed=seed).dev
        assert Counter(len(example.entities) for example in dev) == {0: 6, 1: 1}


def test_dev_data_of_a_tagging_without_an_entity_is_refused_for_to_find_nothing_would_be_best() -> None:
    plain = [LabelledText(f"text {i}") for i in range(60)]
    tagged = [LabelledText(f"Anna {i}", None, (Entity("PER", 0, 4),)) for i in range(5)]
    for train, dev in ((tagged, plain), ([*plain, tagged[0]], [])):
        with pytest.raises(DataError, match="the dev data holds no entity"):
            check_data(train, dev, [])


def test_dev_data_split_off_a_regression_has_values_from_all_over() -> None:
    data = check_data(texts(*(i / 10 for i in range(2000))), [], [])
    counts = Counter(example.value // 20 for example in data.dev)
    assert len(data.dev) == 200
    assert min(counts[part] for part in range(10)) >= 10


@pytest.mark.parametrize("kind", ["classes", "values", "entities"])
def test_texts_that_are_added_leave_those_of_before_on_their_sides(kind: str) -> None:
    def example(number: int) -> LabelledText:
        if kind == "entities":
            return LabelledText(f"Anna {number}", None, (Entity("PER", 0, 4),) * (number % 3 > 0))
        return LabelledText(f"text {number}", str(number / 7) if kind == "values" else "abc"[number % 3])

    before, after = ([example(number) for number in range(count)] for count in (1000, 1500))
    old, new = (check_data(list(reversed(some)), [], [], seed=3) for some in (before, after))
    trained_on = {one.text for one in old.train}
    assert len(new.dev) == pytest.approx(150, abs=3)
    # Where chance decided anew, it would be 90.
    assert sum(one.text in trained_on for one in new.dev) < 20


def test_too_few_examples_to_split_ask_for_dev_data() -> None:
    with pytest.raises(DataError, match="give dev data"):
        check_data(texts("a", "b"), [], [])


@pytest.mark.parametrize(("labels", "is_said"), [(("1", "2"), True), (("a", "b"), False), (("1", "b"), False)])
def test_too_few_examples_are_told_of_a_regression_only_where_labels_are_numbers(
    labels: tuple[str, ...], is_said: bool
) -> None:
    with pytest.raises(DataError, match="give dev data") as refusal:
        check_data(texts(*labels), [], [])
    assert ("--task regression" in str(refusal.value)) is is_said


def test_odd_line_separators_inside_a_field_stay_inside(tmp_path: Path) -> None:
    (one,) = read_file(write(tmp_path, "a.csv", "label,text\npos,good film\u2028bad\x0cfilm\n"))
    assert one.text == "good film\u2028bad\x0cfilm"


def test_a_byte_order_mark_and_windows_line_ends_are_no_part_of_the_data(tmp_path: Path) -> None:
    content = b'\xef\xbb\xbftext,label\r\n"two\r\nlines",x\r\n'
    (one,) = read_file(write(tmp_path, "a.csv", content))
    assert one == LabelledText("two\r\nlines", "x")


def test_a_folder_is_read_by_the_names_of_its_files(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"text {i}", "label": "xy"[i % 2]}) + "\n" for i in range(40))
    write(tmp_path, "train.jsonl", rows)
    write(tmp_path, "test.tsv", "text\tlabel\na\tx\n")
    data = read_folder(tmp_path)
    assert (len(data.train), len(data.dev), len(data.test)) == (36, 4, 1)
    with pytest.raises(DataError, match=r"train\.jsonl cannot be read"):
        read_folder(tmp_path / "nothing")


def test_a_folder_with_two_files_of_one_part_is_refused_and_notes_beside_it_are_not_read(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"text {i}", "label": "xy"[i % 2]}) + "\n" for i in range(40))
    write(tmp_path, "train.jsonl", rows)
    for name in ("train.README.md", "train.arff", "train.jsonl.bak"):
        write(tmp_path, name, "of another kind")
    assert len(read_folder(tmp_path).train) == 36
    write(tmp_path, "train.csv", "text,label\nolder,x\nones,y\n")
    with pytest.raises(DataError, match=r"has both train\.csv and train\.jsonl: leave one"):
        read_folder(tmp_path)
    (tmp_path / "train.csv").unlink()
    write(tmp_path, "dev.txt", "of another kind")
    with pytest.raises(DataError, match=r"dev\.txt: the ending must be one of"):
        read_folder(tmp_path)


def test_a_column_of_half_a_surrogate_pair_is_refused_in_words_that_can_be_written(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"\\ud800": "x"}\n')
    with pytest.raises(DataError, match="no column `text`") as found:
        read_data(tmp_path / "train.jsonl")
    assert str(found.value).encode()


def test_more_examples_than_are_taken_are_refused_before_the_rest_is_read(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(labelled_files, "MOST_EXAMPLES", 3)
    (tmp_path / "train.csv").write_text("text,label\n" + "a,b\n" * 4 + 'broken"line\n')
    with pytest.raises(DataError, match="holds more than 3 examples"):
        read_data(tmp_path / "train.csv")


def test_a_text_of_one_emoji_newer_than_pythons_tables_is_a_text(tmp_path: Path) -> None:
    newest = chr(0x1FAFF)
    (read,) = read_file(write(tmp_path, "a.jsonl", json.dumps({"text": newest, "label": "x"})))
    assert read.text == newest
