"""Labels as people, spreadsheets and programs write them: numbers, missing values, and names that look the same."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path

import pytest
from hplm_builder.cli.build import app as builder
from hplm_builder.data.labelled import LabelledData
from hplm_builder.data.labelled_files import read_data
from typer.testing import CliRunner

from hplm.errors import DataError

# More different numbers than classes that are named by numbers.
MANY = 47


def table(folder: Path, labels: Sequence[str], name: str = "tickets.csv") -> Path:
    path = folder / name
    rows = "".join(f'"text {number}";"{label}"\r\n' for number, label in enumerate(labels))
    path.write_text(f"Text;Label\r\n{rows}", encoding="utf-8")
    return path


def read(folder: Path, labels: Sequence[str], task: str | None = None) -> LabelledData:
    return read_data(table(folder, labels), task=task)


def values(data: LabelledData) -> set[float]:
    return {example.value for example in [*data.train, *data.dev]}


@pytest.mark.parametrize(
    ("form", "value", "said"),
    [
        ("{},5", 0.5, "a decimal comma: '0,5' (tickets.csv, line 2) as 0.5"),
        ("-{},25", 0.25, "a decimal comma: '-0,25' (tickets.csv, line 2) as -0.25"),
        ("\u2212{},25", 0.25, "a decimal comma: '\u22120,25' (tickets.csv, line 2) as -0.25"),
        ("{} %", 0, "a decimal point and a percent sign, which is left out: '0 %' (tickets.csv, line 2) as 0"),
        ("{},5%", 0.5, "a decimal comma and a percent sign, which is left out: '0,5%' (tickets.csv, line 2) as 0.5"),
        ("1 {:03}", 1000, "a decimal point: '1 000' (tickets.csv, line 2) as 1000"),
        ("1\u00a0{:03}", 1000, "a decimal point: '1\\xa0000' (tickets.csv, line 2) as 1000"),
        ("1\u202f{:03},5", 1000.5, "a decimal comma: '1\\u202f000,5' (tickets.csv, line 2) as 1000.5"),
        ("1.{:03},5", 1000.5, "a decimal comma: '1.000,5' (tickets.csv, line 2) as 1000.5"),
        ("1,{:03}.5", 1000.5, "a decimal point: '1,000.5' (tickets.csv, line 2) as 1000.5"),
        ("1\u2019{:03}.5", 1000.5, "a decimal point: '1\u2019000.5' (tickets.csv, line 2) as 1000.5"),
        ("{},5\u200b", 0.5, "a decimal comma: '0,5\\u200b' (tickets.csv, line 2) as 0.5"),
    ],
)
@pytest.mark.parametrize("task", [None, "regression"])
def test_a_column_of_numbers_is_read_in_the_style_that_it_has_as_a_whole(
    tmp_path: Path, form: str, value: float, said: str, task: str | None
) -> None:
    data = read(tmp_path, [form.format(number) for number in range(MANY)], task)
    sign = -1 if "-" in form or "\u2212" in form else 1
    assert data.task == "regression"
    assert values(data) == {sign * (value + number) for number in range(MANY)}
    assert [note.replace(f"{tmp_path}/", "") for note in data.notes] == [f"labels are read as numbers with {said}"]


@pytest.mark.parametrize("mixed", ["45,5", "45.5%", "abc", "n/a", "NULL", "None", "NA", "-", "inf"])
def test_a_column_that_is_mostly_numbers_is_refused_with_the_lines_of_the_others(tmp_path: Path, mixed: str) -> None:
    labels = [f"{number}.5" for number in range(MANY)]
    labels[3] = labels[7] = mixed
    refused = rf"2 of {MANY} labels are no numbers.*tickets.csv, line 5: '{mixed}'; .*line 9: '{mixed}'\): correct them"
    for task in (None, "regression"):
        with pytest.raises(DataError, match=refused):
            read(tmp_path, labels, task)
    assert read(tmp_path, labels * 2, "classification").task == "classification"


def test_a_word_among_json_numbers_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    labels = [*(f"{number}.5" for number in range(MANY)), '"n/a"', '"7,5"']
    path.write_text("".join(f'{{"text": "text {number}", "label": {label}}}\n' for number, label in enumerate(labels)))
    with pytest.raises(DataError, match=r"1 of 49 labels are no numbers .*line 48: 'n/a'"):
        read_data(path)
    path.write_text(path.read_text().replace('"n/a"', '"8,5"'))
    assert values(read_data(path)) == {number + 0.5 for number in range(MANY)}


def test_half_decimal_commas_and_half_points_are_no_classes(tmp_path: Path) -> None:
    labels = [f"{number}{',' if number % 2 else '.'}5" for number in range(MANY)]
    with pytest.raises(DataError, match=r"23 of 47 labels are no numbers with a decimal point like '0\.5' \(.*'1,5'"):
        read(tmp_path, labels)


def test_a_column_that_may_have_two_meanings_is_refused_or_told(tmp_path: Path) -> None:
    thousands = [f"1,{number:03}" for number in range(MANY)]
    for task in (None, "regression"):
        with pytest.raises(DataError, match=r"'1,000' \(.*line 2\) may have a decimal mark or divide thousands: write"):
            read(tmp_path, thousands, task)
    assert read(tmp_path, thousands * 2, "classification").task == "classification"
    assert values(read(tmp_path, [*thousands, "0,5"])) >= {0.5, 1.0, 1.046}
    points = read(tmp_path, [f"1.{number:03}" for number in range(MANY)])
    assert points.notes == [
        "labels such as '1.000' are read with a decimal point: if it divides thousands, leave it out"
    ]
    assert min(values(points)) == 1.0


def test_a_few_numbers_with_marks_may_be_classes(tmp_path: Path) -> None:
    assert read(tmp_path, ["50%", "100%"] * 20).labels == ("100%", "50%")
    assert read(tmp_path, ["1,234", "2,345"] * 20).labels == ("1,234", "2,345")
    assert read(tmp_path, ["50%", "100%"] * 20, "regression").task == "regression"


@pytest.mark.parametrize(
    "mark",
    ["nan", "NaN", "#N/A", "#DIV/0!", "#REF!", "#NAME?", "#VALUE!", "#NV", "#WERT!", "#¡VALOR!", "<NA>", " #N/A\u200b"],
)
@pytest.mark.parametrize("task", [None, "classification", "regression"])
def test_error_values_are_no_labels_and_no_texts(tmp_path: Path, mark: str, task: str | None) -> None:
    labels = ["a", "b"] * 20
    labels[3] = labels[6] = mark
    with pytest.raises(
        DataError, match=r"2 labels or texts are error values or marks of a missing value \(.*line 5: .*; .*line 8: "
    ):
        read(tmp_path, labels, task)
    path = tmp_path / "cells.csv"
    path.write_text("text,label\n" + "a b,x\nc d,y\n" * 5 + f"{mark},x\n", encoding="utf-8")
    if "#" not in mark:
        assert read_data(path).task == "classification"
        return
    with pytest.raises(DataError, match=r"1 labels or texts are error values .*cells.csv, line 12"):
        read_data(path)
    with pytest.raises(DataError, match=r"1 labels or texts are error values .*cells.csv, line 12"):
        read_data(table(tmp_path, ["a", "b"] * 20), unlabelled=path)


def test_a_word_for_a_missing_value_may_be_a_class_and_is_told(tmp_path: Path) -> None:
    data = read(tmp_path, ["None", "billing", "N/A", "billing"] * 10)
    assert data.labels == ("N/A", "None", "billing")
    assert [note.replace(f"{tmp_path}/", "") for note in data.notes] == [
        "10 examples have the label 'None' (tickets.csv, line 2), which is trained as a class: if it marks a missing label, "
        "delete these rows",
        "10 examples have the label 'N/A' (tickets.csv, line 4), which is trained as a class: if it marks a missing label, "
        "delete these rows",
    ]


@pytest.mark.parametrize("unseen", ["\u200b", "\ufeff", "\u00ad", "\u2060", "\u200d", "\u202a", "\u00a0"])
def test_what_cannot_be_seen_makes_no_further_class(tmp_path: Path, unseen: str) -> None:
    ends = read(tmp_path, ["billing", "delivery", f"billing{unseen}", f"{unseen}billing"] * 10)
    assert ends.labels == ("billing", "delivery")
    assert ends.notes == []


def test_labels_that_look_the_same_are_one_label_and_told(tmp_path: Path) -> None:
    within = read(tmp_path, ["in\u200bvoice", "invoice", "new\u00a0york", "invoice", "new york", "new york"] * 10)
    assert within.labels == ("invoice", "new york")
    assert [note.replace(f"{tmp_path}/", "") for note in within.notes] == [
        r"10 labels 'in\u200bvoice' (tickets.csv, line 2) are read as 'invoice', which looks the same",
        r"10 labels 'new\xa0york' (tickets.csv, line 4) are read as 'new york', which looks the same",
    ]
    # England and Scotland: the flags differ in characters without a picture of their own.
    flags = ["\U0001f3f4\U000e0067\U000e0062\U000e0065\U000e007f", "\U0001f3f4\U000e0067\U000e0062\U000e0073\U000e007f"]
    assert set(read(tmp_path, flags * 10).labels) == set(flags)
    joined = "\u0645\u06cc\u200c\u062e\u0648\u0627\u0647\u0645"
    assert joined in read(tmp_path, [joined, "x"] * 10).labels


def test_an_unknown_label_that_looks_like_a_known_one_is_shown_with_escapes(tmp_path: Path) -> None:
    train = table(tmp_path, ["yes", "no"] * 10)
    test = table(tmp_path, ["yes", "\uff59\uff45\uff53", "n\u00f6"], "test.csv")
    with pytest.raises(DataError, match=r"labels that the train data lacks: 'nö', '\\uff59\\uff45\\uff53'"):
        read_data(train, test=test)
    with pytest.raises(DataError, match=r"\(new: '\\uff4e\\uff4f'; missing: 'no'\)"):
        read_data(table(tmp_path, ["yes", "\uff4e\uff4f"] * 10), expected_labels=("yes", "no"))


@pytest.mark.parametrize(
    ("labels", "options", "words"),
    [
        (["#N/A", "a", "b"], [], "line 2: '#N/A'"),
        (["nan", "1", "2"], ["--task", "regression"], "line 2: 'nan'"),
        (["NULL", "1,5", "2,5"], ["--task", "regression"], "line 2: 'NULL'"),
        (["1,234", "2,345"], ["--task", "regression"], "'1,234'"),
    ],
)
def test_the_build_command_refuses_values_by_line(
    tmp_path: Path, labels: list[str], options: list[str], words: str
) -> None:
    done = CliRunner().invoke(builder, ["tenant", "desk", "--train", str(table(tmp_path, labels * 5)), *options])
    assert isinstance(done.exception, DataError)
    assert words in str(done.exception)


@pytest.mark.parametrize(
    ("names", "words"),
    [
        (("config.json", "model.safetensors"), "is a model (config.json, model.safetensors), and labelled examples"),
        (("adapter_config.json", "adapter_model.safetensors"), "is an adapter (adapter_config.json"),
        (("pytorch_model.bin",), "is a model (pytorch_model.bin)"),
        (("train.csv", "dev.csv"), "is not a file but a folder: dev.csv, train.csv"),
    ],
)
def test_a_folder_in_the_place_of_examples_is_named_for_what_it_is(
    tmp_path: Path, names: tuple[str, ...], words: str
) -> None:
    folder = tmp_path / "mine"
    folder.mkdir()
    for name in names:
        (folder / name).touch()
    done = CliRunner().invoke(builder, ["tenant", "mine", "--train", str(folder)])
    assert isinstance(done.exception, DataError)
    assert words in str(done.exception)
    if "train.csv" not in names:
        assert "Send the examples that it was trained on" in str(done.exception)
