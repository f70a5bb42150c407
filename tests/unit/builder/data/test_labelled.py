"""Reading labelled data, and refusing broken data with a reason."""

from __future__ import annotations

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest
from hplm_builder.data import labelled_files
from hplm_builder.data.labelled import LabelledFile
from hplm_builder.data.labelled_checks import check_data
from hplm_builder.data.labelled_files import read_data, read_file, read_folder

from hplm.core.columns import Columns, check_header
from hplm.core.text_lines import MOST_LINE_BYTES
from hplm.errors import ConfigError, DataError
from hplm.tasks.examples import Entity, LabelledText
from tests.open_files import open_files


def write(folder: Path, name: str, content: str | bytes) -> Path:
    path = folder / name
    path.write_bytes(content if isinstance(content, bytes) else content.encode())
    return path


def texts(*labels: str | float) -> list[LabelledText]:
    return [LabelledText(f"text {i}", str(label)) for i, label in enumerate(labels)]


def test_all_formats_give_the_same_examples(tmp_path: Path) -> None:
    jsonl = read_file(
        write(tmp_path, "a.jsonl", '{"text": "one, two", "label": "x"}\n\n{"text": "three", "label": 7}\n')
    )
    csv = read_file(write(tmp_path, "A.CSV", 'label,text\nx,"one, two"\n7,three\n'))
    tsv = read_file(write(tmp_path, "a.tsv", "sentence\tlabel\none, two\tx\nthree\t7\n"))
    assert jsonl == csv == tsv


def test_pairs_are_read_under_both_names_of_their_columns(tmp_path: Path) -> None:
    jsonl = read_file(write(tmp_path, "a.jsonl", '{"text": "one", "text_pair": "two", "label": 3.5}\n'))
    tsv = read_file(write(tmp_path, "a.tsv", "sentence1\tsentence2\tscore\none\ttwo\t3.5\n"))
    assert jsonl == tsv == [LabelledText("one", "3.5", (), "two")]
    assert jsonl[0].text_or_pair == ("one", "two")


def test_conll_tags_become_entities_over_characters(tmp_path: Path) -> None:
    text = "Anna NN O B-PER\nLee NN O I-PER\nof NN O O\nRome NN O I-LOC\n\nso NN O O\n"
    first, second = read_file(write(tmp_path, "a.conll", text))
    assert first.text == "Anna Lee of Rome"
    assert first.entities == (Entity("PER", 0, 8), Entity("LOC", 12, 16))
    assert second.entities == ()


def test_conll_words_may_hold_spaces_between_tabs_and_non_ascii_spaces_anywhere(tmp_path: Path) -> None:
    text = "New York\tNP\tB-LOC\nhas  \tNN\tO\r\n\u00a0\nso\t\tO \n"
    first, second = read_file(write(tmp_path, "a.conll", text))
    assert (first.text, first.entities) == ("New York has", (Entity("LOC", 0, 8),))
    assert second.text == "so"
    text = "100\u00a0000 B-NUM\nBad \u3000 O\nNew York\tB-LOC\n"
    (only,) = read_file(write(tmp_path, "b.conll", text))
    assert only.text == "100\u00a0000 Bad New York"
    assert only.entities == (Entity("NUM", 0, 7), Entity("LOC", 12, 20))


def test_bioes_and_bilou_are_read_as_the_same_entities_as_iob(tmp_path: Path) -> None:
    words = "Anna Lee met Bo and Ed Al Roy there"
    tags = {
        "iob": "B-PER I-PER O B-PER O B-PER B-PER I-PER O",
        "bioes": "B-PER E-PER O S-PER O S-PER B-PER E-PER O",
        "bilou": "B-PER L-PER O U-PER O U-PER B-PER L-PER O",
    }
    read = []
    for name, row in tags.items():
        lines = "".join(f"{word} {tag}\n" for word, tag in zip(words.split(), row.split(), strict=True))
        read.append(read_file(write(tmp_path, f"{name}.conll", lines)))
    assert read[0] == read[1] == read[2]
    assert [(one.start, one.end) for one in read[0][0].entities] == [(0, 8), (13, 15), (20, 22), (23, 29)]
    # No word continues an entity after the entity's last word.
    (one,) = read_file(write(tmp_path, "a.conll", "Anna S-PER\nLee I-PER\nRoy E-PER\nBo I-PER\n"))
    assert [(each.start, each.end) for each in one.entities] == [(0, 4), (5, 12), (13, 15)]


def test_conll_columns_may_be_aligned_by_several_tabs_or_be_empty(tmp_path: Path) -> None:
    for text in ("Anna\t\tB-PER\nAlexandra\tB-PER\n", "Anna\t\tB-PER\nAlexandra\tNP\tB-PER\n"):
        (one,) = read_file(write(tmp_path, "a.conll", text))
        assert one.text == "Anna Alexandra"
        assert len(one.entities) == 2


ROWS = {
    "a.jsonl": '{"text": "one", "label": "x"}\n{"text": "zwölf", "label": "y"}\n',
    "a.csv": 'text,label\none,x\n"zwölf",y\n',
    "a.tsv": "text\tlabel\none\tx\nzwölf\ty\n",
    "a.conll": "one B-x\n\nzwölf B-y\n",
}


@pytest.mark.parametrize("name", ROWS)
@pytest.mark.parametrize("end", ["\n", "\r\n", "\r", "\r\r\n"], ids=["lf", "crlf", "cr", "crcrlf"])
@pytest.mark.parametrize("encoding", ["utf-8", "utf-8-sig", "utf-16", "utf-16-be"])
def test_encoding_and_line_ends_do_not_change_the_data(tmp_path: Path, name: str, end: str, encoding: str) -> None:
    plain = read_file(write(tmp_path, name, ROWS[name]))
    assert [one.text for one in plain] == ["one", "zwölf"]
    mark = b"\xfe\xff" if encoding == "utf-16-be" else b""
    assert read_file(write(tmp_path, name, mark + ROWS[name].replace("\n", end).encode(encoding))) == plain


def test_a_cell_of_two_lines_stays_whole_in_a_file_whose_rows_end_with_carriage_returns(tmp_path: Path) -> None:
    (one,) = read_file(write(tmp_path, "a.csv", 'text,label\r"two\nlines",x\r'))
    assert one == LabelledText("two\nlines", "x")


@pytest.mark.parametrize("indent", [None, 2])
@pytest.mark.parametrize("encoding", ["utf-8-sig", "utf-16"])
def test_a_json_list_is_read_as_json_lines_are(tmp_path: Path, indent: int | None, encoding: str) -> None:
    rows = [{"text": f"text {i} [1] \u00e4 \U0001f600", "label": "ab"[i % 2]} for i in range(30_000)]
    lines = read_file(write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    listed = json.dumps(rows, indent=indent, ensure_ascii=False)
    # More bytes than a line may have.
    assert len(listed) > MOST_LINE_BYTES
    read = read_file(write(tmp_path, "b.jsonl", f"\n {listed}\n".encode(encoding)))
    assert read == lines
    assert read[2].where.endswith(f"line {2 if indent is None else 11}, entry 3")
    with pytest.raises(DataError, match="more than the 5,000 bytes"):
        read_file(LabelledFile(tmp_path / "b.jsonl", "b.jsonl", 5000))


def test_an_error_in_a_long_json_list_names_its_place(tmp_path: Path) -> None:
    rows = ['{"text": "a", "label": "x"},\n'] * 100_000
    rows[50_000] = '{"text": "a" "label": "x"},\n'
    with pytest.raises(DataError, match=r"line 50002, entry 50001 is not JSON: Expecting ',' delimiter"):
        read_file(write(tmp_path, "a.jsonl", "[\n" + "".join(rows) + "]"))


@pytest.mark.parametrize("key", ["label", "labels", "entities", "Labels"])
def test_entities_are_read_as_annotation_tools_write_them(tmp_path: Path, key: str) -> None:
    rows = [{"id": 1, "text": "Anna left", key: [[0, 4, "PER"]]}, {"id": 2, "text": "so", key: []}]
    first, second = read_file(write(tmp_path, "a.jsonl", "".join(json.dumps(row) + "\n" for row in rows)))
    assert (first.label, first.entities) == (None, (Entity("PER", 0, 4),))
    assert (second.label, second.entities) == (None, ())


@pytest.mark.parametrize(
    "content",
    [
        "Text,LABEL\na,x\n",
        '"text";"label"\n"a";"x"\n',
        "id;Text ;Label;note, more\n1;a;x;\n",
        "text\tlabel\na\tx\n",
        '"text"\t"labels"\n"a"\tx\n',
        "sep=;\r\nText;Label\r\na;x\r\n",
        '\ufeff"sep=|"\r\ntext|label\r\na|x\r\n',
        "SEP=\t\ntext\tlabel\na\tx\n",
        "sep=,\n\u200bText\u00a0,\ufeffLabel\u00ad\na,x\n",
    ],
)
def test_a_csv_is_split_by_the_separator_that_gives_the_needed_columns_in_any_case(
    tmp_path: Path, content: str
) -> None:
    path = write(tmp_path, "a.csv", content)
    assert read_file(path) == [LabelledText("a", "x")]
    check_header(path, Columns(), is_labelled=True)


def test_errors_behind_a_separators_line_name_the_lines_of_the_file(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"a\.csv, line 2: no column .*; the header was read as divided by '\|'"):
        read_file(write(tmp_path, "a.csv", "sep=|\nbody|label\na|x\n"))
    with pytest.raises(DataError, match="line 4 has 1 columns, the header has 2"):
        read_file(write(tmp_path, "a.csv", "sep=;\ntext;label\na;x\nb\n"))


TICKETS = Columns(text="body", label="Category")


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("a.csv", "\ufeffSubject,Body,Category,label\r\nprinter,it burns,hardware,7\r\n"),
        ("a.csv", "Subject;Body;Category\nprinter;it burns;hardware\n"),
        ("a.tsv", "Body\tCategory\nit burns\thardware\n"),
        ("a.jsonl", '{"Body": "it burns", "Category": "hardware", "label": 7, "entities": [[0, 2, "x"]]}'),
    ],
)
def test_columns_may_have_any_name_that_is_given(tmp_path: Path, name: str, content: str) -> None:
    assert read_file(write(tmp_path, name, content), TICKETS) == [LabelledText("it burns", "hardware")]


def test_columns_of_pairs_may_have_any_name_and_unlabelled_texts_need_no_label_column(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "Question,Answer,Good\nwhy?,so,1\nhow?,so,0\n")
    columns = Columns("question", "answer", "good")
    assert read_file(path, columns)[0] == LabelledText("why?", "1", (), "so")
    more = write(tmp_path, "more.csv", "Question,Answer\nwhen?,now\n")
    assert read_file(more, columns, is_labelled=False) == [LabelledText("when?", pair="now")]
    data = read_data(path, path, unlabelled=more, columns=columns)
    assert data.unlabelled == [LabelledText("when?", pair="now")]


@pytest.mark.parametrize(
    ("columns", "words"),
    [
        (Columns(text="Body"), r"a\.csv, line 1: no column 'Body'; there are 'id', 'text', 'label': .*--text-column, "),
        (Columns(pair="other"), r"a\.csv, line 1: no column 'other'; there are 'id', 'text', 'label'"),
        (Columns(label="Category"), r"a\.csv, line 1: no column 'Category'; there are 'id', 'text', 'label'"),
        (Columns(text="id", pair="ID"), r"a\.csv, line 1: column 'id' is named for two things"),
        (Columns(text="label"), r"a\.csv, line 1: no `label` or `score`"),
    ],
)
def test_a_named_column_that_is_missing_is_refused_with_a_list_of_the_columns(
    tmp_path: Path, columns: Columns, words: str
) -> None:
    path = write(tmp_path, "a.csv", "id,text,label\n1,a,x\n")
    with pytest.raises(DataError, match=words):
        read_file(LabelledFile(path, "a.csv"), columns)
    with pytest.raises(DataError, match=words):
        check_header(path, columns, is_labelled=True)


def test_a_header_needs_a_label_only_if_the_file_is_labelled(tmp_path: Path) -> None:
    path = write(tmp_path, "a.csv", "text\nhello\n".encode("utf-16"))
    check_header(path, Columns(label="Category"), is_labelled=False)
    with pytest.raises(DataError, match=r"a\.csv, line 1: no column 'Category'"):
        check_header(path, Columns(label="Category"), is_labelled=True)


def test_column_names_for_a_format_without_columns_are_refused(tmp_path: Path) -> None:
    path = write(tmp_path, "a.conll", "Anna B-PER\nso O\n")
    with pytest.raises(DataError, match=r"columns of a \.conll have no names, but a name was given for text"):
        read_data(path, path, columns=Columns(text="Body"))
    for name in ("", " ", "a\nb", "x" * 201):
        with pytest.raises(ConfigError, match="1 to 200 printable characters"):
            Columns(label=name)


BROKEN: list[tuple[str, str | bytes, str]] = [
    ("a.txt", "x", "ending must be one of"),
    ("a.jsonl", "", "no example"),
    ("a.jsonl", '{"text": "a", "label": "x"}\n{"text"', "line 2 is not JSON"),
    ("a.jsonl", '{"a":' * 100_000, "line 1 is not JSON"),
    ("a.jsonl", "7\n", "line 1: expected an object"),
    (
        "a.jsonl",
        '{\n"text": "a",\n"label": "x"\n}\n',
        "line 1 is not JSON.* each object on one line, or all objects in one list",
    ),
    ("a.jsonl", '["a"]', "line 1, entry 1: expected an object, got '\"'"),
    ("a.jsonl", "[" * 100_000, "line 1, entry 1: expected an object, got '\\['"),
    ("a.jsonl", '[{"text": "a", "label": "x"}\n,\n{"text": }]', "line 3, entry 2 is not JSON"),
    ("a.jsonl", '[{"text": "a", "score": 1},\n {"text": "a", "score": NaN}]', "line 2, entry 2 is not JSON: NaN is no"),
    ("a.jsonl", '[{"text": "a", "label": "x"},]', "entry 2: expected an object, got '\\]'"),
    ("a.jsonl", '[{"text": "a", "label": "x"} {', "entry 1: expected a comma or \\] after an object, got '{'"),
    ("a.jsonl", '[{"text": "a", "label": "x"}', "entry 1: expected a comma or \\] .* got 'the end of the file'"),
    ("a.jsonl", '[{"text": "a", "label": "x"}]\n[]', "line 2, entry 1: more text after the end of the list"),
    ("a.jsonl", '{"label": "x"}', "no column `text`"),
    ("a.jsonl", '{"text": " ", "label": "x"}', "the text is empty"),
    ("a.jsonl", '{"text": 7, "label": "x"}', "the text is empty or not a string"),
    (
        "a.jsonl",
        '{"text": " \u200b\ufeff\ufe0f", "label": "x"}',
        "line 1: the text holds nothing but white space and control",
    ),
    ("a.jsonl", '{"text": "a", "text_pair": "\u200b", "label": "x"}', "line 1: the second text holds nothing but"),
    ("a.jsonl", r'{"text": "\ud800", "label": "x"}', "line 1: the text has a lone surrogate"),
    ("a.jsonl", r'{"text": "a\u0000", "label": "x"}', "line 1: the text holds a NUL"),
    ("a.jsonl", '{"text": "a"}', "no `label` or `score`; there are 'text'"),
    ("a.jsonl", '{"text": "a", "label": null}', "`label` is null"),
    ("a.csv", "Text,Category\na,x\n", "line 1: no `label` or `score`; there are 'Text', 'Category': .* --label-column"),
    ("a.csv", "Größe;Titel\n1;x\n", "line 1: no column `text`.* 'Größe', 'Titel'.* read as divided by semicolons"),
    ("a.csv", "text|label\na|x\n", "line 1: no column `text`.* there are 'text|label'"),
    ("a.csv", "TEXT,Text,label\na,b,x\n", "line 1: columns 'TEXT' and 'Text' differ in case alone"),
    ("a.csv", "text,label\na,x\rb,y\n", "line 2 is not valid CSV: line ends are mixed"),
    ("a.tsv", "text;label\na, b;x\n", "line 1: no column `text`.*'text;label'.* divided by tabs and has no quotes"),
    ("a.tsv", '"text"\t"label"\na\tx\n', "line 1: no column `text`.* divided by tabs and has no quotes: is it a .csv"),
    ("a.jsonl", '{"text": "a", "label": ["x"]}', "line 1: the label is a list of 1, but a text has one label"),
    ("a.jsonl", '{"text": "a", "labels": ["x", "y"]}', "line 1: the label is a list of 2, but a text has one label"),
    ("a.jsonl", '{"text": "a", "label": {"x": 1}}', "the label is empty or not a string"),
    ("a.jsonl", '{"text": "a", "label": [[0, 1]]}', "must be a list of objects .* or of lists .start, end, label."),
    ("a.jsonl", '{"text": "a", "label": [[0, 9, "x"]]}', "not within the text"),
    *(
        (
            "a.jsonl",
            json.dumps({"text": "a", "entities": [{"label": tag, "start": 0, "end": 1}]}),
            "is the tag of a word",
        )
        for tag in ("B-PER", "I-PER", "O")
    ),
    ("a.jsonl", '{"text": "a", "labels": [[0, 1, "B-PER"]]}', "label 'B-PER' is the tag of a word"),
    ("a.jsonl", '{"text": "a", "label": "' + "x" * 201 + '"}', "the label has 201 characters"),
    ("a.jsonl", r'{"text": "a", "label": "x\ny"}', "has a line break or another control character"),
    ("a.jsonl", r'{"text": "a", "label": "\u001b[31mx"}', "has a line break or another control character"),
    ("a.jsonl", r'{"text": "a", "label": "x\u202ey"}', "has a line break or another control character"),
    ("a.conll", "cat B-\x1b[2J\n", "has a line break or another control character"),
    ("a.jsonl", '{"text": "a", "text_pair": "", "label": "x"}', "the second text is empty"),
    ("a.jsonl", '{"text": "a", "entities": [{"label": "x", "start": 0, "end": 9}]}', "not within the text"),
    (
        "a.jsonl",
        '{"text": "a", "entities": [{"label": "x", "start": 0, "end": Infinity}]}',
        "line 1 is not JSON: Infinity is not a finite number",
    ),
    (
        "a.jsonl",
        '{"text": "a", "score": 1}\n{"text": "a", "score": NaN}',
        "line 2 is not JSON: NaN is not a finite number",
    ),
    ("a.jsonl", '{"text": "a", "score": 1e999}', "line 1 is not JSON: 1e999 is not a finite number"),
    ("a.jsonl", '{"text": "a", "entities": [1]}', "must be a list of objects"),
    (
        "a.jsonl",
        '{"text": "ab", "entities": [{"label": "x", "start": "0", "end": 1}]}',
        "must be whole numbers of characters",
    ),
    (
        "a.jsonl",
        '{"text": "ab", "entities": [{"label": "x", "start": 0, "end": true}]}',
        "must be whole numbers of characters",
    ),
    (
        "a.jsonl",
        '{"text": "a b c", "entities": [{"label": "x", "start": 2, "end": 5}, {"label": "y", "start": 0, "end": 3}]}',
        "entities 0-3 and 2-5 overlap",
    ),
    ("a.csv", 'text,label\n"open,x\n', "not valid CSV"),
    ("a.csv", "text,label\na,b,c\n", "line 2 has 3 columns, the header has 2"),
    ("a.csv", "text,label\na\n", "line 2 has 1 columns, the header has 2"),
    ("a.csv", "sentence1,label\na,b\n", "`sentence1` without `sentence2`"),
    ("a.csv", b"text,label\n\xff\xfe,x\n", "line 2 is not UTF-8 at byte 0"),
    ("a.csv", b"text,label\ra,x\r\xff\xfe,x\r", "line 3 is not UTF-8 at byte 0"),
    (
        "a.csv",
        "text,label\na,x\n".encode("utf-16-le"),
        "line 1 holds a NUL byte.* UTF-16 begins with a byte order mark",
    ),
    ("a.csv", "text,label\na,x\n".encode("utf-32"), "a.csv is UTF-32: save it as UTF-8"),
    ("a.csv", "text,label\na,x\n".encode("utf-16") + b"x", "a.csv is not UTF-16 at its end"),
    ("a.csv", "text,label\na,x\nab\udc80,x\n".encode("utf-16", "surrogatepass"), "line 3 is not UTF-16 at character 2"),
    ("a.csv", b"text,label\na,x\nb\0,x\n", "line 3 holds a NUL byte"),
    ("a.conll", "Anna\n", "expected a word and an IOB, BIOES or BILOU tag"),
    ("a.conll", "Anna NN PER\n", "expected a word and an IOB, BIOES or BILOU tag"),
    ("a.conll", "Anna NN B-\n", "expected a word and an IOB, BIOES or BILOU tag"),
    ("a.conll", "She PRP B-NP O\nlives VBZ B-VP\n", "line 2 has 3 columns, line 1 has 4, between blanks"),
    ("a.conll", "-DOCSTART- O\n\nin O\n\nNew York B-LOC\n", "line 5 has 3 columns, line 3 has 2, between blanks"),
    ("a.conll", "Rome\tNP\tB-LOC\nNew York O\n", "line 2 has 1 columns, line 1 has 3, between tabs"),
    ("a.conll", "Rome NP B-LOC\nNew York\tO\n", "line 2 has 2 columns, line 1 has 3, between blanks"),
    ("a.conll", "Rome\tNP\tB-LOC\nis\tV\t\n", "line 2 has 2 columns, line 1 has 3, between tabs"),
    ("a.conll", "Rome\t\tB-LOC\nis\tV\tO\nso\tO\n", "line 3 has 2 columns, line 1 has 3, between tabs"),
    ("a.conll", "Rome B-LOC\nis O\rso O\n", "line 2: line ends are mixed"),
    ("a.conll", "Rome B-LOC\ris O\nso O\r", "line 2: line ends are mixed"),
    ("a.conll", "Rome B-B-LOC\n", "label 'B-LOC' is the tag of a word"),
]


@pytest.mark.parametrize(("name", "content", "words"), BROKEN, ids=[f"{words[:30]}" for *_, words in BROKEN])
def test_a_broken_file_is_refused_with_the_fault_and_its_place(
    tmp_path: Path, name: str, content: str | bytes, words: str
) -> None:
    with pytest.raises(DataError, match=words):
        read_file(write(tmp_path, name, content))


@pytest.mark.parametrize(
    ("name", "head", "repeated"),
    [
        ("a.jsonl", b'{"text": "a", "label": "b"}\n{"text": "', b"x" * 1000),
        ("a.jsonl", b'[{"text": "a", "label": "b"}, {"text": "', b"x" * 1000),
        ("a.jsonl", b'[{"text": [', b"[], " * 250),
        ("a.csv", b"text,label\na,b\n", b"x" * 1000),
        # Every line is short, but the quotes never let the record end.
        ("a.csv", b'text,label\na,b\n"', b"x\n" * 500),
        ("a.csv", b'text,label\na,b\n"', b'","\n' * 250),
        ("a.conll", b"", b"word O\n" * 150),
    ],
    ids=["json-line", "json-list", "json-list-of-lists", "csv-line", "quoted-lines", "quoted-fields", "conll-sentence"],
)
def test_an_endless_example_is_refused_before_it_fills_the_memory(
    tmp_path: Path, name: str, head: bytes, repeated: bytes
) -> None:
    path = write(tmp_path, name, head + repeated * 30_000)
    assert path.stat().st_size > 20 * MOST_LINE_BYTES
    tracemalloc.start()
    with pytest.raises(DataError, match="without an end"):
        read_file(path)
    most_bytes = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    # The words of one sentence are many small strings. The words of the whole file would take hundreds of MB.
    assert most_bytes < 30 * MOST_LINE_BYTES


def test_the_error_of_a_bad_row_does_not_keep_the_file_open(tmp_path: Path) -> None:
    path = write(tmp_path, "train.csv", "words,label\na,x\n")
    with pytest.raises(DataError) as raised:
        read_file(path)
    assert raised.traceback
    assert path not in open_files()


def test_a_missing_file_is_named(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"gone\.csv cannot be read"):
        read_file(tmp_path / "gone.csv")
    (tmp_path / "folder.csv").mkdir()
    with pytest.raises(DataError, match="is not a file but a folder: it is empty"):
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
        ("a,x\nb,y\n", "c,z\n", "labels that the train data lacks: 'z'"),
    ],
)
def test_data_from_which_nothing_can_be_learned_is_refused(tmp_path: Path, train: str, dev: str, words: str) -> None:
    paths = [write(tmp_path, name, "text,label\n" + rows) for name, rows in (("t.csv", train), ("d.csv", dev))]
    with pytest.raises(DataError, match=words):
        read_data(*paths)


def test_an_entity_type_that_train_lacks_is_refused() -> None:
    known, other = (LabelledText("a b", None, (Entity(kind, 0, 1),)) for kind in ("T", "U"))
    for dev, test, name in (([other], [], "dev"), ([known], [known, other], "test")):
        with pytest.raises(DataError, match=f"the {name} data has types of entities that the train data lacks: 'U'"):
            check_data([known] * 4, dev, test)


def test_a_column_of_free_text_is_refused_as_labels() -> None:
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


def test_numbers_are_a_regression_if_one_is_no_integer_or_if_the_task_says_so() -> None:
    assert check_data(texts(0, 1, 2), texts(0, 1), []).task == "classification"
    assert check_data(texts("0.0", "1.0"), texts("0.0"), []).task == "classification"
    assert check_data(texts(0, 1, 2.5), texts(0, 1), []).task == "regression"
    assert check_data(texts(0, 1, 2), texts(0, 1), [], task="regression").labels == ("score",)
    assert check_data(texts("0.5", "1.5"), texts("0.5"), [], task="classification").labels == ("0.5", "1.5")


def test_a_few_labels_that_are_no_numbers_do_not_turn_numbers_into_classes(tmp_path: Path) -> None:
    rows = [f"text {i},{'n/a' if i == 5 else i % 30 + 0.5}" for i in range(60)]
    bad = write(tmp_path, "train.csv", "text,label\n" + "\n".join(rows))
    with pytest.raises(DataError, match=r"1 of 60 labels .* no numbers.*train.csv, line 7: 'n/a'.*--task"):
        read_data(bad)
    assert read_data(bad, task="classification").task == "classification"
    with pytest.raises(
        DataError, match=r"1 of 60 labels .* no numbers.*train.csv, line 7: 'n/a'\): correct them, or delete the rows$"
    ):
        read_data(bad, task="regression")
    # A few different numbers may well be class names.
    assert check_data(texts(*"1234567890" * 5, "x", "y"), texts(1), []).task == "classification"


def test_a_score_is_a_number(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"text {i}", "score": "high" if i % 2 else 1}) + "\n" for i in range(6))
    bad = write(tmp_path, "train.jsonl", rows)
    with pytest.raises(DataError, match=r"3 of 6 labels .*train.jsonl, line 2: 'high'; .*line 4: 'high'"):
        read_data(bad)
    assert read_data(bad, task="classification").labels == ("1", "high")


def test_the_task_decides_between_labels_and_entities_if_a_file_has_both(tmp_path: Path) -> None:
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
    # The field that the task does not use may hold anything.
    assert read_data(file("odd.jsonl", "none", 7), task="classification").task == "classification"
    assert read_data(empty, empty, both).task == "classification"


def test_labels_that_look_the_same_are_one_label(tmp_path: Path) -> None:
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


def test_labels_of_an_earlier_version_keep_its_spelling() -> None:
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
def test_errors_quote_only_the_beginning_of_long_values(tmp_path: Path, name: str, content: str) -> None:
    with pytest.raises(DataError) as refused:
        read_file(write(tmp_path, name, content))
    assert len(str(refused.value)) < 500


def test_header_names_are_stripped_and_must_be_different(tmp_path: Path) -> None:
    assert read_file(write(tmp_path, "a.csv", "text , label,,\nhello,x,,\n")) == [LabelledText("hello", "x")]
    with pytest.raises(DataError, match=r"a\.csv, line 1: the header has the column 'label' more than once"):
        read_file(write(tmp_path, "a.csv", "text,label,label\nhello,x,y\n"))


@pytest.mark.parametrize(
    ("header", "words"),
    [
        (",".join(f"c{number}" for number in range(100_000)), "line 1: no column `text`.* there are 'c0', 'c1', "),
        (",".join("c" * 100_000), "line 1: the header has the column 'c' more than once"),
    ],
    ids=["distinct", "alike"],
)
def test_a_header_of_100_000_columns_is_refused_with_a_short_error(tmp_path: Path, header: str, words: str) -> None:
    row = f"{',' * 99_999}\n"
    path = write(tmp_path, "a.csv", f"{header}\n{row * 20}")
    # Reading one more row would raise another error.
    most_bytes = len(header) + 1 + len(row)
    with pytest.raises(DataError, match=rf"a\.csv, {words}") as found:
        read_file(LabelledFile(path, "a.csv", most_bytes))
    assert len(str(found.value)) < 500


def test_a_regression_whose_differences_float32_would_lose_is_refused_with_advice() -> None:
    steps = [0.5, 7.5, 3.5, 12.5]
    assert check_data(texts(*(1e5 + step for step in steps)), texts(1, 2), [], task="regression")
    assert check_data(texts(*(step * 1e-20 for step in steps)), texts(1, 2), [], task="regression")
    with pytest.raises(DataError, match=r"as large as 1\.7e\+09 .* is only 4\.5.*subtract an offset"):
        check_data(texts(*(1.7e9 + step for step in steps)), texts(1, 2), [], task="regression")
    with pytest.raises(DataError, match=r"too small for float32: multiply"):
        check_data(texts(*(step * 1e-38 for step in steps)), texts(1, 2), [], task="regression")


def test_a_regression_whose_only_different_value_moved_to_dev_is_refused() -> None:
    rows = [LabelledText(f"text {number}", "1.0") for number in range(29)] + [LabelledText("other", "2.5")]
    said = set()
    for seed in range(30):
        try:
            check_data(rows, [], [], task="regression", seed=seed)
        except DataError as error:
            said.add(str(error).partition(":")[0])
    assert said == {"the train data has one value only (1.0)", "the dev data holds one value only"}


@pytest.mark.parametrize(
    ("train", "dev", "words"),
    [
        (("1.5", "high"), ("1", "2"), "1 of 4 labels are no numbers .*'text 1': 'high'"),
        (("1.5", "2"), ("1", "inf"), "1 of 4 labels are no numbers .*'text 1': 'inf'"),
        (("1.5", "1e39"), ("1", "2"), "train example 2: label '1e39' is not a number that float32 can hold"),
        (("1.5", "1.5"), ("1", "2"), "one value"),
        (("1.5", "2"), ("1", "1"), "the dev data holds one value"),
    ],
)
def test_an_impossible_regression_is_refused(train: tuple[str, ...], dev: tuple[str, ...], words: str) -> None:
    with pytest.raises(DataError, match=words):
        check_data(texts(*train), texts(*dev), [], task="regression")


def test_a_task_that_does_not_fit_the_data_is_refused() -> None:
    tagged = [LabelledText("a b", None, (Entity("T", 0, 1),))] * 20
    with pytest.raises(DataError, match="classification is expected, but the data has entities"):
        check_data(tagged, tagged, [], task="classification")
    many = [LabelledText("a b", None, (Entity(f"T{i}", 0, 1),)) for i in range(101)]
    with pytest.raises(DataError, match="101 types of entities, at most 100"):
        check_data(many, many[:1], [])
    with pytest.raises(DataError, match="tagging is expected, but the data has labels"):
        check_data(texts("x", "y"), texts("x"), [], task="tagging")


def test_an_update_must_have_the_labels_of_the_first_version_and_keeps_their_order() -> None:
    data = check_data(texts("a", "b", "c"), texts("a"), [], expected_labels=("c", "a", "b"))
    assert data.labels == ("c", "a", "b")
    with pytest.raises(DataError, match=r"not the labels of the first version \(new: 'c'; missing: 'd'\)"):
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


def test_dev_data_of_a_tagging_without_an_entity_is_refused() -> None:
    plain = [LabelledText(f"text {i}") for i in range(60)]
    tagged = [LabelledText(f"Anna {i}", None, (Entity("PER", 0, 4),)) for i in range(5)]
    for train, dev in ((tagged, plain), ([*plain, tagged[0]], [])):
        with pytest.raises(DataError, match="the dev data holds no entity"):
            check_data(train, dev, [])


def test_dev_data_split_off_a_regression_covers_the_range_of_values() -> None:
    data = check_data(texts(*(i / 10 for i in range(2000))), [], [])
    counts = Counter(example.value // 20 for example in data.dev)
    assert len(data.dev) == 200
    assert min(counts[part] for part in range(10)) >= 10


@pytest.mark.parametrize("kind", ["classes", "values", "entities"])
def test_added_texts_leave_earlier_texts_on_their_side_of_the_split(kind: str) -> None:
    def example(number: int) -> LabelledText:
        if kind == "entities":
            return LabelledText(f"Anna {number}", None, (Entity("PER", 0, 4),) * (number % 3 > 0))
        return LabelledText(f"text {number}", str(number / 7) if kind == "values" else "abc"[number % 3])

    before, after = ([example(number) for number in range(count)] for count in (1000, 1500))
    old, new = (check_data(list(reversed(some)), [], [], seed=3) for some in (before, after))
    trained_on = {one.text for one in old.train}
    assert len(new.dev) == pytest.approx(150, abs=3)
    # A new random split would move about 90.
    assert sum(one.text in trained_on for one in new.dev) < 20


def test_too_few_examples_to_split_give_an_error_that_asks_for_dev_data() -> None:
    with pytest.raises(DataError, match="give dev data"):
        check_data(texts("a", "b"), [], [])


@pytest.mark.parametrize(("labels", "is_said"), [(("1", "2"), True), (("a", "b"), False), (("1", "b"), False)])
def test_the_error_for_too_few_examples_suggests_a_regression_only_if_labels_are_numbers(
    labels: tuple[str, ...], is_said: bool
) -> None:
    with pytest.raises(DataError, match="give dev data") as refusal:
        check_data(texts(*labels), [], [])
    assert ("--task regression" in str(refusal.value)) is is_said


def test_dev_and_test_have_each_distinct_text_once_with_its_usual_label_and_say_what_was_left_out() -> None:
    train = texts("x", "y")
    first = [
        LabelledText(" A Cat", "y"),
        LabelledText("a cat", "x"),
        LabelledText("A  CAT", "x"),
        LabelledText("dog", "y"),
    ]
    data = check_data(train, first * 60, [*texts("x"), LabelledText("TEXT 0", "x")])
    assert [(one.text, one.label) for one in data.dev] == [("a cat", "x"), ("dog", "y")]
    assert data.counts == {"train": 2, "dev": 2, "test": 1}
    assert data.repeats == {
        "dev": "240 dev examples have 2 distinct texts: each text counts once, 238 repeats are left out; 1 of these texts "
        "have more than one label, of which the usual one is kept",
        "test": "2 test examples have 1 distinct texts: each text counts once, 1 repeat is left out",
    }


def test_copies_of_a_number_keep_the_median_and_copies_of_a_tagging_may_differ_in_white_space() -> None:
    values = [LabelledText("same", str(value)) for value in (9.5, 1.5, 2.5)]
    data = check_data(texts(0.5, 1.5), [*values, *texts(3.5)], [])
    assert [one.label for one in data.dev] == ["2.5", "3.5"]
    anna = [
        LabelledText("Anna ran", None, (Entity("PER", 0, 4),)),
        LabelledText(" anna ran", None, (Entity("PER", 1, 5),)),
    ]
    assert "label" not in check_data(anna, anna, []).repeats["dev"]


@pytest.mark.parametrize("seed", range(20))
def test_a_label_whose_only_text_is_a_copy_keeps_a_train_example(seed: int) -> None:
    train = [LabelledText(f"text {i}", "AC"[i % 2]) for i in range(100)]
    train += [LabelledText(f"Text {i}", f"B{i}") for i in range(0, 100, 7)]
    data = check_data(train, [], [], seed=seed)
    assert {example.label for example in data.train} == set(data.labels)


def test_copies_of_a_text_are_on_one_side_of_the_split() -> None:
    train = [*texts(*"ab" * 30), *(LabelledText(f"Text  {i}", "ab"[i % 2]) for i in range(60))]
    data = check_data(train, [], [])
    assert (len(data.train), len(data.dev)) == (108, 6)
    assert not {one.text.casefold() for one in data.dev} & {" ".join(one.text.casefold().split()) for one in data.train}
    assert data.repeats["dev"].startswith("12 dev examples have 6 distinct texts")
    with pytest.raises(DataError, match="60 train examples of 2 distinct texts are too few to split dev data off"):
        check_data(texts("a", "b") * 30, [], [])


def test_odd_line_separators_inside_a_field_stay_inside(tmp_path: Path) -> None:
    (one,) = read_file(write(tmp_path, "a.csv", "label,text\npos,good film\u2028bad\x0cfilm\n"))
    assert one.text == "good film\u2028bad\x0cfilm"


def test_a_byte_order_mark_and_windows_line_ends_do_not_change_the_data(tmp_path: Path) -> None:
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


def test_a_folder_with_two_files_for_a_part_is_refused_and_other_files_are_ignored(tmp_path: Path) -> None:
    rows = "".join(json.dumps({"text": f"text {i}", "label": "xy"[i % 2]}) + "\n" for i in range(40))
    write(tmp_path, "train.jsonl", rows)
    for name in ("train.README.md", "train.arff", "train.jsonl.bak"):
        write(tmp_path, name, "of another kind")
    assert len(read_folder(tmp_path).train) == 36
    write(tmp_path, "train.csv", "text,label\nolder,x\nones,y\n")
    with pytest.raises(DataError, match=r"has both train\.csv and train\.jsonl: keep only one"):
        read_folder(tmp_path)
    (tmp_path / "train.csv").unlink()
    write(tmp_path, "dev.txt", "of another kind")
    with pytest.raises(DataError, match=r"dev\.txt: the ending must be one of"):
        read_folder(tmp_path)


def test_a_column_name_with_a_lone_surrogate_is_refused_with_a_printable_error(tmp_path: Path) -> None:
    (tmp_path / "train.jsonl").write_text('{"\\ud800": "x"}\n')
    with pytest.raises(DataError, match="no column `text`") as found:
        read_data(tmp_path / "train.jsonl")
    assert str(found.value).encode()


def test_too_many_examples_are_refused_before_the_rest_is_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(labelled_files, "MOST_EXAMPLES", 3)
    (tmp_path / "train.csv").write_text("text,label\n" + "a,b\n" * 4 + 'broken"line\n')
    with pytest.raises(DataError, match="holds more than 3 examples"):
        read_data(tmp_path / "train.csv")


def test_a_text_of_one_emoji_newer_than_pythons_tables_is_a_text(tmp_path: Path) -> None:
    newest = chr(0x1FAFF)
    (read,) = read_file(write(tmp_path, "a.jsonl", json.dumps({"text": newest, "label": "x"})))
    assert read.text == newest
