"""A task in one JSON file, and the real tasks if this machine has them."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import pytest
from hplm_builder.data.labelled_files import read_folder

from hplm.errors import DataError

# Folders with chemprot, clinc150 and so on; by default a folder beside the checkout.
DATA = Path(os.environ.get("HPLM_TASKS") or Path(__file__).parents[5] / "shared" / "data")
SIZES = {
    "NCBI-disease": ("tagging", 3, 5_424, 923, 937),
    "chemprot": ("classification", 13, 4_169, 2_410, 3_444),
    "clinc150": ("classification", 150, 15_000, 3_000, 4_500),
    "sci-cite": ("classification", 3, 7_320, 916, 1_857),
    "sciie": ("tagging", 13, 1_861, 275, 551),
    "sst-2": ("classification", 2, 60_614, 6_732, 872),
}
PARTS: dict[str, Any] = {
    "train": [["pay my bill", "bank"], ["book a flight", "travel"]],
    "val": [["pay it", "bank"]],
    "test": [["fly me", "travel"]],
    "oos_train": [["tell a joke", "oos"]],
}


def write(folder: Path, content: object) -> Path:
    text = content if isinstance(content, str) else json.dumps(content)
    (folder / "data_full.json").write_text(text)
    (folder / "domains.json").write_text('{"banking": ["bank"]}')
    return folder


def test_a_task_in_one_file_is_read_without_out_of_scope_texts(tmp_path: Path) -> None:
    data = read_folder(write(tmp_path, PARTS))
    assert (data.task, data.labels) == ("classification", ("bank", "travel"))
    assert [(one.text, one.label) for one in data.train] == [("pay my bill", "bank"), ("book a flight", "travel")]
    assert [one.text for one in (*data.dev, *data.test)] == ["pay it", "fly me"]


def test_files_of_parts_take_precedence_over_a_single_file(tmp_path: Path) -> None:
    write(tmp_path, PARTS)
    rows = ({"text": f"text {i}", "label": f"{i % 2}"} for i in range(40))
    (tmp_path / "train.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
    assert read_folder(tmp_path).labels == ("0", "1")


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ("{", "is not JSON"),
        ([], "expected an object with the lists train, val, test"),
        ({**PARTS, "val": {}}, "expected an object with the lists train, val, test"),
        ({**PARTS, "val": [["one"]]}, "val 1: expected"),
        ({**PARTS, "test": [["fly me", "travel"], ["", "travel"]]}, "test 2: the text is empty"),
        ({**PARTS, "train": [["a", "x"], ["b", None]]}, "train 2: `label` is null"),
        ({**PARTS, "test": [["tell a joke", "oos"]]}, "labels that the train data lacks: 'oos'"),
    ],
)
def test_an_error_names_its_place_in_the_single_file(tmp_path: Path, content: object, words: str) -> None:
    with pytest.raises(DataError, match=words):
        read_folder(write(tmp_path, content))


def test_a_file_that_is_not_text_is_refused(tmp_path: Path) -> None:
    (tmp_path / "data_full.json").write_bytes(b"\xff\xfe")
    with pytest.raises(DataError, match="is not UTF-8"):
        read_folder(tmp_path)


@pytest.mark.skipif(not DATA.is_dir(), reason="the labelled tasks are not on this machine")
@pytest.mark.parametrize("name", SIZES)
def test_the_papers_tasks_are_read_whole_and_each_dev_and_test_text_once(name: str) -> None:
    data = read_folder(DATA / name)
    assert (data.task, len(data.labels), len(data.train), len(data.dev), len(data.test)) == SIZES[name]
